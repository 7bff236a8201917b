"""``ef.fit`` against six published methods with own parts, the solved average, and own models.

The tables are those of ``promise``, the images are frozen features; ``plan.md`` was committed
before the first run and says which comparison decides. Every method has four tries as published
and four more with an own bias; both are trained again on all rows but test rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import (
    EXPERIMENTS,
    Cell,
    Check,
    Context,
    Outcome,
    Settings,
    Table,
    definition,
)
from experiments.harness.network_parts import load_table
from experiments.harness.networks import prepared
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray
from scipy.stats import binom

import equifed as ef
from equifed.algorithms import AFL, DRFA, FedAvg, QFedAvg, Scaffold, ScaffPD
from equifed.contract import LocalSGD
from equifed.data import Federation, Split
from equifed.objectives import ChiSquare
from equifed.training import TrainingError

Array = NDArray[np.float64]
Told = dict[str, Any]
Found = dict[str, list[Told]]
"""By set, what every split gave."""

RULE, KEPT, AVERAGE, OWN_AVERAGE, ALONE = (
    "ef.fit", "ef.fit, own models kept", "solved average", "solved average, own bias", "alone",
)  # fmt: skip
BIASED = ", own bias"
BEST = "best of the six"
"""In every split the one of the published methods, with or without own bias, that its validation
rows like best."""
L2 = 1e-3


def run(context: Context) -> Outcome:
    """Measure every set and split that is not there yet, and compare."""
    settings = context.settings
    known = definition("promise")["sets"]
    tables = {name: known[name] for name in settings["tables"]}
    for name in settings["pictures"]:
        path = prepared("frozen", settings["images"][name], context.console)
        tables[name] = {"path": str(path), **settings["partition"]}
    shared = {"tries": settings["tries"], "rounds": settings["rounds"], "steps": settings["steps"]}
    parts = {
        f"{name}-{seed}": Part(measure, {"set": name, "given": given, "seed": seed, **shared})
        for seed in settings["seeds"]
        for name, given in tables.items()
    }
    answers = compute_parts(context, parts)
    found = {name: [answers[f"{name}-{seed}"] for seed in settings["seeds"]] for name in tables}
    methods = list(found[next(iter(tables))][0]["values"])
    return write(found, [m for m in methods if m != RULE], settings)


def write(found: Found, methods: Sequence[str], settings: Settings) -> Outcome:
    """Return checks, tables and the figure."""
    tables = {
        "points": points_table(found, methods),
        "rivals": rivals_table(found, methods, settings["margin"]),
        "levels": levels_table(found, [RULE, *methods]),
        "choices": choices_table(found, settings["tries"]),
        "clients": clients_table(found, [RULE, *methods], settings["seeds"]),
        "losses": losses_table(found, settings["seeds"]),
    }
    return Outcome(checks(found, methods, settings["margin"]), tables, {"points": drawn(found)})


# -- one split of one set ---------------------------------------------------------------------


def measure(set: str, given: Settings, seed: int, tries: Settings, rounds: int, steps: int) -> Told:
    """Return every client's test value under every method, and all that was tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, served = serve(set, given, seed)
        whole = pooled(data)
        values, losses = read_rule(served), {}
        tried: dict[str, list[Any]] = {}
        for method in tries["shared"]:
            work = Work(method, smoothness(data), rounds, steps)
            best: Settings = {}
            for name, axis in ((method, "shared"), (method + BIASED, "own")):
                own = tries[axis].get(method, tries[axis].get("any"))
                told = [(one, validate(work, data, best | one)) for one in own]
                tried[name] = [[words(one), _known(each)] for one, each in told]
                best |= min(told, key=lambda pair: mean_of(pair[1]))[0]
                losses[name] = min(mean_of(each) for _, each in told)
                values[name] = work.values(whole, best)
    known = [k for k in losses if np.isfinite(values[k]).any()]  # trained to the end on all rows
    chosen = min(known, key=lambda k: losses[k])
    values[BEST] = values[chosen]
    metric, unit = served.history.main_metric()[0], 1.0
    if metric != "accuracy":
        unit = float(np.var(data.in_units(np.concatenate([data.train.targets, data.test.targets]))))
    return {
        "metric": metric, "unit": unit, "test": data.test.sizes.tolist(), "best": chosen,
        "family": served.chosen.point.family, "tried": tried,
        "values": {k: _known(v) for k, v in values.items()},
    }  # fmt: skip


def serve(name: str, given: Settings, seed: int) -> tuple[Any, Any]:
    """Return the federation with the rows that ``ef.fit`` holds out, and what it chose."""
    if "path" in given:
        held = {"seed": seed, "holdout": {"validation": 0.2, "seed": seed}}
        data = load_table({"name": "arrays", **given, **held})
        return data, ef.fit(data, seed=seed, keep_own=True)
    frame = EXPERIMENTS["promise"].module.load({"set": name, **given})
    task = "classification" if given.get("classes") else "regression"
    options: dict[str, Any] = {"client": "client", "target": given["target"], "task": task}
    options |= {"features": given["features"], "test": 0.25, "seed": seed}
    data = Federation.from_table(frame, validation=0.2 * (1 - 0.25), **options)  # as ef.fit does
    return data, ef.fit(frame, keep_own=True, **options)


def pooled(data: Federation) -> Federation:
    """Return a federation with the validation rows among the training rows, as ``ef.fit`` has."""
    inputs, targets, ends = [], [], [0]
    for i in range(len(data)):
        both = [part.client(i) for part in (data.train, data.validation) if part is not None]
        inputs += [x for x, _ in both]
        targets += [y for _, y in both]
        ends.append(ends[-1] + sum(len(y) for _, y in both))
    train = Split(np.concatenate(inputs), np.concatenate(targets), np.array(ends))
    return replace(data, train=train, validation=None)


def read_rule(served: Any) -> dict[str, list[float]]:
    """Return the clients' test values under the rule and the solved models beside it."""
    runs, told = served.runs, served.history
    shown = {
        RULE: runs[served.chosen.point.family], KEPT: told,
        AVERAGE: runs["one shared model, average"], OWN_AVERAGE: runs["own bias, average"],
    }  # fmt: skip
    values = {k: history.last(None, "test").values.tolist() for k, history in shown.items()}
    alone = told.alone
    return values | {ALONE: [math.nan] * len(told.names) if alone is None else list(alone.values)}


def smoothness(data: Federation) -> float:
    """Return the largest curvature of any client's loss of a linear model."""
    train, sizes = data.train, []
    for i in range(len(data)):
        x = train.client(i)[0]
        rows = np.column_stack([x.reshape(len(x), -1), np.ones(len(x))]).astype(np.float64)
        sizes.append(np.linalg.norm(rows, 2) ** 2 / len(rows))
    return float({None: 2.0, 2: 0.25}.get(data.classes, 0.5) * max(sizes))


class Work:
    """A published method on some rows: full-gradient local steps, everybody in every round."""

    def __init__(self, method: str, curvature: float, rounds: int, steps: int) -> None:
        self.method, self.curvature, self.rounds, self.steps = method, curvature, rounds, steps

    def values(self, data: Federation, one: Settings, metric: str | None = None) -> list[float]:
        """Return every client's value on the test rows, or NaN for all where training failed."""
        split = "test" if data.validation is None else "validation"
        own = {"own": "bias", "own_l2": one["own_l2"]} if "own_l2" in one else {}
        clients = ef.simulate(data, *model(data), l2=L2, dtype=torch.float64, **own)
        try:
            history = ef.train(self.algorithm(one), clients, rounds=self.rounds, progress=False,
                               evaluate=(split,), every=self.rounds)  # fmt: skip
        except TrainingError:
            return [math.nan] * len(data)
        record = history.last(metric, split)
        return [math.nan] * len(data) if record is None else record.values.tolist()

    def algorithm(self, one: Settings) -> Any:
        """Return the method with its settings."""
        lr = one.get("c", 1.0) / self.curvature
        local = LocalSGD(lr=lr, steps=self.steps, batch_size=None)
        if self.method == "FedAvg":
            return FedAvg(local, weighting="uniform")
        if self.method == "SCAFFOLD":
            return Scaffold(local)
        if self.method == "AFL":
            return AFL(local, dual_step=one["dual_step"])
        if self.method == "DRFA":
            return DRFA(local, dual_step=one["dual_step"])
        if self.method == "q-FFL":
            return QFedAvg(local, q=one["q"])
        return ScaffPD(ChiSquare(one["rho"]), LocalSGD(lr=lr, steps=self.steps))


def validate(work: Work, data: Federation, one: Settings) -> list[float]:
    """Return every client's loss on validation rows."""
    return work.values(data, one, "loss")


def model(data: Federation) -> tuple[str, str]:
    """Return the linear model and its loss, as ``ef.fit`` has them."""
    if data.classes is None:
        return "linear", "squared"
    return "logistic", "logistic" if data.classes == 2 else "cross_entropy"


def mean_of(losses: Sequence[float]) -> float:
    """Return the mean loss of the clients; infinity after a failure."""
    some = np.array(losses)
    some = some[~np.isnan(some)]
    return float(some.mean()) if len(some) and np.isfinite(some).all() else math.inf


def words(one: Settings) -> str:
    """Return settings as a table of choices has them."""
    return ", ".join(f"{k} = {v:g}" for k, v in one.items())


def _known(values: Sequence[float]) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


# -- points -----------------------------------------------------------------------------------


def points(one: Told, method: str, fifth: bool = True) -> float:
    """Return accuracy in %, or the explained share of the target's variance in %, in one split.

    Of the worst-served fifth of the clients by this method, or of all.
    """
    values = np.array([math.nan if v is None else v for v in one["values"][method]])
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan
    served = 100 * (values if one["metric"] == "accuracy" else 1 - values / one["unit"])
    return float(np.sort(served)[: math.ceil(0.2 * len(served)) if fifth else None].mean())


def gain(splits: Sequence[Told], method: str, fifth: bool = True) -> Array:
    """Return the rule's points minus a method's, split by split."""
    return np.array([points(s, RULE, fifth) - points(s, method, fifth) for s in splits])


def mean(values: Array | list[float]) -> float:
    """Return the mean of what is known."""
    some = np.array(values)
    some = some[np.isfinite(some)]
    return float(some.mean()) if len(some) else math.nan


def gains(found: Found, method: str, fifth: bool = True) -> Array:
    """Return the mean gain of every set."""
    return np.array([mean(gain(splits, method, fifth)) for splits in found.values()])


def median_with_limits(values: Array) -> tuple[float, float, float]:
    """Return the median and its limits by order statistics, of at least 95 % for any distribution.

    >>> median_with_limits(np.arange(18.0))
    (8.5, 4.0, 13.0)
    """
    ranked, n = np.sort(values), len(values)
    k = max(int(binom.ppf(0.025, n, 0.5)), 1)
    if 2 * binom.cdf(k - 1, n, 0.5) > 0.05:
        k -= 1
    low, high = (ranked[k - 1], ranked[n - k]) if k else (-math.inf, math.inf)
    return float(np.median(values)), float(low), float(high)


# -- tables -----------------------------------------------------------------------------------


def points_table(found: Found, methods: Sequence[str]) -> Table:
    """Return the rule minus every method in the worst fifth, set by set."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        fifth = float(np.mean([points(s, RULE) for s in splits]))
        best = ", ".join(sorted({s["best"] for s in splits}))
        row: list[Cell] = [name, splits[0]["metric"], len(splits[0]["test"]), fifth]
        rows.append([*row, *(mean(gain(splits, m)) for m in methods), best])
    columns = ["set", "metric", "clients", f"{RULE}, points", *(f"minus {m}" for m in methods)]
    return Table("Worst fifth: points of the rule, and the rule minus each method (means of the "
                 "splits)", [*columns, "best of the six by validation rows"], rows)  # fmt: skip


def rivals_table(found: Found, methods: Sequence[str], margin: float) -> Table:
    """Return how often the rule is ahead, level and behind, method by method."""
    rows: list[list[Cell]] = []
    for method in methods:
        row: list[Cell] = [method]
        for fifth in (True, False):
            each = gains(found, method, fifth)
            each = each[np.isfinite(each)]
            row += [shown(each), int((each > margin).sum()),
                    int((np.abs(each) <= margin).sum()), int((each < -margin).sum())]  # fmt: skip
        rows.append(row)
    told = [f"{what}: {w}" for what in ("worst fifth", "average") for w in (
        "median of the sets (95 %)", "ahead", "within the margin", "behind")]  # fmt: skip
    return Table(f"The rule minus each method in points; numbers of sets, margin {margin:g}",
                 ("method", *told), rows)  # fmt: skip


def shown(each: Array) -> str:
    """Return a median with its limits."""
    middle, low, high = median_with_limits(each)
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


def levels_table(found: Found, methods: Sequence[str]) -> Table:
    """Return the points of every method, worst fifth and average."""
    rows: list[list[Cell]] = [
        [name, splits[0]["metric"], *(
            mean([points(s, m, fifth) for s in splits])
            for m in methods for fifth in (True, False)
        )] for name, splits in found.items()
    ]  # fmt: skip
    columns = [f"{m}, {what}" for m in methods for what in ("worst fifth", "average")]
    return Table("Points: accuracy in %, or explained share of the target's variance in %",
                 ("set", "metric", *columns), rows)  # fmt: skip


def choices_table(found: Found, tries: Settings) -> Table:
    """Return how many splits of all sets chose each try."""
    counts: dict[tuple[str, str], int] = {}
    for one in (s for splits in found.values() for s in splits):
        for method, tried in one["tried"].items():
            means = [mean_of([math.nan if v is None else v for v in each]) for _, each in tried]
            for k, (settings, _) in enumerate(tried):
                key = method, settings
                counts[key] = counts.get(key, 0) + (k == int(np.argmin(means)))
    rows: list[list[Cell]] = [[*key, times] for key, times in counts.items()]
    return Table("What validation rows chose, all sets and splits together",
                 ("method", "settings", "trials that chose it"), rows)  # fmt: skip


def every_split(found: Found, seeds: Sequence[int]) -> Iterator[tuple[str, int, Told]]:
    """Yield every split of every set."""
    for name, splits in found.items():
        for seed, one in zip(seeds, splits, strict=True):
            yield name, seed, one


def clients_table(found: Found, methods: Sequence[str], seeds: Sequence[int]) -> Table:
    """Return every client's value in every split."""
    rows: list[list[Cell]] = []
    for name, seed, one in every_split(found, seeds):
        for i, size in enumerate(one["test"]):
            told = (one["values"][m][i] for m in methods if m != BEST)
            rows.append([name, seed, i, size, *(None if v is None else float(f"{v:.3g}")
                                                for v in told)])  # fmt: skip
    columns = ("set", "split", "client", "n", *(m for m in methods if m != BEST))
    return Table("Every client of every split", columns, rows)


def losses_table(found: Found, seeds: Sequence[int]) -> Table:
    """Return every client's validation loss in every try, in thousandths; 'x' after a failure."""
    rows: list[list[Cell]] = []
    for name, seed, one in every_split(found, seeds):
        for method, tried in one["tried"].items():
            for k, (_, each) in enumerate(tried):
                told = " ".join("x" if v is None or v > 1e6 else f"{1000 * v:.0f}" for v in each)
                rows.append([name, seed, method, k, told])
    return Table("Validation losses of the clients in every try, in thousandths",
                 ("set", "split", "method", "try", "losses"), rows)  # fmt: skip


def drawn(found: Found) -> str:
    """Draw the rule minus the best of the six, the solved average and own models."""
    lines = {}
    for method in (BEST, AVERAGE, ALONE):
        each = np.sort(np.clip(gains(found, method), -20, 40))
        lines[f"minus {method}"] = Line(np.arange(1, len(each) + 1), each, dots=True)
    return figure(lines, title="ef.fit minus others, worst fifth", x_label="sets, from worst to "
                  "best (cut at -20 and 40)", y_label="points")  # fmt: skip


# -- checks -----------------------------------------------------------------------------------


def checks(found: Found, methods: Sequence[str], margin: float) -> list[Check]:
    """Return the comparison that decides, and what is told beside it."""
    source, each = "our plan", gains(found, BEST)
    middle, _, high = (low_high := median_with_limits(each))
    agrees = middle >= margin and low_high[1] > 0
    why = "" if agrees or high < margin else "the interval includes the margin: undecided"
    out = [
        Check(
            "ef.fit serves the worst fifth better than the best of six published methods with own "
            f"parts, by at least {margin:g} point at the median of the sets",
            f"{source}; decides, by plan.md",
            f"{shown(each)} points, {len(each)} sets; ahead by more than {margin:g} on "
            f"{int((each > margin).sum())}, behind on {int((each < -margin).sum())}",
            agrees,
            why,
        )
    ]
    for method in methods:
        values = gains(found, method)
        values = values[np.isfinite(values)]
        behind = [k for k, v in zip(found, gains(found, method), strict=True) if v < -margin]
        out.append(
            Check(
                f"on no set is ef.fit more than {margin:g} point behind {method} (worst fifth)",
                source,
                f"{shown(values)} points; behind on {len(behind)} ({', '.join(behind) or 'none'})",
                not behind,
            )
        )
    return out
