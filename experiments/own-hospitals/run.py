"""Four hospitals, 100 random splits: one shared regression, own intercepts, own models.

Every hospital's accuracy on held-out patients is compared with that of its own model, whose penalty
is chosen on the hospital's validation patients. The shared models have as many tries. They are
chosen in two ways: one model for all by the mean validation loss of the four, or by each hospital
as it chooses its own model, by its own validation loss. Everything is solved to a certified gap, so
nothing is left to step sizes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.measures import for_new_samples, with_limits
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray

import equifed as ef
from equifed.algorithms import FairNewton
from equifed.metrics import Interval, mean_interval
from equifed.objectives import Average, ChiSquare, ExcessRisk, SaddleObjective, WorstCase

Array = NDArray[np.float64]
KINDS = {"shared": None, "own intercept": "bias"}
CHOSEN = {"together": "", "each": ", each chooses"}
"""Who chooses the penalty, and what a method is called then."""
BASELINES = ("own model", "majority class")


def run(context: Context) -> Outcome:
    """Measure every split that is not there yet, and compare."""
    keys = ("test", "validation", "missing", "l2", "rounds", "gap", "objectives")
    given = {key: context.settings[key] for key in keys}
    parts = {
        f"split-{seed:03d}": Part(measure_split, {"settings": given, "seed": seed})
        for seed in range(context.settings["splits"])
    }
    found = [chosen(one, given["l2"]) for one in compute_parts(context, parts).values()]
    tables = {"points": points_table(found), "accuracy": accuracy_table(found)}
    tables |= {"chosen": chosen_table(found), "splits": splits_table(found)}
    return Outcome(checks(found, context.settings), tables, {"points": drawn(found)})


# -- one split --------------------------------------------------------------------------------


def measure_split(settings: Settings, seed: int) -> dict[str, Any]:
    """Return the accuracies of every method in one split, and what was chosen."""
    data = ef.load(
        "heart-disease", missing=settings["missing"], test=settings["test"],
        validation=settings["validation"], seed=seed,
    )  # fmt: skip
    alone = ef.alone(data, "logistic", "logistic", l2=settings["l2"][0], split="test")
    out: dict[str, Any] = {
        "clients": list(data.names),
        "train": data.train.sizes.tolist(),
        "test": data.test.sizes.tolist() if data.test is not None else [],
        "one class": list(alone.one_class),
        "chosen": {"own model": alone.l2.tolist()},
        "gaps": {},
        "accuracy": {"own model": alone.record.values.tolist(), "majority class": majority(data)},
    }
    baselines = {
        l2: ef.alone(data, "logistic", "logistic", l2=l2, tune=False).losses
        for l2 in settings["l2"]
    }
    out["tries"] = {
        f"{kind}, {name}": [
            train(settings, data, l2, own, objective(given, baselines[l2])) for l2 in settings["l2"]
        ]
        for name, given in settings["objectives"].items()
        for kind, own in KINDS.items()
    }
    return out


def chosen(split: dict[str, Any], penalties: list[float]) -> dict[str, Any]:
    """Return a split with the tries that validation patients choose: for all, and for each."""
    out = {**split, "chosen": dict(split["chosen"]), "accuracy": dict(split["accuracy"])}
    hospitals = range(len(split["clients"]))
    for title, tries in split["tries"].items():
        held = np.array([one["validation"] for one in tries])  # (tries, hospitals)
        together = int(np.nanmean(held, axis=1).argmin())
        # A hospital without validation patients takes what suits the others.
        each = [int(held[:, i].argmin()) if np.isfinite(held[:, i]).all() else together
                for i in hospitals]  # fmt: skip
        for way, picks in (("together", [together] * len(each)), ("each", each)):
            name = title + CHOSEN[way]
            out["accuracy"][name] = [tries[k]["test"][i] for i, k in enumerate(picks)]
            out["chosen"][name] = [penalties[k] for k in picks]
            out["gaps"][name] = max(one["gap"] for one in tries)
    return out


def objective(given: Settings, baselines: Array) -> SaddleObjective:
    """Return the objective of a definition; excess risk is about the clients' own losses."""
    match given["name"]:
        case "average":
            return Average()
        case "chi-square":
            return ChiSquare(given["rho"], scale=1.0)
        case "worst-case":
            return WorstCase()
        case "excess-risk":
            return ExcessRisk(tuple(baselines.tolist()))
    raise ValueError(f"There is no objective {given['name']!r} in this experiment.")


def train(
    settings: Settings, data: ef.Federation, l2: float, own: str | None, objective: SaddleObjective
) -> dict[str, Any]:
    """Return validation losses, test accuracies and the certified gap of one model."""
    clients = ef.simulate(data, "logistic", "logistic", l2=l2, own=own)

    def proved(history: ef.History) -> str | None:
        gap = history.rounds[-1].numbers.get("gap", math.inf)
        return f"the gap is {gap:.1e}" if gap <= settings["gap"] else None

    history = ef.train(
        FairNewton(objective), clients, rounds=settings["rounds"], stop=[proved], progress=False,
        evaluate=("validation", "test"), every=settings["rounds"],
    )  # fmt: skip
    held, test = history.last("loss", "validation"), history.last("accuracy", "test")
    assert held is not None and test is not None
    gap = min(r.numbers.get("gap", math.inf) for r in history.rounds)
    return {"validation": held.values.tolist(), "test": test.values.tolist(), "gap": gap}


def majority(data: ef.Federation) -> list[float]:
    """Return the test accuracy of each hospital's most frequent class in training."""
    assert data.test is not None
    out = []
    for i in range(len(data.names)):
        counts = np.bincount(data.train.client(i)[1], minlength=2)
        out.append(float((data.test.client(i)[1] == counts.argmax()).mean()))
    return out


# -- all splits -------------------------------------------------------------------------------


def accuracies(found: list[dict[str, Any]], method: str) -> Array:
    """Return the accuracies of a method in %, shape (splits, hospitals)."""
    return 100 * np.array([one["accuracy"][method] for one in found])


def differences(found: list[dict[str, Any]], method: str) -> list[tuple[Interval, Interval]]:
    """Return points against each hospital's own model: over these splits, and for new patients.

    Random splits share patients, and the second interval is widened for that.
    """
    change = accuracies(found, method) - accuracies(found, "own model")
    out = []
    for k in range(change.shape[1]):
        told = mean_interval(change[:, k])
        ratio = found[0]["test"][k] / found[0]["train"][k]
        out.append((told, for_new_samples(told, len(found), ratio)))
    return out


def methods(found: list[dict[str, Any]]) -> list[str]:
    """Return the methods but the one that all are compared with."""
    return [m for m in found[0]["accuracy"] if m != "own model"]


def points_table(found: list[dict[str, Any]]) -> Table:
    """Return points against the own model, with both intervals."""
    rows: list[list[Cell]] = []
    for method in methods(found):
        told = differences(found, method)
        rows.append([method, *(f"{with_limits(a)} [{b.lower:+.1f} to {b.upper:+.1f}]"
                               for a, b in told)])  # fmt: skip
    title = (
        "Test accuracy minus that of the hospital's own tuned model, points: mean over splits "
        "(95 % over splits) [95 % for new patients]"
    )
    return Table(title, ("method", *found[0]["clients"]), rows)


def accuracy_table(found: list[dict[str, Any]]) -> Table:
    """Return mean accuracies."""
    rows: list[list[Cell]] = [
        [m, *(float(v) for v in accuracies(found, m).mean(0)),
         float(accuracies(found, m).min(1).mean())]
        for m in found[0]["accuracy"]
    ]  # fmt: skip
    return Table("Test accuracy in %, mean over splits",
                 ("method", *found[0]["clients"], "worst hospital"), rows)  # fmt: skip


def chosen_table(found: list[dict[str, Any]]) -> Table:
    """Return which penalties were chosen, and how well the worst try was solved."""
    rows: list[list[Cell]] = []
    names = found[0]["clients"]
    for method in (m for m in found[0]["accuracy"] if m not in BASELINES):
        picks = [[one["chosen"][method][i] for one in found] for i in range(len(names))]
        told = [", ".join(f"{v:g}: {one.count(v)}" for v in sorted(set(one))) for one in picks]
        rows.append([method, *told, max(one["gaps"][method] for one in found)])
    return Table("l2 chosen (splits), and the largest certified gap of all tries",
                 ("method", *names, "largest gap"), rows)  # fmt: skip


def splits_table(found: list[dict[str, Any]]) -> Table:
    """Return the accuracies of every split, for other questions."""
    rows: list[list[Cell]] = [
        [seed, method, *(round(100 * v, 3) for v in values)]
        for seed, one in enumerate(found)
        for method, values in one["accuracy"].items()
    ]
    return Table("Test accuracy in % of every split",
                 ("split", "method", *found[0]["clients"]), rows)  # fmt: skip


def drawn(found: list[dict[str, Any]]) -> str:
    """Draw the points against the own model, hospital by hospital."""
    lines, names = {}, found[0]["clients"]
    for method in (m for m in methods(found) if m in BASELINES or m.endswith(CHOSEN["each"])):
        told = [a for a, _ in differences(found, method)]
        ends = [a.lower for a in told], [a.upper for a in told]
        lines[method] = Line(np.arange(len(names)), [a.estimate for a in told], *ends, dots=True)
    shown = ", ".join(f"{k} {name}" for k, name in enumerate(names))
    return figure(lines, title="Points against the hospital's own model",
                  x_label=f"{shown} (band: 95 % over splits)", y_label="points")  # fmt: skip


def checks(found: list[dict[str, Any]], settings: Settings) -> list[Check]:
    """Hold what was aimed at against what came out."""
    names, out = found[0]["clients"], []
    allowed = settings["allowed"]
    for way, told_of in CHOSEN.items():
        for name in settings["objectives"]:
            told = [a for a, _ in differences(found, f"own intercept, {name}{told_of}")]
            plain = [a for a, _ in differences(found, f"shared, {name}{told_of}")]
            good = all(a.estimate >= -allowed[n] for n, a in zip(names, told, strict=True))
            limits = ", ".join(f"{n} {-allowed[n]:+g}" for n in names)
            who = "one l2 for all" if way == "together" else "each hospital chooses its l2"
            out.append(Check(
                f"own intercept, {name}, {who}: no hospital below its own tuned model by more than "
                f"{limits}",
                "our aim",
                "; ".join(f"{n} {with_limits(a)}, shared {b.estimate:+.1f}"
                          for n, a, b in zip(names, told, plain, strict=True)),
                good,
            ))  # fmt: skip
    return out
