"""Clients with wrong labels: fair objectives of losses, and of losses above those of own models.

A client whose labels are partly wrong has a large loss under every model, its own too. Fair
objectives give it weight, as they do to a client that a better model could serve; excess risk
(:class:`equifed.objectives.ExcessRisk`) tells the two apart. All models are solved to a certified
gap, so that the objective alone makes the difference; test labels are right for all clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.network_parts import load_table
from experiments.harness.recipe import worst
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray

import equifed as ef
from equifed.algorithms import FairNewton
from equifed.metrics import Interval, paired_difference
from equifed.objectives import Average, ChiSquare, CVaR, ExcessRisk, SaddleObjective, WorstCase

Array = NDArray[np.float64]
PLAIN, EXCESS = "average", "excess risk, "
KINDS: dict[str, Callable[..., SaddleObjective]] = {
    "average": Average, "chi-square": ChiSquare, "cvar": CVaR, "worst-case": WorstCase,
}  # fmt: skip
MEASURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "right labels, average": lambda one: 100 * float(_of(one, noisy=False).mean()),
    "right labels, worst fifth": lambda one: 100 * worst(_of(one, noisy=False)),
    "wrong labels, average": lambda one: 100 * float(_of(one, noisy=True).mean()),
    "weight of the wrong": lambda one: 100 * float(np.array(one["weights"])[one["noisy"]].sum()),
}
COMPARED = tuple(MEASURES)[:3]
Found = dict[str, dict[str, list[dict[str, Any]]]]
"""By labels ("right" or "wrong") and objective, split by split."""


def run(context: Context) -> Outcome:
    """Measure what is not there yet, with labels flipped and as published, and compare."""
    settings, parts = context.settings, {}
    given = {key: settings[key] for key in ("rounds", "gap", "objectives", "noisy")}
    given["data"] = settings["sets"][settings["data"]]
    shares, seeds = {"wrong": settings["flipped"], "right": 0.0}, range(settings["splits"])
    for seed, (labels, share) in itertools.product(seeds, shares.items()):
        for l2 in settings["l2"]:
            told = {"settings": given, "flipped": share, "seed": seed, "l2": l2}
            parts[_name(labels, seed, l2)] = Part(measure_split, told)
    answers = compute_parts(context, parts)
    found: Found = {}
    for labels in shares:
        splits = [[answers[_name(labels, seed, l2)] for l2 in settings["l2"]] for seed in seeds]
        found[labels] = {m: [chosen(one, m) for one in splits] for m in splits[0][0]["models"]}
    tables = {
        "methods": methods_table(found),
        "against-average": differences_table(found),
        "choice": choice_table(found, settings["l2"]),
    }
    drawn = {"average-and-worst": draw(found["wrong"])}
    return Outcome(checks(found["wrong"]), tables, drawn)


def _name(labels: str, seed: int, l2: float) -> str:
    return f"{labels}-{seed:02d}-{l2:g}"


# -- one split ------------------------------------------------------------------------------------


def flip_labels(data: ef.Federation, clients: list[int], share: float, seed: int) -> ef.Federation:
    """Return binary data with a share of some clients' training and validation labels flipped."""
    draw, out = np.random.default_rng([seed, 1]), {}
    for name in ("train", "validation"):
        split = data.splits()[name]
        targets = split.targets.copy()
        for i in clients:
            rows = np.arange(split.offsets[i], split.offsets[i + 1])
            wrong = rows[draw.random(len(rows)) < share]
            targets[wrong] = 1 - targets[wrong]
        out[name] = replace(split, targets=targets)
    return replace(data, **out)


def measure_split(settings: Settings, flipped: float, seed: int, l2: float) -> dict[str, Any]:
    """Return the accuracies under every objective with one penalty, and who has wrong labels."""
    data = load_table({**settings["data"], "seed": seed})
    noisy = np.random.default_rng([seed, 0]).choice(len(data), settings["noisy"], replace=False)
    data = flip_labels(data, sorted(noisy.tolist()), flipped, seed)
    alone = ef.alone(data, "logistic", "logistic", l2=l2, tune=False).losses
    models: dict[str, dict[str, Any]] = {}
    for name, given in settings["objectives"].items():
        objective = KINDS[given["name"]](**{k: v for k, v in given.items() if k != "name"})
        models[name] = train(settings, data, l2, objective)
        if name != PLAIN:
            excess = ExcessRisk(tuple(alone.tolist()), objective)
            models[EXCESS + name] = train(settings, data, l2, excess)
    return {"noisy": sorted(noisy.tolist()), "models": models}


def train(
    settings: Settings, data: ef.Federation, l2: float, objective: SaddleObjective
) -> dict[str, Any]:
    """Return accuracies, the last weights and the certified gap of one model."""
    clients = ef.simulate(data, "logistic", "logistic", l2=l2)
    history = ef.train(
        FairNewton(objective), clients, rounds=settings["rounds"], progress=False,
        stop=ef.StopWhen(at_relative_gap=settings["gap"]), evaluate=("validation", "test"),
        every=settings["rounds"],
    )  # fmt: skip
    out: dict[str, Any] = {"weights": history.weights[max(history.weights)].tolist()}
    for split in ("validation", "test"):
        record = history.last("accuracy", split)
        assert record is not None
        out[split] = record.values.tolist()
    proof = history.certificate()
    return {**out, "gap": proof["gap"] if isinstance(proof, dict) else None}


def chosen(tries: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """Return the model that validation samples choose, whose labels may be wrong, too."""
    scores = []
    for one in tries:
        values = np.array(one["models"][method]["validation"], dtype=np.float64)
        known = values[~np.isnan(values)]
        scores.append((float(known.mean()) + worst(known)) / 2)
    place = int(np.argmax(scores))
    told = {"noisy": tries[place]["noisy"], "place": place, "scores": scores}
    return {**tries[place]["models"][method], **told}


def _of(one: Mapping[str, Any], noisy: bool) -> Array:
    """Return the test accuracies of the clients with wrong labels, or of the others."""
    values = np.array(one["test"], dtype=np.float64)
    values = values[np.isin(np.arange(len(values)), one["noisy"]) == noisy]
    return np.asarray(values[~np.isnan(values)])


# -- all splits -----------------------------------------------------------------------------------


def column(runs: list[dict[str, Any]], measure: str) -> Array:
    """Return a measure, split by split."""
    return np.array([MEASURES[measure](one) for one in runs])


def difference(found: Mapping[str, Any], method: str, base: str, measure: str) -> Interval:
    """Return by how much two objectives differ within splits."""
    return paired_difference(column(found[method], measure), column(found[base], measure))


def methods_table(found: Found) -> Table:
    """Return every objective's measures, with labels flipped and without."""
    rows: list[list[Cell]] = [
        [labels, method, len(runs), *(with_interval(column(runs, m)) for m in MEASURES),
         max((one["gap"] for one in runs if one["gap"] is not None), default=None)]
        for labels, methods in found.items()
        for method, runs in methods.items()
    ]  # fmt: skip
    title = ("Test accuracy in % by right labels, mean over splits ± 95 %: of clients that keep "
             "their labels, and of those drawn to have wrong ones")  # fmt: skip
    return Table(title, ("labels", "objective", "splits", *MEASURES, "largest gap"), rows)


def differences_table(found: Found) -> Table:
    """Return what every objective has more than the average, within splits."""
    rows: list[list[Cell]] = [
        [labels, f"{method} minus {base}",
         *(with_limits(difference(methods, method, base, m)) for m in COMPARED)]
        for labels, methods in found.items()
        for method in methods
        for base in (PLAIN, method.removeprefix(EXCESS))
        if base != method
    ]  # fmt: skip
    return Table("Points within splits (95 %)", ("labels", "objectives", *COMPARED), rows)


def choice_table(found: Found, penalties: list[float]) -> Table:
    """Return how often every penalty was chosen, with its mean score."""
    rows: list[list[Cell]] = []
    for labels, methods in found.items():
        for method, runs in methods.items():
            scores = np.array([one["scores"] for one in runs]).mean(0)
            for k, l2 in enumerate(penalties):
                times = sum(one["place"] == k for one in runs)
                rows.append([f"{method}, {labels} labels", f"l2 = {l2:g}", float(scores[k]), times])
    columns = ("method", "settings", "average and worst fifth on validation samples, mean",
               "trials that chose it")  # fmt: skip
    return Table("Choice on validation samples, in each split", columns, rows)


def draw(methods: Mapping[str, list[dict[str, Any]]]) -> str:
    """Draw the worst fifth of the others against those with wrong labels."""
    x, y = "wrong labels, average", "right labels, worst fifth"
    lines = {m: Line([column(runs, x).mean()], [column(runs, y).mean()], dots=True)
             for m, runs in methods.items()}  # fmt: skip
    return figure(lines, title="Test accuracy, mean over splits", x_label=f"{x}, %",
                  y_label=f"{y}, %")  # fmt: skip


def checks(methods: Mapping[str, list[dict[str, Any]]]) -> list[Check]:
    """Hold what excess risk is said to do against what came out."""
    out, measure = [], "right labels, worst fifth"
    for method in (m for m in methods if m.startswith(EXCESS)):
        base = method.removeprefix(EXCESS)
        told = difference(methods, method, base, measure)
        out.append(Check(f"{method} serves the worst fifth of the clients with right labels better "
                         f"than {base}", "our aim", f"{with_limits(told)} points",
                         told.estimate > 0, "" if told.lower > 0 or told.upper < 0 else
                         "splits do not tell the two apart"))  # fmt: skip
        shares = [float(column(methods[m], "weight of the wrong").mean()) for m in (method, base)]
        out.append(Check(f"{method} gives the clients with wrong labels less weight than {base}",
                         "our aim", f"{shares[0]:.0f} % against {shares[1]:.0f} % of the weight",
                         shares[0] < shares[1]))  # fmt: skip
    return out
