"""What a method achieved and cost, over its seeds, and against a baseline seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from equifed.contract.arrays import Index, Losses
from equifed.metrics import (
    Interval,
    accuracy_intervals,
    describe,
    mean_interval,
    summary,
    wilson_interval,
)
from equifed.report.differences import Difference, Samples, agree, compare_samples, compare_values
from equifed.report.methods import Method, count_correct
from equifed.report.scales import DASH, Scale, bytes_text
from equifed.training.history import History

Form = Literal["value", "gap", "index", "count", "bytes"]
Source = Literal["seeds", "samples", "none"]
RESAMPLES = 400


@dataclass(frozen=True)
class Measure:
    """One row of a comparison: a number for each run, and how to write it."""

    key: str
    label: str
    meaning: str
    form: Form
    lower_is_better: bool


@dataclass(frozen=True)
class Estimate:
    """A measure of one method over its runs.

    Parameters
    ----------
    values : tuple of float
        One for each run, NaN where it is not defined, as a target that was not reached.
    interval : Interval
        Their mean; limits are infinite where nothing is known about them.
    source : str
        What the limits are about: other ``"seeds"``, other test ``"samples"`` of these clients (a
        classifier with one seed, or whose seeds all agree), or ``"none"``.
    difference : Difference, optional
        How far it lies from the baseline.
    """

    values: tuple[float, ...]
    interval: Interval
    source: Source = "none"
    difference: Difference | None = None

    @property
    def reached(self) -> int:
        """How many runs have the measure."""
        return sum(math.isfinite(value) for value in self.values)


@dataclass(frozen=True)
class Target:
    """How good the worst client, or the average, has to become, and what that took."""

    value: float
    of: Literal["worst", "average"] = "worst"


def choose_scale(methods: Sequence[Method]) -> Scale | None:
    """Return the metric and split to report: accuracy before loss, test before the others."""
    for method in methods:
        for run in method.runs:
            chosen = run.history.main_metric()
            if chosen is not None:
                return Scale(*chosen)
    return None


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
    "twenty_twenty": "Relative unfairness, 20:20",
}


def list_measures(scale: Scale, target: Target | None) -> tuple[Measure, ...]:
    """Return the rows of a comparison."""
    rows = []
    for key, label in LABELS.items():
        reducer = describe(key)
        form: Form = "value" if key in LEVELS else "gap" if key == "spread" else "index"
        lower = reducer.lower_is_better(higher_is_better=scale.higher_is_better)
        rows.append(Measure(key, label, reducer.meaning, form, lower))
    if target is not None:
        who = "the worst client has" if target.of == "worst" else "the clients have on average"
        until = f"until {who} {scale.text(target.value)}"
        took = f"rounds {until}"
        rows.append(Measure("rounds_to_target", "Rounds to target", took, "count", True))
        sent = f"bytes sent and received by all clients {until}"
        rows.append(Measure("bytes_to_target", "Bytes to target", sent, "bytes", True))
    rows.append(Measure("rounds", "Rounds", "rounds that were run", "count", True))
    total = "bytes sent and received by all clients"
    rows.append(Measure("bytes", "Bytes", total, "bytes", True))
    return tuple(rows)


def reduce_clients(values: Losses, scale: Scale, of: str) -> Losses:
    """Reduce clients (k, N) to the worst or the average of those that have a value (k,)."""
    some = values[:, ~np.isnan(values).all(axis=0)]
    if some.size == 0:
        return np.full(len(values), np.nan)
    if of == "average":
        return np.asarray(np.nanmean(some, axis=1))
    worst = np.nanmin if scale.higher_is_better else np.nanmax
    return np.asarray(worst(some, axis=1))


def count_bytes(history: History, rounds: Index) -> Index:
    """Return the bytes that all clients had sent and received when each of the rounds ended."""
    ends = np.array([record.round for record in history.rounds], dtype=np.int64)
    sent = np.array([record.bytes_up + record.bytes_down for record in history.rounds])
    total = np.concatenate([[0], np.cumsum(sent, dtype=np.int64)])
    return np.asarray(total[np.searchsorted(ends, rounds, side="right")], dtype=np.int64)


def measure_run(history: History, scale: Scale, target: Target | None) -> dict[str, float]:
    """Return every reducer of the run's last evaluation, and what the run cost."""
    record = history.last(scale.metric, scale.split)
    known = np.empty(0) if record is None else record.values[~np.isnan(record.values)]
    out = {"rounds": float(len(history.rounds))}
    out["bytes"] = float(sum(r.bytes_up + r.bytes_down for r in history.rounds))
    if record is not None and known.size and np.isfinite(known).all():
        higher = scale.higher_is_better
        out |= summary(record.values, record.sizes, higher_is_better=higher, missing="drop")
    if target is not None:
        out |= _to_target(history, scale, target)
    return out


def _to_target(history: History, scale: Scale, target: Target) -> dict[str, float]:
    rounds, values = history.series(scale.metric, scale.split)
    reached = reduce_clients(values, scale, target.of) if len(rounds) else np.empty(0)
    good = reached >= target.value if scale.higher_is_better else reached <= target.value
    if not good.any():
        return {"rounds_to_target": math.nan, "bytes_to_target": math.nan}
    first = rounds[good.argmax()]
    sent = count_bytes(history, np.array([first]))[0]
    return {"rounds_to_target": float(first), "bytes_to_target": float(sent)}


def choose_target(baseline: Method, scale: Scale) -> Target | None:
    """Return the worst client's final value under the baseline, in its least good run.

    Every run of the baseline gets there, and the question to the others is how soon they do.
    """
    final = reduce_clients(baseline.final(scale), scale, "worst")
    known = final[np.isfinite(final)]
    if not known.size:
        return None
    return Target(float(known.min() if scale.higher_is_better else known.max()))


def estimate_measures(
    method: Method, baseline: Method | None, scale: Scale, target: Target | None
) -> dict[str, Estimate]:
    """Return every measure of a method, with the paired difference to the baseline if given."""
    ours = [measure_run(run.history, scale, target) for run in method.runs]
    theirs = {} if baseline is None else _by_seed(baseline, scale, target)
    common = [seed for seed in _positions(method) if seed in theirs]
    mine = dict(zip(_positions(method), ours, strict=True))
    keys = dict.fromkeys(key for row in ours for key in row)
    columns = {key: tuple(row.get(key, math.nan) for row in ours) for key in keys}
    pairs = {
        key: [(mine[s].get(key, math.nan), theirs[s].get(key, math.nan)) for s in common]
        for key in keys
    }
    samples = None if baseline is None else _compare_runs(method, baseline, scale, pairs)
    sampled = _sample_intervals(method, scale, columns)
    out = {}
    for key, values in columns.items():
        cost = key in COSTS
        difference = compare_values(key, pairs[key], samples, cost)
        interval, source = _interval(values, sampled.get(key), cost)
        out[key] = Estimate(values, interval, source, difference)
    return out


def _compare_runs(
    method: Method, baseline: Method, scale: Scale, pairs: dict[str, list[tuple[float, float]]]
) -> Samples | None:
    """Return what single samples say about two methods that share seeds."""
    ours, theirs = (dict(zip(_positions(m), m.runs, strict=True)) for m in (method, baseline))
    runs = [(run, theirs[seed]) for seed, run in ours.items() if seed in theirs]
    levels = [np.array(found) for key, found in pairs.items() if key not in COSTS and found]
    known = [found for found in levels if np.isfinite(found).all()]
    vary = not any(agree(found[:, 0] - found[:, 1]) for found in known)
    return compare_samples(runs, scale, vary) if known else None


def _positions(method: Method) -> list[object]:
    """Return what identifies a run among those of a method: its seed, or its place if unknown."""
    unclear = len(set(method.seeds)) < len(method.runs)  # unknown, or the same twice
    return [
        ("at", i) if unclear or run.seed is None else run.seed for i, run in enumerate(method.runs)
    ]


def _by_seed(method: Method, scale: Scale, target: Target | None) -> dict[object, dict[str, float]]:
    rows = [measure_run(run.history, scale, target) for run in method.runs]
    return dict(zip(_positions(method), rows, strict=True))


def _interval(
    values: Sequence[float], sampled: Interval | None, cost: bool
) -> tuple[Interval, Source]:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values) or not known:
        # A mean over the runs that got there would flatter a method that seldom does.
        mean = math.nan if not known else math.inf if len(known) < len(values) else known[0]
        return Interval(mean, -math.inf, math.inf), "none"
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
    known = count_correct(method, scale) if any(agree(v) for v in levels) else None
    if known is None:
        return {}
    _, counts, sizes = known
    if len(sizes) > 1:
        return accuracy_intervals(counts[0], sizes, resamples=RESAMPLES)
    (lower,), (upper,) = wilson_interval(counts[0], sizes)  # as in the table of clients
    one = Interval(float(counts[0][0] / sizes[0]), float(lower), float(upper))
    return dict.fromkeys((*LEVELS, "minimum", "maximum", "best", "average_by_sample"), one)


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
