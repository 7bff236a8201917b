"""Schedules of step sizes: what one is, constant ones, and those of the papers' conditions.

A schedule yields the step sizes of the first round and turns those of one round into those of the
next, so that the current ones are part of the algorithm's state and a run can be resumed anywhere.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

from equifed.contract import Clients, ClientVectors, Stream, Vector, Weights
from equifed.contract.arrays import check_settings


@dataclass(frozen=True)
class StepSizes:
    """Step sizes of one round."""

    primal: float  # tau, of the model
    dual: float  # sigma, of the weights
    extrapolation: float  # theta, of the losses
    local: float | None = None  # eta, of the local steps; None leaves it to the local work
    gamma: float | None = None  # sigma / tau, which the accelerated schedules remember
    rate: float | None = None  # how fast gamma grows
    round: int = 0  # rounds before this one, for a schedule that counts them

    def numbers(self) -> dict[str, float]:
        """Return the step sizes for the round's record."""
        out = {"primal_step": self.primal, "dual_step": self.dual}
        out["extrapolation"] = self.extrapolation
        return out if self.local is None else {**out, "local_step": self.local}

    def said(self) -> tuple[str, ...]:
        """Return what to tell about the choice of these sizes, if they were chosen."""
        return ()

    def halved(self) -> StepSizes | None:
        """Return half the step sizes; None where they were chosen by somebody and stay."""
        return None


@dataclass(frozen=True, eq=False)
class Problem:
    """What a schedule may look at in the first round, after the first gradients."""

    algorithm: Any  # its objective, local and gradient_batch_size
    clients: Clients
    x: Vector
    gradients: ClientVectors
    stream: Stream


@dataclass(frozen=True, eq=False)
class WeightChange:
    """How the weights turned in a round, and what shows what that does to the model."""

    change: Weights  # of those present
    weights: Weights  # of all
    gradients: ClientVectors  # of those present

    def coupling(self) -> float | None:
        r"""Return :math:`|\sum_i \Delta\lambda_i c_i|^2 / |\Delta\lambda|^2`; None without a turn.

        Where sums are hidden and this one beside the first would show too much, None as well.
        One more weighted sum of the gradients, in the exchange that asks for their first.
        """
        turned = float(self.change @ self.change)
        if turned <= 1e-24 * float(self.weights @ self.weights):
            return None
        if not self.gradients.allows(self.change):
            return None
        moved = self.gradients.weighted_sum(self.change)
        return float(moved @ moved) / turned


class Schedule(Protocol):
    """Step sizes, round after round."""

    def start(self, problem: Problem) -> StepSizes:
        """Return the step sizes of the first round; may ask the clients."""
        ...

    def next(self, sizes: StepSizes, turned: WeightChange) -> StepSizes:
        """Return the step sizes of the round after the one that used ``sizes``."""
        ...


def share_of_latest(t: float, decay: float = 3.0) -> float:
    r"""Return what the last of t values counts in their mean: :math:`(\eta + 1)/(t + \eta)`.

    Value s counts about as :math:`s^\eta` then (Shamir and Zhang 2013, Section 4).

    >>> share_of_latest(1), share_of_latest(4, decay=0)
    (1.0, 0.25)
    """
    return (decay + 1) / (t + decay)


def epsilon(x: Vector) -> float:
    """Return the distance from 1 to the next number in the precision of a vector."""
    import torch  # a node's first process does without it

    return float(torch.finfo(x.dtype).eps)


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
        check_settings(self, primal="(0, inf]", dual="(0, inf]", extrapolation="[0, 1]")

    def start(self, problem: Problem | None = None) -> StepSizes:
        """Return the step sizes of the first round."""
        return StepSizes(self.primal, self.dual, self.extrapolation, self.local)

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the same step sizes."""
        return sizes


@dataclass(frozen=True)
class _Theory:
    """What the papers' conditions know of the clients, and the recursion of gamma and tau."""

    smoothness: float
    strong_convexity: float
    coupling: float
    local_steps: float

    def __post_init__(self) -> None:
        known = {name: "[0, inf]" for name in ("noise", "spread") if name in vars(self)}
        check_settings(self, **dict.fromkeys(vars(self), "(0, inf]") | known)

    def next(self, sizes: StepSizes, turned: WeightChange | None = None) -> StepSizes:
        """Return the step sizes of the next round."""
        assert sizes.gamma is not None and sizes.local is not None and sizes.rate is not None
        gamma = sizes.gamma * (1 + sizes.rate * sizes.primal)
        tau = sizes.primal * math.sqrt(sizes.gamma / gamma)
        dual, local = gamma * tau, sizes.local * tau / sizes.primal
        return StepSizes(tau, dual, sizes.dual / dual, local, gamma, sizes.rate)


@dataclass(frozen=True)
class AcceleratedSteps(_Theory):
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
    local_steps : float
        J times the server's step eta_g >= 1: the local step size is tau / (J eta_g) (Lemma D.2).
        Twice the number of local steps is a server step of 2.
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

    balance: float = 1.0

    def start(self, problem: Problem | None = None) -> StepSizes:
        """Return the step sizes of the first round."""
        # (1/2)/tau = 12 L + 4 Llx^2 gamma tau  <=>  4 Llx^2 gamma tau^2 + 12 L tau - 1/2 = 0
        a, b = 4 * self.coupling**2 * self.balance, 12 * self.smoothness
        tau = 1 / (b + math.sqrt(b * b + 2 * a))
        local, rate = tau / self.local_steps, self.strong_convexity / 4
        return StepSizes(tau, self.balance * tau, 1.0, local, self.balance, rate)


@dataclass(frozen=True)
class LinearRateSteps(_Theory):
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

    Examples
    --------
    >>> steps = LinearRateSteps(10.0, 1.0, coupling=5.0, local_steps=8, dual_strong_convexity=0.5)
    >>> first = steps.start(None)
    >>> round(first.extrapolation, 4)  # theta, the rate: it converges, and slowly
    0.9979
    """

    dual_strong_convexity: float
    noise: float = 0.0
    accuracy: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise and self.accuracy is None:
            raise ValueError("noise needs accuracy=, the accuracy to reach.")

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
class SignedWeightSteps(_Theory):
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

    With ``spread`` the models stay bounded without a set Theta (Proposition 20, which replaces
    Assumption 7): :math:`\tau_0 \le \min(1, m'/C, 1/m')`, where

    .. math:: C = \max\bigl(m',\ 1 + 3 |\Lambda|_1^2 M^2 + 96 |\Lambda|_1^2 M^2
              (2 B^2 + |\Lambda|_1^2 M^2)\bigr), \qquad
              m' = \tfrac12 \bigl(m \tfrac{|\Lambda|_1 + 1}{2} - M \tfrac{|\Lambda|_1 - 1}{2}\bigr)

    is the constant of its proof for :math:`\tau_0 \le 1 \le \beta`, with the powers of
    :math:`|\Lambda|_1` and M that Jensen's inequality gives (some are lost in print), and m' the
    dissipativity of strongly convex losses (Assumption 9).

    Parameters
    ----------
    smoothness, strong_convexity
        M and m, of every client's loss.
    coupling, local_steps, balance
        As for :class:`AcceleratedSteps`.
    spread : float, optional
        B of Assumption 9: gradients of two minibatches at x differ by at most
        :math:`B (1 + |x - x_0|)`; 0 for full gradients. None leaves Proposition 20 out.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> steps = SignedWeightSteps(58.0, 1e-3, coupling=5.0, local_steps=8)
    >>> history = ef.train(ef.ScaffPDIA(phi=0.0, steps=steps), clients, rounds=1)
    >>> round(1 / history.rounds[0].numbers["primal_step"])  # 1200 M: tau is tiny
    69600
    """

    balance: float = 1.0
    spread: float | None = None

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
        if self.spread is not None:
            bounds += self._bounded(size)
        tau = min(bounds)
        local = tau / (self.local_steps * max(1.0, 2 * tau * big))
        rate = max(0.0, m / 4 - big * (size - 1) / 2)
        return StepSizes(tau, self.balance * tau, 1.0, local, self.balance, rate)

    def _bounded(self, size: float) -> list[float]:
        """Return what Proposition 20 asks of tau_0 for weights of this l1 norm."""
        m, lipschitz = self.strong_convexity, (size * self.smoothness) ** 2
        pull = (m * (size + 1) - self.smoothness * (size - 1)) / 4  # m', of a sum of all clients
        if pull <= 0:
            raise ValueError(
                f"Proposition 20 needs convex sums of losses; |Lambda|_1 = {size:.4g} gives none "
                f"for m = {m:g} and M = {self.smoothness:g}; use a smaller phi."
            )
        constant = 1 + 3 * lipschitz + 96 * lipschitz * (2 * (self.spread or 0.0) ** 2 + lipschitz)
        return [1.0, pull / max(pull, constant), 1 / pull]
