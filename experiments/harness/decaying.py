"""DRFA whose gamma shrinks from round to round, as in its authors' public code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from equifed import DRFA
from equifed.contract import Clients, Info, Stream, Vector


@dataclass(frozen=True)
class Decaying:
    """DRFA whose gamma is multiplied by a factor before every round.

    Parameters
    ----------
    drfa : DRFA
        With the gamma before the first round.
    factor : float
        0.9 in MLOPTPSU/FedTorch, ``centered/drfa.py``.
    """

    drfa: DRFA = field(default_factory=DRFA)
    factor: float = 0.9

    def init(self, clients: Clients, x: Vector) -> Any:
        """Return the state before the first round."""
        return self.drfa.init(clients, x)

    def round(self, state: Any, clients: Clients, stream: Stream) -> tuple[Any, Info]:
        """Return the state after one round of DRFA with this round's gamma."""
        gamma = self.drfa.dual_step * self.factor ** (state.rounds + 1)
        return replace(self.drfa, dual_step=gamma).round(state, clients, stream)

    def model(self, state: Any) -> Vector:
        """Return DRFA's model."""
        return self.drfa.model(state)
