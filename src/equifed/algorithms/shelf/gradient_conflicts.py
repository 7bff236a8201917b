"""FedMGDA+, UPGrad and FedFV: directions that hurt nobody, from inner products of the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from equifed.algorithms.fedavg import State
from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import sample_clients, scatter
from equifed.contract.clients import inner_products
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives.projections import project_capped_simplex

Matrix = NDArray[np.float64]
TINY = 1e-300  # squared norms below this are those of a client that does not move


@dataclass(frozen=True)
class _Conflicts(Federated):
    """Local steps, then a combination of the updates that their inner products decide."""

    local: LocalSGD = DEFAULT_WORK
    participation: float = 1.0
    server_lr: float = 1.0

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        gram = inner_products(chosen, moved.displacement, type(self).__name__)  # G_ij = <g_i, g_j>
        share = self.combine(gram, chosen, state.x, stream)
        x = state.x - self.server_lr * moved.displacement.weighted_sum(share)
        total = share.sum()
        weights = share / total if total > TINY else np.full(len(share), 1 / len(share))
        told = scatter(weights, chosen.index, len(clients.names))
        return State(x), Info(told, index=chosen.index)

    def combine(self, gram: Matrix, chosen: Clients, x: Vector, stream: Stream) -> Weights:
        """Return what each client's update counts, from their inner products."""
        raise NotImplementedError


@dataclass(frozen=True)
class FedMGDA(_Conflicts):
    r"""FedMGDA+ (Hu et al. 2022): the shortest combination of the normalised updates.

    .. math::

       \lambda = \arg\min \Bigl|\sum_i \lambda_i \frac{g_i}{|g_i|}\Bigr|^2
       \quad \text{over the simplex with } |\lambda_i - \tfrac1m| \le \epsilon, \qquad
       x \leftarrow x - \text{server\_lr}\; \gamma \sum_i \lambda_i \frac{g_i}{|g_i|}

    With :math:`\epsilon = 1` no client's loss rises for small steps, and nothing moves where no
    direction serves all; :math:`\epsilon = 0` is the mean of the normalised updates. The paper has
    a server step of its own; here it is in multiples of the median norm :math:`\gamma` of all.
    It minimises no objective: it ends where no model is better for all. Absent clients have no say.

    Parameters
    ----------
    local, participation, server_lr
        As for FedAvg.
    epsilon : float
        How far the weights may be from equal ones, in [0, 1]; the paper tunes it.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedMGDA(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    epsilon: float = 1.0

    allowed: ClassVar = {"epsilon": "[0, 1]"}

    def combine(self, gram: Matrix, chosen: Clients, x: Vector, stream: Stream) -> Weights:
        """Return lambda_i gamma / |g_i|."""
        norms = np.sqrt(np.maximum(np.diag(gram), TINY))
        shares = shortest(gram / np.outer(norms, norms), self.epsilon)
        return np.asarray(shares * (np.median(norms) / norms))


@dataclass(frozen=True)
class UPGrad(_Conflicts):
    r"""UPGrad (Quinton and Rey 2024): the mean of the updates after each gave up its conflicts.

    .. math:: v_k = \arg\min_{v \ge e_k} v^\top G v, \qquad
              x \leftarrow x - \text{server\_lr}\; \tfrac1m \sum_k \sum_i (v_k)_i\, g_i

    :math:`\sum_i (v_k)_i g_i` is the projection of :math:`g_k` onto the cone of the directions
    along which no client's update is opposed; without conflicts this is FedAvg with equal weights.
    Like FedMGDA+ it minimises no objective. Absent clients have no say.

    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.UPGrad(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    def combine(self, gram: Matrix, chosen: Clients, x: Vector, stream: Stream) -> Weights:
        """Return the mean of the v_k."""
        return unconflicting(gram)


@dataclass(frozen=True)
class FedFV(_Conflicts):
    r"""FedFV (Wang et al. 2021), Algorithm 1: conflicts are taken out in the order of the losses.

    .. math:: \tilde g_k \leftarrow \tilde g_k - \frac{\min(\tilde g_k \cdot g_j, 0)}{|g_j|^2}\, g_j
              \quad \text{for } j \text{ by rising loss}, \qquad
              x \leftarrow x - \text{server\_lr}\;
              \frac{|\bar g|}{|\bar{\tilde g}|}\, \bar{\tilde g}

    from :math:`\tilde g_k = g_k`; the ``keep`` share of clients with the largest losses stay as
    they are, and :math:`\bar g` is the mean. Conflicts with clients that were not sampled (the
    paper's tau) stay. Like FedMGDA+ it minimises no objective.

    Parameters
    ----------
    local, participation, server_lr
        As for FedAvg.
    keep : float
        alpha, the share of the sampled clients whose updates stay, in [0, 1].

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedFV(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    keep: float = 0.1

    allowed: ClassVar = {"keep": "[0, 1]"}

    def combine(self, gram: Matrix, chosen: Clients, x: Vector, stream: Stream) -> Weights:
        """Return what the updates count in the rescaled mean."""
        losses = chosen.losses(x, stream.at("losses"), self.local.batch_size)
        return without_conflicts(gram, losses, self.keep)


def shortest(gram: Matrix, epsilon: float, rounds: int = 2000) -> Weights:
    """Return the weights with the smallest l'Gl, each within epsilon of an equal share.

    Accelerated projected gradient steps, started anew where they point backwards.

    >>> shortest(np.diag([1.0, 1.0, 2.0]), 1.0).round(6)
    array([0.4, 0.4, 0.2])
    """
    m = len(gram)
    low = np.full(m, max(1 / m - epsilon, 0.0))
    room = 1 - low.sum()
    if room <= 1e-15:
        return np.full(m, 1 / m)
    caps = np.full(m, (min(1 / m + epsilon, 1.0) - low[0]) / room)
    step = 1 / max(float(np.linalg.norm(gram, 2)), TINY)
    at = ahead = np.full(m, 1 / m)
    t = 1.0
    for _ in range(rounds):
        slope = ahead - step * (gram @ ahead)
        new = low + room * project_capped_simplex((slope - low) / room, caps)
        if np.abs(new - at).max() < 1e-15:
            return np.asarray(new)
        if (ahead - new) @ (new - at) > 0:
            t = 1.0
        following = (1 + np.sqrt(1 + 4 * t * t)) / 2
        ahead = new + (t - 1) / following * (new - at)
        at, t = new, following
    return at


def unconflicting(gram: Matrix) -> Weights:
    """Return the mean over k of argmin over v >= e_k of v'Gv.

    With G = A'A and v = e_k + u it is the nonnegative least squares problem of A u = -A e_k.

    >>> unconflicting(np.array([[1.0, -0.5], [-0.5, 1.0]]))  # each takes half of the other
    array([0.75, 0.75])
    """
    from scipy.optimize import nnls

    values, vectors = np.linalg.eigh(gram)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    scale = max(float(np.abs(root).max()), TINY)
    parts: list[Any] = [nnls(root / scale, -root[:, k] / scale)[0] for k in range(len(gram))]
    return np.asarray((np.eye(len(gram)) + np.array(parts)).mean(axis=0))


def without_conflicts(gram: Matrix, losses: Losses, keep: float) -> Weights:
    """Return what each update counts in FedFV's mean, by inner products alone."""
    m, order = len(gram), np.argsort(losses, kind="stable")
    kept = set(order[m - int(np.floor(keep * m)) :].tolist())
    rows = np.eye(m)  # row k: what the updates count in g~_k
    for k in set(range(m)) - kept:
        for j in order:
            inner = float(rows[k] @ gram[j])
            if j != k and inner < 0 and gram[j, j] > TINY:
                rows[k, j] -= inner / gram[j, j]
    share, plain = rows.mean(axis=0), np.full(m, 1 / m)
    before, after = float(plain @ gram @ plain), float(share @ gram @ share)
    return np.asarray(share * np.sqrt(max(before, 0.0) / after)) if after > TINY else share
