"""AAggFF: the server chooses the client weights as an online learner that bets on large losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from equifed.algorithms.fedavg import DEFAULT_WORK
from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import carry_over, sample_clients, scale_to_present
from equifed.objectives.projections import project_capped_simplex

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class State:
    """Model and weights; sums of the gradients g and of g g' so far, losses known, rounds."""

    x: Vector
    weights: Weights
    slope: Weights
    curvature: Matrix | None = None  # silo alone
    losses: Losses | None = None
    rounds: int = 0


@dataclass(frozen=True)
class AAggFF(Federated):
    r"""Adaptive aggregation for fair federated learning (Hahn et al. 2024), Algorithms 2 and 3.

    .. math:: \ell_t(p) = -\log(1 + \langle p, r_t\rangle), \qquad
              r_i = c \cdot \mathrm{cdf}(L_i / \bar L), \qquad g_t = \nabla \ell_t(p_t)

    with the normal distribution function, one of six that the paper tries (Section 4.3).
    The weights of the round that saw the losses are, for ``setting="silo"`` (c = 1/N) and
    ``"device"`` (c = C, the participation),

    .. math::

       p &= \arg\min_{p \in \Delta} \langle \textstyle\sum_t g_t, p\rangle + \tfrac{a}{2} |p|^2
       + \tfrac{b}{2} \textstyle\sum_t \langle g_t, p\rangle^2, \qquad a = 4,\ b = N/4 \\
       p &\propto \exp\Bigl(-\frac{\sqrt{\log N}}{\sqrt{t + 1}\,(2 + C)}
       \textstyle\sum_t g_t\Bigr)

    In the second the clients that were not asked have the mean response, those that were
    :math:`\bar r + (r_i - \bar r)/C`, and g is linearised at the mean. The released code adds a
    times the identity to the curvature once more, drops the mean of those who were asked and turns
    the normal distribution around; this follows the paper. Weights move slowly by design: regret is
    what is bounded, no objective is minimised. Weights of the clients of a round are
    :math:`p_i N/|S|` here, which has the right mean; the paper divides by their sum.

    Parameters
    ----------
    local, participation, server_lr
        As for FedAvg.
    setting : {"silo", "device"}
        Which of the two dual steps; silo keeps N times N numbers, and those who take no part keep
        their last loss.
    """

    local: LocalSGD = DEFAULT_WORK
    setting: Literal["silo", "device"] = "silo"
    participation: float = 1.0
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.setting not in ("silo", "device"):
            raise ValueError(f"AAggFF setting is 'silo' or 'device', got {self.setting!r}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        n = len(clients.names)
        silo = np.zeros((n, n)) if self.setting == "silo" else None
        return State(x, np.full(n, 1 / n), np.zeros(n), silo)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        n, t, p = len(clients.names), state.rounds + 1, state.weights
        chosen = sample_clients(clients, self.participation, stream)
        seen = chosen.losses(state.x, stream.at("losses"), self.local.batch_size)
        losses = carry_over(state.losses, chosen.index, seen, n)
        if state.curvature is not None:
            r = respond(losses) / n
            g = -r / (1 + p @ r)
            slope, curvature = state.slope + g, state.curvature + np.outer(g, g)
            weights = regularised_leader(slope, 4 * np.eye(n) + n / 4 * curvature)
        else:
            c = len(chosen.index) / n
            answers = c * respond(seen)
            mean, r = answers.mean(), np.full(n, answers.mean())
            r[chosen.index] += (answers - mean) / c
            g = -r / (1 + mean) + mean * (p @ (r - mean)) / (1 + mean) ** 2
            slope, curvature = state.slope + g, None
            bets = -slope * np.sqrt(np.log(n)) / (np.sqrt(t + 1) * (2 + c))
            weights = np.exp(bets - bets.max()) / np.exp(bets - bets.max()).sum()
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        share = scale_to_present(weights, chosen.index)
        x = state.x - self.server_lr * moved.displacement.step(share)
        info = Info(weights, losses, index=chosen.index)
        return State(x, weights, slope, curvature, losses, t), info


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
