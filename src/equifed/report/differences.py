"""How far two methods differ, and how sure that is: over seeds, and over single test samples.

Seeds that all give the same number are no evidence about anything but the seeds. Limits of a
difference therefore come from the test samples: paired sample by sample where both runs recorded
which samples they answer correctly, and otherwise as if each model had its own samples, which is
cautious. Where seeds vary on the same samples, both reasons to vary are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equifed.contract.arrays import Index, Losses
from equifed.metrics import (
    Interval,
    assume_independent,
    combine_sources,
    correct_counts,
    count_pairs,
    difference_intervals,
    paired_difference,
)
from equifed.metrics.paired import Joint
from equifed.report.methods import RunData
from equifed.report.scales import Scale

About = Literal["seeds", "samples", "seeds and samples", "none"]
RESAMPLES = 400
COMPARED = (
    "average_by_client", "average_by_sample", "worst", "minimum", "worst_20_percent",
    "best_20_percent", "gini", "twenty_twenty",
)  # fmt: skip
"""Differences of these have limits over samples."""


@dataclass(frozen=True)
class Difference:
    """A mean difference to the baseline within seeds.

    Parameters
    ----------
    interval : Interval
        Limits are infinite where nothing is known about them.
    before, after : float
        Mean over the same seeds of the baseline and of the method.
    pairs : int
        Over how many seeds.
    about : str
        For what the limits allow: other seeds, other test samples of these clients, or both.
    paired : bool
        Whether limits over samples compare the two models sample by sample.
    """

    interval: Interval
    before: float
    after: float
    pairs: int
    about: About = "none"
    paired: bool = False


@dataclass(frozen=True, eq=False)
class Samples:
    """What single samples say about the difference of two methods, over the seeds.

    ``together`` tells whether all seeds had the same samples, so that seeds do not show how much
    the samples matter.
    """

    intervals: dict[str, Interval]
    paired: bool
    together: bool


def compare_values(
    key: str, pairs: Sequence[tuple[float, float]], samples: Samples | None, cost: bool
) -> Difference | None:
    """Return the difference of one measure; None where it is not defined in every seed."""
    # A mean over the pairs that happen to be defined would be a biased one.
    if not pairs or not np.isfinite(pairs).all():
        return None
    ours, theirs = (np.array(column) for column in zip(*pairs, strict=True))
    over_seeds = paired_difference(ours, theirs)
    mean, count = over_seeds.estimate, len(pairs)
    about: About = "seeds" if count > 1 else "none"
    levels = float(theirs.mean()), float(ours.mean())
    vary = not agree(ours - theirs)
    sampled = None if samples is None else samples.intervals.get(key)
    if cost or (vary and (sampled is None or samples is None or not samples.together)):
        return Difference(over_seeds, *levels, count, about)
    if sampled is None or samples is None:
        return Difference(Interval(mean, -math.inf, math.inf), *levels, count)
    if vary:
        both = combine_sources(mean, [over_seeds, sampled])
        return Difference(both, *levels, count, "seeds and samples", samples.paired)
    alone = combine_sources(mean, [sampled])
    return Difference(alone, *levels, count, "samples", samples.paired)


def agree(values: Losses | Sequence[float]) -> bool:
    """Tell whether numbers are equal but for rounding; a single one agrees with itself.

    >>> agree([0.1 + 0.2, 0.3]), agree([0.3, 0.31])
    (True, False)
    """
    array = np.asarray(values, dtype=np.float64)
    return float(np.ptp(array)) <= 1e-12 * max(1.0, float(np.abs(array).max()))


def compare_samples(
    pairs: Sequence[tuple[RunData, RunData]], scale: Scale, vary: bool
) -> Samples | None:
    """Return limits over samples for two methods, mean over their common seeds.

    None if the accuracies are no counts of equally many samples; and where every measure varies
    over seeds and samples cannot be paired, for then seeds are the evidence there is.
    """
    if not scale.kind.is_fraction or not pairs:
        return None
    found = [_pair_runs(ours, theirs, scale) for ours, theirs in pairs]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    sums = [found for _, found in known if found is not None]
    paired = len(sums) == len(known)
    together = paired and all(np.array_equal(one, sums[0]) for one in sums)
    if vary and not together:
        return None
    # The seeds share their samples, so that several of them do not narrow the limits.
    intervals = [difference_intervals(joint, COMPARED, resamples=RESAMPLES) for joint, _ in known]
    means = {key: _mean([row[key] for row in intervals]) for key in intervals[0]}
    return Samples(means, paired, together)


def _mean(intervals: Sequence[Interval]) -> Interval:
    table = np.array([[i.estimate, i.lower, i.upper] for i in intervals])
    with np.errstate(invalid="ignore"):  # limits without bounds on both sides: unknown
        return Interval(*(float(number) for number in table.mean(axis=0)))


def _pair_runs(ours: RunData, theirs: RunData, scale: Scale) -> tuple[Joint, Index | None] | None:
    """Return the counts of two runs' answers, and the samples' checksums if they were paired."""
    records = [run.history.last(scale.metric, scale.split) for run in (ours, theirs)]
    if records[0] is None or records[1] is None:
        return None
    (a, b), sizes = (r.values for r in records if r is not None), records[0].sizes
    known = np.isfinite(a) & (sizes > 0)
    same = np.array_equal(known, np.isfinite(b) & (records[1].sizes > 0))
    if not same or not known.any() or not np.array_equal(sizes[known], records[1].sizes[known]):
        return None
    try:
        counts = [correct_counts(values[known], sizes[known]) for values in (a, b)]
    except ValueError:  # accuracies that are no counts: weighted, or rounded by their source
        return None
    joint = assume_independent(counts[0], counts[1], sizes[known])
    hits = [run.history.hits.get(scale.split) for run in (ours, theirs)]
    if hits[0] is None or hits[1] is None:
        return joint, None
    if not np.array_equal(hits[0].checksums, hits[1].checksums):
        return joint, None
    if not len(hits[0].correct) == len(hits[1].correct) == sizes[known].sum():
        return joint, None
    exact = count_pairs(hits[0].correct, hits[1].correct, sizes[known])
    totals = (exact[:, 0] + exact[:, 1], exact[:, 0] + exact[:, 2])
    if not all(np.array_equal(t, c) for t, c in zip(totals, counts, strict=True)):
        return joint, None  # the hits are of another model than the accuracies
    return exact, hits[0].checksums
