"""Step sizes that choose themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from equifed.contract.absence import carry_over
from equifed.contract.curvature import Curvature
from equifed.steps.schedule import Problem, StepSizes, WeightChange
from equifed.steps.smoothness import measured_smoothness

LARGEST, TINY = 1e300, 1e-300

DECAY = 0.8
"""How much of the steepest coupling so far a round remembers."""


@dataclass(frozen=True)
class AutoSizes(StepSizes):
    """Step sizes with what the automatic rule remembers.

    Parameters
    ----------
    smoothness : float
        L, measured or known.
    halvings : int
        How often a safeguard halved the step sizes.
    steepest : float
        The coupling of weights and model, its largest over the last rounds.
    free : bool
        Whether the sum S of the weights is free, so that the model's step is tau / S.
    """

    smoothness: float = 0.0
    halvings: int = 0
    steepest: float = 0.0
    free: bool = False

    def numbers(self) -> dict[str, float]:
        """Return the step sizes and the measured smoothness for the round's record."""
        return {**super().numbers(), "smoothness": self.smoothness, "halvings": self.halvings}

    def said(self) -> tuple[str, ...]:
        """Return the chosen sizes in words."""
        sizes = f"tau {self.primal:.4g}, eta {self.local:.4g}, first sigma {self.dual:.4g}"
        return (f"automatic step sizes for smoothness {self.smoothness:.4g}: {sizes}",)

    def halved(self) -> AutoSizes:
        """Return half the step sizes."""
        assert self.local is not None
        return replace(
            self,
            primal=self.primal / 2,
            dual=self.dual / 2,
            local=self.local / 2,
            halvings=self.halvings + 1,
        )


@dataclass(frozen=True)
class AutoSteps:
    r"""Step sizes for SCAFF-PD and SCAFF-PD-IA that need no tuning.

    .. math::

       T &= \min(4, J) / (L\, |\Lambda|_1), \qquad \tau = T, \quad \eta = T / J, \quad \theta = 1 \\
       K &\leftarrow \max\Bigl(\frac{|\sum_i \Delta\lambda_i \nabla f_i(x)|^2}
                     {|\Delta\lambda|^2},\ 0.8\, K\Bigr), \qquad
              \sigma \leftarrow \frac{0.7}{T K}, \ \text{changing at most twofold a round},
              \qquad \sigma_0 = \frac{0.7}{T \sum_i |\nabla f_i(x)|^2}

    L is the largest smoothness of any client: the largest eigenvalue from the data for linear
    models in one process where the Hessian's bound is tight (squared and logistic loss, softmax of
    two classes), else measured (:func:`equifed.steps.smoothness.measured_smoothness`, about 12
    exchanges before the first round). The dual step follows the coupling of weights and model in
    the direction in which the weights turned: the condition :math:`\sigma \tau |\nabla l|^2 < 1` of
    primal-dual methods with the norm taken where it matters, as in the line search of Malitsky and
    Pock (2018), at the cost of a second weighted sum in an exchange that is made anyway. Where the
    sum S of the weights is free (q-fair), the model's step is T / S by convention of the algorithm,
    so :math:`|\Lambda|_1` does not enter and sigma is S times as large; the first S is that of the
    weights at the first losses, at the cost of an exchange.

    For **minibatches** T is half of that, because a minibatch is steeper than all samples. For
    **neural networks** the same rule holds with L at the first model. Neither has a guarantee, and
    curvature grows in training: :class:`equifed.algorithms.safeguarded.Safeguarded`, in which
    SCAFF-PD is usually run, goes back and halves the steps when they were too bold.

    Parameters
    ----------
    smoothness : float, optional
        L, if it is known; saves the measurement.
    horizon : float
        T L for full gradients; 4 is the paper-free default, 8 can diverge.
    coupling : float
        The product of step sizes and squared coupling; must stay below 1.
    probe : int
        Clients to ask at most when the smoothness is measured.
    """

    smoothness: float | None = None
    horizon: float = 4.0
    coupling: float = 0.7
    probe: int = 32

    def __post_init__(self) -> None:
        if self.smoothness is not None and not self.smoothness > 0:
            raise ValueError(f"smoothness must be positive, got {self.smoothness}.")
        if not self.horizon > 0:
            raise ValueError(f"horizon must be positive, got {self.horizon}.")
        if not 0 < self.coupling < 1:
            raise ValueError(f"coupling must lie in (0, 1), got {self.coupling}.")
        if self.probe < 1:
            raise ValueError(f"probe must be at least 1, got {self.probe}.")

    def start(self, problem: Problem) -> AutoSizes:
        """Return the step sizes of the first round; may measure."""
        algorithm, clients = problem.algorithm, problem.clients
        smoothness = self._smoothness(problem)
        steps = int(algorithm.local.steps_for(clients.sizes).max())
        norm = algorithm.objective.l1_norm(len(clients.names))
        free = math.isinf(norm)
        time = min(self.horizon, steps) / (smoothness * (1.0 if free else norm))
        if algorithm.local.batch_size is not None or algorithm.gradient_batch_size is not None:
            time /= 2
        total = self._first_total(problem) if free else 1.0
        squares = float(problem.gradients.squared_norms().sum())
        dual = min(self.coupling * total / max(time * squares, TINY), LARGEST)
        local = time / steps
        return AutoSizes(time, dual, 1.0, local, smoothness=smoothness, free=free)

    def next(self, sizes: StepSizes, turned: WeightChange) -> AutoSizes:
        """Return the sizes with the next dual step; each halving has halved it as well."""
        assert isinstance(sizes, AutoSizes)
        coupling = turned.coupling()
        if coupling is None:
            return sizes
        steepest = max(coupling, DECAY * sizes.steepest)
        total = float(turned.weights.sum()) if sizes.free else 1.0
        wanted = self.coupling * total / max(sizes.primal * 4.0**sizes.halvings * steepest, TINY)
        dual = float(np.clip(wanted, sizes.dual / 2, min(2 * sizes.dual, LARGEST)))
        return replace(sizes, dual=dual, steepest=steepest)

    def _first_total(self, problem: Problem) -> float:
        """Return the sum of the weights at the first losses."""
        clients, objective = problem.clients, problem.algorithm.objective
        seen = clients.losses(problem.x, problem.stream.at("losses"))
        return objective.total(
            objective.weights(carry_over(None, clients.index, seen, len(clients.names)))
        )

    def _smoothness(self, problem: Problem) -> float:
        if self.smoothness is not None:
            return self.smoothness
        known, bound = problem.clients.curvature(), math.inf
        if isinstance(known, Curvature):
            bound = float(known.smoothness.max())
            if known.tight and math.isfinite(bound):
                return bound
        measured = measured_smoothness(
            problem.clients, problem.x, problem.stream.at("smoothness"), self.probe
        )
        found = min(measured, bound)
        return found if found > 0 else 1.0  # flat: any step will do
