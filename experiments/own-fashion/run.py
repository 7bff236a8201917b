"""Fashion-MNIST under label skew: one softmax regression, own output biases, models alone.

Shared and own-bias models are trained by FairNewton with Hessians of low rank until the certified
gap is small; own models are scikit-learn's, one per client and penalty. Test samples follow the
clients' class mixtures.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

import equifed as ef
from equifed.algorithms import FairNewton, ScaffPD
from equifed.metrics import paired_difference, worst_fraction
from equifed.objectives import Average, ChiSquare

Array = NDArray[np.float64]
MEASURES: dict[str, Callable[[Array], float]] = {
    "average": lambda values: float(values.mean()),
    "worst 20 %": lambda values: float(worst_fraction(values, 0.2, higher_is_better=True)),
}
OWN, SHARED = "own bias", "shared"
KINDS = {"shared": SHARED, "own": OWN}
METHODS: dict[str, Any] = {"SCAFF-PD": ScaffPD, "FairNewton": FairNewton}
Found = dict[int, dict[int, dict[str, Any]]]
"""By number of samples and seed."""


def run(context: Context) -> Outcome:
    """Measure what is not there yet, and compare."""
    settings = context.settings
    sizes = {int(k): seeds for k, seeds in settings["seeds"].items() if seeds}
    parts, given = {}, {key: settings[key] for key in ("clients", "alpha")}
    for l2 in settings["gaps"]["l2"]:
        for method, rounds in settings["gaps"]["rounds"].items():
            told = {key: settings["gaps"][key] for key in ("samples", "rho")} | given
            told |= {"l2": l2, "method": method, "rounds": rounds}
            parts[_gap_name(method, l2)] = Part(follow_gap, told)
    for samples in sorted(sizes, reverse=True):  # what takes longest comes first
        for seed in sizes[samples]:
            told = {"samples": samples, "seed": seed} | given
            parts[f"alone-{samples}-{seed}"] = Part(
                train_alone, told | {"penalties": settings["alone_l2"]}
            )
            told |= {key: settings[key] for key in ("l2", "rounds", "gap")}
            parts[f"own-{samples}-{seed}"] = Part(train_together, told | {"own": "bias"})
            parts[f"shared-{samples}-{seed}"] = Part(train_together, told | {"own": None})
    answers = compute_parts(context, parts)
    found = {n: {k: _joined(answers, n, k) for k in sizes[n]} for n in sorted(sizes)}
    curves = {
        f"{method}, l2 = {l2:g}": answers[_gap_name(method, l2)]
        for l2 in settings["gaps"]["l2"]
        for method in METHODS
    }
    tables = {"accuracy": accuracy_table(found), "against-shared": differences(found)}
    figures = {"samples": draw_samples(found, "worst 20 %")}
    figures["samples-average"] = draw_samples(found, "average")
    if curves:
        tables["gaps"], figures["gaps"] = gap_table(curves), draw_gaps(curves)
    return Outcome(checks(found, curves, settings), tables, figures)


def _gap_name(method: str, l2: float) -> str:
    return f"gaps-{method}-{l2:g}"


def _joined(answers: dict[str, Any], samples: int, seed: int) -> dict[str, Any]:
    """Return the accuracies of all methods on one division, and the certified gaps."""
    both = {name: answers[f"{kind}-{samples}-{seed}"] for kind, name in KINDS.items()}
    accuracy = {name: one["accuracy"] for name, one in both.items()}
    accuracy |= {f"alone, l2 = {k}": v for k, v in answers[f"alone-{samples}-{seed}"].items()}
    return {"accuracy": accuracy, "gap": {name: one["gap"] for name, one in both.items()}}


# -- measuring --------------------------------------------------------------------------------


def load(samples: int, seed: int, clients: int, alpha: float) -> ef.Federation:
    """Return the clients."""
    base = {"name": "dirichlet", "clients": clients, "alpha": alpha}
    partition = {"name": "imbalance", "base": base}
    return ef.load("fashion-mnist", samples=samples, partition=partition, seed=seed)


def train_together(
    own: str | None, l2: float, rounds: int, gap: float, **division: Any
) -> dict[str, Any]:
    """Return the clients' accuracies with one model, or with own biases, and the certified gap."""
    clients = ef.simulate(load(**division), "logistic", l2=l2, own=own)

    def proved(history: ef.History) -> str | None:
        last = history.rounds[-1]
        done = last.numbers.get("gap", math.inf) <= gap * float(last.objective or 0.0)
        return "the gap is proved" if done else None

    history = ef.train(
        FairNewton(Average(), metric="low-rank"), clients, rounds=rounds, stop=[proved],
        evaluate=("test",), every=rounds, progress=False,
    )  # fmt: skip
    record, proof = history.last("accuracy", "test"), history.certificate()
    assert record is not None
    return {"accuracy": record.values.tolist(), "rounds": len(history.rounds),
            "gap": proof["gap"] if isinstance(proof, dict) else None}  # fmt: skip


def train_alone(penalties: list[float], **division: Any) -> dict[str, list[float]]:
    """Return the test accuracies of the clients' own models, by penalty."""
    data = load(**division)
    return {f"{l2:g}": [_one_alone(data, i, l2) for i in range(len(data.names))]
            for l2 in penalties}  # fmt: skip


def _one_alone(data: ef.Federation, i: int, l2: float) -> float:
    """Return the test accuracy of a client's own model; its class where it has only one."""
    assert data.test is not None
    (a, y), (b, z) = data.train.client(i), data.test.client(i)
    if not len(z):
        return float("nan")
    if len(np.unique(y)) == 1:
        return float((z == y[0]).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last digits do not move an accuracy
        model = LogisticRegression(C=1 / (l2 * len(y)), max_iter=300)
        model.fit(a.reshape(len(a), -1), y)
    return float(model.score(b.reshape(len(b), -1), z))


def follow_gap(
    method: str, l2: float, rho: float, rounds: int, **division: Any
) -> dict[str, list[float]]:
    """Return the certified relative gap with an own bias, round by round."""
    clients = ef.simulate(load(seed=0, **division), "logistic", l2=l2, own="bias")
    algorithm = METHODS[method](ChiSquare(rho, scale=1.0))
    history = ef.train(algorithm, clients, rounds=rounds, progress=False)
    gaps = [float(r.numbers["gap"]) / float(r.objective or 1.0) for r in history.rounds]
    return {"gap": np.minimum.accumulate(gaps).tolist(),
            "seconds": [r.seconds for r in history.rounds]}  # fmt: skip


# -- comparing --------------------------------------------------------------------------------


def column(found: Found, samples: int, method: str, measure: str) -> Array:
    """Return a measure of a method in %, seed by seed; clients without test samples left out."""
    values = [np.array(one["accuracy"][method]) for one in found[samples].values()]
    return np.array([100 * MEASURES[measure](v[~np.isnan(v)]) for v in values])


def methods(found: Found, samples: int) -> list[str]:
    """Return the names of all methods."""
    return list(next(iter(found[samples].values()))["accuracy"])


def accuracy_table(found: Found) -> Table:
    """Return every method's measures."""
    rows: list[list[Cell]] = []
    for samples, runs in found.items():
        for method in methods(found, samples):
            gaps = [one["gap"].get(method) for one in runs.values()]
            largest = None if None in gaps else max(gaps)
            shown = [with_interval(column(found, samples, method, m)) for m in MEASURES]
            rows.append([samples, method, len(runs), *shown, largest])
    title = "Test accuracy in %, mean over seeds ± 95 %, and the largest certified gap"
    return Table(title, ("samples", "method", "seeds", *MEASURES, "gap"), rows)


def differences(found: Found) -> Table:
    """Return what every method has more than the shared model, within seeds."""
    rows: list[list[Cell]] = []
    for samples in found:
        for method in (m for m in methods(found, samples) if m != SHARED):
            told = [
                paired_difference(column(found, samples, method, m),
                                  column(found, samples, SHARED, m))
                for m in MEASURES
            ]  # fmt: skip
            rows.append([samples, method, *map(with_limits, told)])
    return Table("Points more than the shared model, within seeds (95 %)",
                 ("samples", "method", *MEASURES), rows)  # fmt: skip


def gap_table(curves: dict[str, Any]) -> Table:
    """Return at which round a certified gap is reached."""
    rows: list[list[Cell]] = []
    for name, told in curves.items():
        reached = [rounds_to(told["gap"], part) for part in (0.1, 0.01, 0.001)]
        rows.append([name, len(told["gap"]), float(told["gap"][-1]), *reached])
    title = "Own biases, chi-square: certified gap as a part of the objective"
    return Table(title, ("method", "rounds", "gap at the end", "10 %", "1 %", "0.1 %"), rows)


def rounds_to(gaps: list[float], part: float) -> int | None:
    """Return the first round that proves a gap of at most this; None if there is none."""
    first = np.flatnonzero(np.array(gaps) <= part)
    return int(first[0]) + 1 if len(first) else None


def draw_samples(found: Found, measure: str) -> str:
    """Draw a measure over the number of samples."""
    lines = {}
    for method in methods(found, next(iter(found))):
        values = [column(found, samples, method, measure) for samples in found]
        ends = [v.min() for v in values], [v.max() for v in values]
        lines[method] = Line(np.log10(list(found)), [v.mean() for v in values], *ends, dots=True)
    return figure(lines, title=f"Clients: {measure}", y_label="test accuracy, %",
                  x_label="log10 of the samples, before the imbalance (band: seeds)")  # fmt: skip


def draw_gaps(curves: dict[str, Any]) -> str:
    """Draw certified gaps over the rounds."""
    lines = {
        n: Line(np.arange(1, len(t["gap"]) + 1), np.array(t["gap"])) for n, t in curves.items()
    }
    return figure(lines, title="Certified gap with own biases", x_label="round",
                  y_label="part of the objective", log=True)  # fmt: skip


def checks(found: Found, curves: dict[str, Any], settings: Settings) -> list[Check]:
    """Hold what was aimed at against what came out."""
    main, out = settings["main"], []
    for measure, points in settings["wanted"].items():
        told = paired_difference(column(found, main, OWN, measure),
                                 column(found, main, SHARED, measure))  # fmt: skip
        out.append(Check(f"own bias at least {points:+g} points over the shared model, {measure}",
                         "our aim", f"{with_limits(told)}, {main} samples",
                         told.estimate >= points))  # fmt: skip
    for samples in found:
        rivals = [m for m in methods(found, samples) if m.startswith("alone")]
        for measure in MEASURES:
            ours = column(found, samples, OWN, measure)
            best = max(rivals, key=lambda m: float(column(found, samples, m, measure).mean()))
            told = paired_difference(ours, column(found, samples, best, measure))
            against = f"{best} (the best of {len(rivals)}, chosen on test samples)"
            out.append(Check(f"own bias above every model alone, {measure}, {samples} samples",
                             "our aim", f"{with_limits(told)} points against {against}",
                             told.estimate > 0))  # fmt: skip
    for l2 in settings["gaps"]["l2"]:
        first, second = (rounds_to(curves[f"{m}, l2 = {l2:g}"]["gap"], 0.001) for m in METHODS)
        out.append(Check(f"FairNewton proves 0.1 % in fewer rounds than SCAFF-PD, l2 = {l2:g}",
                         "our aim", f"{second or 'not reached'}, SCAFF-PD {first or 'not reached'}",
                         second is not None and (first is None or second < first)))  # fmt: skip
    return out
