"""What a model is worth to each client, and what single samples say about it at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Index, Losses, Vector

SPLITS = ("train", "validation", "test")

Flags: TypeAlias = NDArray[np.bool_]
"""One truth value per sample."""


SampleMetric: TypeAlias = Any
"""What is computed where a client's samples are: an :class:`equifed.metrics.Metric`, which the
contract does not import. Engines read ``name``, ``needs``, ``task``, ``compute``, ``each`` and
``counts``, and call ``measure``, ``try_measure`` and ``limits``."""


@dataclass(frozen=True, eq=False)
class Hits:
    """Which samples of a split a classifier answers correctly."""

    correct: Flags  # (total,), the clients one after the other
    checksums: Index  # (N,), of each client's samples: models are compared where they agree


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

    Examples
    --------
    >>> import equifed as ef
    >>> from equifed.contract import Stream
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> (found,) = clients.evaluate(clients.initial(Stream(0)), ["test"])
    >>> found.sizes, found.metrics["loss"].round(2)  # log 3: nothing is known of 3 classes
    (array([500, 500, 500]), array([1.1, 1.1, 1.1]))
    """

    split: str
    sizes: Index
    metrics: dict[str, Losses]
    hits: Hits | None = None


Evaluator: TypeAlias = Callable[[Vector], list[Evaluation]]
"""Anything that measures a model on the clients, split by split."""

Limits: TypeAlias = dict[str, tuple[float, float]]
"""95 % limits by metric."""

MEANS = ("predicted", "observed", "error")
AT_THRESHOLDS = ("threshold", "accuracy", "accuracy_at_threshold")
"""Numbers of a client's decisions: all of the first, some of the others."""

BINS = 10
"""Equally wide bins of the probability of the predicted class."""


@dataclass(frozen=True)
class Calibration:
    """Samples by the probability that the model gave its answer."""

    count: tuple[int, ...]  # samples per bin
    confidence: tuple[float, ...]  # sum of the probabilities of the predicted class
    correct: tuple[int, ...]  # samples that were answered correctly

    def error(self) -> float:
        """Return the expected calibration error: the mean over samples of |confidence - right|."""
        count, confidence, correct = map(np.array, (self.count, self.confidence, self.correct))
        total = count.sum()
        if not total:
            return math.nan
        return round(float(np.abs(confidence - correct).sum() / total), 15)

    @classmethod
    def measure(cls, confidence: NDArray[Any], correct: NDArray[Any]) -> Calibration:
        """Sort samples into bins."""
        place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        sums = [np.bincount(place, weights=w, minlength=BINS) for w in (confidence, correct)]
        count = np.bincount(place, minlength=BINS)
        return cls(tuple(count.tolist()), tuple(sums[0].tolist()), tuple(map(int, sums[1])))


@dataclass(frozen=True)
class GroupDetail:
    """The samples of one group at one client: how many, their metrics and limits."""

    size: int
    values: dict[str, float]
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True)
class ClientDetail:
    """What one client's samples say."""

    size: int
    limits: Limits = field(default_factory=dict)  # those that are known
    majority: float | None = None  # share of its most frequent class
    classes: int | None = None  # how many it has samples of
    calibration: Calibration | None = None
    groups: dict[str, GroupDetail] = field(default_factory=dict)
    decision: dict[str, float] = field(default_factory=dict)  # mean prediction, own threshold, ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them; what is not finite is left out."""
        return _drop_unknown(asdict(self))

    @classmethod
    def from_dict(cls, told: Any) -> ClientDetail:
        """Read what :meth:`to_dict` wrote; raise ValueError if it is anything else."""
        try:
            majority, classes = told.get("majority"), told.get("classes")
            decision = _read_numbers(told.get("decision", {}))
            if decision and not set(MEANS) <= decision.keys() <= {*MEANS, *AT_THRESHOLDS}:
                raise ValueError(f"a decision has {', '.join(decision)}")
            return cls(
                _count(told["size"]),
                _read_limits(told["limits"]),
                None if majority is None else _number(majority, 0.0, 1.0),
                None if classes is None else _count(classes),
                _read_calibration(told.get("calibration")),
                {str(name): _read_group(group) for name, group in told.get("groups", {}).items()},
                decision,
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


def _drop_unknown(told: dict[str, Any]) -> dict[str, Any]:
    """Return a tree without what is None or not finite."""
    parts = {k: _drop_unknown(v) if isinstance(v, dict) else v for k, v in told.items()}
    plain = {k: v for k, v in parts.items() if v is not None}
    return {k: v for k, v in plain.items() if isinstance(v, dict) or np.isfinite(v).all()}


def _read_numbers(told: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(value) for name, value in told.items()}


def _read_group(told: Any) -> GroupDetail:
    values, limits = _read_numbers(told["values"]), _read_limits(told["limits"])
    return GroupDetail(_count(told["size"]), values, limits)


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
