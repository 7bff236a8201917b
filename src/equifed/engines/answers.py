"""What a model answers to single samples, as metrics need it, and what that says about a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.evaluation import Calibration, ClientDetail, GroupDetail, SampleMetric
from equifed.contract.streams import Stream
from equifed.models.losses import base_loss, hinge, squared

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
class Samples:
    """Targets, losses and outputs of some samples; ``classes`` is None for regression."""

    targets: NDArray[Any]
    losses: NDArray[Any]
    outputs: NDArray[Any]
    classes: int | None

    def take(self, rows: Any) -> Samples:
        """Return some of the samples."""
        parts = (self.targets[rows], self.losses[rows], self.outputs[rows])
        return Samples(*parts, self.classes)

    def answer(self, needs: str) -> NDArray[Any]:
        """Return what a metric needs to know of the model.

        >>> logits = np.log([[0.2, 0.8], [0.5, 0.5]])
        >>> samples = Samples(np.array([1, 0]), np.zeros(2), logits, 2)
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
    samples: Samples,
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


def _try_measure(metric: SampleMetric, samples: Samples) -> float:
    """Return a metric; NaN where an own function does not take these few samples."""
    try:
        return metric.measure(samples.targets, samples.answer(metric.needs))
    except ValueError:
        return float("nan")


def _limit(
    samples: Samples, metrics: Sequence[SampleMetric], stream: Stream
) -> dict[str, tuple[float, float]]:
    found = {m.name: m.limits(samples.targets, samples.answer(m.needs), stream) for m in metrics}
    return {name: ends for name, ends in found.items() if not np.isnan(ends).any()}


def _calibrate(samples: Samples) -> Calibration | None:
    chance = samples.answer("probability")
    sure = np.maximum(chance, 1 - chance) if chance.ndim == 1 else chance.max(axis=1)
    if not np.isfinite(sure).all():  # outputs that are too large to be compared
        return None
    return Calibration.measure(sure, samples.answer("prediction") == samples.targets)
