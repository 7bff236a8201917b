"""How well a method serves its clients, what that cost, and how far it is from a baseline.

Seeds that all give the same number are no evidence: limits of a difference come from test samples,
paired sample by sample where both runs recorded their answers, and cautious otherwise. Where seeds
vary on the same samples, both reasons to vary are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from equifed.contract.arrays import Index, Losses
from equifed.metrics import (
    REDUCERS,
    Interval,
    accuracy_intervals,
    mean_interval,
    paired_difference,
    summary,
    wilson_interval,
)
from equifed.metrics.intervals import correct_counts
from equifed.metrics.metric import DASH
from equifed.metrics.paired import (
    assume_independent,
    combine_sources,
    count_pairs,
    difference_intervals,
)
from equifed.report.methods import Method, Scale, bytes_text
from equifed.training.history import History

Form = Literal["value", "gap", "index", "count", "bytes"]
Source = Literal["seeds", "samples", "seeds and samples", "none"]
"""What limits allow for: other seeds, other test samples of these clients, or both."""
RESAMPLES, FEWEST_RESAMPLES = 400, 100
COSTS = ("rounds", "bytes", "rounds_to_target", "bytes_to_target")
"""Measures that were counted, not estimated from samples."""
LEVELS = ("average_by_client", "worst", "worst_20_percent", "best_20_percent")
LABELS = {
    "average_by_client": "Average over clients",
    "worst": "Worst client",
    "worst_20_percent": "Worst-served 20 %",
    "best_20_percent": "Best-served 20 %",
    "spread": "Spread, best to worst",
    "gini": "Gini coefficient",
}
COMPARED = (
    "average_by_client", "average_by_sample", "worst", "worst_20_percent", "best_20_percent",
    "gini", "twenty_twenty",
)  # fmt: skip
"""Differences of these have limits over samples."""


@dataclass(frozen=True)
class Measure:
    """One row of a comparison: a number for each run, and how to write it."""

    key: str
    label: str
    form: Form
    lower_is_better: bool


@dataclass(frozen=True)
class Difference:
    """A mean difference to the baseline within seeds; infinite limits where nothing is known."""

    interval: Interval
    before: float  # mean of the baseline over the same seeds
    after: float  # and of the method
    pairs: int  # how many seeds
    about: Source = "none"
    paired: bool = False  # limits compare the two models sample by sample


@dataclass(frozen=True)
class Measured:
    """A measure of one method over its runs; limits are infinite where nothing is known."""

    values: tuple[float, ...]  # one for each run; NaN: a target that was not reached
    interval: Interval
    source: Source = "none"  # what limits are about
    difference: Difference | None = None

    @property
    def reached(self) -> int:
        """How many runs have the measure."""
        return sum(math.isfinite(value) for value in self.values)


def list_measures(scale: Scale, target: float | None) -> tuple[Measure, ...]:
    """Return the rows of a comparison; ``target`` is how good the worst client has to become."""
    rows = []
    for key, label in LABELS.items():
        form: Form = "value" if key in LEVELS else "gap" if key == "spread" else "index"
        lower = REDUCERS[key].lower_is_better(higher_is_better=scale.higher_is_better)
        rows.append(Measure(key, label, form, lower))
    if target is not None:
        rows.append(Measure("rounds_to_target", "Rounds to target", "count", True))
        rows.append(Measure("bytes_to_target", "Bytes to target", "bytes", True))
    rows.append(Measure("rounds", "Rounds", "count", True))
    return (*rows, Measure("bytes", "Bytes", "bytes", True))


def reduce_clients(values: Losses, scale: Scale, of: str) -> Losses:
    """Reduce clients (k, N) to the worst or the average of those that have a value (k,)."""
    some = values[:, ~np.isnan(values).all(axis=0)]
    worst = np.nanmin if scale.higher_is_better else np.nanmax
    pick = np.nanmean if of == "average" else worst
    return np.asarray(pick(some, axis=1)) if some.size else np.full(len(values), np.nan)


def count_bytes(history: History, rounds: Index) -> Index:
    """Return the bytes that all clients had sent and received when each of the rounds ended."""
    ends = np.array([record.round for record in history.rounds], dtype=np.int64)
    sent = np.array([record.bytes_up + record.bytes_down for record in history.rounds])
    total = np.concatenate([[0], np.cumsum(sent, dtype=np.int64)])
    return np.asarray(total[np.searchsorted(ends, rounds, side="right")], dtype=np.int64)


def measure_run(history: History, scale: Scale, target: float | None) -> dict[str, float]:
    """Return every reducer of the run's last evaluation, and what the run cost."""
    record, higher = history.last(scale.metric, scale.split), scale.higher_is_better
    sent = sum(r.bytes_up + r.bytes_down for r in history.rounds)
    out = {"rounds": float(len(history.rounds)), "bytes": float(sent)}
    some = np.empty(0, bool) if record is None else ~np.isnan(record.values)
    if record is not None and some.any() and np.isfinite(record.values[some]).all():
        out |= summary(record.values[some], record.sizes[some], higher_is_better=higher)
    if target is not None:
        rounds, values = history.series(scale.metric, scale.split)
        reached = reduce_clients(values, scale, "worst") if len(rounds) else np.empty(0)
        good = reached >= target if higher else reached <= target
        first = rounds[good][:1]
        for key, took in {"rounds": first, "bytes": count_bytes(history, first)}.items():
            out[f"{key}_to_target"] = float(took[0]) if len(took) else math.nan
    return out


def choose_target(baseline: Method, scale: Scale) -> float | None:
    """Return the worst client's final value under the baseline, in its least good run."""
    final = reduce_clients(baseline.final(scale), scale, "worst")
    known: list[float] = final[np.isfinite(final)].tolist()
    return (min if scale.higher_is_better else max)(known, default=None)


def estimate_measures(
    method: Method, baseline: Method | None, scale: Scale, target: float | None
) -> dict[str, Measured]:
    """Return every measure of a method, with the paired difference to the baseline if given."""
    ours, theirs = (
        {} if m is None else {
            seed: (run, measure_run(run, scale, target))
            for seed, run in zip(_identify_runs(m), m.runs, strict=True)
        }
        for m in (method, baseline)
    )  # fmt: skip
    common = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    keys = dict.fromkeys(key for _, row in ours.values() for key in row)
    values = {k: tuple(row.get(k, math.nan) for _, row in ours.values()) for k in keys}
    pairs = {
        k: [(a.get(k, math.nan), b.get(k, math.nan)) for (_, a), (_, b) in common] for k in keys
    }
    levels = [np.array(pairs[k]) for k in keys if k not in COSTS and pairs[k]]
    levels = [found for found in levels if np.isfinite(found).all()]
    vary = not any(agree(found[:, 0] - found[:, 1]) for found in levels)
    runs = [(a, b) for (a, _), (b, _) in common] if levels else []
    samples = compare_samples(runs, scale, vary)
    sampled = _sample_intervals(method, scale, values)
    return {
        k: Measured(
            values[k],
            *_interval(values[k], sampled.get(k), k in COSTS),
            compare_values(k, pairs[k], samples, k in COSTS),
        )
        for k in keys
    }


def _identify_runs(method: Method) -> list[object]:
    """Return what identifies a run among those of a method: its seed, or its place if unknown."""
    unclear = len(set(method.seeds)) < len(method.runs)  # unknown, or the same twice
    return [
        ("at", i) if unclear or run.seed is None else run.seed for i, run in enumerate(method.runs)
    ]


def _interval(
    values: Sequence[float], sampled: Interval | None, cost: bool
) -> tuple[Interval, Source]:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values):
        # A mean over the runs that got there would flatter a method that seldom does.
        return Interval(math.inf if known else math.nan, -math.inf, math.inf), "none"
    if len(known) > 1 and (cost or not agree(known)):
        return mean_interval(known), "seeds"
    if sampled is not None:
        return replace(sampled, estimate=mean_interval(known).estimate), "samples"
    return mean_interval(known[:1]), "none"  # seeds that agree say nothing about other samples


def _sample_intervals(
    method: Method, scale: Scale, columns: dict[str, tuple[float, ...]]
) -> dict[str, Interval]:
    """Return intervals over test samples, for a classifier of which some measure does not vary."""
    levels = [v for key, v in columns.items() if key not in COSTS and np.isfinite(v).all()]
    known = method.count_correct(scale) if any(agree(v) for v in levels) else None
    if known is None:
        return {}
    _, counts, sizes = known
    if len(sizes) > 1:
        return accuracy_intervals(counts[0], sizes, resamples=choose_resamples(len(sizes)))
    (lower,), (upper,) = wilson_interval(counts[0], sizes)  # as in the table of clients
    one = Interval(float(counts[0][0] / sizes[0]), float(lower), float(upper))
    return dict.fromkeys((*LEVELS, "average_by_sample"), one)


def choose_format(measure: Measure, scale: Scale) -> Callable[[float], str]:
    """Return how to write values of a measure."""
    forms: dict[Form, Callable[[float], str]] = {
        "value": scale.text,
        "gap": scale.gap,
        "index": lambda v: f"{v:.3f}" if math.isfinite(v) else "∞" if v > 0 else DASH,
        "count": lambda v: f"{v:,.0f}" if float(v).is_integer() else f"{v:,.1f}",
        "bytes": bytes_text,
    }
    return forms[measure.form]


# -- differences ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleEvidence:
    """What single samples say about the difference of two methods, over the seeds."""

    intervals: dict[str, Interval]
    paired: bool
    together: bool  # all seeds had the same samples, so that seeds do not show what these do


def compare_values(
    key: str, pairs: Sequence[tuple[float, float]], samples: SampleEvidence | None, cost: bool
) -> Difference | None:
    """Return the difference of one measure; None where it is not defined in every seed."""
    # A mean over the pairs that happen to be defined would be a biased one.
    if not pairs or not np.isfinite(pairs).all():
        return None
    ours, theirs = (np.array(column) for column in zip(*pairs, strict=True))
    interval = paired_difference(ours, theirs)
    about: Source = "seeds" if len(pairs) > 1 else "none"
    paired, vary = False, not agree(ours - theirs)
    sampled = None if samples is None or cost else samples.intervals.get(key)
    if samples is not None and sampled is not None and (not vary or samples.together):
        sources = [interval, sampled] if vary else [sampled]
        interval = combine_sources(interval.estimate, sources)
        about, paired = "seeds and samples" if vary else "samples", samples.paired
    elif not cost and not vary:
        interval, about = Interval(interval.estimate, -math.inf, math.inf), "none"
    before, after = float(theirs.mean()), float(ours.mean())
    return Difference(interval, before, after, len(pairs), about, paired)


def agree(values: Losses | Sequence[float]) -> bool:
    """Tell whether numbers are equal but for rounding; a single one agrees with itself."""
    array = np.asarray(values, dtype=np.float64)
    return float(np.ptp(array)) <= 1e-12 * max(1.0, float(np.abs(array).max()))


def compare_samples(
    pairs: Sequence[tuple[History, History]], scale: Scale, vary: bool
) -> SampleEvidence | None:
    """Return limits over samples for two methods, mean over their common seeds; None: no counts.

    Where every measure varies over seeds and samples cannot be paired, seeds are the evidence.
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
    draws = choose_resamples(sum(len(joint) for joint, _ in known))
    intervals = [difference_intervals(joint, COMPARED, resamples=draws) for joint, _ in known]
    means = {key: _mean([row[key] for row in intervals]) for key in intervals[0]}
    return SampleEvidence(means, paired, together)


def choose_resamples(clients: int) -> int:
    """Return how many resamples give a deviation: B of them err by 1 / sqrt(2 B) of it."""
    return max(FEWEST_RESAMPLES, min(RESAMPLES, 1_000_000 // clients))


def _mean(intervals: Sequence[Interval]) -> Interval:
    table = np.array([[i.estimate, i.lower, i.upper] for i in intervals])
    with np.errstate(invalid="ignore"):  # limits without bounds on both sides: unknown
        return Interval(*(float(number) for number in table.mean(axis=0)))


def _pair_runs(ours: History, theirs: History, scale: Scale) -> tuple[Losses, Index | None] | None:
    """Return the counts of two runs' answers, and the samples' checksums if they were paired."""
    first, second = (run.last(scale.metric, scale.split) for run in (ours, theirs))
    if first is None or second is None:
        return None
    known, others = (np.isfinite(r.values) & (r.sizes > 0) for r in (first, second))
    sizes = first.sizes[known]
    if not np.array_equal(known, others) or not np.array_equal(sizes, second.sizes[known]):
        return None
    try:
        correct, other = (correct_counts(r.values[known], sizes) for r in (first, second))
    except ValueError:  # no counts: nobody measured, or accuracies weighted or rounded
        return None
    a, b = (run.hits.get(scale.split) for run in (ours, theirs))
    if a is None or b is None or not np.array_equal(a.checksums, b.checksums):
        return assume_independent(correct, other, sizes), None
    if len(a.correct) == len(b.correct) == sizes.sum():
        exact = count_pairs(a.correct, b.correct, sizes)
        totals = exact[:, 0] + exact[:, 1], exact[:, 0] + exact[:, 2]
        if np.array_equal(totals, (correct, other)):  # else the hits are of another model
            return exact, a.checksums
    return assume_independent(correct, other, sizes), None
