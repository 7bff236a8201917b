"""Local steps, then a mean by weights that follow the losses: Reweighted and FedEBA+."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from equifed.algorithms.absence import call_roll
from equifed.algorithms.delta_fl import State
from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Stream, Vector
from equifed.contract.absence import PATIENCE, sample_clients, scatter
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives import Objective, Proportional, Relative, SemiVariance, Tilted


@dataclass(frozen=True)
class Reweighted(Federated):
    r"""Descent on any objective of the client losses, with local steps.

    .. math::

       w = \nabla\Phi(f_1(x), \dots, f_N(x)) \,/\, \textstyle\sum_i \nabla_i\Phi, \qquad
       x \leftarrow x - \text{server\_lr} \sum_i w_i (x - u_i)

    One local step is a gradient step on the objective; several are FedAvg's, weighted. The weights
    are divided by their sum, so that the step size is that of FedAvg. An objective that is no
    smooth function of the losses (the worst case, CVaR) makes this swing: use SCAFF-PD or AFL.
    Clients that take no part keep their last loss, and the weights of those present are
    :math:`w_i N/|\text{present}|`.

    Parameters
    ----------
    objective : Objective
        Phi; one with a dual step or without.
    local, participation, server_lr
        As for FedAvg.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.

    Examples
    --------
    >>> import equifed as ef
    >>> fair = ef.Reweighted(ef.objectives.Tilted(tilt=1.0), ef.LocalSGD(lr=0.02, steps=5))
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(fair, clients, rounds=50, evaluate=["test"], every=50)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.5
    0.6
    """

    objective: Objective
    local: LocalSGD = DEFAULT_WORK
    participation: float = 1.0
    server_lr: float = 1.0
    patience: int = PATIENCE

    one_sum: ClassVar = True

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        roll = call_roll(self, state, chosen)
        losses = roll.losses(state.x, stream.at("losses"), self.local.batch_size)
        weights = roll.objective.weights(losses)
        weights = weights / weights.sum()
        moved = roll.local_steps(state.x, self.local, stream.at("local"))
        x = state.x - self.server_lr * moved.displacement.step(weights)
        info = Info(weights, losses, roll.objective.value(losses), chosen.index, notes=roll.notes)
        return State(x, losses, roll.away), info


def tilted_erm(
    local: LocalSGD = DEFAULT_WORK,
    tilt: float = 1.0,
    prior: tuple[float, ...] | None = None,
    participation: float = 1.0,
    server_lr: float = 1.0,
    patience: int = PATIENCE,
    scale: float | None = None,
) -> Reweighted:
    r"""Return tilted empirical risk of the clients (TERM, Li et al. 2021), with local steps.

    .. math:: \Phi = \tfrac1t \log \textstyle\sum_i p_i e^{t f_i}, \qquad
              w_i = \frac{p_i e^{t f_i(x)}}{\sum_j p_j e^{t f_j(x)}} \quad \text{(their Lemma 1)}

    One local step is their batch method, with clients for groups; several are ours. Large t
    approaches the worst case, t = 0 is FedAvg, t < 0 discounts clients with large losses. Clients
    that take no part keep their last loss in the sum.

    Parameters
    ----------
    tilt : float
        t, in the inverse unit of the loss. The paper tunes it; the default is ours.
    prior : tuple of float, optional
        Positive numbers, one per client, normalised to the p_i; None is uniform.
    local, participation, server_lr, patience
        As for :class:`Reweighted`.
    scale : float, optional
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

    >>> tilted_erm(tilt=2.0).objective
    Tilted(tilt=2.0, prior=None, scale=None)
    """
    return Reweighted(Tilted(tilt, prior, scale), local, participation, server_lr, patience)


def propfair(
    ceiling: float = 5.0,
    floor: float = 0.2,
    local: LocalSGD = DEFAULT_WORK,
    participation: float = 1.0,
    server_lr: float = 1.0,
    patience: int = PATIENCE,
    prior: tuple[float, ...] | None = None,
    scale: float | None = None,
) -> Reweighted:
    r"""Return PropFair: weights :math:`p_i/(M - f_i)`, M the ``ceiling``.

    It minimises :math:`-\sum_i p_i \log(M - f_i)`, continued by its tangent where M - f_i is below
    ``floor``. ``prior`` are the p_i: uniform unless given; the released code takes the numbers of
    samples. The paper transforms the loss of every minibatch, here it is that of the round's start.
    The ceiling is in multiples of ``scale`` as for :class:`equifed.objectives.Relative`.
    Zhang, Malekmohammadi, Chen, Yu. "Proportional fairness in federated learning." TMLR 2023.

    >>> propfair(ceiling=3.0).objective
    Proportional(ceiling=3.0, floor=0.2, prior=None, scale=None)
    """
    objective = Proportional(ceiling, floor, prior, scale)
    return Reweighted(objective, local, participation, server_lr, patience)


def semi_vred(
    strength: float = 0.5,
    local: LocalSGD = DEFAULT_WORK,
    participation: float = 1.0,
    server_lr: float = 1.0,
    patience: int = PATIENCE,
    prior: tuple[float, ...] | None = None,
    scale: float | None = None,
) -> Reweighted:
    """Return Semi-VRed: mean loss plus ``strength`` times the semi-variance of the losses.

    ``prior`` are the weights of the means; ``scale`` as for :class:`equifed.objectives.Relative`.
    Malekmohammadi, Yu. "Semi-variance reduction for fair federated learning." arXiv:2406.16193
    (its text was not at hand).

    >>> semi_vred(1.0).objective
    SemiVariance(strength=1.0, prior=None, scale=None)
    """
    objective = SemiVariance(strength, prior, scale)
    return Reweighted(objective, local, participation, server_lr, patience)


@dataclass(frozen=True)
class FedEBA(Relative, Federated):
    r"""FedEBA+: entropy-based aggregation, with gradient and model alignment (Algorithm 1).

    .. math::

       p_i &= e^{f_i(x)/\tau} / \textstyle\sum_j e^{f_j(x)/\tau} && (3) \\
       u &\leftarrow u - \text{lr}\,\bigl((1 - \alpha)\, g_i(u)
       + \alpha \textstyle\sum_j p_j \nabla f_j(x)\bigr), \quad
       x \leftarrow x - \text{server\_lr} \sum_i p_i (x - u_i) && (9), (10) \\
       & \qquad \text{where } \angle(f(x), \mathbf 1) > \theta; \text{ else plain local steps and}
       \\
       x &\leftarrow x - \text{server\_lr} \bigl((1 - \alpha) \textstyle\sum_i p_i (x - u_i)
       + \alpha \tfrac1{|S|} \sum_{i \in S} (x - u_i^{(1)})\bigr) && (7), (8)

    with :math:`u_i^{(1)}` after the first local step. For ``align=0`` this is TERM. The paper's
    sums are over the clients of a round: here those who take no part keep their last loss, and the
    others have the weights :math:`p_i N/|\text{present}|`. The prior :math:`q_i` is uniform here.
    Equations are those of arXiv:2301.12407v4 as an account gives them: the text was not at hand.

    Parameters
    ----------
    local, participation, server_lr
        As for FedAvg.
    temperature : float
        tau, in multiples of ``scale``: the smaller, the more the worst-served count.
    align : float
        alpha, in [0, 1); 0 asks for no gradients.
    angle : float
        theta in degrees, from 0 (gradients are aligned unless all losses are equal) to 90.
    align_model : bool
        Whether models are aligned within the angle, as in the paper; else local steps are plain.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.
    scale : float, optional
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

    References
    ----------
    Wang, Wang, Shi, Karimireddy, Tang. "Entropy-driven fair and effective federated learning"
    (first "FedEBA+: towards fair and effective federated learning via entropy-based model"),
    arXiv:2301.12407, Section 4, Algorithm 1.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedEBA(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.5
    """

    local: LocalSGD = DEFAULT_WORK
    temperature: float = 1.0
    align: float = 0.5
    angle: float = 45.0
    participation: float = 1.0
    server_lr: float = 1.0
    patience: int = PATIENCE
    align_model: bool = True
    scale: float | None = None

    allowed: ClassVar = {"temperature": "(0, inf)", "align": "[0, 1)", "angle": "[0, 90]"}

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        roll = call_roll(self, state, chosen, Tilted(1 / self.temperature, scale=self.scale))
        losses = roll.losses(state.x, stream.at("losses"), self.local.batch_size)
        weights = roll.objective.weights(losses)
        work, control, target, counted = self.local, None, None, roll.counted()
        unequal = angle_to_equal(losses[counted]) > self.angle
        if self.align and not unequal and self.align_model:
            work = work.work(snapshot=1)
        if self.align and unequal:
            _, gradients = roll.value_and_gradient(
                state.x, stream.at("aligned"), self.local.batch_size
            )
            scale = 1 - self.align  # (1-a) g + a G = (1-a) (g + a/(1-a) G)
            work = replace(work, lr=scale * work.lr)
            control = chosen.remembered(None, chosen.index)  # zeros
            target = self.align / scale * gradients.weighted_sum(weights)
        moved = roll.local_steps(state.x, work, stream.at("local"), control=control, target=target)
        steps = moved.displacement
        update = (steps.step if target is None else steps.weighted_sum)(weights)
        if moved.snapshot is not None:  # (7), (8)
            even = scatter(np.full(len(counted), 1 / len(counted)), counted, len(weights))
            first = state.x - moved.snapshot.weighted_sum(even)
            update = (1 - self.align) * update + self.align * first
        info = Info(weights, losses, index=chosen.index, notes=roll.notes)
        return State(state.x - self.server_lr * update, losses, roll.away), info


def angle_to_equal(losses: Losses) -> float:
    """Return the angle between the losses and equal ones, in degrees.

    >>> round(angle_to_equal(np.array([1.0, 0.0])), 9)
    45.0
    """
    length = float(np.linalg.norm(losses)) * np.sqrt(len(losses))
    share = float(losses.sum()) / length if length > 0 else 1.0
    return float(np.degrees(np.arccos(np.clip(share, -1.0, 1.0))))
