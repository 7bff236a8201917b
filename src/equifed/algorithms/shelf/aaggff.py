"""AAggFF: the server chooses the client weights as an online learner that bets on large losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import carry_over, sample_clients, scale_to_present
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives.projections import project_capped_simplex

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class State:
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
    it keeps N times N numbers. Regret is bounded, no objective is minimised. Clients that take no
    part keep their last loss, and weights of those who do are :math:`p_i N/|S|` here, which has the
    right mean; the paper divides by their sum.

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

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        n = len(clients.names)
        return State(x, np.full(n, 1 / n), np.zeros(n), np.zeros((n, n)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
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
        return State(x, weights, slope, curvature, losses), info


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
