"""An objective over some of the clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import Objective, SaddleObjective


@dataclass(frozen=True)
class Among(SaddleObjective):
    """Another objective, over its ``members`` alone; the other clients have weight zero.

    Parameters
    ----------
    objective
        What is minimised; it must not have settings for each client.
    members
        Positions of the clients that count, increasing.

    Examples
    --------
    >>> from equifed.objectives import WorstCase
    >>> Among(WorstCase(), (0, 2)).weights(np.array([1.0, 9.0, 2.0]))
    array([0., 0., 1.])
    """

    objective: Objective
    members: tuple[int, ...]

    @override
    def value(self, losses: Losses) -> float:
        return self.objective.value(losses[self._here])

    @override
    def weights(self, losses: Losses) -> Weights:
        return self._everyone(self.objective.weights(losses[self._here]), losses.size)

    @override
    def penalty(self, weights: Weights) -> float:
        return self._saddle.penalty(weights[self._here])

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self._everyone(self._saddle.prox(point[self._here], step), point.size)

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        here = self._here
        old = weights[here]
        if not old.any():  # all weight was with clients that do not count now
            old = self._saddle.start(len(here))
        return self._everyone(self._saddle.mirror(old, losses[here], step), losses.size)

    @override
    def start(self, n: int) -> Weights:
        return self._everyone(self._saddle.start(len(self.members)), n)

    @override
    def strong_convexity(self, n: int) -> float:
        return self._saddle.strong_convexity(len(self.members))

    @override
    def l1_norm(self, n: int) -> float:
        return self._saddle.l1_norm(len(self.members))

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        return self._everyone(self._saddle.penalty_gradient(weights[self._here]), weights.size)

    @property
    @override
    def is_smooth(self) -> bool:
        return self._saddle.is_smooth

    @property
    @override
    def is_entropic(self) -> bool:
        return self._saddle.is_entropic

    @property
    @override
    def unfit(self) -> str | None:
        return self._saddle.unfit

    @property
    def _here(self) -> list[int]:
        return list(self.members)

    @property
    def _saddle(self) -> SaddleObjective:
        assert isinstance(self.objective, SaddleObjective)
        return self.objective

    def _everyone(self, weights: Weights, n: int) -> Weights:
        out = np.zeros(n)
        out[self._here] = weights
        return out
