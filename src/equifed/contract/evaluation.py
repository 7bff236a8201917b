"""What a model is worth to each client, outside any algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Index, Losses, Vector

SPLITS = ("train", "validation", "test")

Flags: TypeAlias = NDArray[np.bool_]
"""One truth value per sample."""


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
        "loss" (mean per-sample loss without the L2 penalty) and, for classification, "accuracy".
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


class Evaluator(Protocol):
    """Anything that measures a model on the clients."""

    def __call__(self, x: Vector) -> list[Evaluation]:
        """Return the per-client numbers of every split."""
        ...
