"""Fairness of one number per client: reducers, a summary under stable names, and how sure it is."""

from equifed.metrics.bootstrap import bootstrap_both, bootstrap_clients, bootstrap_samples
from equifed.metrics.inequality import (
    atkinson,
    burden,
    cosine,
    entropy,
    gini,
    jain,
    lorenz_curve,
    theil,
)
from equifed.metrics.intervals import (
    Interval,
    WorstClient,
    clopper_pearson_interval,
    correct_counts,
    wilson_interval,
    worst_client_interval,
)
from equifed.metrics.levels import (
    average_by_client,
    average_by_sample,
    best,
    best_fraction,
    maximum,
    minimum,
    spread,
    standard_deviation,
    variance,
    worst,
    worst_fraction,
)
from equifed.metrics.paired import mean_interval, paired_difference
from equifed.metrics.summary import Direction, Reducer, describe, reducers, summary
from equifed.metrics.summary_intervals import accuracy_intervals, summary_intervals
from equifed.metrics.tails import cvar, hcvar, palma, relative_unfairness, twenty_twenty

__all__ = [
    "Direction",
    "Interval",
    "Reducer",
    "WorstClient",
    "accuracy_intervals",
    "atkinson",
    "average_by_client",
    "average_by_sample",
    "best",
    "best_fraction",
    "bootstrap_both",
    "bootstrap_clients",
    "bootstrap_samples",
    "burden",
    "clopper_pearson_interval",
    "correct_counts",
    "cosine",
    "cvar",
    "describe",
    "entropy",
    "gini",
    "hcvar",
    "jain",
    "lorenz_curve",
    "maximum",
    "mean_interval",
    "minimum",
    "paired_difference",
    "palma",
    "reducers",
    "relative_unfairness",
    "spread",
    "standard_deviation",
    "summary",
    "summary_intervals",
    "theil",
    "twenty_twenty",
    "variance",
    "wilson_interval",
    "worst",
    "worst_client_interval",
    "worst_fraction",
]
