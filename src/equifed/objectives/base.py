"""What an objective is: a function of the client losses, and its exact dual step.

Objectives are frozen values that hold no data: the number of clients n is the length of the
losses, of the point, or of the prior that was given. Arrays are NumPy in float64, whatever the
model's precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from equifed.contract.arrays import Losses, Weights

if TYPE_CHECKING:
    from equifed.objectives.permutahedron import Permutahedron


@runtime_checkable
class Objective(Protocol):
    """A function of the losses that training minimises.

    Losses are minimised, weights maximise. ``weights`` is a (sub)gradient of ``value``, so that a
    gradient step of the objective is a gradient step of the weighted sum of client losses.
    """

    def value(self, losses: Losses) -> float:
        """Phi(l), which the server minimises; nondecreasing in every loss unless signed."""
        ...

    def weights(self, losses: Losses) -> Weights:
        """Return a (sub)gradient of Phi at ``losses``; equal losses are treated alike."""
        ...


@runtime_checkable
class SaddleObjective(Objective, Protocol):
    """An objective of the form Phi(l) = max over w in W of <w, l> - psi(w)."""

    def penalty(self, weights: Weights) -> float:
        """psi(w), finite for every w in W; membership of W is not checked."""
        ...

    def prox(self, point: Weights, step: float) -> Weights:
        """Return argmin over w in W of step * psi(w) + |w - point|^2 / 2, exactly."""
        ...

    def start(self, n: int) -> Weights:
        """Return a feasible first dual point for n clients: uniform, or the prior."""
        ...

    def strong_convexity(self, n: int) -> float:
        """Return the modulus mu_lambda of psi in the Euclidean norm; 0 where it has none."""
        ...

    def l1_norm(self, n: int) -> float:
        """|W|_1 = max over w in W of |w|_1; 1 on the simplex, larger for signed weights."""
        ...


@runtime_checkable
class SymmetricSet(SaddleObjective, Protocol):
    """A set W that is a translated permutahedron, with psi = 0; can enter relative fairness."""

    def permutahedron(self, n: int) -> Permutahedron:
        """Return W for n clients."""
        ...


@runtime_checkable
class CappedSet(SaddleObjective, Protocol):
    """A set W = {0 <= w_i <= caps_i, sum of w = 1}, with psi = 0; has entropic steps."""

    def caps(self, n: int) -> Weights:
        """Return the largest weight that each client may get."""
        ...
