"""One recipe for all data sets, against every method, with equal tries.

Ours is FairNewton with a chi-square objective and an own output bias for every client beside a
shared one, solved until the gap is proved; how strongly own biases are held to the shared one is
chosen on validation samples. Step sizes and penalty of the methods with local steps are, for each
data set, those that suit FedAvg best on validation samples of splits that are not reported. Every
method tries nine settings in every split and keeps what that split's validation samples choose.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from experiments.harness.choice import alternatives
from experiments.harness.experiment import Context, Outcome, Settings
from experiments.harness.network_parts import load_table
from experiments.harness.networks import prepared
from experiments.harness.recipe import ALONE, BASE, OURS, Found, Trial, score
from experiments.harness.recipe_table import compare
from experiments.harness.running import Part, compute_parts
from rich.console import Console
from sklearn.linear_model import LogisticRegression

from equifed.report import slug
from equifed.runs import RunConfig, build_run, merge_tables

CONSTANT = "experiments.harness.network_parts:with_constant"
REACH = 4
"""How many step sizes are tried below the one that suits a set, and as many above it."""


def run(context: Context) -> Outcome:
    """Measure what is not there yet, and compare."""
    settings = context.settings
    tables = {name: settings["data"][name]["data"] for name in settings["sets"]}
    for table in tables.values():
        located(table, context.console)  # features are made once, before anything is run
    scales, tuned = find_scales(context, tables)
    parts, places = {}, {}
    for name in settings["sets"]:
        methods = set_methods(settings, name, scales[name])
        for seed in range(settings["data"][name]["seeds"]):
            split = {"data": seeded(tables[name], seed)}
            for method, tries in methods.items():
                key = places[name, method, seed] = f"{name}-{slug(method)}-{seed}"
                parts[key] = Part(measure, split | {"run": settings["run"], "tries": tries})
            if ALONE not in settings["data"][name].get("left_out", ()):
                key = places[name, ALONE, seed] = f"{name}-{ALONE}-{seed}"
                parts[key] = Part(measure_alone, split | {"penalties": settings["alone"]["l2"]})
    # What takes longest comes first: models that are solved.
    order = sorted(parts, key=lambda key: "stop" not in str(parts[key].given))
    if not settings["finish"]:
        order = [key for key in order if (context.out / "runs" / f"{key}.json").exists()]
    answers = compute_parts(context, {key: parts[key] for key in order})
    found: Found = {name: {} for name in settings["sets"]}
    for (name, method, seed), key in places.items():
        if key in answers:
            found[name].setdefault(method, {})[seed] = Trial.of(answers[key])
    kept, missing = keep_complete(found, places)
    return compare(kept, tuned, settings, missing)


def keep_complete(
    found: Found, wanted: Collection[tuple[str, str, int]]
) -> tuple[Found, list[str]]:
    """Return the methods with all seeds, on the sets with FedAvg and ours; and who has not."""
    kept: Found = {}
    missing = []
    for name, methods in found.items():
        seeds = {m: sum(one[:2] == (name, m) for one in wanted) for _, m, _ in wanted}
        kept[name] = {m: runs for m, runs in methods.items() if len(runs) == seeds[m]}
        short = [f"{m} ({len(methods.get(m, ()))} of {n})" for m, n in seeds.items()
                 if n and m not in kept[name]]  # fmt: skip
        if short:
            missing.append(f"{name}: not all splits, so left out: {', '.join(short)}")
        if not {BASE, OURS} <= kept[name].keys():
            del kept[name]
    return kept, missing


# -- what is run ------------------------------------------------------------------------------


def located(data: Settings, console: Console | None = None) -> Settings:
    """Return a table of data with the path of its features, made if they are not there."""
    table = dict(data)
    if features := table.pop("features", None):
        table["path"] = str(prepared("frozen", features, console or Console(quiet=True)))
    return table


def seeded(data: Settings, seed: int) -> Settings:
    """Return a table of data whose split (and partition) is drawn with a seed."""
    out = merge_tables(data, {"seed": seed})
    return merge_tables(out, {"holdout": {"seed": seed}}) if "holdout" in data else out


def find_scales(
    context: Context, tables: dict[str, Settings]
) -> tuple[dict[str, Settings], dict[str, Any]]:
    """Return the step size and the penalty of each set, and the scores of all that was tried."""
    settings, scale = context.settings, context.settings["scale"]
    run, seeds = merge_tables(settings["run"], scale["run"]), settings["tuning_seeds"]
    parts = {}
    searched = scale["lr"][REACH - 1 : 1 - REACH]
    for name, data in tables.items():
        for lr in searched:
            variants = [_scaled(settings, settings["methods"][BASE], lr, l2) for l2 in scale["l2"]]
            given = {"run": run, "splits": [seeded(data, seed) for seed in seeds]}
            parts[f"scale-{name}-{lr:g}"] = Part(score_all, given | {"variants": variants})
    answers = compute_parts(context, parts)
    best, scores = {}, {}
    for name in tables:
        scores[name] = {
            (lr, l2): float(np.mean(of_l2))
            for lr in searched
            for l2, of_l2 in zip(scale["l2"], answers[f"scale-{name}-{lr:g}"], strict=True)
        }
        best[name] = choose_scale(scores[name], scale)
    return best, {name: (scores[name], best[name]) for name in tables}


def choose_scale(scores: Mapping[tuple[float, float], float], scale: Settings) -> Settings:
    """Return a step size, all that are tried around it, and a penalty.

    Scores of few splits are noisy: of all triples of step sizes that are nearly as good the one
    with the smallest is taken, and of those with the same step sizes the best. Those at
    both ends, one fewer than the reach, are neighbours only and have no scores.
    """
    rates = scale["lr"]
    means = {
        (k, l2): float(np.mean([scores[lr, l2] for lr in rates[k - 1 : k + 2]]))
        for k in range(REACH, len(rates) - REACH)
        for l2 in scale["l2"]
    }
    near = [one for one in means if means[one] >= max(means.values()) - scale["points"]]
    k, l2 = min(near, key=lambda one: (one[0], -means[one]))
    return {"lr": rates[k], "tried": rates[k - REACH : k + REACH + 1], "l2": l2}


def _scaled(settings: Settings, method: Settings, lr: float, l2: float) -> Settings:
    """Return a variant with the step size (unless it is solved) and the penalty of a set."""
    out = merge_tables({"model": {"l2": l2}}, method)
    if "stop" not in out:
        out = merge_tables(out, {"algorithm": {"local": {**settings["work"], "lr": lr}}})
    return out


def set_methods(settings: Settings, name: str, scale: Settings) -> dict[str, list[Any]]:
    """Return what every method tries on a set: words and variants."""
    given, steps = settings["data"][name], {"algorithm.local.lr": scale["tried"]}
    methods = {
        method: _scaled(settings, one, scale["lr"], scale["l2"])
        for method, one in settings["methods"].items()
        if method not in given.get("left_out", ())
    }
    tried = {method: settings["tried"].get(method, steps) for method in methods}
    if not given.get("own", True):  # then ours tries what FairNewton does
        del methods[OURS]["model"]["own"]
        tried[OURS] = settings["tried"]["FairNewton"]
    known = {"methods": methods, "tried": tried, "places": settings["places"]}
    return {m: list(map(list, alternatives(known, m).values())) for m in methods}


# -- measuring --------------------------------------------------------------------------------


def measure(data: Settings, run: Settings, tries: list[Any]) -> dict[str, Any]:
    """Return validation and test accuracies of a method's tries on one split."""
    return {"tries": [train(data, run, variant) | {"settings": words} for words, variant in tries]}


def train(data: Settings, run: Settings, variant: Settings) -> dict[str, Any]:
    """Return the clients' accuracies under one setting; none where training failed."""
    table = merge_tables(merge_tables(run, {"data": located(data)}), variant)
    if "own" in table["model"]:
        table["data"] = {"name": CONSTANT, "of": table["data"]}
    built = build_run(RunConfig.from_dict(table))
    try:
        history = built.train()
    except Exception as error:  # counted: one try that breaks does not take the others along
        return {"failed": f"{type(error).__name__}: {error}"}
    out: dict[str, Any] = {"rounds": len(history.rounds)}
    if "stop" in table:
        proof, value = history.certificate(), history.rounds[-1].objective
        out["gap"] = proof["gap"] / value if isinstance(proof, dict) and value else None
    for split in ("validation", "test"):
        record = history.last("accuracy", split)
        assert record is not None
        out[split] = _known(record.values.tolist())
        out[f"{split} samples"] = record.sizes.tolist()
    out["train samples"] = built.federation.train.sizes.tolist()
    return out


def score_all(run: Settings, splits: list[Settings], variants: list[Settings]) -> list[Any]:
    """Return the validation scores of variants, split by split."""
    return [
        [score(train(data, run, variant), split="validation") for data in splits]
        for variant in variants
    ]


def measure_alone(data: Settings, penalties: list[float]) -> dict[str, Any]:
    """Return the accuracies of the clients' own models, by penalty."""
    federation = load_table(located(data))
    tries = []
    for l2 in penalties:
        out: dict[str, Any] = {"settings": f"l2 = {l2:g}", "validation": [], "test": []}
        for i in range(len(federation.names)):
            model = fit_alone(*federation.train.client(i), l2)
            for split in ("validation", "test"):
                x, y = federation.splits()[split].client(i)
                right = model(x.reshape(len(x), -1)) == y if len(y) else np.array([np.nan])
                out[split].append(float(right.mean()))
        for split in ("train", "validation", "test"):
            out[f"{split} samples"] = federation.splits()[split].sizes.tolist()
        tries.append(out | {"validation": _known(out["validation"]), "test": _known(out["test"])})
    return {"tries": tries}


def fit_alone(x: Any, y: Any, l2: float) -> Any:
    """Return how a client's own model predicts; its class where it has only one."""
    if len(np.unique(y)) == 1:
        return lambda seen: np.full(len(seen), y[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last digits do not move an accuracy
        model = LogisticRegression(C=1 / (l2 * len(y)), max_iter=300)
        return model.fit(x.reshape(len(x), -1), y).predict


def _known(values: list[float]) -> list[float | None]:
    return [None if v != v else v for v in values]
