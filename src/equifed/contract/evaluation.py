"""What a model is worth to each client, outside any algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Index, Losses, Vector
from equifed.contract.details import Details
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


@runtime_checkable
class KnowsFeatures(Protocol):
    """Clients whose training samples are at hand: an optional question about their features."""

    def feature_scales(self) -> Losses | None:
        """Return every feature's standard deviation, NaN if it hardly varies; None: no vectors."""
        ...


@runtime_checkable
class Describes(Protocol):
    """Clients that can say more about a model than numbers: an optional question at the end."""

    def describe(self, x: Vector, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        """Return limits, groups and calibration on one split; None: nobody has samples of it."""
        ...


class Evaluator(Protocol):
    """Anything that measures a model on the clients."""

    def __call__(self, x: Vector) -> list[Evaluation]:
        """Return the per-client numbers of every split."""
        ...
