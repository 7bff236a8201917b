"""FedEBA+: weights of maximal entropy, and local steps aligned where losses differ much."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from equifed.algorithms.absence import PATIENCE, call_roll
from equifed.algorithms.fedavg import DEFAULT_WORK
from equifed.algorithms.reweighted import State
from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Stream, Vector
from equifed.contract.absence import sample_clients
from equifed.objectives.kl import Tilted


@dataclass(frozen=True)
class FedEBA(Federated):
    r"""FedEBA+: entropy-based aggregation, with alignment of the local steps.

    .. math::

       p_i &= e^{f_i(x)/\tau} / \textstyle\sum_j e^{f_j(x)/\tau}, \qquad
       x \leftarrow x - \text{server\_lr} \sum_i p_i (x - u_i) \\
       u &\leftarrow u - \text{lr}\,\bigl((1 - \alpha)\, g_i(u)
       + \alpha \textstyle\sum_j p_j \nabla f_j(x)\bigr)
       \quad \text{where } \angle(f(x), \mathbf 1) > \theta

    and plain local steps where the losses are nearer to equal. For ``align=0`` this is TERM. The
    paper's sums are over the clients of a round, which favours them where some are missing: here
    those who take no part keep their last loss, as for TERM, and the others have the weights
    :math:`p_i N/|\text{present}|`, scaled once.

    Parameters
    ----------
    local : LocalSGD
        Local work.
    temperature : float
        tau, in the unit of the loss: the smaller, the more the worst-served count.
    align : float
        alpha, in [0, 1); 0 asks for no gradients.
    angle : float
        theta in degrees, from 0 (always aligned unless all losses are equal) to 90.
    participation, server_lr
        As for FedAvg.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.
    """

    local: LocalSGD = DEFAULT_WORK
    temperature: float = 1.0
    align: float = 0.5
    angle: float = 45.0
    participation: float = 1.0
    server_lr: float = 1.0
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < np.inf:
            raise ValueError(f"FedEBA temperature must be positive, got {self.temperature}.")
        if not 0 <= self.align < 1:
            raise ValueError(f"FedEBA align must lie in [0, 1), got {self.align}.")
        if not 0 <= self.angle <= 90:
            raise ValueError(f"FedEBA angle must lie in [0, 90] degrees, got {self.angle}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        roll = call_roll(self, state, chosen, Tilted(1 / self.temperature))
        losses = roll.losses(state.x, stream.at("losses"), self.local.batch_size)
        weights = roll.objective.weights(losses)
        work, control, target = self.local, None, None
        if self.align and angle_to_equal(losses[roll.counted()]) > self.angle:
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
