"""Per-client losses and accuracies of a model on data that this process holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Index, Losses, Vector
from equifed.contract.evaluation import SPLITS, Evaluation
from equifed.models.flat import as_data
from equifed.models.losses import predicted_classes

if TYPE_CHECKING:
    from equifed.data.federation import Federation
    from equifed.models.flat import FlatModel


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
        self._classify = federation.classes is not None
        self._splits = {}
        for name in splits:
            split = getattr(federation, name)
            if split is not None:
                inputs = as_data(split.inputs, model.dtype, model.device)
                targets = as_data(split.targets, model.dtype, model.device)
                self._splits[name] = (inputs, targets, np.asarray(split.offsets))

    def __call__(self, x: Vector) -> list[Evaluation]:
        """Return the per-client numbers of every split."""
        return [self._evaluate(name, x) for name in self._splits]

    def _evaluate(self, name: str, x: Vector) -> Evaluation:
        inputs, targets, offsets = self._splits[name]
        losses, hits = [], []
        with torch.no_grad():
            for a in range(0, len(inputs), self._block):
                t = targets[a : a + self._block]
                outputs = self._model.outputs(x, inputs[a : a + self._block])
                losses.append(self._model.loss(outputs, t))
                if self._classify:
                    hits.append(predicted_classes(outputs) == t)
        sizes = np.diff(offsets)
        metrics = {"loss": _client_means(losses, offsets)}
        if self._classify:
            metrics["accuracy"] = _client_means(hits, offsets)
        return Evaluation(name, sizes, metrics)


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
