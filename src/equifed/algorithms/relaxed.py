"""Relaxed: any algorithm whose server steps become shorter the more often clients are missing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from equifed.algorithms.wrapper import inner_state, with_inner_state
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream


@dataclass(frozen=True)
class State:
    """The algorithm's state, and in how many rounds clients were missing."""

    inner: Any
    missed: int = 0

    @property
    def x(self) -> Vector:
        """The model."""
        return self.inner.x  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Relaxed:
    r"""Goes only a part of the way, the less the more often clients were missing.

    .. math:: x \leftarrow x + s_k\, (x^+ - x), \qquad s_k = (1 + k/h)^{-1/2}

    where :math:`x^+` is the model after the algorithm's round, and k counts the rounds before in
    which somebody was missing. Clients that are missing at random are noise, and with steps of
    constant length even the mean of the iterates is off: the losses that lead the weights are those
    of models that jump. Steps of order :math:`k^{-1/2}` are what stochastic descent-ascent takes
    (Nemirovski et al. 2009); those of the weights stay as they are, for the losses are known.

    With everybody there it is the algorithm itself, to the bit.

    Parameters
    ----------
    algorithm : Algorithm
        Any.
    horizon : float
        h: after 3 h rounds with missing clients steps are half as long.
    """

    algorithm: AnyAlgorithm
    horizon: float = 10.0

    def __post_init__(self) -> None:
        if not self.horizon > 0:
            raise ValueError(f"horizon must be positive, got {self.horizon}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after a part of one round of the algorithm."""
        after, info = self.algorithm.round(state.inner, clients, stream)
        share = 1 / math.sqrt(1 + state.missed / self.horizon)
        if share < 1:
            part: Vector = state.x + share * (after.x - state.x)
            after = with_inner_state(after, replace(inner_state(after), x=part))
        missing = len(clients.index) < len(clients.names)
        return State(after, state.missed + missing), info

    def model(self, state: State) -> Vector:
        """Return the algorithm's model."""
        return self.algorithm.model(state.inner)
