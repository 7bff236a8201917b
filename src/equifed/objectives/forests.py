"""The exact dual step of a transport penalty: pivots on a forest of routes.

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

from equifed.contract.arrays import Weights

Arc = tuple[int, int]
Flow = dict[Arc, float]
Matrix = NDArray[np.float64]

_PIVOTS = 1000  # times n + 10: far beyond what is ever needed, so that no rounding can loop


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
