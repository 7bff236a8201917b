"""What a model is worth to each client, outside any algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from equifed.contract.arrays import Index, Losses, Vector

SPLITS = ("train", "validation", "test")


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
    """

    split: str
    sizes: Index
    metrics: dict[str, Losses]


class Evaluator(Protocol):
    """Anything that measures a model on the clients."""

    def __call__(self, x: Vector) -> list[Evaluation]:
        """Return the per-client numbers of every split."""
        ...
