"""Per-client losses and accuracies of a model on data that this process holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract import Index, Losses, Stream, Vector
from equifed.contract.evaluation import (
    SPLITS,
    Calibration,
    ClientDetail,
    Details,
    Evaluation,
    GroupDetail,
    Hits,
    SampleMetric,
)
from equifed.models.flat import as_data
from equifed.models.losses import base_loss, hinge, predicted_classes, squared
from equifed.models.predictor import class_scores, most_likely

if TYPE_CHECKING:
    from equifed.data.federation import Federation
    from equifed.data.split import Split
    from equifed.models.flat import FlatModel

NO_PROBABILITIES = (hinge, squared)
"""Losses whose outputs are no log-odds."""


def to_array(values: Tensor) -> NDArray[Any]:
    """Return samples as NumPy has them; numbers in double precision."""
    real = values.to("cpu", torch.float64) if values.is_floating_point() else values.cpu()
    return np.asarray(real.numpy())


def gives_probabilities(loss: Any) -> bool:
    """Tell whether a model that was trained on this loss gives log-odds."""
    return base_loss(loss) not in NO_PROBABILITIES


def check_metrics(metrics: Sequence[SampleMetric], classes: int | None, loss: Any) -> None:
    """Refuse metrics that these data, or this loss, do not have."""
    have, lack = ("values to regress on", "classes") if classes is None else ("classes", "values")
    for metric in metrics:
        sure = metric.needs == "probability"
        if metric.task == lack or (sure and classes is None):
            raise ValueError(f"The metric {metric.name} is about {lack}; these data have {have}.")
        if sure and not gives_probabilities(loss):
            name = getattr(base_loss(loss), "__name__", "of this model")
            raise ValueError(
                f"The metric {metric.name} needs probabilities; a model trained on the loss {name} "
                "gives scores alone. Train on cross_entropy or logistic, or leave the metric out."
            )


@dataclass(frozen=True, eq=False)
class SampleScores:
    """Targets, losses and outputs of some samples; ``classes`` is None for regression."""

    targets: NDArray[Any]
    losses: NDArray[Any]
    outputs: NDArray[Any]
    classes: int | None

    def take(self, rows: Any) -> SampleScores:
        """Return some of the samples."""
        kept = self.targets[rows], self.losses[rows], self.outputs[rows]
        return SampleScores(*kept, self.classes)

    def answer(self, needs: str) -> NDArray[Any]:
        """Return what a metric needs to know of the model.

        >>> logits = np.log([[0.2, 0.8], [0.5, 0.5]])
        >>> samples = SampleScores(np.array([1, 0]), np.zeros(2), logits, 2)
        >>> samples.answer("prediction"), samples.answer("probability").round(3)
        (array([1, 0]), array([0.8, 0.5]))
        """
        if needs == "loss":
            return self.losses
        if self.classes is None:
            return self.outputs.reshape(self.targets.shape)
        score = class_scores(self.outputs.reshape(len(self.outputs), -1))
        if needs == "score":
            return score
        if needs == "prediction":
            return most_likely(score)
        if score.ndim == 1:
            return np.asarray(np.exp(-np.logaddexp(0.0, -score)))
        powers = np.exp(score - score.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def describe_client(
    samples: SampleScores, metrics: Sequence[SampleMetric], groups: NDArray[Any] | None,
    stream: Stream, probabilities: bool,
) -> ClientDetail:  # fmt: skip
    """Return what one client's samples say about a model."""
    inside: dict[str, GroupDetail] = {}
    for group in () if groups is None else np.unique(groups).tolist():
        part, at = samples.take(groups == group), stream.at("group", group)
        values = {m.name: m.try_measure(part.targets, part.answer(m.needs)) for m in metrics}
        inside[group] = GroupDetail(len(part.targets), values, _limit(part, metrics, at))
    told = ClientDetail(len(samples.targets), _limit(samples, metrics, stream), groups=inside)
    if samples.classes is None:
        return told
    counts = np.bincount(samples.targets, minlength=samples.classes)
    majority, classes = float(counts.max() / counts.sum()), int(np.count_nonzero(counts))
    sure = _calibrate(samples) if probabilities else None
    return replace(told, majority=majority, classes=classes, calibration=sure)


def _limit(
    samples: SampleScores, metrics: Sequence[SampleMetric], stream: Stream
) -> dict[str, tuple[float, float]]:
    found = {m.name: m.limits(samples.targets, samples.answer(m.needs), stream) for m in metrics}
    return {name: ends for name, ends in found.items() if not np.isnan(ends).any()}


def _calibrate(samples: SampleScores) -> Calibration | None:
    chance = samples.answer("probability")
    sure = np.maximum(chance, 1 - chance) if chance.ndim == 1 else chance.max(axis=1)
    if not np.isfinite(sure).all():  # outputs that are too large to be compared
        return None
    return Calibration.measure(sure, samples.answer("prediction") == samples.targets)


MOST_ROWS = 10_000
"""Samples from which the scales of features are measured, evenly taken."""
RARE = 0.01
"""A feature that takes one value but for this fraction of the samples hardly varies."""
BLOCK = 4096
"""Samples of a forward pass."""
VECTORS = 1 << 17
"""The same on a GPU where samples are vectors of numbers, which make no large activations."""
Span = tuple[int, int, Tensor]
"""Samples from one row up to another, and the model for them."""
Quick = Callable[[Tensor, Tensor, Tensor, Index], tuple[Tensor, Tensor, Tensor] | None]
"""Maps model, inputs, targets and offsets to clients' mean losses, how many samples are answered
correctly, and which; None where it cannot."""


class FederationEvaluator:
    """Evaluates on data that this process holds: one pass per split for all clients."""

    def __init__(self, federation: Federation, model: FlatModel) -> None:
        self._federation, self._model, self._classes = federation, model, federation.classes
        self._held: dict[str, tuple[Tensor, Tensor, Index]] = {}
        self.quick: Quick | None = None

    def __call__(
        self, x: Vector, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = (),
        own: Vector | None = None,
    ) -> list[Evaluation]:  # fmt: skip
        """Return the per-client numbers of the splits that there are; own parts are rows."""
        self._check(metrics, own)
        known = [name for name in splits if getattr(self._federation, name) is not None]
        return [self._evaluate(name, x, own, metrics) for name in known]

    def describe(
        self, name: str, x: Vector, metrics: Sequence[SampleMetric], own: Vector | None = None
    ) -> Details | None:
        """Return what the samples of a split say about a model, client by client."""
        self._check(metrics, own)
        split: Split | None = getattr(self._federation, name)
        if split is None or not len(split.targets):
            return None
        sure = self._classes is not None and gives_probabilities(self._model.loss)
        names = self._federation.names
        found: list[ClientDetail | None] = [None] * len(names)
        for i in np.flatnonzero(np.diff(split.offsets)).tolist():
            model = x if own is None else torch.cat([x, own[i]])
            span = int(split.offsets[i]), int(split.offsets[i + 1]), model
            parts = zip(*self._answers(name, [span]), strict=True)
            targets, losses, outputs = (to_array(torch.cat(part)) for part in parts)
            samples = SampleScores(targets, losses, outputs, self._classes)
            stream = Stream(0).at("details", names[i], name)
            found[i] = describe_client(samples, metrics, split.client_groups(i), stream, sure)
        return Details(name, tuple(found))

    def _check(self, metrics: Sequence[SampleMetric], own: Vector | None) -> None:
        check_metrics(metrics, self._classes, self._model.loss)
        if (own is None) != (self._model.own_size == 0):
            raise ValueError(
                "The model has own parameters of every client: evaluate with clients.evaluate(x)."
            )

    def _hold(self, name: str) -> tuple[Tensor, Tensor, Index]:
        """Return inputs and targets of a split where the model is, and checksums of classes'."""
        if name not in self._held:
            split, where = getattr(self._federation, name), (self._model.dtype, self._model.device)
            sums = np.zeros(0, dtype=np.int64) if self._classes is None else sum_clients(split)
            self._held[name] = as_data(split.inputs, *where), as_data(split.targets, *where), sums
        return self._held[name]

    def _in_units(self, values: Tensor) -> Tensor:
        # in double precision: a small scale beside a large centre would cost digits
        return values if self._classes is not None else self._federation.in_units(values.double())

    def _answers(self, name: str, spans: Iterable[Span]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield targets, losses and outputs of the samples in spans, each with its model.

        Values of a regression are in the unit of the target column, losses are as in training.
        """
        inputs, targets, _ = self._hold(name)
        vectors = inputs.is_cuda and inputs.dim() == 2 and inputs.is_floating_point()
        block = VECTORS if vectors else BLOCK
        for start, end, model in spans:
            for a in range(start, end, block):
                rows = slice(a, min(a + block, end))
                with torch.no_grad():
                    outputs = self._model.outputs(model, inputs[rows])
                    losses = self._model.loss(outputs, targets[rows])
                yield self._in_units(targets[rows]), losses, self._in_units(outputs)

    def _evaluate(
        self, name: str, x: Vector, own: Vector | None, asked: Sequence[SampleMetric]
    ) -> Evaluation:
        offsets = np.asarray(getattr(self._federation, name).offsets)
        inputs, targets, checksums = self._hold(name)
        sizes, classify = np.diff(offsets), self._classes is not None
        quick = self.quick if classify and not asked else None
        found = None if quick is None else quick(x, inputs, targets, offsets)
        if found is not None:
            value, count, right = (values.cpu().numpy() for values in found)
            numbers = {"loss": value.astype(np.float64), "accuracy": count / sizes}
            return Evaluation(name, sizes, numbers, Hits(right, checksums))
        spans = [(0, int(offsets[-1]), x)]
        if own is not None:  # each client has a model of its own
            models = (torch.cat([x, part]) for part in own)
            spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), models, strict=True))
        losses, each, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
        for target, loss, output in self._answers(name, spans):
            losses.append(loss)
            if classify:
                each.append(predicted_classes(output) == target)
            elif self._model.loss is squared:
                each.append((_flat(output) - _flat(target)).square().mean(1))
            if asked:
                outputs.append(output)
        metrics, hits = {"loss": _client_means(losses, offsets)}, None
        if classify or self._model.loss is squared:
            metrics["accuracy" if classify else "mse"] = _client_means(each, offsets)
        if classify:
            hits = Hits(torch.cat([targets[:0].bool(), *each]).cpu().numpy(), checksums)
        asked = [metric for metric in asked if metric.name not in metrics]
        metrics |= self._measure(name, losses, outputs, asked)
        return Evaluation(name, sizes, metrics, hits)

    def _measure(
        self, name: str, losses: list[Tensor], outputs: list[Tensor], asked: Sequence[SampleMetric]
    ) -> dict[str, Losses]:
        """Return further metrics of every client; NaN for one without samples."""
        names, offsets = self._federation.names, getattr(self._federation, name).offsets
        out = {metric.name: np.full(len(names), np.nan) for metric in asked}
        if not out or not outputs:
            return out
        targets = to_array(self._in_units(self._hold(name)[1]))
        answers = to_array(torch.cat(losses)), to_array(torch.cat(outputs))
        whole = SampleScores(targets, *answers, self._classes)
        for i in np.flatnonzero(np.diff(offsets)).tolist():
            samples = whole.take(slice(offsets[i], offsets[i + 1]))
            try:
                for one in asked:
                    out[one.name][i] = one.measure(samples.targets, samples.answer(one.needs))
            except ValueError as error:
                raise ValueError(f"Client {names[i]!r}, {name}: {error}") from error
        return out


def _client_means(parts: list[Tensor], offsets: Index) -> Losses:
    sizes = np.diff(offsets)
    out, some = np.full(len(sizes), np.nan), sizes > 0
    if (
        parts
    ):  # differences of a running sum would lose digits: each client's samples are added apart
        values = torch.cat(parts).to("cpu", torch.float64).numpy()
        out[some] = np.add.reduceat(values, offsets[:-1][some]) / sizes[some]
    return out


def _flat(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).to(torch.float64)


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
