"""FedDyn and DRDM: every client's loss is tilted until its own optimum is the shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from equifed.algorithms.absence import call_roll
from equifed.algorithms.fedavg import Weighting, all_sizes, client_weights
from equifed.contract import Clients, Federated, Index, Info, Losses, Moved, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE, sample_clients, scatter
from equifed.contract.arrays import ClientVectors, check_settings
from equifed.contract.local import DEFAULT_WORK, LocalSGD
from equifed.objectives import DualStep, Euclidean, SaddleObjective, WorstCase


@dataclass(frozen=True)
class State:
    """The model, the server's h, and the clients' h_i."""

    x: Vector
    h: Vector
    multipliers: ClientVectors | None = None


class _Dynamic(Federated):
    """Local steps with a proximal term of strength alpha."""

    local: LocalSGD
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, "FedAvg has none", alpha="(0, inf)")
        if self.local.proximal:
            raise ValueError(
                f"{type(self).__name__} sets local.proximal to alpha = {self.alpha}, got "
                f"local.proximal = {self.local.proximal}; leave it out."
            )


@dataclass(frozen=True)
class FedDyn(_Dynamic):
    r"""FedDyn (Acar et al. 2021), Algorithm 1: dynamic regularisation of the local losses.

    .. math::

       u_i &\approx \arg\min_u f_i(u) - \langle h_i, u\rangle + \tfrac{\alpha}{2} |u - x|^2,
       \qquad h_i \leftarrow h_i + \alpha (x - u_i) && i \in S \\
       h &\leftarrow h + \alpha \textstyle\sum_{i \in S} p_i (x - u_i), \qquad
       x \leftarrow \sum_{i \in S} \bar p_i u_i - h / \alpha

    by local steps from x; clients keep :math:`h_i`, which become their gradients at the solution.
    The :math:`p_i` are those over all clients (1/N in the paper) and :math:`\bar p_i` those over S,
    so that h stays the p-weighted sum of all :math:`h_i`. Few or short local steps need a large
    alpha, or the sum h swings (the paper takes whole passes).

    Parameters
    ----------
    local : LocalSGD
        Local work; its ``proximal`` is alpha.
    alpha : float
        Strength of the regularisation; the paper tunes it between 0.001 and 0.1, the default suits
        ten short steps.
    weighting, participation
        As for FedAvg.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedDyn(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    local: LocalSGD = DEFAULT_WORK
    alpha: float = 1.0
    weighting: Weighting = "uniform"
    participation: float = 1.0

    remembers: ClassVar = True  # clients keep h_i: sampling leaves no noise

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round; all h start at zero."""
        return State(x, torch.zeros_like(x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        everyone = client_weights(self.weighting, all_sizes(clients))  # p
        chosen = sample_clients(clients, self.participation, stream)
        share = client_weights(self.weighting, chosen.sizes)  # p over S
        moved, kept = dynamic_steps(
            chosen, state.x, self.local, self.alpha, state.multipliers, stream
        )
        part = everyone[chosen.index].sum()  # p_i = part * share_i
        mean = moved.displacement.weighted_sum(share)
        h = state.h + self.alpha * part * mean
        info = Info(scatter(share, chosen.index, len(everyone)), index=chosen.index)
        return State(state.x - mean - h / self.alpha, h, kept), info


@dataclass(frozen=True)
class RobustState:
    """The model, the weights, the clients' h_i, and their sum, by weights that count."""

    x: Vector
    weights: Weights
    h: Vector
    counted: Weights
    multipliers: ClientVectors | None = None
    losses: Losses | None = None
    away: Index | None = None


@dataclass(frozen=True)
class DRDM(_Dynamic):
    r"""DRDM: the dual steps of DRFA with the local steps of FedDyn.

    .. math::

       x^+ &= x - \textstyle\sum_i \lambda_i (x - u_i) - \tfrac1\alpha \sum_i \lambda_i h_i \\
       \lambda &\leftarrow \mathrm{prox}(\lambda + \tau\gamma v, \tau\gamma), \qquad
       v_i = f_i(x'), \quad x' = \textstyle\sum_i \lambda_i u_i^{(t')}

    with :math:`u_i, h_i` as for FedDyn after tau local steps, and t' uniform in 1, ..., tau. The
    weights change, so the sum of the :math:`h_i` is by the present ones. Clients that take no part
    keep their :math:`h_i` and the weight that they had in it, and the model goes as far as the
    weight of those who are there. Under hidden sums a round with somebody missing ends the run: the
    kept h_i would show who it is.

    Parameters
    ----------
    local : LocalSGD
        tau steps, the same for every client; its ``proximal`` is alpha.
    alpha : float
        Strength of the regularisation, as for FedDyn.
    dual_step : float
        gamma. The h_i follow the weights late, so it must be smaller than DRFA's: with DRFA's 0.008
        the weights swing. The default is ours.
    objective, dual, patience
        As for DRFA.

    References
    ----------
    Krouka, Ben Issaid, Bennis. "Distributionally robust federated learning with client drift
    minimization." IEEE Transactions on Machine Learning in Communications and Networking 4, 2026
    (arXiv:2505.15371), Algorithm 1. It draws the clients of a round by lambda; here everybody
    takes part, with weights lambda. (Written after accounts of it; its text was not at hand.)

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.DRDM(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.7
    """

    local: LocalSGD = DEFAULT_WORK
    alpha: float = 1.0
    dual_step: float = 0.001
    objective: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    dual: DualStep = Euclidean()  # noqa: RUF009 - a frozen value
    patience: int = PATIENCE

    equal_steps: ClassVar = True

    def init(self, clients: Clients, x: Vector) -> RobustState:
        """Return the state before the first round; all h start at zero."""
        weights = self.objective.start(len(clients.names))
        return RobustState(x, weights, torch.zeros_like(x), np.zeros(len(weights)))

    def round(
        self, state: RobustState, clients: Clients, stream: Stream
    ) -> tuple[RobustState, Info]:
        """Return the state after one round."""
        assert self.local.steps is not None
        tau, roll = self.local.steps, call_roll(self, state, clients)
        mix = roll.weights / self.objective.total(roll.weights)  # lambda, or its shares
        share = mix[clients.index]
        part = share.sum()  # 1 if everybody is there: so far the model goes
        t = int(stream.at("snapshot").generator().integers(1, tau + 1))
        moved, kept = dynamic_steps(
            clients, state.x, self.local.work(snapshot=t), self.alpha, state.multipliers, stream
        )
        assert moved.snapshot is not None
        h, counted = self._tilt(state, moved, clients, mix, roll.members)
        x = state.x - moved.displacement.weighted_sum(share) - part * h / self.alpha
        at = moved.snapshot.weighted_sum(share) + (1 - part) * state.x  # x'
        losses = roll.losses(at, stream.at("losses"), self.local.batch_size)  # v
        weights = self.dual.ascend(roll.objective, roll.weights, losses, tau * self.dual_step)
        info = Info(roll.weights, index=clients.index, notes=roll.notes)
        return RobustState(x, weights, h, counted, kept, losses, roll.away), info

    def _tilt(
        self, state: RobustState, moved: Moved, chosen: Clients, mix: Weights, members: Index | None
    ) -> tuple[Vector, Weights]:
        """Return the sum of all h_i, and the weights in it: lambda_i for those who were there now.

        It begins anew when somebody leaves for good, whose h_i nobody could take out.
        """
        assert moved.multiplier is not None
        here = chosen.index
        new = moved.multiplier.weighted_sum(mix[here])
        gone = members is not None and bool(np.delete(state.counted, members).any())
        if gone or len(here) == len(mix):
            return new, scatter(mix[here], here, len(mix))
        counted, old = state.counted.copy(), chosen.remembered(state.multipliers, here)
        total = state.h + new - old.weighted_sum(counted[here])
        counted[here] = mix[here]
        return total, counted


def dynamic_steps(
    clients: Clients, x: Vector, work: LocalSGD, alpha: float,
    kept: ClientVectors | None, stream: Stream,
) -> tuple[Moved, ClientVectors]:  # fmt: skip
    """Return what came of local steps on f_i - <h_i, .> + alpha/2 |. - x|^2, and all h_i after."""
    h, work = clients.remembered(kept, clients.index), work.work(multiplier=True, proximal=alpha)
    moved = clients.local_steps(x, work, stream.at("local"), control=h, target=torch.zeros_like(x))
    assert moved.multiplier is not None
    return moved, clients.remember(kept, clients.index, moved.multiplier)
