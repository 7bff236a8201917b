"""One row per client: how it is served, how sure that is, and what part it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.metrics import WorstClient, correct_counts, wilson_interval, worst_client_interval
from equifed.report.methods import Method
from equifed.report.scales import Scale


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Per-client numbers of one method, each of shape (N,); NaN where a number is not known.

    Parameters
    ----------
    value
        Mean over runs of the shown metric.
    lower, upper
        Mean over runs of Wilson's 95 % limits, for accuracies. The runs share their test samples,
        so several runs do not narrow the limits.
    loss
        Mean over runs of the loss on the same split.
    sizes
        Samples in the split.
    weight
        Weight in the last recorded round, mean over runs.
    participation
        Fraction of the rounds the client took part in.
    quarantines
        Rounds in which its answer was refused, over all runs.
    worst
        What the first run's samples say about the worst client, for accuracies.
    """

    value: Losses
    lower: Losses
    upper: Losses
    loss: Losses
    sizes: Index
    weight: Weights
    participation: Weights
    quarantines: Index
    worst: WorstClient | None

    def worst_position(self, scale: Scale) -> int | None:
        """Return the client with the worst mean, if any was measured."""
        if np.isnan(self.value).all():
            return None
        pick = np.nanargmin if scale.higher_is_better else np.nanargmax
        return int(pick(self.value))


def client_rows(method: Method, scale: Scale) -> ClientRows:
    """Return the per-client numbers of a method."""
    final = method.final(scale.metric, scale.split)
    sizes = method.sizes(scale.metric, scale.split)
    lower, upper, worst = _limits(final, sizes, scale)
    return ClientRows(
        _mean(final),
        lower,
        upper,
        _mean(method.final("loss", scale.split)),
        sizes,
        method.last_weights(),
        method.participation(),
        method.quarantines(),
        worst,
    )


def _mean(rows: Losses) -> Losses:
    """Return the mean over runs, NaN for clients that some run has no number for."""
    return np.asarray(rows.mean(axis=0))


def _limits(final: Losses, sizes: Index, scale: Scale) -> tuple[Losses, Losses, WorstClient | None]:
    unknown = np.full(len(sizes), np.nan)
    some = (sizes > 0) & np.isfinite(final).all(axis=0)
    if scale.metric != "accuracy" or not some.any():
        return unknown, unknown, None
    try:
        counts = [correct_counts(row[some], sizes[some]) for row in final]
    except ValueError:  # accuracies that are no counts: weighted, or rounded by their source
        return unknown, unknown, None
    lower, upper = unknown.copy(), unknown.copy()
    limits = np.array([wilson_interval(count, sizes[some]) for count in counts])
    lower[some], upper[some] = limits.mean(axis=0)
    worst = worst_client_interval(counts[0], sizes[some])
    places = np.flatnonzero(some)
    worst = WorstClient(
        worst.interval, int(places[worst.observed]), tuple(int(places[i]) for i in worst.candidates)
    )
    return lower, upper, worst


def ordered(rows: ClientRows, scale: Scale) -> Sequence[int]:
    """Return the clients from the worst served to the best, those without a value last."""
    key = rows.value if scale.higher_is_better else -rows.value
    return [int(i) for i in np.argsort(key, kind="stable")]
