"""What a model is worth to each client, outside any algorithm.

An :class:`Evaluation` has the numbers of one split; :class:`Details` is what single samples say
about the model at the end: limits of the metrics, the most frequent class, calibration, groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Index, Losses, Vector
from equifed.contract.streams import Stream

SPLITS = ("train", "validation", "test")

Flags: TypeAlias = NDArray[np.bool_]
"""One truth value per sample."""


class SampleMetric(Protocol):
    """A number that is computed where a client's samples are, from targets and answers."""

    @property
    def name(self) -> str:
        """Name in evaluations."""
        ...

    @property
    def needs(self) -> Literal["prediction", "score", "probability", "loss"]:
        """What the answers are."""
        ...

    @property
    def task(self) -> Literal["any", "classes", "values"]:
        """What the data must be for."""
        ...

    @property
    def compute(self) -> Callable[[Any, Any], float] | None:
        """The function; None: it cannot be computed."""
        ...

    @property
    def each(self) -> Callable[[Any, Any], Losses] | None:
        """The function per sample, if the metric is its mean."""
        ...

    @property
    def counts(self) -> Callable[[Any, Any], tuple[int, int] | None] | None:
        """Successes and trials, if the metric is their ratio."""
        ...

    def measure(self, y: Any, answers: Any) -> float:
        """Return the metric of one client; NaN where it is not defined."""
        ...

    def limits(self, y: Any, answers: Any, stream: Stream) -> tuple[float, float]:
        """Return 95 % limits for other samples of the client; NaN where nothing is known."""
        ...


@dataclass(frozen=True, eq=False)
class Hits:
    """Which samples of a split a classifier answers correctly, and what it answers.

    Parameters
    ----------
    correct : array of bool, shape (total,)
        One entry per sample, the clients one after the other.
    checksums : array of int, shape (N,)
        A number of each client's samples: the answers of two models may be compared sample by
        sample where their checksums agree.
    predicted : array of int, shape (classes,)
        How many samples were given each class.
    """

    correct: Flags
    checksums: Index
    predicted: Index


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One split's per-client numbers.

    Parameters
    ----------
    split : str
        "train", "validation" or "test".
    sizes : array of int, shape (N,)
        Samples of each client in the split; a client with none has NaN in every metric.
    metrics : dict of arrays, shape (N,)
        "loss" (mean per-sample loss without the L2 penalty), for classification "accuracy", for
        regression with the squared loss "mse"; then those that were asked for.
    hits : Hits, optional
        The single samples behind the accuracies, where they are at hand.
    """

    split: str
    sizes: Index
    metrics: dict[str, Losses]
    hits: Hits | None = None


class Evaluator(Protocol):
    """Anything that measures a model on the clients."""

    def __call__(self, x: Vector) -> list[Evaluation]:
        """Return the per-client numbers of every split."""
        ...


Limits: TypeAlias = dict[str, tuple[float, float]]
"""95 % limits by metric."""

BINS = 10
"""Equally wide bins of the probability of the predicted class."""


@dataclass(frozen=True)
class Calibration:
    """Samples by the probability that the model gave its answer: how many, how sure, how right.

    Parameters
    ----------
    count : tuple of int
        Samples per bin.
    confidence : tuple of float
        Sum of the probabilities of the predicted class, per bin.
    correct : tuple of int
        Samples that were answered correctly, per bin.

    >>> Calibration((0, 4), (0.0, 3.2), (0, 2)).error()
    0.3
    """

    count: tuple[int, ...]
    confidence: tuple[float, ...]
    correct: tuple[int, ...]

    def error(self) -> float:
        """Return the expected calibration error: the mean over samples of |confidence - right|."""
        count, confidence, correct = map(np.array, (self.count, self.confidence, self.correct))
        total = count.sum()
        if not total:
            return math.nan
        return round(float(np.abs(confidence - correct).sum() / total), 15)

    def add(self, other: Calibration) -> Calibration:
        """Return both clients' samples together."""
        pairs = zip(
            *(vars(self)[k] for k in _PARTS), *(vars(other)[k] for k in _PARTS), strict=True
        )
        rows = [(a + d, b + e, c + f) for a, b, c, d, e, f in pairs]
        return Calibration(*(tuple(column) for column in zip(*rows, strict=True)))

    @classmethod
    def measure(cls, confidence: NDArray[Any], correct: NDArray[Any]) -> Calibration:
        """Sort samples into bins."""
        place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        sums = [np.bincount(place, weights=w, minlength=BINS) for w in (confidence, correct)]
        count = np.bincount(place, minlength=BINS)
        return cls(tuple(count.tolist()), tuple(sums[0].tolist()), tuple(map(int, sums[1])))


_PARTS = ("count", "confidence", "correct")


@dataclass(frozen=True)
class GroupDetail:
    """The samples of one group at one client: how many, their metrics and limits."""

    size: int
    values: dict[str, float]
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True)
class ClientDetail:
    """What one client's samples say.

    Parameters
    ----------
    size : int
        Samples.
    limits : dict
        95 % limits of its metrics; those that are not known are left out.
    majority : float, optional
        Share of its most frequent class: the accuracy of a model that always answers it.
    classes : int, optional
        How many classes it has samples of.
    calibration : Calibration, optional
        Where the model gives probabilities.
    groups : dict
        The groups among its samples.
    """

    size: int
    limits: Limits = field(default_factory=dict)
    majority: float | None = None
    classes: int | None = None
    calibration: Calibration | None = None
    groups: dict[str, GroupDetail] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them; what is not finite is left out."""
        out: dict[str, Any] = {"size": self.size, "limits": _pack_limits(self.limits)}
        if self.majority is not None:
            out |= {"majority": self.majority, "classes": self.classes}
        if self.calibration is not None:
            out["calibration"] = {k: list(vars(self.calibration)[k]) for k in _PARTS}
        if self.groups:
            out["groups"] = {
                name: {
                    "size": group.size,
                    "values": {k: v for k, v in group.values.items() if math.isfinite(v)},
                    "limits": _pack_limits(group.limits),
                }
                for name, group in self.groups.items()
            }
        return out

    @classmethod
    def from_dict(cls, told: Any) -> ClientDetail:
        """Read what :meth:`to_dict` wrote; raise ValueError if it is anything else."""
        try:
            groups = {
                str(name): GroupDetail(
                    _count(group["size"]),
                    {str(k): _number(v) for k, v in group["values"].items()},
                    _read_limits(group["limits"]),
                )
                for name, group in told.get("groups", {}).items()
            }
            majority = told.get("majority")
            classes = told.get("classes")
            return cls(
                _count(told["size"]),
                _read_limits(told["limits"]),
                None if majority is None else _number(majority, 0.0, 1.0),
                None if classes is None else _count(classes),
                _read_calibration(told.get("calibration")),
                groups,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no details of a client: {error!r}") from error


@dataclass(frozen=True, eq=False)
class Details:
    """What the samples of one split say, client by client; None for one that has none."""

    split: str
    clients: tuple[ClientDetail | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        told = [None if client is None else client.to_dict() for client in self.clients]
        return {"split": self.split, "clients": told}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Details:
        """Read what :meth:`to_dict` wrote."""
        clients = (None if c is None else ClientDetail.from_dict(c) for c in told["clients"])
        return cls(str(told["split"]), tuple(clients))

    def limits(self, metric: str) -> NDArray[np.float64]:
        """Return the limits of a metric, shape (N, 2); NaN where they are not known."""
        none = (math.nan, math.nan)
        found = [none if c is None else c.limits.get(metric, none) for c in self.clients]
        return np.array(found, dtype=np.float64).reshape(len(self.clients), 2)

    def majorities(self) -> NDArray[np.float64]:
        """Return the share of every client's most frequent class; NaN where there is none."""
        found = [None if c is None else c.majority for c in self.clients]
        return np.array([math.nan if m is None else m for m in found], dtype=np.float64)

    def group_names(self) -> list[str]:
        """Return the groups that clients have, sorted."""
        return sorted({name for c in self.clients if c is not None for name in c.groups})

    def pool_calibration(self) -> Calibration | None:
        """Return the calibration of all clients' samples together."""
        known = [c.calibration for c in self.clients if c is not None and c.calibration is not None]
        total: Calibration | None = None
        for one in known:
            total = one if total is None else total.add(one)
        return total


def _pack_limits(limits: Limits) -> dict[str, list[float]]:
    return {k: [*ends] for k, ends in limits.items() if all(map(math.isfinite, ends))}


def _read_limits(told: Mapping[str, Sequence[Any]]) -> Limits:
    out: Limits = {}
    for name, ends in told.items():
        lower, upper = (_number(end) for end in ends)
        if lower > upper:
            raise ValueError(f"limits of {name} in the wrong order: {lower} and {upper}")
        out[str(name)] = lower, upper
    return out


def _read_calibration(told: Any) -> Calibration | None:
    if told is None:
        return None
    count, correct = (tuple(_count(v) for v in told[k]) for k in ("count", "correct"))
    confidence = tuple(_number(v, 0.0, math.inf) for v in told["confidence"])
    if not len(count) == len(confidence) == len(correct) == BINS:
        raise ValueError(f"calibration must have {BINS} bins")
    return Calibration(count, confidence, correct)


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r:.80}")
    if not low <= value <= high:
        raise ValueError(f"expected a number from {low} to {high}, got {value}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a count, got {value!r:.80}")
    return value
