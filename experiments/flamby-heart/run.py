"""Fed-Heart-Disease by FLamby's rule: the published split, and a hundred others beside it.

Nothing is chosen: the published methods run with the published settings, ours with one recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Settings, Table
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray

from equifed import (
    FairNewton,
    FedAvg,
    Federation,
    LocalSGD,
    ScaffPD,
    ServerOptimised,
    alone,
    simulate,
    train,
)
from equifed.datasets import EMBEDDED
from equifed.metrics import mean_interval
from equifed.objectives import Average, ChiSquare

Array = NDArray[np.float64]
SOURCE = "FLamby, Fed-Heart-Disease, published results per seed"
SITES = {
    "Cleveland": "cleveland",
    "Hungary": "hungarian",
    "Switzerland": "switzerland",
    "Long Beach": "va",
}
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Columns that become 0/1 columns, and their values but the first."""

PUBLISHED = {"alone": "only itself", "FedAvg": "FedAvg", "FedYogi": "FedYogi"}
CERTAIN = 1e-3
"""Certified distance from the optimal value, in units of the loss, that counts as solved."""

NEAR = 3
"""Patients by which a reproduced mean may differ: seeds of other machines start elsewhere."""


def read_hospital(code: str) -> tuple[Array, NDArray[np.int64]]:
    """Return a hospital's 13 columns and labels: the first ten attributes, rows without gaps."""
    lines = (EMBEDDED / f"processed.{code}.data").read_text(encoding="utf-8").split()
    kept = [[line.split(",")[k] for k in (*range(10), 13)] for line in lines]
    numbers = np.array([row for row in kept if "?" not in row], dtype=np.float64)
    plain = [numbers[:, k] for k in range(10) if k not in CATEGORIES]
    dummies = [numbers[:, k] == v for k, values in CATEGORIES.items() for v in values]
    features = np.column_stack([*plain, *dummies]).astype(np.float64)
    return features, (numbers[:, 10] > 0).astype(np.int64)


def federation(seed: int, train_fraction: float = 0.66) -> Federation:
    """Return the hospitals, split and scaled as FLamby does; 43 is its seed.

    Stratified where every class has more than two patients, which Switzerland's has not.
    """
    from sklearn.model_selection import train_test_split

    parts: dict[str, dict[str, Any]] = {"train": {}, "test": {}}
    for site, code in SITES.items():
        features, labels = read_hospital(code)
        enough = np.bincount(labels, minlength=2).min() > 2
        seen, held = train_test_split(
            np.arange(len(labels)),
            test_size=1.0 - train_fraction,
            train_size=train_fraction,
            random_state=seed,
            shuffle=True,
            stratify=labels if enough else None,
        )
        mean, spread = features[seen].mean(0), features[seen].std(0, ddof=1)
        scaled = (features - mean) / np.where(spread > 0, spread, 1.0)  # Swiss cholesterol is 0
        for part, rows in (("train", np.sort(seen)), ("test", np.sort(held))):
            parts[part][site] = (scaled[rows], labels[rows])
    return Federation.from_clients(parts["train"], test=parts["test"], name="flamby-heart")


def published_methods(settings: Settings) -> dict[str, Any]:
    """Return FedAvg and FedYogi with the published settings."""
    work: dict[str, Any] = {"steps": settings["local_steps"], "batch_size": settings["batch_size"]}
    slow = FedAvg(LocalSGD(lr=settings["fedavg_lr"], **work))
    fast = FedAvg(LocalSGD(lr=settings["fedyogi_lr"], **work))
    yogi = ServerOptimised(
        fast, "yogi", settings["fedyogi_server_lr"], betas=(0.9, 0.999), tau=1e-8
    )
    return {"FedAvg": slow, "FedYogi": yogi}


def exact_methods(settings: Settings) -> dict[str, tuple[Any, str | None]]:
    """Return what solves the convex problems: an algorithm, and the own part or None."""
    fair, mean = ChiSquare(settings["rho"], scale=1.0), Average()
    return {
        "average, solved": (FairNewton(mean), None),
        "SCAFF-PD": (ScaffPD(fair), None),
        "FairNewton": (FairNewton(fair), None),
        "average, own bias": (FairNewton(mean), "bias"),
        "ours": (FairNewton(fair), "bias"),
    }


GIVEN = (
    *("train_fraction", "batch_size", "local_steps", "rounds", "fedavg_lr", "fedyogi_lr"),
    *("fedyogi_server_lr", "l2", "rho", "fair_rounds"),
)
"""Settings that every part depends on."""


def measure(split: int, seed: int, solved: bool, settings: Settings) -> dict[str, Any]:
    """Return every method's test accuracies on one split, one per hospital."""
    data = federation(split, settings["train_fraction"])
    out, gap = publish(data, seed, settings), 0.0
    if solved:
        exact, gap = solve(data, settings)
        out |= exact
    told = {name: values.tolist() for name, values in out.items()}
    return {"test": told, "samples": np.diff(data.test.offsets).tolist(), "gap": gap}


def publish(data: Federation, model_seed: int, settings: Settings) -> dict[str, Array]:
    """Return the test accuracies of the published methods, one per hospital."""
    out: dict[str, Array] = {}
    for name, algorithm in published_methods(settings).items():
        torch.manual_seed(model_seed)
        clients = simulate(data, torch.nn.Linear(13, 1), "logistic", dtype=torch.float64)
        found = train(algorithm, clients, rounds=settings["rounds"], seed=model_seed,
                      evaluate=("test",), every=settings["rounds"], progress=False)  # fmt: skip
        out[name] = found.last("accuracy", "test").values
    return out


def solve(data: Federation, settings: Settings) -> tuple[dict[str, Array], float]:
    """Return the accuracies of the solved problems, and the largest certified relative gap."""
    own = alone(data, "logistic", l2=settings["l2"], tune=False, dtype=torch.float64)
    majority = [np.mean(data.test.client(i)[1] == round(float(data.train.client(i)[1].mean())))
                for i in range(len(SITES))]  # fmt: skip
    out, gaps = {"alone": own.record.values, "majority class": np.array(majority)}, [0.0]
    for name, (algorithm, part) in exact_methods(settings).items():
        clients = simulate(data, "logistic", l2=settings["l2"], dtype=torch.float64, own=part)
        last = settings["fair_rounds"]
        found = train(
            algorithm, clients, rounds=last, evaluate=("test",), every=last, progress=False
        )
        out[name] = found.last("accuracy", "test").values
        gaps.append(float(found.rounds[-1].numbers["gap"]))
    return out, max(gaps)


def run(context: Context) -> Outcome:
    """Measure on the published split and on others, and compare with what is published."""
    settings, rows = context.settings, []
    split, random = settings["split_seed"], range(1000, 1000 + settings["random_splits"])
    first, *seeds = settings["model_seeds"]
    given = {key: settings[key] for key in GIVEN}
    parts = {
        f"published-{seed}": Part(
            measure, {"split": split, "seed": seed, "solved": seed == first, "settings": given}
        )
        for seed in (first, *seeds)
    } | {
        f"split-{one}": Part(
            measure, {"split": one, "seed": first + one - 1000, "solved": True, "settings": given}
        )
        for one in random
    }
    answers = compute_parts(context, parts)
    fits = [answers[f"published-{seed}"] for seed in (first, *seeds)]
    here = {
        name: 100 * np.array([fit["test"][name] for fit in fits if name in fit["test"]])
        for name in fits[0]["test"]
    }
    sizes = np.array(fits[0]["samples"])
    for name, values in here.items():
        rows.append((name, *values.mean(0).round(1), float(values.min(1).mean().round(1))))
    told = settings["published"]
    rows += [(f"published: {k}", *v, min(v)) for k, v in told.items()]
    others = [answers[f"split-{one}"] for one in random]
    elsewhere = {
        name: np.array([one["test"][name] for one in others]) for name in others[0]["test"]
    }
    gap = max(one["gap"] for one in (*fits, *others))
    columns = ("method", *SITES, "worst hospital")
    tables = {
        "published-split": Table("Accuracy, published split (%)", columns, rows),
        "random-splits": _summary(elsewhere, columns),
        "against-alone": _differences(elsewhere, "alone"),
        "against-own-bias": _differences(elsewhere, "average, own bias"),
        "fits": _all(elsewhere),
    }
    lines = {name: Line(range(4), 100 * values.mean(0), dots=True)
             for name, values in elsewhere.items()}  # fmt: skip
    drawn = figure(lines, title="Mean over random splits", x_label=", ".join(SITES),
                   y_label="test accuracy, %")  # fmt: skip
    checks = [_check_published(here, told, sizes), _check_order(here, told),
              *_check_ours(elsewhere), _check_gap(gap)]  # fmt: skip
    return Outcome(checks, tables, {"hospitals": drawn})


def _summary(found: dict[str, Array], columns: Sequence[str]) -> Table:
    rows = [
        (name, *(100 * values.mean(0)).round(1), float((100 * values.min(1)).mean().round(1)))
        for name, values in found.items()
    ]
    count = len(next(iter(found.values())))
    return Table(f"Accuracy, mean of {count} random splits (%)", columns, rows)


def _differences(found: dict[str, Array], base: str) -> Table:
    rows = []
    for name, values in found.items():
        if name not in (base, "majority class"):
            ends = [_paired(values[:, i] - found[base][:, i]) for i in range(len(SITES))]
            worst = _paired(values.min(1) - found[base].min(1))
            rows.append((name, *(f"{m:+.1f} ({a:+.1f} to {b:+.1f})" for m, a, b in [*ends, worst])))
    title = f"Points of accuracy above '{base}', paired over splits, 95 % interval of the mean"
    return Table(title, ("method", *SITES, "worst hospital"), rows)


def _paired(differences: Array) -> tuple[float, float, float]:
    interval = mean_interval(100 * differences)
    return float(100 * differences.mean()), interval.lower, interval.upper


def _all(found: dict[str, Array]) -> Table:
    rows = [(1000 + k, name, *(float(v) for v in values[k].round(4)))
            for name, values in found.items() for k in range(len(values))]  # fmt: skip
    return Table("Every fit", ("split", "method", *SITES), rows)


def _check_published(here: dict[str, Array], told: dict[str, Any], sizes: Array) -> Check:
    means = {name: here[name].mean(0) for name in ("FedAvg", "FedYogi")}
    patients = {n: np.abs(m - told[PUBLISHED[n]]) * sizes / 100 for n, m in means.items()}
    most = max(float(p.max()) for p in patients.values())
    return Check(
        f"FedAvg {told['FedAvg']}, FedYogi {told['FedYogi']} (means of seeds 42 to 46)",
        SOURCE,
        "; ".join(f"{n} {m.round(1).tolist()}" for n, m in means.items())
        + f"; at most {most:.1f} test patients apart",
        most <= NEAR,
        f"agree: at most {NEAR} patients apart in every hospital ({sizes.tolist()} are tested)",
    )


def _check_order(here: dict[str, Array], told: dict[str, Any]) -> Check:
    own, shared = here["alone"].mean(0), here["FedAvg"].mean(0)
    return Check(
        f"every hospital's own model ({told['only itself']}) is better than FedAvg",
        SOURCE,
        f"own models {own.round(1).tolist()}, FedAvg {shared.round(1).tolist()}",
        bool((own > shared).all()),
        "ours are exact solutions with the L2 penalty of the recipe, theirs end early",
    )


def _check_gap(gap: float) -> Check:
    return Check(
        f"every solved problem is certified to within {CERTAIN:g} of its optimum",
        "ours",
        f"largest certified gap {gap:.1e}",
        gap <= CERTAIN,
    )


def _check_ours(found: dict[str, Array]) -> list[Check]:
    checks = []
    for base, claim in (
        ("alone", "ours serves no hospital worse than its own model"),
        (
            "average, own bias",
            "the fair objective serves the worst hospital no worse than the mean",
        ),
        ("FedYogi", "ours serves the worst hospital better than FedYogi"),
    ):
        ends = [_paired(found["ours"][:, i] - found[base][:, i]) for i in range(len(SITES))]
        worst = _paired(found["ours"].min(1) - found[base].min(1))
        agrees = {
            "alone": all(high >= 0 for _, _, high in ends),
            "average, own bias": worst[2] >= 0,
            "FedYogi": worst[1] > 0,
        }[base]
        told = ", ".join(f"{s} {m:+.1f} ({a:+.1f} to {b:+.1f})"
                         for s, (m, a, b) in zip(SITES, ends, strict=True))  # fmt: skip
        measured = f"{told}; worst hospital {worst[0]:+.1f} ({worst[1]:+.1f} to {worst[2]:+.1f})"
        checks.append(Check(claim, "ours", measured, agrees, "points, paired over random splits"))
    return checks
