"""Fairness of one number per client: reducers, a summary under stable names, and how sure it is."""

from equifed.metrics.chance import (
    EqualService,
    chance_floor,
    compare_to_chance,
    variance_beyond_chance,
)
from equifed.metrics.intervals import (
    Interval,
    WorstClient,
    accuracy_intervals,
    mean_interval,
    wilson_interval,
    worst_client_interval,
)
from equifed.metrics.metric import METRICS, Metric, as_metric, find_metric
from equifed.metrics.paired import paired_difference
from equifed.metrics.reducers import (
    REDUCERS,
    average_by_client,
    average_by_sample,
    best_fraction,
    gini,
    lorenz_curve,
    relative_unfairness,
    spread,
    standard_deviation,
    summary,
    twenty_twenty,
    worst,
    worst_fraction,
)

__all__ = [
    "METRICS", "REDUCERS", "EqualService", "Interval", "Metric", "WorstClient",
    "accuracy_intervals", "as_metric", "average_by_client", "average_by_sample", "best_fraction",
    "chance_floor", "compare_to_chance", "find_metric", "gini", "lorenz_curve", "mean_interval",
    "paired_difference", "relative_unfairness", "spread", "standard_deviation", "summary",
    "twenty_twenty", "variance_beyond_chance", "wilson_interval", "worst", "worst_client_interval",
    "worst_fraction",
]  # fmt: skip
