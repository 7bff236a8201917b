"""Exact projections, Euclidean and entropic, as plain functions of arrays (docs/mathematics.md).

Every function works on differences of the point's entries near the answer, so that a point at
scale 1e300, or one with exact ties there, is projected as exactly as a point at scale 1. Nothing
has a tolerance to tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights


@dataclass(frozen=True, eq=False)
class Permutahedron:
    """The set offset + conv{permutations of corner}.

    The simplex, the capped simplex of CVaR and the integrated set of relative fairness are
    permutahedra, and a single point (the average) is one with corner 0, translated.

    Parameters
    ----------
    corner
        The vector whose permutations span the set, in decreasing order.
    offset
        A translation; the zero vector for the sets that treat all clients alike.

    Examples
    --------
    >>> simplex = Permutahedron(corner=np.array([1.0, 0.0, 0.0]), offset=np.zeros(3))
    >>> simplex.project(np.array([0.5, 0.75, -1.0]))
    array([0.375, 0.625, 0.   ])
    """

    corner: Weights
    offset: Weights

    def project(self, point: Weights) -> Weights:
        """Return the nearest point of the set, in O(n log n)."""
        return self.offset + project_permutahedron(point - self.offset, self.corner)

    def value(self, losses: Losses) -> float:
        """Return the support function: max over the set of <w, losses>."""
        # Largest against largest (rearrangement inequality); no solver.
        return float(np.sort(losses)[::-1] @ self.corner + losses @ self.offset)

    def maximiser(self, losses: Losses) -> Weights:
        """Return the maximiser of <w, losses> that treats equal losses alike."""
        return self.offset + spread_evenly(losses, self.corner)

    def l1_norm(self) -> float:
        """Return max |w|_1 over the set."""
        # |o + c| is a convex function of o + c, so pairing largest with largest maximises its sum.
        return float(np.abs(np.sort(self.offset)[::-1] + self.corner).sum())


def capped_corner(n: int, tail: float) -> Weights:
    """Return the sorted vertex of the capped simplex: 1/(tail n) repeated, a remainder, zeros.

    >>> capped_corner(4, tail=0.625)
    array([0.4, 0.4, 0.2, 0. ])
    """
    cap = 1.0 / (tail * n)
    # Entry k is h(k) - h(k-1) with h(k) = min(1, k cap), written so that repeats are equal exactly.
    corner = np.clip(1.0 - cap * np.arange(n, dtype=np.float64), 0.0, min(cap, 1.0))
    return np.asarray(corner)


def cut_corner(corner: Weights, most: float) -> Weights:
    """Return the corner of a permutahedron of which all that is above ``most`` is cut away.

    The k largest entries of a point of the set sum to V_k at most, that of the corner. Cut, they
    sum to min(V_k, k most), which is concave in k as V is: the cut set is a permutahedron again.

    >>> cut_corner(np.array([2.0, 0.0, -1.0]), 0.75)
    array([ 0.75,  0.75, -0.5 ])
    """
    sums = np.cumsum(corner)
    k = int(np.count_nonzero(sums > most * np.arange(1, corner.size + 1)))
    if k == 0:
        return corner
    out = corner.copy()
    out[:k] = most
    if k < corner.size:
        out[k] = sums[k] - k * most
    return np.asarray(out)


def transfer(corner: Weights, target: Weights, followers: tuple[Weights, ...]) -> list[list[float]]:
    """Lead ``corner`` to ``target`` by transfers, and return ``followers`` after the same ones.

    Both decrease, and target is majorised by corner. Each transfer averages entries i < j in
    part: it moves mass from the nearest entry with too much to the first with too little.
    """
    surplus = (corner - target).tolist()
    aim, moved = target.tolist(), [side.tolist() for side in followers]
    rich: list[int] = []  # entries before j that still hold too much, the nearest last
    for j in range(len(surplus)):
        while rich and surplus[j] < 0:
            i = rich[-1]
            move = min(surplus[i], -surplus[j])
            share = move / (surplus[i] + aim[i] - surplus[j] - aim[j])
            for side in moved:
                change = share * (side[i] - side[j])
                side[i], side[j] = side[i] - change, side[j] + change
            surplus[i], surplus[j] = surplus[i] - move, surplus[j] + move
            if surplus[i] <= 0:
                rich.pop()
        if surplus[j] > 0:
            rich.append(j)
    return moved


def spread_evenly(losses: Losses, corner: Weights) -> Weights:
    """Return the permutation of ``corner`` that follows ``losses``, averaged over equal losses.

    >>> spread_evenly(np.array([3.0, 1.0, 3.0]), np.array([1.0, 0.0, 0.0]))
    array([0.5, 0. , 0.5])
    """
    order, starts = group_ties(losses)
    result = np.empty_like(corner)
    result[order] = _block_means(corner, starts)
    return result


def group_ties(losses: Losses) -> tuple[Index, Index]:
    """Return the order from the largest loss down, and where each group of equals starts in it."""
    order = np.argsort(-losses, kind="stable")
    ordered = losses[order]
    return order, np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])


def join_ties(losses: Losses, within: float) -> Losses:
    """Return losses in which those that differ by no more than ``within`` are equal.

    From the largest down, each group reaches ``within`` below its first member and takes its mean,
    so that a long row of near losses does not become one group.

    >>> join_ties(np.array([1.0, 3.0, 1.25, 2.875]), within=0.25)
    array([1.125 , 2.9375, 1.125 , 2.9375])
    """
    order = np.argsort(-losses, kind="stable")
    ordered, starts = losses[order], [0]
    while (end := int(np.searchsorted(-ordered, within - ordered[starts[-1]], "right"))) < len(
        order
    ):
        starts.append(end)
    result = np.empty_like(losses)
    result[order] = _block_means(ordered, np.array(starts))
    return result


def project_permutahedron(point: Weights, corner: Weights) -> Weights:
    """Return the nearest point of conv{permutations of ``corner``}; ``corner`` decreases.

    With z the sorted point and v the decreasing isotonic regression of z - corner, the answer is
    z - v. O(n log n), with one isotonic regression for each separate group of drops of ``corner``
    (at most five in this library's sets).

    >>> project_permutahedron(np.array([1e300, 1e300, 0.0]), np.array([1.0, 0.0, 0.0]))
    array([0.5, 0.5, 0. ])
    """
    order = np.argsort(-point, kind="stable")
    z = point[order]
    answer = corner.astype(np.float64)
    for window in _windows(z, corner):
        answer[window] = _project_sorted(z[window], corner[window])
    result = np.empty_like(answer)
    result[order] = answer
    return result


def _windows(z: Weights, corner: Weights) -> Iterator[slice]:
    """Yield the stretches outside of which the projection of the sorted point is ``corner``.

    On a block of the isotonic regression the answer is z minus a constant, so z varies there by at
    most the range R of ``corner``; and a block matters only if ``corner`` drops inside it. So
    nothing further than R from both sides of a drop is in its block. Working window by window
    keeps the arithmetic at the scale of R however large the point is.
    """
    drops = np.flatnonzero(corner[1:] < corner[:-1])
    reach = 2.0 * (corner[0] - corner[-1])  # twice R, because the sums below may round
    firsts = np.searchsorted(-z, -(z[drops + 1] + reach), side="left")
    ends = np.searchsorted(-z, -(z[drops] - reach), side="right")
    first, end = 0, 0
    for next_first, next_end in zip(firsts.tolist(), ends.tolist(), strict=True):
        if next_end <= next_first:  # z falls too far at this drop for a block across it
            continue
        if next_first >= end:
            if end > first:
                yield slice(first, end)
            first = next_first
        end = next_end
    if end > first:
        yield slice(first, end)


def _project_sorted(z: Weights, corner: Weights) -> Weights:
    """Project a decreasing point that is of the corner's scale apart from a shift."""
    from scipy.optimize import isotonic_regression

    z = z - z[z.size // 2]
    starts = isotonic_regression(z - corner, increasing=False).blocks[:-1]
    centred = z - _block_means(z, starts)
    centred -= _block_means(centred, starts)  # again, against the rounding of the first mean
    return np.asarray(np.clip(centred + _block_means(corner, starts), corner[-1], corner[0]))


def _block_means(values: Weights, starts: Index) -> Weights:
    """Replace each block of consecutive values by its mean."""
    lengths = np.append(starts[1:], values.size) - starts
    return np.asarray(np.repeat(np.add.reduceat(values, starts) / lengths, lengths))


def project_capped_simplex(point: Weights, caps: Weights) -> Weights:
    """Return the nearest w with 0 <= w_i <= caps_i and sum one; the caps sum to one or more.

    w_i = clip(point_i - nu, 0, caps_i), and nu is found exactly by sorting the 2n break points,
    in O(n log n).

    >>> project_capped_simplex(np.array([9.0, 0.125, 0.25]), np.array([0.5, 1.0, 1.0]))
    array([0.5   , 0.1875, 0.3125])
    """
    reach = 2.0 * float(caps.max())

    def excess(above: Weights) -> float:
        return float(np.clip(above, 0.0, caps).sum()) - 1.0

    # First the neighbourhood: nu lies below the anchor, by no more than the largest cap.
    ladder = np.sort(point)
    below = _last_true(ladder, lambda nu: excess(clipped_difference(point, nu, reach)) >= 0)
    near = clipped_difference(point, ladder[below + 1], reach)
    # Then the piece: between two break points the total is linear in nu.
    breaks = np.concatenate([near - caps, near])
    nu = piecewise_root(lambda nu: excess(near - nu), breaks)
    return np.asarray(np.clip(near - nu, 0.0, caps))


def piecewise_root(excess: Callable[[float], float], breaks: Weights) -> float:
    """Return the zero of a nonincreasing function that is linear between the ``breaks``.

    Exact up to rounding, in O(log n) evaluations; an end point if there is no change of sign.
    """
    ladder = np.sort(breaks)
    piece = _last_true(ladder, lambda nu: excess(nu) >= 0)
    low, high = float(ladder[max(piece, 0)]), float(ladder[min(piece + 1, ladder.size - 1)])
    over, under = excess(low), excess(high)
    for _ in range(3):  # later passes remove the rounding of the first
        if not under < 0 < over:
            break
        middle = min(max(low + (high - low) * (over / (over - under)), low), high)
        left = excess(middle)
        low, over, high, under = (
            (middle, left, high, under) if left >= 0 else (low, over, middle, left)
        )
    return low if over <= -under else high


def clipped_difference(point: Weights, origin: float, reach: float) -> Weights:
    """Return point - origin, clipped to [-reach, reach] (the difference may overflow)."""
    with np.errstate(over="ignore"):
        return np.asarray(np.clip(point - origin, -reach, reach))


def _last_true(ladder: Weights, holds: Callable[[float], bool]) -> int:
    """Return the last index that satisfies ``holds`` (true, then false); -1 if none does."""
    low, high = -1, ladder.size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(float(ladder[middle])) else (low, middle)
    return low


def power_roots(z: Weights, step: float, p: Weights, q: float) -> Weights:
    """Return w >= 0 with w + step (w/p)^(1/q) = z, for z >= 0, by Newton's method from above.

    The left side is convex in w for q <= 1 and in (w/p)^(1/q) for q >= 1, so no iterate passes the
    root. The first is where one of the two terms alone is z, within a factor of two.

    >>> power_roots(np.array([6.0, 2.0]), step=1.0, p=np.ones(2), q=2.0)
    array([4., 1.])
    """
    if step == 0:
        return z
    with np.errstate(over="ignore"):  # the other bound is then the smaller one
        if q >= 1:  # t = (w/p)^(1/q): p t^q + step t = z
            t = np.minimum((z / p) ** (1.0 / q), z / step)
        else:  # t = w
            t = np.minimum(z, p * (z / step) ** q)
    while True:
        if q >= 1:
            over, slope = p * t**q + step * t - z, q * p * t ** (q - 1) + step
        else:
            over = t + step * (t / p) ** (1 / q) - z
            slope = 1 + step / (q * p) * (t / p) ** (1 / q - 1)
        lower = t - over / slope
        if not (lower < t).any():
            return np.asarray(p * t**q if q >= 1 else t)
        t = np.minimum(t, lower)


# -- distance by relative entropy -----------------------------------------------------------------
#
# Two problems over W = {0 <= w_i <= caps_i, sum of w = 1}, each with one monotone scalar root:
# ``tilt`` is reference_i exp(step losses_i), scaled and cut at the caps; in ``entropic_prox`` each
# weight solves w_i + temperature log(w_i / prior_i) = point_i - nu (the Wright omega function).
# Which clients sit at their caps is found by bisection over the sorted order: exact at every scale.

Fill = Callable[[Index, float], Weights]
"""(clients, mass) -> their weights if they share that mass and no cap binds."""
Beside = Callable[[Index], Weights]
"""clients -> their weights when the first of them is exactly at its cap."""

_EXTREME = 1e300  # tilts beyond this are treated as equal
_COLD = 1e-200  # below this temperature the entropy changes no digit of the answer
_PRECISION = 4 * np.finfo(np.float64).eps


def tilt(reference: Weights, losses: Losses, step: float, caps: Weights) -> Weights:
    """Return argmax over W of step <w, losses> - KL(w, reference); a zero reference stays zero.

    >>> tilt(np.array([0.5, 0.5]), np.log([3.0, 1.0]), step=1.0, caps=np.ones(2))
    array([0.75, 0.25])
    >>> tilt(np.array([0.25, 0.25, 0.5]), np.array([800.0, 0.0, 0.0]), 1.0, caps=np.full(3, 0.4))
    array([0.4, 0.2, 0.4])
    """
    if caps[reference > 0].sum() < 1.0 - 1e-12:
        raise ValueError(
            f"the {np.count_nonzero(reference)} clients with positive weight have caps that sum to "
            f"{caps[reference > 0].sum():g} < 1, and an entropic step cannot revive the others; "
            "start from positive weights or use the Euclidean step."
        )
    with np.errstate(divide="ignore", over="ignore"):
        logits = np.log(reference) + np.clip(step * losses, -_EXTREME, _EXTREME)
    everyone = np.arange(logits.size)

    def fill(who: Index, mass: float) -> Weights:
        return _softmax(logits[who], mass)

    def beside(who: Index) -> Weights:
        return np.asarray(caps[who[0]] * np.exp(logits[who] - logits[who[0]]))

    if (caps >= 1.0).all():
        return fill(everyone, 1.0)
    return _with_caps(logits - np.log(caps), caps, fill, beside)


def _softmax(logits: Weights, mass: float) -> Weights:
    if logits.max() == -np.inf:
        return np.zeros_like(logits)
    odds = np.exp(logits - logits.max())
    return np.asarray(mass * (odds / odds.sum()))


def entropic_prox(point: Weights, temperature: float, prior: Weights, caps: Weights) -> Weights:
    """Return argmin over W of |w - point|^2 / 2 + temperature * KL(w, prior).

    >>> entropic_prox(np.zeros(2), 1e9, prior=np.array([0.75, 0.25]), caps=np.ones(2)).round(6)
    array([0.75, 0.25])
    """
    from scipy.special import wrightomega

    if temperature < _COLD:
        return project_capped_simplex(point, caps)
    if temperature == np.inf:
        return tilt(prior, np.zeros_like(point), 0.0, caps)
    with np.errstate(divide="ignore"):
        log_prior = np.log(prior)

    def fill(who: Index, mass: float) -> Weights:
        return _omega_shares(point[who], temperature, log_prior[who], mass)

    def beside(who: Index) -> Weights:
        ratio = caps[who[0]] / temperature
        with np.errstate(over="ignore"):
            height = (point[who] - point[who[0]]) / temperature
        height += log_prior[who] - log_prior[who[0]]
        return np.asarray(temperature * wrightomega(height + ratio + np.log(ratio)))

    if (caps >= 1.0).all():
        return fill(np.arange(point.size), 1.0)
    # Client i reaches its cap when nu falls to this; so it orders the clients.
    key = point - caps - temperature * (np.log(caps) - log_prior)
    return _with_caps(key, caps, fill, beside)


def _omega_shares(point: Weights, temperature: float, log_prior: Weights, mass: float) -> Weights:
    """Solve w_i + temperature log(w_i / prior_i) = point_i - nu for sum w = mass."""
    from scipy.special import wrightomega

    with np.errstate(over="ignore"):
        height = (point - point.max()) / temperature + log_prior
    if height.max() == -np.inf or mass == 0.0:
        return np.zeros_like(height)
    height -= height.max()
    # The highest client alone has all the mass, or an equal part of it: a bracket, with some room.
    total, part = mass / temperature, mass / temperature / point.size
    room = 1.0 + 0.01 * total
    low, high = -(total + np.log(total)) - room, -(part + np.log(part)) + room
    nu = high - room
    while True:
        omega = wrightomega(height - nu)  # weights in units of the temperature
        held = float(omega.sum())
        slope = float((omega / (1.0 + omega)).sum())
        # Newton on held / m + log(held) for m as below: exact in one step for m equal clients.
        change = (held - total) * (1.0 / slope - 1.0 / held) + float(np.log(held / total))
        if abs(change) <= _PRECISION * max(1.0, abs(nu)) or not low < nu < high:
            return np.asarray(mass * (omega / held))
        low, high = (nu, high) if held > total else (low, nu)
        nu = nu + change if low < nu + change < high else 0.5 * (low + high)


def _with_caps(key: Weights, caps: Weights, fill: Fill, beside: Beside) -> Weights:
    """Put the clients with the largest ``key`` at their caps and let ``fill`` share the rest.

    How many: the least k for which client k of the order, put at its cap, together with what the
    later ones then get, leaves nothing of the mass. Then its own weight is its cap or less.
    """
    order = np.argsort(-key, kind="stable")
    spent = np.concatenate([[0.0], np.cumsum(caps[order])])
    low, high = -1, min(caps.size, int(np.searchsorted(spent, 1.0, side="left"))) - 1
    while high - low > 1:  # with ``high`` clients at their caps, the next cap takes the rest
        middle = (low + high) // 2 if low >= 0 else 0  # 0 first: mostly no cap binds
        enough = spent[middle] + float(beside(order[middle:]).sum()) >= 1.0
        low, high = (low, middle) if enough else (middle, high)
    weights, rest = caps.astype(np.float64), order[high:]
    while True:
        weights[rest] = 0.0
        weights[rest] = fill(rest, max(0.0, 1.0 - float(weights.sum())))
        over = weights[rest] > caps[rest]  # by rounding of ``key``, at huge scales only
        weights[rest] = np.minimum(weights[rest], caps[rest])
        rest = rest[~over]
        if not over.any() or rest.size == 0:
            return weights
