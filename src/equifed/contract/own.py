"""Parameters that every client keeps for itself, as training and wrappers see them.

Only engines in which one program plays all clients give them out; on a real federation they stay
where the client is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.evaluation import Evaluation

OwnSteps = Literal["auto", "profile", "joint", "alternating"]
"""How own parts are found: the best ones for the shared model (profile losses), or by local steps,
together with the shared parameters or before them."""

OwnL2: TypeAlias = float | str
"""Strength of the penalty on own parameters: a number, or ``"3/n"``, which is 3 divided by the
client's number of training samples, and at most 1 (any number may stand for the 3)."""


def own_strength(own_l2: OwnL2, samples: int = 1) -> float:
    """Return the strength of the penalty for a client with so many training samples.

    >>> own_strength(0.01, 200), own_strength("10/n", 200), own_strength("10/n", 3)
    (0.01, 0.05, 1.0)
    """
    found = re.fullmatch(r"(.+)/ *n *", own_l2) if isinstance(own_l2, str) else None
    try:
        value = float(own_l2 if found is None else found[1])
    except (TypeError, ValueError):
        value = math.nan
    if not (value >= 0 and math.isfinite(value)) or (isinstance(own_l2, str) and found is None):
        raise ValueError(
            f'own_l2 must be a number of at least 0, got {own_l2}; "3/n" is 3 divided by the '
            "client's number of training samples."
        )
    return value if found is None else min(1.0, value / max(1, samples))


@dataclass(frozen=True, eq=False)
class Inexactness:
    """By how much answers at a model may be off, because own parts are found numerically.

    Parameters
    ----------
    losses : array, shape (N,)
        The loss told is above the exact profile loss by at most this, and never below.
    gradients : array, shape (N,)
        The gradient told is at most this far from the exact one.
    """

    losses: Losses
    gradients: Losses

    def of_value(self, weights: Weights) -> float:
        """Return how far the weighted loss may be below what was told."""
        return float(np.maximum(weights, 0.0) @ self.losses)

    def of_gradient(self, weights: Weights) -> float:
        """Return how far the weighted gradient may be from what was told."""
        return float(np.abs(weights) @ self.gradients)


def uses_minibatches(algorithm: Any) -> bool:
    """Tell whether an algorithm, or one inside it, asks for minibatches.

    >>> from equifed.contract.local import LocalSGD
    >>> uses_minibatches(LocalSGD(lr=0.1, steps=1, batch_size=5))
    True
    """
    if not dataclasses.is_dataclass(algorithm):
        return False
    fields = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    asked = any(n.endswith("batch_size") and v is not None for n, v in fields.items())
    return asked or any(uses_minibatches(value) for value in fields.values())


@runtime_checkable
class MeasuresShared(Protocol):
    """Clients that can say what the shared model is worth to them: an optional question."""

    def evaluate_shared(self, x: Vector, splits: Sequence[str]) -> list[Evaluation]:
        """Return the per-client numbers of x with the mean of all own parts, for everybody."""
        ...


@runtime_checkable
class TellsOwn(Protocol):
    """Clients that may keep an own part each, wherever it is."""

    def describe_own(self) -> str | None:
        """Say what the own parts are and how they are found; None: there are none."""
        ...

    def warn_of_own(self) -> str | None:
        """Say for which clients own parts rest on their penalty alone; None: for nobody."""
        ...

    def inexactness(self, x: Vector) -> Inexactness | str | None:
        """Return how far answers at x may be off; None if not at all, a reason if unknown."""
        ...


@runtime_checkable
class KeepsOwn(TellsOwn, Protocol):
    """Clients whose own parts this program holds."""

    def remembers_own(self) -> bool:
        """Tell whether own parts depend on more than the shared model, so a state must hold them.

        The best own parts for a shared model (profile losses) do not.
        """
        ...

    def with_own(self, own: Vector) -> Self:
        """Return the same clients with these own parts, one row per client of the federation."""
        ...

    def own_after(self) -> Vector:
        """Return the own parts of all clients after the last local steps of these clients.

        Those who took none keep theirs.
        """
        ...

    def own_parts(self, x: Vector) -> Vector:
        """Return the own part that every client of the federation uses with the shared model x."""
        ...

    def own_parameters(self, own: Vector) -> dict[str, Vector]:
        """Return own parts by the parameters' names, in their shapes, clients first."""
        ...
