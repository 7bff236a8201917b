"""q-FedAvg and q-FedSGD: clients with larger losses move the model further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from equifed.algorithms.fedavg import State, Weighting, client_weights
from equifed.contract import Clients, Federated, Info, LocalSGD, Stream, Vector
from equifed.contract.absence import sample_clients, scatter
from equifed.contract.local import DEFAULT_WORK

# Losses below this count as this: a power below zero of a loss of zero has no value
LEAST_LOSS = 1e-10


@dataclass(frozen=True)
class QFedAvg(Federated):
    r"""q-FedAvg (Li et al. 2020), Algorithm 2: minimises :math:`\sum_k p_k F_k^{q+1}/(q+1)`.

    .. math::

       \Delta w_k &= L\,(w - w_k), \quad w_k \text{ after local steps from } w \\
       \Delta_k &= F_k^q\, \Delta w_k, \quad h_k = q F_k^{q-1} |\Delta w_k|^2 + L F_k^q \\
       w &\leftarrow w - \textstyle\sum_k p_k \Delta_k \,/\, \sum_k p_k h_k

    :math:`F_k` is the loss at the model that the round starts from; both sums are divided by the
    largest :math:`F_k^q`, so that no power overflows. The paper draws clients with probability
    :math:`p_k` and weighs them equally; here the sample is uniform and ``weighting`` enters as
    :math:`p_k`. For q = 0 this is FedAvg. :func:`qfedsgd` is the paper's Algorithm 1.

    Absent clients are not sampled. A run records the weights :math:`p_k F_k^q`, scaled to sum one.

    Parameters
    ----------
    local : LocalSGD
        Local work; its step size is the one that suits FedAvg (q = 0), tuned in the paper.
    q : float
        How much fairness, at least 0. The default is that of the comparison in DRFA's Section 6.
    lipschitz : float, optional
        L. The paper's rule 1 / lr, which needs no new tuning when q changes, is the default.
    weighting, participation
        p_k; fraction of clients in a round.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.QFedAvg(q=5), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.5
    """

    local: LocalSGD = DEFAULT_WORK
    q: float = 0.2
    lipschitz: float | None = None
    weighting: Weighting = "uniform"
    participation: float = 1.0

    allowed: ClassVar = {"q": "[0, inf)", "lipschitz": "(0, inf)"}

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        constant = 1 / self.local.lr if self.lipschitz is None else self.lipschitz  # L
        seen = chosen.losses(state.x, stream.at("losses"))
        losses = np.maximum(seen, LEAST_LOSS)  # F_k
        p = client_weights(self.weighting, chosen.sizes)
        power = p * (losses / losses.max()) ** self.q  # p_k F_k^q, divided by the largest F_k^q
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        squares = constant**2 * moved.displacement.squared_norms()  # |Dw_k|^2
        h = power @ (self.q * squares / losses + constant)  # sum of h_k
        x = state.x - moved.displacement.step(power * (constant / h))
        weights = scatter(power / power.sum(), chosen.index, len(clients.names))
        with np.errstate(over="ignore"):
            value = float(p @ losses ** (self.q + 1)) / (self.q + 1)
        objective = value if np.isfinite(value) else None
        return State(x), Info(weights, objective=objective, index=chosen.index)


def qfedsgd(
    lr: float = DEFAULT_WORK.lr,
    q: float = 0.2,
    batch_size: int | None = None,
    weighting: Weighting = "uniform",
    participation: float = 1.0,
) -> QFedAvg:
    r"""Return q-FedSGD (Li et al. 2020, Algorithm 1): :math:`\Delta w_k = \nabla F_k(w)`, L = 1/lr.

    It is q-FedAvg with one local step of size 1/L, since then :math:`L (w - w_k) = \nabla F_k(w)`.

    >>> qfedsgd(lr=0.1).local.steps
    1
    """
    step = LocalSGD(lr=lr, steps=1, batch_size=batch_size)
    return QFedAvg(step, q, None, weighting, participation)
