"""How sure a metric of one client is: limits for other samples of the same client.

Ratios of counts (accuracy; recall and precision of two classes) have Wilson's limits, means over
samples Student's, all others those of a bootstrap over the client's samples. Where the samples
cannot tell, there are no limits (NaN): below ``FEWEST`` samples, or when resamples do not vary.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import numpy as np

from equifed.contract.evaluation import SampleMetric
from equifed.contract.streams import Stream
from equifed.metrics.checks import Values
from equifed.metrics.intervals import wilson_interval

Counts: TypeAlias = tuple[int, int]
"""Successes and trials."""
RESAMPLES = 200
FEWEST = 5
"""A bootstrap of fewer samples knows too few of the values that others could have."""
NOTHING = (float("nan"), float("nan"))


def limit_metric(
    metric: SampleMetric, y: Any, answers: Any, stream: Stream, level: float = 0.95
) -> tuple[float, float]:
    """Return the limits of a metric of one client; see the module."""
    counts = None if metric.counts is None or len(y) == 0 else metric.counts(y, answers)
    if counts is not None:
        return NOTHING if counts[1] == 0 else limit_ratio(counts, level)
    if metric.each is not None:
        return limit_mean(metric.each(y, answers), level)
    if len(y) < FEWEST or np.isnan(_try_measure(metric, y, answers)):
        return NOTHING
    draw = stream.at("bootstrap", metric.name).generator()
    rows = draw.integers(len(y), size=(RESAMPLES, len(y)))
    values = np.array([_try_measure(metric, y[row], answers[row]) for row in rows])
    known = values[np.isfinite(values)]  # a resample may lack a class
    if len(known) < RESAMPLES / 2 or np.ptp(known) == 0:
        return NOTHING
    lower, upper = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(lower), float(upper)


def _try_measure(metric: SampleMetric, y: Any, answers: Any) -> float:
    """Return a metric; NaN where an own function does not take a resample, as of one class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return metric.measure(y, answers)
        except ValueError:
            return float("nan")


def limit_ratio(counts: Counts, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's limits.

    >>> [round(limit, 3) for limit in limit_ratio((8, 10))]
    [0.49, 0.943]
    """
    lower, upper = wilson_interval([counts[0]], [counts[1]], level)
    return float(lower[0]), float(upper[0])


def limit_mean(values: Values, level: float = 0.95) -> tuple[float, float]:
    """Return Student's limits of a mean; those of numbers that are never negative stay above 0.

    >>> limit_mean(np.array([1.0, 1.0]))
    (nan, nan)
    """
    if len(values) < 2 or not np.isfinite(values).all() or np.ptp(values) == 0:
        return NOTHING
    from scipy.special import stdtrit  # lazily: metrics stay cheap to import

    half = stdtrit(len(values) - 1, (1 + level) / 2) * values.std(ddof=1) / np.sqrt(len(values))
    lower = values.mean() - half
    return float(max(lower, 0.0) if values.min() >= 0 else lower), float(values.mean() + half)
