"""AAggFF and FedDG-GA: the server moves the client weights from round to round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import carry_over, sample_clients, scale_to_present
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives.base import check_length
from equifed.objectives.projections import project_capped_simplex

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class BetState:
    """Model and weights; sums of the gradients g and of g g' so far, and the losses known."""

    x: Vector
    weights: Weights
    slope: Weights
    curvature: Matrix
    losses: Losses | None = None


@dataclass(frozen=True)
class AAggFF(Federated):
    r"""Adaptive aggregation for fair federated learning (Hahn et al. 2024), Algorithm 2.

    .. math::

       \ell_t(p) &= -\log(1 + \langle p, r_t\rangle), \qquad
       r_i = \mathrm{cdf}(L_i / \bar L) / N, \qquad g_t = \nabla \ell_t(p_t) \\
       p &= \arg\min_{p \in \Delta} \langle \textstyle\sum_t g_t, p\rangle + \tfrac{a}{2} |p|^2
       + \tfrac{b}{2} \textstyle\sum_t \langle g_t, p\rangle^2, \qquad a = 4,\ b = N/4

    with the normal distribution function, one of six that the paper tries (Section 4.3), for silos;
    it keeps N times N numbers. It has no objective. Clients that take no part keep their last
    loss, and weights of those who do are :math:`p_i N/|S|`; the paper divides by their sum.

    Checked against the released code (``src/server/aaggffserver.py``), not the paper's text: the
    code adds a times the identity to the curvature once more and turns the normal distribution
    around. The Newton step whose regret is bounded (Hazan, Agarwal, Kale 2007) has
    :math:`\langle g_t, p - p_t\rangle^2` in place of :math:`\langle g_t, p\rangle^2`.

    Parameters
    ----------
    local, participation, server_lr
        As for FedAvg.

    References
    ----------
    Hahn, Kim, Lee. "Pursuing overall welfare in federated learning through sequential decision
    making." ICML 2024, (4), (8), Algorithm 2.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.AAggFF(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.7
    """

    local: LocalSGD = DEFAULT_WORK
    participation: float = 1.0
    server_lr: float = 1.0

    def init(self, clients: Clients, x: Vector) -> BetState:
        """Return the state before the first round."""
        n = len(clients.names)
        return BetState(x, np.full(n, 1 / n), np.zeros(n), np.zeros((n, n)))

    def round(self, state: BetState, clients: Clients, stream: Stream) -> tuple[BetState, Info]:
        """Return the state after one round."""
        n = len(clients.names)
        chosen = sample_clients(clients, self.participation, stream)
        seen = chosen.losses(state.x, stream.at("losses"), self.local.batch_size)
        losses = carry_over(state.losses, chosen.index, seen, n)
        r = respond(losses) / n
        g = -r / (1 + state.weights @ r)
        slope, curvature = state.slope + g, state.curvature + np.outer(g, g)
        weights = regularised_leader(slope, 4 * np.eye(n) + n / 4 * curvature)
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        share = scale_to_present(weights, chosen.index)
        x = state.x - self.server_lr * moved.displacement.step(share)
        info = Info(weights, losses, index=chosen.index)
        return BetState(x, weights, slope, curvature, losses), info


def respond(losses: Losses) -> Losses:
    """Return the normal distribution function, about 1, at the losses over their mean."""
    if losses.min() < 0:
        raise ValueError(
            f"AAggFF divides losses by their mean and needs them to be at least 0, got "
            f"{losses.min():.3g}; use a loss without negative values."
        )
    mean = losses.mean()
    ratios = losses / mean if mean > 0 else losses + 1
    return np.array([0.5 * math.erfc((1 - r) / math.sqrt(2)) for r in ratios])


def regularised_leader(slope: Weights, curvature: Matrix, rounds: int = 5000) -> Weights:
    """Return the weights on the simplex with the smallest <slope, p> + p' curvature p / 2.

    >>> regularised_leader(np.array([0.0, -4.0, 9.0]), 4 * np.eye(3))
    array([0., 1., 0.])
    """
    n = len(slope)
    values = np.linalg.eigvalsh(curvature)
    kappa = np.sqrt(values[0] / values[-1])
    at = ahead = np.full(n, 1 / n)
    for _ in range(rounds):  # Nesterov's steps for strongly convex functions
        new = project_capped_simplex(ahead - (slope + curvature @ ahead) / values[-1], np.ones(n))
        if np.abs(new - ahead).max() < 1e-15:
            break
        at, ahead = new, new + (1 - kappa) / (1 + kappa) * (new - at)
    return np.asarray(new)


@dataclass(frozen=True)
class State:
    """Model and weights; the losses known so far, and the rounds."""

    x: Vector
    weights: Weights
    losses: Losses | None = None
    rounds: int = 0


@dataclass(frozen=True)
class FedDGGA(Federated):
    r"""Generalisation adjustment (Zhang et al. 2023), equations 8 to 10.

    .. math::

       G_i = f_i(x) - f_i^\star, \qquad
       p_i \leftarrow \mathrm{clip}_{[0, 1]}\Bigl(p_i + \text{step}\cdot\text{decay}^{t-1}
       \frac{G_i - \bar G}{\max_j |G_j - \bar G|}\Bigr), \qquad
       p \leftarrow p / \textstyle\sum_j p_j

    with :math:`f_i(x)` on the client's validation samples (training samples where there are none)
    and :math:`f_i^\star` the loss of the client's own model, ``references``. The paper takes the
    client's model of that round for it, which only the client could measure, and lets the step fall
    linearly to zero; here it decays. Absent clients keep their last loss. It has no objective.

    Parameters
    ----------
    local, participation, server_lr
        As for FedAvg.
    step : float
        Largest change of a weight, in (0, 1]; the paper tunes it.
    decay : float
        Factor of the step per round, in (0, 1].
    references : tuple of float, optional
        The loss of every client's own model; None takes 0 for all, so that the gap is the loss.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedDGGA(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    local: LocalSGD = DEFAULT_WORK
    step: float = 0.05
    decay: float = 0.99
    references: tuple[float, ...] | None = None
    participation: float = 1.0
    server_lr: float = 1.0

    allowed: ClassVar = {"step": "(0, 1]", "decay": "(0, 1]"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.references is not None and not np.isfinite(self.references).all():
            raise ValueError(f"FedDGGA references must be finite, got {self.references}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        n = len(clients.names)
        if self.references is not None:
            check_length(self.references, n, "FedDGGA references")
        return State(x, np.full(n, 1 / n))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        n, t = len(clients.names), state.rounds + 1
        chosen = sample_clients(clients, self.participation, stream)
        losses = carry_over(state.losses, chosen.index, held_out(chosen, state.x, stream), n)
        gap = losses if self.references is None else losses - np.array(self.references)  # (8)
        step = self.step * self.decay ** (t - 1)
        weights = adjust(state.weights, gap, step)  # (9), (10)
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        share = scale_to_present(weights, chosen.index)
        x = state.x - self.server_lr * moved.displacement.step(share)
        return State(x, weights, losses, t), Info(weights, index=chosen.index)


def held_out(clients: Clients, x: Vector, stream: Stream) -> Losses:
    """Return the losses on validation samples; on training samples where a client has none."""
    found = clients.evaluate(x, ("validation",))
    if not found:
        return clients.losses(x, stream.at("losses"))
    values = found[0].metrics["loss"]
    values = values if len(values) == len(clients.index) else values[clients.index]
    if np.isnan(values).any():
        values = np.where(np.isnan(values), clients.losses(x, stream.at("losses")), values)
    return values


def adjust(weights: Weights, gap: Losses, step: float) -> Weights:
    """Return weights moved by at most ``step`` towards large gaps, clipped and normalised.

    >>> adjust(np.array([0.5, 0.5]), np.array([1.0, 3.0]), 0.1)
    array([0.4, 0.6])
    """
    far = gap - gap.mean()
    largest = float(np.abs(far).max())
    moved = np.clip(weights + step * far / largest, 0, 1) if largest > 0 else weights
    return np.asarray(moved / moved.sum())
