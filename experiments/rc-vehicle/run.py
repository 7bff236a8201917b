"""RC-FL on 23 vehicle sensors: a linear SVM, and everybody takes part.

RC-FL's Table 1 has some 43,700 samples of the sensors and we have 1,860, so the order of the
methods is compared and not the numbers. A sensor has few test samples in a trial, so that those of
all trials are pooled.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from experiments.harness.choice import chosen_in_each_trial
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Settings, Table
from experiments.harness.measures import (
    ALONE,
    Answers,
    accuracy_table,
    answers,
    own_checks,
    percentages,
    validation_score,
    with_interval,
)
from experiments.harness.natural import EQUAL, MEASURES, TAIL, draw_clients, rc_checks, shortened
from experiments.harness.network_parts import load_table
from experiments.harness.running import Histories, Part, compute_parts
from numpy.typing import NDArray
from scipy.special import stdtrit
from sklearn.svm import LinearSVC

from equifed import Federation, History
from equifed.algorithms import client_weights
from equifed.metrics import Interval
from equifed.runs import merge_tables

Array = NDArray[np.float64]
WORST = 0.1


def score(history: History) -> float:
    """Return how good a run is on validation samples."""
    return validation_score(history, TAIL)


def run(context: Context) -> Outcome:
    """Choose settings anew in each trial, on its own validation samples, and compare."""
    found, _, searched, problems = chosen_in_each_trial(context, score, one_tail_apart)
    base = "FedAvg" + EQUAL
    alone = fit_machines(context)
    published = context.settings["published"]
    tables = {
        "published": beside(found, published),
        "accuracy": accuracy_table(found, MEASURES, fraction=WORST, alone=alone),
        "pooled": pooled_table(found, alone),
        "grid": searched,
    }
    by_size = {m: found[m] for m in published}
    equal = {m: found.get(m + EQUAL, runs) for m, runs in by_size.items()}
    out = []
    for one, how in ((by_size, "p_i by samples"), (equal, "p_i equal")):
        source = f"RC-FL, Table 1, Vehicle (43,700 samples there, 1,860 here; {how})"
        out += [*rc_checks(one, source, together), _order(one, published, source)]
    out += own_checks(found, alone, WORST, base)
    figures = {"clients": draw_clients(found), "clients-pooled": _drawn_together(found)}
    return Outcome(out, tables, figures, problems)


def fit_machines(context: Context) -> Answers:
    """Return how well every client is served by a linear SVM of its own, trial by trial."""
    settings, data = context.settings, context.settings["run"]["data"]
    parts = {
        f"alone-{seed}": Part(
            measure_alone, {"data": {**data, "seed": seed}, "strengths": settings["own_l2"]}
        )
        for seed in settings["seeds"]
    }
    told = compute_parts(context, parts)
    return {seed: tuple(map(np.array, told[f"alone-{seed}"])) for seed in settings["seeds"]}


def measure_alone(data: Settings, strengths: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return how well every client of one trial is served by a machine of its own."""
    return own_machines(load_table(data), strengths)


def own_machines(data: Federation, strengths: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return every client's test accuracy with a linear SVM of its own, and its test samples.

    The exact one, whose penalty is the best on the client's validation samples, the first of equal
    ones; a client with one class in training answers with it.
    """
    out = []
    assert data.test is not None
    for i in range(len(data.names)):
        (x, y), held, test = (split.client(i) for split in data.splits().values())
        if len(np.unique(y)) == 1:
            out.append(float((test[1] == y[0]).mean()))
            continue
        fitted = [
            LinearSVC(loss="hinge", C=1 / (l2 * len(y)), max_iter=20_000, random_state=0).fit(x, y)
            for l2 in strengths
        ]
        scores = [one.score(*held) if len(held[1]) else 0.0 for one in fitted]
        out.append(float(fitted[int(np.argmax(scores))].score(*test)))
    return out, data.test.sizes.astype(float).tolist()


def one_tail_apart(variant: Settings, before: Mapping[str, History]) -> Settings:
    """Give a client a tail alpha_1 of its own and all others alpha_2, as RC-FL does for Vehicle.

    A grid holds the pair. The paper does not say which client: here the one with the largest
    training loss under FedAvg in the same trial. No tail is below the client's share p_i, of the
    samples or of the clients, as RC-FL wants it.
    """
    pair = variant["algorithm"].get("tails")
    if pair is None:
        return variant
    losses = before["FedAvg"].last("loss", "train")
    assert losses is not None
    tails = np.full(len(losses.values), float(pair[1]))
    tails[int(np.argmax(losses.values))] = pair[0]
    share = client_weights(variant["algorithm"].get("weighting", "size"), losses.sizes)
    return merge_tables(variant, {"algorithm": {"tails": np.maximum(tails, share).tolist()}})


def beside(found: Histories, published: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the published table with ours in the columns between."""
    rows = []
    for method, runs in found.items():
        if method.removesuffix(EQUAL) not in published:
            continue
        ours = [with_interval(measure(percentages(runs))) for measure in MEASURES.values()]
        theirs = [published[method.removesuffix(EQUAL)][name] for name in MEASURES]
        rows.append([method, *itertools.chain(*zip(theirs, ours, strict=True))])
    columns = ["method"]
    for name in MEASURES:
        columns += [f"{name}, published", f"{name}, here"]
    return Table("Published and measured test accuracy in %, ± 95 % here", columns, rows)


def pooled(told: Answers, trials: Sequence[int] | None = None) -> Array:
    """Return each client's accuracy in % over the test samples of all trials together.

    A sensor with seven samples has one in the test part; trials draw other ones, so that together
    they say more about the sensor than each alone. ``trials`` may name some of them.
    """
    values, sizes = (np.array([told[trial][k] for trial in trials or told]) for k in (0, 1))
    return np.asarray(100 * (values * sizes).sum(0) / sizes.sum(0))


def pooled_measure(told: Answers, name: str) -> Interval:
    """Return a measure of the pooled accuracies with the jackknife's limits over trials.

    With theta_k the measure without trial k, the squared standard error is (n - 1)/n times the sum
    of (theta_k - mean)^2. Resampling trials with repeats would count test samples twice and make
    every variance too large.
    """
    value, n = float(MEASURES[name](pooled(told)[None])[0]), len(told)
    if n == 1:
        return Interval(value, -np.inf, np.inf)
    left = np.array([pooled(told, [t for t in told if t != trial]) for trial in told])
    without = MEASURES[name](left)
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    half = float(stdtrit(n - 1, 0.975) * error)
    return Interval(value, value - half, value + half)


def pooled_table(found: Histories, alone: Answers) -> Table:
    """Return the measures of the pooled accuracies: less noise of small test parts in them."""
    told = {**{method: answers(runs) for method, runs in found.items()}, ALONE: alone}
    rows = [
        [method, *(with_interval(pooled_measure(one, name)) for name in MEASURES)]
        for method, one in told.items()
    ]
    title = "Test accuracy in %, each client's test samples of all trials together, ± 95 %"
    return Table(title, ("method", *MEASURES), rows)


def together(found: Histories, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return a measure of every method's pooled accuracies, and how to show it."""
    values = {method: pooled_measure(answers(runs), name) for method, runs in found.items()}
    shown = {method: with_interval(one) for method, one in values.items()}
    return {method: one.estimate for method, one in values.items()}, shown


def _order(found: Histories, published: Mapping[str, Mapping[str, Any]], source: str) -> Check:
    here, _ = together(found, "variance")
    there = {method: float(published[method]["variance"]) for method in found}
    ours, theirs = (sorted(one, key=lambda m: -one[m]) for one in (here, there))
    return Check(
        f"variance, from high to low: {', '.join(theirs)}",
        source,
        f"here: {', '.join(ours)}",
        ours == theirs,
    )


def _drawn_together(found: Histories) -> str:
    """Draw the clients' accuracies over the test samples of all trials, from worst to best."""
    lines = {}
    for method, runs in found.items():
        values = np.sort(pooled(answers(runs)))
        lines[shortened(method)] = Line(np.arange(1, len(values) + 1), values, dots=True)
    return figure(
        lines, title="Clients from worst to best, pooled",
        x_label="place of the client (test samples of all trials)", y_label="test accuracy, %",
    )  # fmt: skip
