"""Step sizes that choose themselves, and step back when they were too bold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from equifed.contract.curvature import Curvature
from equifed.steps.curvature import measured_smoothness
from equifed.steps.schedule import Point, Problem, Seen, StepSizes

LARGEST, TINY = 1e300, 1e-300

DECAY = 0.8
"""How much of the steepest coupling so far a round remembers."""

MUCH_WORSE = 100.0
"""A measure that vanishes at the solution is much worse when it is this many times the best."""

GRACE = 10
"""Rounds after a step back in which nothing is judged: the best point may have been a lucky one."""


@dataclass(frozen=True)
class AutoSizes(StepSizes):
    """Step sizes with what the automatic rule remembers.

    Parameters
    ----------
    smoothness : float
        L, measured or known.
    best : Point, optional
        The best point so far.
    first : float
        What the first point was worth.
    stale : int
        Rounds since the best point.
    halvings : int
        How often the safeguard halved the step sizes.
    steepest : float
        The coupling of weights and model, its largest over the last rounds.
    by_gap, by_residual : bool
        Whether rounds are judged by their certified gap, or by how far they are from a saddle
        point; by the objective if neither.
    smoothed : float, optional
        Running mean of the objective where minibatches make it noisy.
    """

    smoothness: float = 0.0
    best: Point | None = None
    first: float = math.inf
    stale: int = 0
    halvings: int = 0
    steepest: float = 0.0
    by_gap: bool = False
    by_residual: bool = False
    smoothed: float | None = None

    def numbers(self) -> dict[str, float]:
        """Return the step sizes and the measured smoothness for the round's record."""
        return {**super().numbers(), "smoothness": self.smoothness, "halvings": self.halvings}

    def said(self) -> tuple[str, ...]:
        """Return the chosen sizes in words."""
        sizes = f"tau {self.primal:.4g}, eta {self.local:.4g}, first sigma {self.dual:.4g}"
        return (f"automatic step sizes for smoothness {self.smoothness:.4g}: {sizes}",)

    def retreat(self) -> AutoSizes | None:
        """Return half the step sizes, from the best point; None if there is none."""
        if self.best is None:
            return None
        return replace(self.halved(), back=self.best, stale=-GRACE)

    def halved(self) -> AutoSizes:
        """Return half the step sizes."""
        assert self.local is not None
        return replace(
            self,
            primal=self.primal / 2,
            dual=self.dual / 2,
            local=self.local / 2,
            stale=0,
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
    models in one process where the Hessian's bound is tight (squared and logistic loss), else
    measured (:func:`equifed.steps.curvature.measured_smoothness`, about 12 exchanges before the
    first round). The dual step follows the coupling of weights and model in the direction in which
    the weights turned: the condition :math:`\sigma \tau |\nabla l|^2 < 1` of primal-dual methods
    with the norm taken where it matters, as in the line search of Malitsky and Pock (2018), at the
    cost of a second weighted sum in an exchange that is made anyway.

    Safeguard: where a round is much worse than the best one (its certified gap 100 times the best;
    or, without a certificate, its objective more than doubled *and* more than half of what was
    gained lost again), training goes back to the best point, both steps are halved, and nothing is
    judged for ten rounds. Where nothing improved for ``patience`` rounds, they are halved. When
    local steps overflow for everybody, training goes back too. Signed weights (relative fairness)
    have no certificate; strongly convex clients are then judged, as by a gap, by the distance from
    a saddle point, :math:`\Phi(x) - F(x, \lambda) + \tau |\nabla_x F(x, \lambda)|^2 / 2`, which
    swings more, so with twice the patience.

    For **minibatches** T is half of that, because a minibatch is steeper than all samples, and the
    safeguard looks at a running mean of the objective, about ten rounds long. For
    **neural networks** the same rule holds with L at the first model; curvature grows in training,
    which the safeguard catches. Neither has a guarantee.

    Parameters
    ----------
    smoothness : float, optional
        L, if it is known; saves the measurement.
    horizon : float
        T L for full gradients; 4 is the paper-free default, 8 can diverge.
    coupling : float
        The product of step sizes and squared coupling; must stay below 1.
    patience : int
        Rounds without improvement after which T is halved.
    probe : int
        Clients to ask at most when the smoothness is measured.
    """

    smoothness: float | None = None
    horizon: float = 4.0
    coupling: float = 0.7
    patience: int = 60
    probe: int = 32

    def __post_init__(self) -> None:
        if self.smoothness is not None and not self.smoothness > 0:
            raise ValueError(f"smoothness must be positive, got {self.smoothness}.")
        if not self.horizon > 0:
            raise ValueError(f"horizon must be positive, got {self.horizon}.")
        if not 0 < self.coupling < 1:
            raise ValueError(f"coupling must lie in (0, 1), got {self.coupling}.")
        for name in ("patience", "probe"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def start(self, problem: Problem) -> AutoSizes:
        """Return the step sizes of the first round; may measure."""
        smoothness = self._smoothness(problem)
        steps = int(problem.local.steps_for(problem.clients.sizes).max())
        norm = problem.objective.l1_norm(len(problem.clients.names))
        signed = norm > 1 + 1e-9
        time = min(self.horizon, steps) / (smoothness * norm)
        if problem.local.batch_size is not None or problem.gradient_batch_size is not None:
            time /= 2
        dual = self.coupling / max(time * float(problem.gradients.squared_norms().sum()), TINY)
        return AutoSizes(
            time,
            min(dual, LARGEST),
            extrapolation=1.0,
            local=time / steps,
            smoothness=smoothness,
            by_gap=_strongly_convex(problem) and not signed,
            by_residual=_strongly_convex(problem) and signed,
            smoothed=None if problem.gradient_batch_size is None else math.nan,
        )

    def next(self, sizes: StepSizes, seen: Seen) -> AutoSizes:
        """Return the step sizes of the next round, and where to go back to if need be."""
        assert isinstance(sizes, AutoSizes)
        sizes = _noted(self._adapted(sizes, seen.coupling()), seen.value)
        merit = _merit(sizes, seen)
        if merit is None:  # somebody is missing: nothing to compare with
            return sizes
        here, best = replace(seen.point, merit=merit), sizes.best
        if best is None:
            return replace(sizes, best=here, first=merit)
        if merit < best.merit:
            return replace(sizes, best=here, stale=0)
        if _vanishing(sizes) and best.merit <= 1e-12 * abs(seen.value):
            return sizes  # converged to rounding
        if sizes.stale >= 0 and merit > _limit(sizes, best.merit):
            return sizes.retreat() or sizes
        if sizes.stale + 1 >= self.patience * (1 + sizes.by_residual):
            return sizes.halved()
        return replace(sizes, stale=sizes.stale + 1)

    def _smoothness(self, problem: Problem) -> float:
        if self.smoothness is not None:
            return self.smoothness
        known, bound = problem.curvature, math.inf
        if isinstance(known, Curvature):
            bound = float(known.smoothness.max())
            if known.tight and math.isfinite(bound):
                return bound
        measured = measured_smoothness(
            problem.clients, problem.x, problem.stream.at("smoothness"), self.probe
        )
        found = min(measured, bound)
        return found if found > 0 else 1.0  # flat: any step will do

    def _adapted(self, sizes: AutoSizes, coupling: float | None) -> AutoSizes:
        """Return the sizes with the next dual step; each halving has halved it as well."""
        if coupling is None:
            return sizes
        steepest = max(coupling, DECAY * sizes.steepest)
        wanted = self.coupling / max(sizes.primal * 4.0**sizes.halvings * steepest, TINY)
        dual = float(np.clip(wanted, sizes.dual / 2, min(2 * sizes.dual, LARGEST)))
        return replace(sizes, dual=dual, steepest=steepest)


def _noted(sizes: AutoSizes, value: float) -> AutoSizes:
    """Return the sizes with the running mean of a noisy objective, about ten rounds long."""
    if sizes.smoothed is None:
        return sizes
    fresh = math.isnan(sizes.smoothed)
    return replace(sizes, smoothed=value if fresh else 0.9 * sizes.smoothed + 0.1 * value)


def _vanishing(sizes: AutoSizes) -> bool:
    """Tell whether what a round is judged by is zero at the solution."""
    return sizes.by_gap or sizes.by_residual


def _merit(sizes: AutoSizes, seen: Seen) -> float | None:
    """Return what a round is judged by; smaller is better."""
    if sizes.by_gap:
        return seen.gap
    if sizes.by_residual:
        return seen.residual
    return seen.value if sizes.smoothed is None else sizes.smoothed


def _limit(sizes: AutoSizes, best: float) -> float:
    """Return what is much worse than the best."""
    if _vanishing(sizes):
        return MUCH_WORSE * best
    return max(best + abs(best), (sizes.first + best) / 2)


def _strongly_convex(problem: Problem) -> bool:
    """Tell whether every client's loss is known to be strongly convex, and everybody is present."""
    known, clients = problem.curvature, problem.clients
    return (
        isinstance(known, Curvature)
        and float(known.strong_convexity.min()) > 0
        and problem.gradient_batch_size is None
        and len(clients.index) == len(clients.names)
    )
