"""Differences between two methods: over seeds, and between models that answered the same samples.

Of a client's m samples, a are answered correctly by both models, b by ours alone, c by theirs alone
and d by neither; the accuracies differ by (b - c)/m, and the counts tell how far luck is shared.

* One client: Newcombe's interval, two Wilson intervals and the correlation of the answers.
* Averages over clients: distances from differences to limits add up as squares (MOVER).
* The worst client: the intervals of the two worst ones, put together in the same way, without
  correlation where they are not the same client.
* Other reducers that rest on more than one client: a bootstrap of the four counts.

References
----------
Newcombe, Statistics in Medicine 17, 1998 (paired data, method 10). Zou and Donner, Statistics in
Medicine 27, 2008.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equifed.contract.streams import Stream
from equifed.metrics.intervals import (
    Interval,
    check_seeds,
    limit_wilson,
    mean_interval,
    resample,
    worst_client_interval,
)
from equifed.metrics.reducers import REDUCERS, Reducer, Values, check_nonnegative

Joint = Values
"""Counts (n, 4) of each client: right for both, for ours alone, for theirs alone, for neither."""


def paired_difference(values: ArrayLike, baseline: ArrayLike) -> Interval:
    """Return the mean of ``values - baseline`` over seeds, with its interval.

    Entry i of both must come from the same seed; see :func:`~equifed.metrics.mean_interval`.

    >>> paired_difference([0.75, 0.5, 1.0], baseline=[0.5, 0.25, 0.75])
    Interval(estimate=0.25, lower=0.25, upper=0.25)
    """
    ours, theirs = check_seeds(values, "values"), check_seeds(baseline, "baseline")
    if ours.shape != theirs.shape:
        raise ValueError(
            f"values and baseline must come from the same seeds, got {ours.size} and {theirs.size}."
        )
    return mean_interval(ours - theirs)


def count_pairs(ours: NDArray[np.bool_], theirs: NDArray[np.bool_], sizes: ArrayLike) -> Joint:
    """Count the pairs of answers of each client; samples lie one client after the other."""
    m = np.asarray(sizes, dtype=np.int64)
    if not len(ours) == len(theirs) == m.sum():
        raise ValueError(f"expected {m.sum()} answers of both, got {len(ours)} and {len(theirs)}.")
    cell = 2 * ~ours + ~theirs
    owner = np.repeat(np.arange(len(m)), m)
    counts = np.bincount(4 * owner + cell, minlength=4 * len(m))
    return counts.reshape(len(m), 4).astype(np.float64)


def assume_independent(ours: ArrayLike, theirs: ArrayLike, sizes: ArrayLike) -> Joint:
    """Return the counts expected if who is right about a sample does not depend on it."""
    m = check_nonnegative(sizes, "sizes")
    p, q = np.asarray(ours) / m, np.asarray(theirs) / m
    shares: Joint = np.stack([p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)], axis=1)
    return m[:, None] * shares


def correlate(joint: Joint) -> Values:
    """Return the correlation of the two models' answers of each client, cautiously: Newcombe's."""
    a, b, c, d = joint.T
    product, m = a * d - b * c, joint.sum(axis=1)
    shared = np.where(product > 0, np.maximum(product - m / 2, 0.0), product)
    scale = np.sqrt((a + b) * (c + d) * (a + c) * (b + d))
    out: Values = np.zeros(len(joint))
    np.divide(shared, scale, out=out, where=scale > 0)
    return out


def newcombe_interval(joint: Joint) -> tuple[Values, Values, Values]:
    r"""Return each client's difference of accuracies, and its limits, shape (n,) each.

    With Wilson's limits l and u of both accuracies p and q and their correlation phi,
    :math:`p - q - \sqrt{(p-l_p)^2 - 2\phi(p-l_p)(u_q-q) + (u_q-q)^2}`, and in the same way upwards.

    >>> counts = np.array([[36.0, 12.0, 2.0, 0.0]])  # the paper's Table II
    >>> [limit.round(4).item() for limit in newcombe_interval(counts)]
    [0.2, 0.0569, 0.3404]
    """
    m, k = joint.sum(axis=1), (joint[:, 0] + joint[:, 1], joint[:, 0] + joint[:, 2])
    (p, below, above), (q, low, high) = (_distances(count, m) for count in k)
    phi = correlate(joint)
    lower = p - q - _combine(below, high, phi)
    upper = p - q + _combine(above, low, phi)
    return p - q, np.maximum(lower, -1.0), np.minimum(upper, 1.0)


def _distances(k: Values, m: Values) -> tuple[Values, Values, Values]:
    """Return accuracies, and how far below and above them Wilson's limits lie."""
    lower, upper = limit_wilson(k, m)
    p = k / m
    return p, np.maximum(p - lower, 0.0), np.maximum(upper - p, 0.0)


def _combine(x: Values | float, y: Values | float, correlation: Values | float) -> Values:
    return np.sqrt(np.maximum(np.square(x) - 2 * correlation * x * y + np.square(y), 0.0))


@dataclass(frozen=True)
class Gain:
    """What one client gains by our model: ours minus theirs, its 95 % limits, and a test."""

    difference: float
    lower: float
    upper: float
    p: float  # chance of samples that speak as much for our model although it is not better


def gain_of_pairs(
    ours: Values, theirs: Values, *, higher_is_better: bool, fraction: bool
) -> Gain:  # fmt: skip
    """Compare what two models do with the same samples of one client.

    Right or wrong answers (1 or 0) have Newcombe's interval and McNemar's exact test.
    """
    from scipy.special import bdtrc, stdtr, stdtrit

    if fraction:
        joint = count_pairs(ours > 0.5, theirs > 0.5, [len(ours)])
        found, lower, upper = (float(limit[0]) for limit in newcombe_interval(joint))
        ahead, behind = map(int, joint[0, 1:3] if higher_is_better else joint[0, 2:0:-1])
        p = 1.0 if ahead == 0 else float(bdtrc(ahead - 1, ahead + behind, 0.5))
        return Gain(found, lower, upper, p)
    change = ours - theirs
    m, mean = len(change), float(change.mean()) if len(change) else math.nan
    error = float(change.std(ddof=1)) / math.sqrt(m) if m > 1 else 0.0
    if not (math.isfinite(error) and error > 0):
        return Gain(mean, -math.inf, math.inf, 1.0)
    half = float(stdtrit(m - 1, 0.975)) * error
    p = float(stdtr(m - 1, (-1 if higher_is_better else 1) * mean / error))
    return Gain(mean, mean - half, mean + half, p)


def combine_sources(estimate: float, intervals: Iterable[Interval]) -> Interval:
    """Return limits for an estimate that varies for several independent reasons."""
    listed = list(intervals)
    below = math.hypot(*(i.estimate - i.lower for i in listed))
    above = math.hypot(*(i.upper - i.estimate for i in listed))
    return Interval(estimate, estimate - below, estimate + above)


def average_difference(joint: Joint, weights: ArrayLike) -> Interval:
    """Return the difference of two weighted averages over clients; the weights add up to 1."""
    w = np.asarray(weights, dtype=np.float64)
    found, lower, upper = newcombe_interval(joint)
    below, above = (float(np.linalg.norm(w * (found - end))) for end in (lower, upper))
    estimate = float(w @ found)
    return Interval(estimate, estimate - below, estimate + above)


def worst_difference(joint: Joint) -> Interval:
    """Return the difference of the lowest accuracies under the two models."""
    if len(joint) == 1:
        return average_difference(joint, [1.0])
    m = np.rint(joint.sum(axis=1))
    ours, theirs = (
        worst_client_interval(np.rint(joint[:, 0] + joint[:, alone]), m) for alone in (1, 2)
    )
    same = ours.observed == theirs.observed
    phi = float(correlate(joint)[ours.observed]) if same else 0.0
    a, b = ours.interval, theirs.interval
    estimate = a.estimate - b.estimate
    below = float(_combine(a.estimate - a.lower, b.upper - b.estimate, phi))
    above = float(_combine(a.upper - a.estimate, b.estimate - b.lower, phi))
    return Interval(estimate, estimate - below, estimate + above)


def bootstrap_difference(reducer: Reducer, joint: Joint, resamples: int = 1000) -> Interval:
    """Return the difference of a reducer of accuracies, the four counts drawn anew.

    One sample's worth of doubt is spread over the four cells: every client varies.
    """

    def reduce(shares: Values) -> Values:
        ours, theirs = shares[..., 0] + shares[..., 1], shares[..., 0] + shares[..., 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(reducer.compute(ours, True) - reducer.compute(theirs, True))

    sizes = joint.sum(axis=1, keepdims=True)
    m, chances = np.rint(sizes[:, 0]).astype(np.int64), (joint + 0.25) / (sizes + 1.0)
    draw = Stream(0).at("bootstrap", "pairs").generator()
    draws = resample(
        lambda rows: draw.multinomial(m, chances, size=(rows, len(m))) / m[:, None], reduce,
        resamples, 4 * len(m),
    )  # fmt: skip
    estimate = float(reduce(joint / sizes))
    if not (np.isfinite(draws).all() and math.isfinite(estimate)):  # a ratio over zero
        return Interval(estimate, -math.inf, math.inf)
    half = NormalDist().inv_cdf(0.975) * float(draws.std())
    return Interval(estimate, estimate - half, estimate + half)


def difference_intervals(
    joint: Joint, names: Sequence[str], *, resamples: int = 1000
) -> dict[str, Interval]:
    """Return a 95 % interval for the difference of each named reducer, if one is valid."""
    sizes, out = joint.sum(axis=1), {}
    for name in names:
        if name == "average_by_client":
            out[name] = average_difference(joint, np.full(len(joint), 1 / len(joint)))
        elif name == "average_by_sample":
            out[name] = average_difference(joint, sizes / sizes.sum())
        elif name == "worst" or (name == "worst_20_percent" and len(joint) <= 5):
            out[name] = worst_difference(joint)  # both are the lowest accuracy: a bootstrap errs
        elif not REDUCERS[name].extreme:
            out[name] = bootstrap_difference(REDUCERS[name], joint, resamples)
    return out
