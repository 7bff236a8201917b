"""Kinds of dual step: Euclidean (proximal or by gradients) and entropic (mirror).

All raise the weights of clients with large losses and stay in the objective's set exactly; they
differ in how they measure the distance from the current weights, and how they treat the penalty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import SaddleObjective, check_saddle, check_step, check_vector


class DualStep(ABC):
    """One step of ascent on <w, losses> - psi(w) over the objective's set.

    >>> import numpy as np
    >>> from equifed.objectives import Entropic, Euclidean, WorstCase
    >>> old, losses = np.array([0.5, 0.5]), np.array([1.0, 2.0])
    >>> [step.ascend(WorstCase(), old, losses, 0.5).round(2) for step in (Euclidean(), Entropic())]
    [array([0.25, 0.75]), array([0.38, 0.62])]
    """

    needs: ClassVar[tuple[str, str] | None] = None  # what an objective must be, and for what

    def check(self, objective: SaddleObjective, who: str) -> None:
        """Refuse an objective for which there is no such step, before any round."""
        check_saddle(objective, who)
        if self.needs is not None and not getattr(objective, self.needs[0]):
            raise ValueError(
                f"{who} has {self.needs[1]}, which {objective!r} does not have exactly; give "
                "dual=Euclidean()."
            )

    @abstractmethod
    def ascend(
        self, objective: SaddleObjective, weights: Weights, losses: Losses, step: float
    ) -> Weights:
        """Return the next weights."""


@dataclass(frozen=True)
class Euclidean(DualStep):
    r"""The proximal gradient step of AFL, DRFA and SCAFF-PD.

    .. math:: w^+ = \mathrm{argmax}_{u \in W}\ s(\langle u, \ell\rangle - \psi(u))
        - \tfrac12 |u - w|^2 = \mathrm{prox}(w + s \ell, s)

    >>> import numpy as np
    >>> from equifed.objectives import WorstCase
    >>> Euclidean().ascend(WorstCase(), np.array([0.5, 0.5]), np.array([1.0, 2.0]), step=0.25)
    array([0.375, 0.625])
    """

    @override
    def ascend(
        self, objective: SaddleObjective, weights: Weights, losses: Losses, step: float
    ) -> Weights:
        ahead = check_vector(weights, "weights") + check_step(step) * check_vector(losses, "losses")
        return objective.prox(ahead, step)


@dataclass(frozen=True)
class ProjectedGradient(DualStep):
    r"""The gradient step that DRFA prints in Section 5.2, for penalties that have a gradient.

    .. math:: w^+ = \Pi_W(w + s (\ell - \nabla\psi(w)))

    Its fixed points are those of the proximal step, but it needs a step below 2 over the
    smoothness of the penalty (2 / (rho n) for chi-square). Without a penalty the two are one.

    >>> import numpy as np
    >>> from equifed.objectives import ChiSquare
    >>> step = ProjectedGradient()
    >>> step.ascend(ChiSquare(1.0), np.array([0.75, 0.25]), np.array([1.0, 1.0]), step=0.25)
    array([0.625, 0.375])
    """

    needs: ClassVar = ("is_smooth", "a gradient step in the penalty")

    @override
    def ascend(
        self, objective: SaddleObjective, weights: Weights, losses: Losses, step: float
    ) -> Weights:
        weights, losses = check_vector(weights, "weights"), check_vector(losses, "losses")
        slope = losses - objective.penalty_gradient(weights)
        return objective.prox(weights + check_step(step) * slope, 0.0)


@dataclass(frozen=True)
class Entropic(DualStep):
    r"""The mirror step with relative entropy: multiplicative weights.

    .. math:: w^+ = \mathrm{argmax}_{u \in W}\ s(\langle u, \ell\rangle - \psi(u))
        - \sum_i u_i \log \frac{u_i}{w_i}

    On the simplex this is :math:`w^+_i \propto w_i e^{s \ell_i}`. Available on the simplex and on
    capped simplices, alone or with a chi-square, squared-distance or KL penalty; signed sets and
    the remaining penalties are refused. A weight that is exactly zero stays zero: start from
    positive weights.

    >>> import numpy as np
    >>> from equifed.objectives import WorstCase
    >>> Entropic().ascend(WorstCase(), np.array([0.5, 0.5]), np.log([1.0, 3.0]), step=1.0)
    array([0.25, 0.75])
    """

    needs: ClassVar = ("is_entropic", "an entropic dual step")

    @override
    def ascend(
        self, objective: SaddleObjective, weights: Weights, losses: Losses, step: float
    ) -> Weights:
        weights, losses = check_vector(weights, "weights"), check_vector(losses, "losses")
        if (weights < 0).any():
            raise ValueError("an entropic step needs weights >= 0; use Euclidean().")
        return objective.mirror(weights, losses, check_step(step))
