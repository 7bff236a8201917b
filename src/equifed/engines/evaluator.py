"""Per-client losses and accuracies of a model on data that this process holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.arrays import Index, Losses, Vector
from equifed.contract.evaluation import SPLITS, Evaluation, Hits
from equifed.models.flat import as_data
from equifed.models.losses import predicted_classes

if TYPE_CHECKING:
    from equifed.data.federation import Federation
    from equifed.data.split import Split
    from equifed.models.flat import FlatModel

MOST_ROWS = 10_000
"""Samples from which the scales of features are measured, evenly taken."""
RARE = 0.01
"""A feature that takes one value but for this fraction of the samples hardly varies."""


class FederationEvaluator:
    """Evaluates on data that this process holds: one pass per split for all clients.

    Parameters
    ----------
    federation : Federation
        The data.
    model : FlatModel
        The engine's model (``clients.model``).
    splits : sequence of str
        Which splits to evaluate; those that the federation lacks are skipped.
    block : int
        Samples per forward pass.
    """

    def __init__(
        self,
        federation: Federation,
        model: FlatModel,
        splits: tuple[str, ...] = SPLITS,
        block: int = 4096,
    ) -> None:
        self._model, self._block = model, block
        self._classes = federation.classes
        self._checksums: dict[str, Index] = {}
        self._splits = {}
        for name in splits:
            split = getattr(federation, name)
            if split is not None:
                inputs = as_data(split.inputs, model.dtype, model.device)
                targets = as_data(split.targets, model.dtype, model.device)
                self._splits[name] = (inputs, targets, np.asarray(split.offsets))
                if self._classes is not None:
                    self._checksums[name] = sum_clients(split)

    def __call__(self, x: Vector, own: Vector | None = None) -> list[Evaluation]:
        """Return the per-client numbers of every split; ``own`` has each client's own part."""
        if (own is None) != (self._model.own_size == 0):
            raise ValueError(
                "The model has own parameters of every client: evaluate with clients.evaluate(x)."
            )
        return [self._evaluate(name, x, own) for name in self._splits]

    def _evaluate(self, name: str, x: Vector, own: Vector | None) -> Evaluation:
        inputs, targets, offsets = self._splits[name]
        losses, answers = [], []
        with torch.no_grad():
            for a, b, model in self._pieces(offsets, x, own):
                t = targets[a:b]
                outputs = self._model.outputs(model, inputs[a:b])
                losses.append(self._model.loss(outputs, t))
                if self._classes is not None:
                    answers.append(predicted_classes(outputs))
        sizes = np.diff(offsets)
        metrics = {"loss": _client_means(losses, offsets)}
        if self._classes is None:
            return Evaluation(name, sizes, metrics)
        given = torch.cat(answers) if answers else targets.new_empty(0)
        correct = given == targets
        metrics["accuracy"] = _client_means([correct] if answers else [], offsets)
        predicted = np.bincount(given.cpu().numpy(), minlength=self._classes)
        hits = Hits(correct.cpu().numpy(), self._checksums[name], predicted)
        return Evaluation(name, sizes, metrics, hits)

    def _pieces(
        self, offsets: Index, x: Vector, own: Vector | None
    ) -> Iterator[tuple[int, int, Vector]]:
        """Yield which samples go through the model at once, and the model: each client's own."""
        ends, models = [0, int(offsets[-1])], [x]
        if own is not None:
            ends, models = offsets.tolist(), [torch.cat([x, part]) for part in own]
        for start, end, model in zip(ends[:-1], ends[1:], models, strict=True):
            for a in range(start, end, self._block):
                yield a, min(a + self._block, end), model


def _client_means(parts: list[Tensor], offsets: Index) -> Losses:
    if not parts:
        return np.full(len(offsets) - 1, np.nan)
    values = torch.cat(parts).to("cpu", torch.float64).numpy()
    # Differences of a running sum would lose digits; reduceat adds each client's samples apart.
    sizes = np.diff(offsets)
    out = np.full(len(sizes), np.nan)
    some = sizes > 0
    if some.any():
        out[some] = np.add.reduceat(values, offsets[:-1][some]) / sizes[some]
    return out


def sum_clients(split: Split) -> Index:
    """Return a checksum of every client's samples, 0 for a client without any."""
    sums = np.zeros(len(split.offsets) - 1, dtype=np.int64)
    for i in np.flatnonzero(np.diff(split.offsets)).tolist():
        inputs, targets = map(np.ascontiguousarray, split.client(i))
        sums[i] = zlib.crc32(targets.data, zlib.crc32(inputs.data))
    return sums


def measure_scales(inputs: NDArray[Any]) -> Losses | None:
    """Return the standard deviation of every feature, NaN where it hardly varies.

    None if the samples are no vectors of numbers: an image's pixels and a text's tokens have no
    units of their own.

    >>> measure_scales(np.array([[0.0, 5.0, 10.0], [0.5, 5.0, 30.0]]))
    array([ 0.25,   nan, 10.  ])
    """
    if inputs.ndim != 2 or not np.issubdtype(inputs.dtype, np.floating):
        return None
    rows = inputs[:: -(-len(inputs) // MOST_ROWS)].astype(np.float64)
    usual = np.median(rows, axis=0, keepdims=True)
    varies = (rows != usual).mean(axis=0) > RARE
    return np.where(varies, rows.std(axis=0), np.nan)
