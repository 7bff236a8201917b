"""What an objective is: a function of the client losses, and its exact dual step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from equifed.arrays import Losses, Weights


@runtime_checkable
class Objective(Protocol):
    """A function of the losses that training minimises.

    Losses are minimised, weights maximise. ``weights`` is a (sub)gradient of ``value``, so that a gradient step of the
    objective is a gradient step of the weighted sum of client losses.
    """

    def value(self, losses: Losses) -> float:
        """Phi(l): what the server minimises; nondecreasing in every loss unless weights are signed."""
        ...

    def weights(self, losses: Losses) -> Weights:
        """Return a (sub)gradient of Phi at ``losses``."""
        ...


@runtime_checkable
class SaddleObjective(Objective, Protocol):
    """An objective of the form Phi(l) = max over w in W of <w, l> - psi(w)."""

    def penalty(self, weights: Weights) -> float:
        """psi(w), finite for every w that ``prox`` returns."""
        ...

    def prox(self, point: Weights, step: float) -> Weights:
        """Return argmin over w in W of step * psi(w) + |w - point|^2 / 2, exactly."""
        ...
