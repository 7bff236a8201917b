"""Optimal-transport distance to a prior, and its exact dual step: pivots on a forest of routes.

    minimise  sum_ij cost_ij T_ij + |w - point|^2 / 2   over T >= 0,  T 1 = prior,  w = T' 1

The method is the network simplex method with a quadratic term. It keeps a forest of *routes*: arcs
of the graph of sources (clients that hold prior mass) and places (clients that receive weight).
On a fixed forest the best plan is explicit. The price of place j is w_j - point_j; every source of
a tree pays the same alpha on all its routes, so the prices of a tree are known up to one level,
which the mass of the tree fixes; the flows follow from the leaves inwards. If a flow would turn
negative, the plan stops where the first one vanishes and that route is dropped. When the best plan
of the forest is reached, a route on which some source would pay less than its alpha enters; if it
closes a cycle, flow is pushed around the cycle until another route is empty. The objective falls,
so no forest returns, and there are finitely many; each pivot costs O(n^2), for the search.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import PriorPenalty, check_vector

Arc = tuple[int, int]
Flow = dict[Arc, float]
Matrix = NDArray[np.float64]

_PIVOTS = 1000  # times n + 10: far beyond what is ever needed, so that no rounding can loop


@dataclass(frozen=True)
class Transport(PriorPenalty):
    r"""Worst weighted loss, where weights pay for carrying mass from a prior p.

    .. math:: \psi(w) = \tau \min_{T \ge 0} \Big\{ \sum_{ij} C_{ij} T_{ij} :
        T \mathbf 1 = p,\ T^\top \mathbf 1 = w \Big\}, \qquad
        \Phi(\ell) = \sum_i p_i \max_j (\ell_j - \tau C_{ij})

    Mass moves only between clients that are near each other at cost C: a hospital in one region
    can stand for others of that region. C = 1 - identity gives ``L1Distance`` of half the strength.

    ``value`` and ``weights`` are closed forms in O(n^2). ``penalty`` is the transport linear
    programme, whose prices the simplex method of HiGHS finds in n^2 variables. ``prox`` is a
    quadratic programme solved by an active-set method on forests of routes, as described above:
    finite, O(n^2) per pivot, and in practice a small multiple of n pivots. Meant for up to a few
    hundred clients.

    Parameters
    ----------
    strength
        tau > 0.
    cost
        The n by n matrix C: nonnegative, with a zero diagonal; need not be symmetric.
    prior, scale
        As for :class:`KL`.

    Examples
    --------
    >>> line = ((0, 1, 2), (1, 0, 1), (2, 1, 0))
    >>> Transport(strength=1.0, cost=line).weights(np.array([0.0, 0.5, 1.75]))
    array([0.33333333, 0.        , 0.66666667])
    >>> Transport(strength=3.0, cost=line).penalty(np.array([0.0, 1 / 3, 2 / 3])).__round__(12)
    2.0

    References
    ----------
    DRFA Section 5 ("optimal transport"), with g = -psi in (5).
    """

    strength: float
    cost: tuple[tuple[float, ...], ...]
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cost = np.asarray(self.cost, dtype=np.float64)
        if cost.ndim != 2 or cost.shape[0] != cost.shape[1] or cost.size == 0:
            raise ValueError(f"Transport cost must be a square matrix, got shape {cost.shape}.")
        if not np.isfinite(cost).all() or (cost < 0).any() or np.diag(cost).any():
            raise ValueError("Transport cost must be finite, >= 0 and zero on the diagonal.")
        object.__setattr__(self, "cost", tuple(tuple(map(float, row)) for row in cost))

    @override
    def value(self, losses: Losses) -> float:
        reach = losses - self.price * self._cost(losses.size)
        return float(self.start(losses.size) @ reach.max(axis=1))

    @override
    def weights(self, losses: Losses) -> Weights:
        reach = losses - self.price * self._cost(losses.size)
        best = reach == reach.max(axis=1, keepdims=True)
        return np.asarray((self.start(losses.size) / best.sum(axis=1)) @ best)

    @override
    def penalty(self, weights: Weights) -> float:
        """Return the cost of the best plan, by its prices (the dual linear programme)."""
        weights = np.maximum(check_vector(weights, "weights"), 0.0)
        n = weights.size
        cost, prior, target = self._cost(n), self.start(n), weights / weights.sum()
        scale = float(cost.max())
        if scale == 0.0:
            return 0.0
        prices = _prices(cost / scale, prior, target)
        least = (cost / scale - prices).min(axis=1)  # the best reply: any prices bound from below
        return max(0.0, self.price * scale * float(prior @ least + target @ prices))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        cost = step * self.price * self._cost(point.size)
        return transport_prox(point, cost, self.start(point.size))

    def _cost(self, n: int) -> Matrix:
        if len(self.cost) != n:
            raise ValueError(f"Transport cost is for {len(self.cost)} clients, not {n}.")
        return np.asarray(self.cost)


def _prices(cost: Matrix, prior: Weights, target: Weights) -> Weights:
    """Return what a unit is worth at each place when the prior goes to the target at least cost.

    The place with the largest target takes what the others leave: so there is a plan however the
    two sums are rounded, which a constraint for every place may deny.
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    n = prior.size
    kept = np.arange(n) != target.argmax()
    rows, columns = kron(eye_array(n), np.ones((1, n))), kron(np.ones((1, n)), eye_array(n))
    plan = linprog(
        cost.ravel(),
        A_eq=vstack([rows, columns.tocsr()[kept]]),
        b_eq=np.concatenate([prior, target[kept]]),
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if plan.status != 0:
        raise ArithmeticError(f"the transport programme was not solved: {plan.message}")
    prices = np.zeros(n)
    prices[kept] = plan.eqlin.marginals[n:]
    return prices


def transport_prox(point: Weights, cost: Matrix, prior: Weights) -> Weights:
    """Return the best w.

    >>> cost = np.array([[0.0, 0.5], [0.5, 0.0]])
    >>> transport_prox(np.array([0.0, 1.0]), cost, prior=np.array([0.5, 0.5]))
    array([0.25, 0.75])
    """
    n = point.size
    # Places this far below the best hold no mass in any case; so any scale of point will do.
    with np.errstate(over="ignore"):
        z = np.maximum(point - point.max(), -(cost.max() + 3.0))
    enough = -1e-13 * (1.0 + float(cost.max()) - float(z.min()))
    flow: Flow = {(i, i): float(prior[i]) for i in range(n)}
    for _ in range(_PIVOTS * (n + 10)):
        flow, forest = _settle(flow, cost, z, prior)
        saving = cost + forest.prices - forest.alphas[:, None]
        source, place = divmod(int(saving.argmin()), n)
        if saving[source, place] >= enough:
            break
        _enter(flow, forest, (source, place))
    else:
        raise ArithmeticError("the transport step did not settle; report the point and the cost.")
    weights = np.zeros(n)
    np.add.at(weights, [place for _, place in flow], list(flow.values()))
    return weights


@dataclass(frozen=True, eq=False)
class _Forest:
    """The best plan on a set of routes, if flows may be negative. Nodes: sources, then places."""

    flow: Flow
    prices: Weights
    alphas: Weights
    parent: list[int]
    tree: list[int]


def _settle(flow: Flow, cost: Matrix, z: Weights, prior: Weights) -> tuple[Flow, _Forest]:
    """Move to the best plan on the routes of ``flow``, dropping those that become empty."""
    while True:
        forest = _best_plan(flow, cost, z, prior)
        blocked = [arc for arc, best in forest.flow.items() if best < 0.0]
        if not blocked:
            return forest.flow, forest
        lengths = {arc: flow[arc] / (flow[arc] - forest.flow[arc]) for arc in blocked}
        first = min(blocked, key=lengths.__getitem__)
        part = lengths[first]
        flow = {arc: (1.0 - part) * flow[arc] + part * forest.flow[arc] for arc in flow}
        del flow[first]
        flow = {arc: max(amount, 0.0) for arc, amount in flow.items()}


def _best_plan(flow: Flow, cost: Matrix, z: Weights, prior: Weights) -> _Forest:
    n = z.size
    near: list[list[int]] = [[] for _ in range(2 * n)]
    for source, place in flow:
        near[source].append(n + place)
        near[n + place].append(source)
    parent, tree = [-1] * (2 * n), [-1] * (2 * n)
    level, need = np.zeros(2 * n), np.concatenate([prior, z])
    best: Flow = {}
    for root in range(n, 2 * n):  # every tree has a place
        if tree[root] >= 0:
            continue
        members = [root]
        tree[root] = root
        for node in members:  # grows while it is walked
            for other in near[node]:
                if tree[other] < 0:
                    arc = (other, node - n) if node >= n else (node, other - n)
                    toll = float(cost[arc])
                    level[other] = level[node] + (toll if node >= n else -toll)
                    tree[other], parent[other] = root, node
                    members.append(other)
        _fix_level(members, level, need, n)
        for node in reversed(members[1:]):  # from the leaves inwards
            up = parent[node]
            best[(up, node - n) if node >= n else (node, up - n)] = float(need[node])
            need[up] -= need[node]
    return _Forest(best, level[n:], level[:n], parent, tree)


def _fix_level(members: list[int], level: Weights, need: Weights, n: int) -> None:
    """Shift a tree's prices so that its places want exactly the mass of its sources."""
    nodes = np.array(members)
    places = nodes[nodes >= n]
    wanted = need[places] + level[places]  # w = z + price
    surplus = (float(need[nodes[nodes < n]].sum()) - float(wanted.sum())) / places.size
    level[nodes] += surplus
    need[places] = wanted + surplus


def _enter(flow: Flow, forest: _Forest, arc: Arc) -> None:
    """Open a route; if it closes a cycle, push flow around until another route is empty."""
    source, place = arc
    n = forest.prices.size
    if forest.tree[source] != forest.tree[n + place]:
        flow[arc] = 0.0
        return
    path = _path(forest.parent, n + place, source)
    steps = [(b, a - n) if a >= n else (a, b - n) for a, b in pairwise(path)]
    falling, rising = steps[0::2], steps[1::2]
    empty = min(falling, key=flow.__getitem__)
    amount = flow[empty]
    for step in falling:
        flow[step] -= amount
    for step in rising:
        flow[step] += amount
    del flow[empty]
    flow[arc] = amount


def _path(parent: list[int], start: int, end: int) -> list[int]:
    """Return the nodes from ``start`` to ``end`` in their tree."""
    up, down = [start], [end]
    while parent[up[-1]] >= 0:
        up.append(parent[up[-1]])
    while parent[down[-1]] >= 0:
        down.append(parent[down[-1]])
    while len(up) > 1 and len(down) > 1 and up[-2] == down[-2]:
        up.pop()
        down.pop()
    return up + down[-2::-1]
