"""Per-client losses and accuracies of a model on data that this process holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.arrays import Index, Losses, Vector
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
from equifed.contract.streams import Stream
from equifed.models.flat import as_data
from equifed.models.losses import base_loss, hinge, predicted_classes, squared

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
    kind = "classes" if classes is not None else "values"
    for metric in metrics:
        if metric.task not in ("any", kind):
            have, wants = (
                ("values to regress on", "classes") if classes is None else ("classes", "values")
            )
            raise ValueError(f"The metric {metric.name} is about {wants}; these data have {have}.")
        if metric.needs == "probability" and classes is None:
            raise ValueError(
                f"The metric {metric.name} needs probabilities of classes; these data have values "
                "to regress on."
            )
        if metric.needs == "probability" and not gives_probabilities(loss):
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
        parts = (self.targets[rows], self.losses[rows], self.outputs[rows])
        return SampleScores(*parts, self.classes)

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
        score = self._score()
        if needs == "score":
            return score
        if needs == "prediction":
            return (score > 0).astype(np.int64) if score.ndim == 1 else score.argmax(axis=1)
        if score.ndim == 1:
            return np.asarray(np.exp(-np.logaddexp(0.0, -score)))
        powers = np.exp(score - score.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def _score(self) -> NDArray[Any]:
        outputs = self.outputs.reshape(len(self.outputs), -1)
        if outputs.shape[1] == 1:
            return outputs[:, 0]
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs


def describe_client(
    samples: SampleScores,
    metrics: Sequence[SampleMetric],
    groups: NDArray[Any] | None,
    stream: Stream,
    probabilities: bool,
) -> ClientDetail:
    """Return what one client's samples say about a model."""
    inside: dict[str, GroupDetail] = {}
    for group in () if groups is None else np.unique(groups).tolist():
        part, at = samples.take(groups == group), stream.at("group", group)
        values = {m.name: _try_measure(m, part) for m in metrics}
        inside[group] = GroupDetail(len(part.targets), values, _limit(part, metrics, at))
    limits = _limit(samples, metrics, stream)
    if samples.classes is None:
        return ClientDetail(len(samples.targets), limits, groups=inside)
    counts = np.bincount(samples.targets, minlength=samples.classes)
    return ClientDetail(
        len(samples.targets),
        limits,
        float(counts.max() / counts.sum()),
        int(np.count_nonzero(counts)),
        _calibrate(samples) if probabilities else None,
        inside,
    )


def _try_measure(metric: SampleMetric, samples: SampleScores) -> float:
    """Return a metric; NaN where an own function does not take these few samples."""
    try:
        return metric.measure(samples.targets, samples.answer(metric.needs))
    except ValueError:
        return float("nan")


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
        self._model, self._block, self._names = model, block, federation.names
        self._classes = federation.classes
        self._checksums: dict[str, Index] = {}
        self._groups = {name: getattr(federation, name) for name in splits}
        self._splits = {}
        for name in splits:
            split = getattr(federation, name)
            if split is not None:
                inputs = as_data(split.inputs, model.dtype, model.device)
                targets = as_data(split.targets, model.dtype, model.device)
                self._splits[name] = (inputs, targets, np.asarray(split.offsets))
                if self._classes is not None:
                    self._checksums[name] = sum_clients(split)

    def __call__(
        self, x: Vector, metrics: Sequence[SampleMetric] = (), own: Vector | None = None
    ) -> list[Evaluation]:
        """Return the per-client numbers of every split; ``own`` has each client's own part."""
        check_metrics(metrics, self._classes, self._model.loss)
        self._check_own(own)
        return [self._evaluate(name, x, own, metrics) for name in self._splits]

    def _check_own(self, own: Vector | None) -> None:
        if (own is None) != (self._model.own_size == 0):
            raise ValueError(
                "The model has own parameters of every client: evaluate with clients.evaluate(x)."
            )

    def _evaluate(
        self, name: str, x: Vector, own: Vector | None, asked: Sequence[SampleMetric]
    ) -> Evaluation:
        _, targets, offsets = self._splits[name]
        losses, answers, outputs = [], [], []
        for a, b, model in self._pieces(offsets, x, own):
            t, loss, output = self._answer(name, model, slice(a, b))
            losses.append(loss)
            if self._classes is not None:
                answers.append(predicted_classes(output))
            elif self._model.loss is squared:
                answers.append((_flat(output) - _flat(t)).square().mean(1))
            if asked:
                outputs.append(output)
        sizes = np.diff(offsets)
        metrics = {"loss": _client_means(losses, offsets)}
        if self._classes is None:
            if self._model.loss is squared:
                metrics["mse"] = _client_means(answers, offsets)
            asked = [m for m in asked if m.name not in metrics]
            return Evaluation(name, sizes, metrics | self._measure(name, losses, outputs, asked))
        given = torch.cat(answers) if answers else targets.new_empty(0)
        correct = given == targets
        metrics["accuracy"] = _client_means([correct] if answers else [], offsets)
        metrics |= self._measure(name, losses, outputs, [m for m in asked if m.name not in metrics])
        predicted = np.bincount(given.cpu().numpy(), minlength=self._classes)
        hits = Hits(correct.cpu().numpy(), self._checksums[name], predicted)
        return Evaluation(name, sizes, metrics, hits)

    def _answer(self, name: str, x: Vector, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets, losses and outputs of a block of samples of a split."""
        inputs, targets, _ = self._splits[name]
        with torch.no_grad():
            outputs = self._model.outputs(x, inputs[rows])
            return targets[rows], self._model.loss(outputs, targets[rows]), outputs

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

    def _measure(
        self,
        name: str,
        losses: list[Tensor],
        outputs: list[Tensor],
        metrics: Sequence[SampleMetric],
    ) -> dict[str, Losses]:
        """Return further metrics of every client; NaN for one without samples."""
        n = len(self._names)
        out = {metric.name: np.full(n, np.nan) for metric in metrics if metric.name != "loss"}
        if not out or not outputs:
            return out
        _, targets, offsets = self._splits[name]
        answers = to_array(torch.cat(losses)), to_array(torch.cat(outputs))
        whole = SampleScores(to_array(targets), *answers, self._classes)
        for i in np.flatnonzero(np.diff(offsets)).tolist():
            samples = whole.take(slice(offsets[i], offsets[i + 1]))
            for metric in metrics:
                if metric.name in out:
                    out[metric.name][i] = self._call(name, i, samples, metric)
        return out

    def _call(self, name: str, i: int, samples: SampleScores, metric: SampleMetric) -> float:
        try:
            return metric.measure(samples.targets, samples.answer(metric.needs))
        except ValueError as error:
            raise ValueError(f"Client {self._names[i]!r}, {name}: {error}") from error

    def _clients(
        self, name: str, x: Vector, own: Vector | None
    ) -> Iterator[tuple[int, SampleScores]]:
        """Go through the clients that have samples in a split; one client's answers are held."""
        _, _, offsets = self._splits[name]
        for i in np.flatnonzero(np.diff(offsets)).tolist():
            model = x if own is None else torch.cat([x, own[i]])
            start, end = int(offsets[i]), int(offsets[i + 1])
            cuts = range(start, end, self._block)
            blocks = [slice(a, min(a + self._block, end)) for a in cuts]
            parts = zip(*(self._answer(name, model, block) for block in blocks), strict=True)
            targets, losses, outputs = (to_array(torch.cat(part)) for part in parts)
            yield i, SampleScores(targets, losses, outputs, self._classes)

    def describe(
        self, name: str, x: Vector, metrics: Sequence[SampleMetric], own: Vector | None = None
    ) -> Details | None:
        """Return what the samples of a split say about a model, client by client."""
        check_metrics(metrics, self._classes, self._model.loss)
        self._check_own(own)
        if name not in self._splits or not len(self._splits[name][1]):
            return None
        sure = self._classes is not None and gives_probabilities(self._model.loss)
        found: list[ClientDetail | None] = [None] * len(self._names)
        for i, samples in self._clients(name, x, own):
            groups = self._groups[name].client_groups(i)
            stream = Stream(0).at("details", self._names[i], name)
            found[i] = describe_client(samples, metrics, groups, stream, sure)
        return Details(name, tuple(found))


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
