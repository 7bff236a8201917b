"""Step sizes of SCAFF-PD: constant, given, or from the papers' conditions.

The automatic ones are in :mod:`equifed.steps.automatic`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

from equifed.steps.schedule import Problem, Schedule, StepSizes, WeightChange

__all__ = [
    "AcceleratedSteps",
    "ConstantSteps",
    "GivenSteps",
    "LinearRateSteps",
    "Schedule",
    "SignedWeightSteps",
    "StepSizes",
]


@dataclass(frozen=True)
class ConstantSteps:
    """The same step sizes in every round.

    >>> ConstantSteps(primal=0.5, dual=1.0).start().extrapolation
    1.0
    """

    primal: float
    dual: float
    extrapolation: float = 1.0
    local: float | None = None

    def __post_init__(self) -> None:
        for name in ("primal", "dual"):
            if not getattr(self, name) > 0:
                raise ValueError(f"The {name} step must be positive, got {getattr(self, name)}.")
        if not 0 <= self.extrapolation <= 1:
            raise ValueError(f"extrapolation must lie in [0, 1], got {self.extrapolation}.")

    def start(self, problem: Problem | None = None) -> StepSizes:
        """Return the step sizes of the first round."""
        return StepSizes(self.primal, self.dual, self.extrapolation, self.local)

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the same step sizes."""
        return sizes


@dataclass(frozen=True)
class GivenSteps:
    """Step sizes listed round by round; the last ones stay in force.

    >>> steps = GivenSteps(primal=(1.0, 0.5), dual=(1.0,), extrapolation=(1.0,))
    >>> steps.next(steps.start()).primal
    0.5
    """

    primal: tuple[float, ...]
    dual: tuple[float, ...]
    extrapolation: tuple[float, ...] = (1.0,)
    local: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("primal", "dual", "extrapolation"):
            if not getattr(self, name):
                raise ValueError(
                    f"The list of {name} step sizes is empty; give one number at least."
                )

    def start(self, problem: Problem | None = None) -> StepSizes:
        """Return the step sizes of the first round."""
        return self._at(0)

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the step sizes of the next round."""
        return self._at(sizes.round + 1)

    def _at(self, r: int) -> StepSizes:
        primal, dual, extrapolation, local = (
            values[min(r, len(values) - 1)] if values else None
            for values in (self.primal, self.dual, self.extrapolation, self.local)
        )
        assert primal is not None and dual is not None and extrapolation is not None
        return StepSizes(primal, dual, extrapolation, local, round=r)


@dataclass(frozen=True)
class AcceleratedSteps:
    r"""SCAFF-PD's schedule for strongly convex losses and any penalty: rate 1/R^2 (Condition 5.1).

    .. math:: \gamma_{r+1} = \gamma_r (1 + \mu' \tau_r), \quad
              \tau_{r+1} = \tau_r \sqrt{\gamma_r / \gamma_{r+1}}, \quad
              \sigma_r = \gamma_r \tau_r, \quad \theta_r = \sigma_{r-1} / \sigma_r, \quad \theta_0 =
              1

    with :math:`\mu' = \mu/4`, which the proof uses (Remark E.4), and the largest :math:`\tau_0`
    that (E.35) allows:
    :math:`(1 - \delta)/\tau_0 = 12 L + 2 L_{\lambda x}^2 \gamma_0 \tau_0 / c_\alpha` with
    :math:`\delta = c_\alpha = 1/2`. Constants of a proof: safe and slow. The paper prints two
    different :math:`\sigma_{-1}`; either only fixes :math:`\theta_0`, taken as 1 here.

    Parameters
    ----------
    smoothness : float
        L, of every client's loss.
    strong_convexity : float
        mu, of every client's loss.
    coupling : float
        L_lambda-x: Lipschitz constant of the vector of losses.
    local_steps : int
        J; the local step size is tau / J (Lemma D.2 with eta_g = 1).
    balance : float
        gamma_0, the ratio of dual to primal step.

    Examples
    --------
    >>> steps = AcceleratedSteps(smoothness=1.0, strong_convexity=1.0, coupling=1.0, local_steps=10)
    >>> first = steps.start()
    >>> 0.5 / first.primal - 12 - 4 * first.dual < 1e-9
    True
    >>> second = steps.next(first)
    >>> second.primal < first.primal and second.dual > first.dual
    True
    """

    smoothness: float
    strong_convexity: float
    coupling: float
    local_steps: int
    balance: float = 1.0

    def __post_init__(self) -> None:
        _refuse_non_positive(self)

    def start(self, problem: Problem | None = None) -> StepSizes:
        """Return the step sizes of the first round."""
        # (1/2)/tau = 12 L + 4 Llx^2 gamma tau  <=>  4 Llx^2 gamma tau^2 + 12 L tau - 1/2 = 0
        a, b = 4 * self.coupling**2 * self.balance, 12 * self.smoothness
        tau = 1 / (b + math.sqrt(b * b + 2 * a))
        return StepSizes(tau, self.balance * tau, 1.0, tau / self.local_steps, self.balance)

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the step sizes of the next round."""
        assert sizes.gamma is not None
        gamma = sizes.gamma * (1 + self.strong_convexity / 4 * sizes.primal)
        tau = sizes.primal * math.sqrt(sizes.gamma / gamma)
        dual = gamma * tau
        return StepSizes(tau, dual, sizes.dual / dual, tau / self.local_steps, gamma)


@dataclass(frozen=True)
class LinearRateSteps:
    r"""SCAFF-PD's schedule for strongly convex losses and penalty: linear rate (Condition 5.2).

    .. math:: \omega = \tfrac12 + 24\kappa
              + \sqrt{(\tfrac12 + 24\kappa)^2 + 16 L_{\lambda x}^2/(\mu \mu_\lambda)}, \quad
              \theta = 1 - 1/\omega, \quad \tau = \frac{4 (1 - \theta)}{\mu\theta}, \quad
              \sigma = \frac{1 - \theta}{\mu_\lambda\theta}

    with :math:`\kappa = L/\mu` and the paper's constant C set to 1, the smallest its inequality
    (E.52) allows. Linear convergence, with the constants of a proof.

    Minibatches leave noise, :math:`E|g_i - \nabla f_i|^2 \le \zeta^2`. For
    :math:`E\,\mu |x - x^\star|^2 \le \epsilon` the condition's other branch is

    .. math:: \omega \ge 1 + 4 \zeta^2 / (\mu\epsilon)
              \quad\Leftrightarrow\quad 4\,\frac{1 - \theta}{\theta}\,\frac{\zeta^2}{\mu}
              \le \epsilon

    which is (E.64), with its constant C set to 1; the larger :math:`\omega` is taken. (The paper
    prints :math:`\zeta^2/\mu` and :math:`\zeta^2/\mu^2`, for :math:`\mu|x - x^\star|^2` and for
    :math:`|x - x^\star|^2`.)

    Parameters
    ----------
    smoothness, strong_convexity, coupling, local_steps
        As for :class:`AcceleratedSteps`.
    dual_strong_convexity : float
        mu_lambda, of the penalty: rho N for chi-square.
    noise : float
        zeta, of the clients' gradients; 0 for full ones.
    accuracy : float, optional
        epsilon, wanted of mu times the squared distance; needed where there is noise.
    """

    smoothness: float
    strong_convexity: float
    coupling: float
    local_steps: int
    dual_strong_convexity: float
    noise: float = 0.0
    accuracy: float | None = None

    def __post_init__(self) -> None:
        _refuse_non_positive(self)
        if self.noise and self.accuracy is None:
            raise ValueError("noise needs the accuracy that is wanted; there is none without it.")

    def start(self, problem: Problem | None = None) -> StepSizes:
        """Return the step sizes of the first round."""
        mu, mu_dual = self.strong_convexity, self.dual_strong_convexity
        half = 0.5 + 24 * self.smoothness / mu
        omega = half + math.sqrt(half**2 + 16 * self.coupling**2 / (mu * mu_dual))
        if self.accuracy is not None:
            omega = max(omega, 1 + 4 * self.noise**2 / (mu * self.accuracy))  # (E.64)
        ratio = 1 / (omega - 1)  # (1 - theta) / theta
        tau = 4 * ratio / mu
        return StepSizes(tau, ratio / mu_dual, 1 - 1 / omega, tau / self.local_steps)

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the same step sizes."""
        return sizes


@dataclass(frozen=True)
class SignedWeightSteps:
    r"""SCAFF-PD-IA's schedule for weights that may be negative: rate 1/R^2 (Assumption 8).

    .. math:: \gamma_{r+1} = \gamma_r \Bigl(1 + \bigl(\tfrac m4
              - \tfrac M2 (|\Lambda|_1 - 1)\bigr) \tau_r\Bigr), \quad
              \tau_{r+1} = \tau_r \sqrt{\gamma_r / \gamma_{r+1}}, \quad
              \sigma_r = \gamma_r \tau_r, \quad \theta_{r+1} = \sigma_r / \sigma_{r+1}, \quad
              \eta_r = \frac{\tau_r}{J \beta}

    with :math:`\beta = \max(1, 2 \tau_0 M)` and the largest :math:`\tau_0` that satisfies
    :math:`\tau_0 \le 1 / (1200 M |\Lambda|_1)`,
    :math:`\tau_0 \le 18 (1 + \sqrt 3) / (m - 2 M (|\Lambda|_1 - 1))` and
    :math:`4 L_{\lambda x}^2 \tau_0^2 \gamma_0 / c_\alpha + 27 M \tau_0 \le 1`,
    :math:`c_\alpha = 1/2`. Convergence is proved for :math:`|\Lambda|_1 < 1 + m / (2 M)`
    (Theorem 3 prints 1 + 2 m / M; the stricter one is used). Beyond it there is a warning and
    gamma stays constant. Constants of a proof: safe and very slow.

    Parameters
    ----------
    smoothness, strong_convexity
        M and m, of every client's loss.
    coupling, local_steps, balance
        As for :class:`AcceleratedSteps`.
    """

    smoothness: float
    strong_convexity: float
    coupling: float
    local_steps: int
    balance: float = 1.0

    def __post_init__(self) -> None:
        _refuse_non_positive(self)

    def start(self, problem: Problem) -> StepSizes:
        """Return the step sizes of the first round; warn if the set is too large."""
        size = problem.algorithm.objective.l1_norm(len(problem.clients.names))
        m, big = self.strong_convexity, self.smoothness
        if math.isinf(size):
            raise ValueError(
                f"SignedWeightSteps is for weights that sum to one, which those of "
                f"{problem.algorithm.objective!r} do not; use AutoSteps or ConstantSteps."
            )
        if not size < 1 + m / (2 * big):
            warnings.warn(
                f"|Lambda|_1 is {size:.4g}; convergence is proved only below 1 + m/(2M) = "
                f"{1 + m / (2 * big):.4g}. A smaller phi, or larger sets A and B, would be below.",
                UserWarning,
                stacklevel=2,
            )
        a, b = 8 * self.coupling**2 * self.balance, 27 * big  # a tau^2 + b tau = 1
        bounds = [1 / (1200 * big * size), 2 / (b + math.sqrt(b * b + 4 * a))]
        spare = m - 2 * big * (size - 1)
        if spare > 0:
            bounds.append(18 * (1 + math.sqrt(3)) / spare)
        tau = min(bounds)
        sizes = StepSizes(tau, self.balance * tau, 1.0, gamma=self.balance)
        local = tau / (self.local_steps * max(1.0, 2 * tau * big))
        return replace(sizes, local=local, rate=max(0.0, m / 4 - big * (size - 1) / 2))

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the step sizes of the next round."""
        assert sizes.gamma is not None and sizes.local is not None and sizes.rate is not None
        gamma = sizes.gamma * (1 + sizes.rate * sizes.primal)
        tau = sizes.primal * math.sqrt(sizes.gamma / gamma)
        local = sizes.local * tau / sizes.primal
        return StepSizes(
            tau, gamma * tau, sizes.dual / (gamma * tau), local, gamma, rate=sizes.rate
        )


def _refuse_non_positive(schedule: AcceleratedSteps | LinearRateSteps | SignedWeightSteps) -> None:
    for name, value in vars(schedule).items():
        if value is not None and not (value > 0 or (name == "noise" and value == 0)):
            raise ValueError(f"{name} must be positive, got {value}.")
