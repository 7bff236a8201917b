"""Monotone scalar roots to machine precision, as plain functions of arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from equifed.contract.arrays import Weights

Reply = Callable[[Weights], Weights]
"""How far each client is from its prior when it is pulled so hard: odd and nondecreasing."""

_LEAST = 1e-300


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


def balance(reply: Reply, behind: Weights, prior: Weights, reach: float) -> Weights:
    """Return w_i = max(0, prior_i + reply(theta - behind_i)) for the theta at which they sum to 1.

    ``behind`` is >= 0 and 0 for the first client; theta lies in [0, reach]. A reply may be steep at
    zero, so theta is searched as a distance from the nearest ``behind``: there the differences
    that matter are exact.
    """

    def spread(anchor: float, further: float) -> Weights:
        pull = np.clip(anchor - behind, -2.0 * reach, reach) + further
        return np.asarray(np.maximum(prior + reply(pull), 0.0))

    def enough(anchor: float, further: float) -> bool:
        return bool(spread(anchor, further).sum() >= 1.0)

    ladder = np.unique(np.r_[behind[behind < reach], reach])
    low, high = 0, ladder.size - 1  # enough at the last, by the choice of reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(ladder[middle], 0.0) else (middle, high)
    if low == 0 and enough(0.0, 0.0):
        return spread(0.0, 0.0)
    half = 0.5 * (ladder[high] - ladder[low])
    from_above = not enough(ladder[low], half)
    anchor, sign = (ladder[high], -1.0) if from_above else (ladder[low], 1.0)
    near, far = _LEAST, half  # theta = anchor + sign * (a length between these)
    while True:  # bisection, by ratios until the ends are within a factor of two
        length = float(np.sqrt(near) * np.sqrt(far)) if far > 2.0 * near else 0.5 * (near + far)
        if not near < length < far:
            break
        beyond = enough(anchor, sign * length) != from_above
        near, far = (near, length) if beyond else (length, far)
    return min(
        (spread(anchor, sign * length) for length in (near, far)), key=lambda w: abs(w.sum() - 1.0)
    )
