"""Parameters that every client keeps for itself, as training and wrappers see them.

Only engines in which one program plays all clients give them out; on a real federation they stay
where the client is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from equifed.contract.arrays import Losses, Weights

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
