"""RC-FL on clients that nobody had to make: vehicle sensors and roles of Shakespeare.

RC-FL's Table 1 has both average and spread of the test accuracies for 23 vehicle sensors (a linear
SVM, everybody takes part) and for 1,101 Twitter accounts (two LSTM layers, ten clients a round).
We have 1,860 of some 43,700 samples of the sensors, so the order of the methods is compared and not
the numbers. The tweets are not to be had: the same path, an LSTM with ten clients a round, runs on
roles of Shakespeare, and the claims about it are compared only in kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from equifed.algorithms.fedavg import client_weights
from equifed.metrics import Interval, best_fraction, paired_difference, worst_fraction
from equifed.runs.compare import merged
from equifed.training.history import History
from experiments.harness.choice import (
    Measure,
    accuracy_table,
    choose,
    chosen_in_each_trial,
    percentages,
    tail_score,
    with_interval,
)
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Settings, Table
from experiments.harness.running import Histories, run_variants

Array = NDArray[np.float64]
Measured = Callable[[Histories, str], tuple[dict[str, float], dict[str, str]]]
"""Maps the runs and the name of a measure to a number and a text for each method."""

EQUAL = ", equal weights"
"""Marks methods whose p_i are equal and not the clients' shares of the samples."""

SAME_AVERAGE = 2.0
"""Points of average accuracy that count as a slight reduction."""

MEASURES: dict[str, Measure] = {
    "average": lambda values: values.mean(1),
    "worst 10 %": lambda values: np.asarray(worst_fraction(values, 0.1, higher_is_better=True)),
    "best 10 %": lambda values: np.asarray(best_fraction(values, 0.1, higher_is_better=True)),
    "variance": lambda values: values.var(1),
}


def vehicle(context: Context) -> Outcome:
    """Run the 23 sensors: settings are chosen anew in each trial, on its own validation samples."""
    found, searched, problems = chosen_in_each_trial(context, tail_score, one_tail_apart)
    published = context.settings["published"]
    tables = {
        "published": beside(found, published),
        "accuracy": accuracy_table(found, MEASURES),
        "pooled": pooled_table(found),
        "grid": searched,
    }
    by_size = {m: runs for m, runs in found.items() if not m.endswith(EQUAL)}
    equal = {m: found.get(m + EQUAL, runs) for m, runs in by_size.items()}
    out = []
    for one, how in ((by_size, "p_i by samples"), (equal, "p_i equal")):
        source = f"RC-FL, Table 1, Vehicle (43,700 samples there, 1,860 here; {how})"
        out += [*checks(one, source, together), _order(one, published, source)]
    figures = {"clients": _drawn(found), "clients-pooled": _drawn_together(found)}
    return Outcome(out, tables, figures, problems)


def shakespeare(context: Context) -> Outcome:
    """Run the roles of Shakespeare with an LSTM and ten clients a round."""
    variants, searched = choose(context, tail_score)
    found, problems = run_variants(context, variants, context.settings["seeds"])
    tables = {"accuracy": accuracy_table(found, MEASURES), "grid": searched}
    source = "RC-FL, Table 1, Sent140 (tweets there, roles of Shakespeare here)"
    out = [*checks(found, source), _better_average(found, source)]
    return Outcome(out, tables, {"clients": _drawn(found)}, problems)


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
    return merged(variant, {"algorithm": {"tails": np.maximum(tails, share).tolist()}})


def beside(found: Histories, published: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the published table with ours in the columns between."""
    rows = []
    for method, runs in found.items():
        ours = [with_interval(measure(percentages(runs))) for measure in MEASURES.values()]
        theirs = [published[method.removesuffix(EQUAL)][name] for name in MEASURES]
        rows.append([method, *itertools.chain(*zip(theirs, ours, strict=True))])
    columns = ["method"]
    for name in MEASURES:
        columns += [f"{name}, published", f"{name}, here"]
    return Table("Published and measured test accuracy in %, ± 95 % here", columns, rows)


def pooled(runs: Mapping[int, History], trials: Sequence[int] | None = None) -> Array:
    """Return each client's accuracy in % over the test samples of all trials together.

    A sensor with seven samples has one in the test part; trials draw other ones, so that together
    they say more about the sensor than each alone. ``trials`` may name some of them.
    """
    used = [runs[trial].last("accuracy", "test") for trial in trials or runs]
    sizes = np.array([record.sizes for record in used if record is not None])
    values = np.array([record.values for record in used if record is not None])
    return np.asarray(100 * (values * sizes).sum(0) / sizes.sum(0))


def pooled_measure(runs: Mapping[int, History], name: str) -> Interval:
    """Return a measure of the pooled accuracies with the jackknife's limits over trials.

    With theta_k the measure without trial k, the squared standard error is (n - 1)/n times the sum
    of (theta_k - mean)^2. Resampling trials with repeats would count test samples twice and make
    every variance too large.
    """
    value, n = float(MEASURES[name](pooled(runs)[None])[0]), len(runs)
    if n == 1:
        return Interval(value, -np.inf, np.inf, 0.95)
    left = np.array([pooled(runs, [t for t in runs if t != trial]) for trial in runs])
    without = MEASURES[name](left)
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    half = float(stdtrit(n - 1, 0.975) * error)
    return Interval(value, value - half, value + half, 0.95)


def pooled_table(found: Histories) -> Table:
    """Return the measures of the pooled accuracies: less noise of small test parts in them."""
    rows = [
        [method, *(_shown(pooled_measure(runs, name)) for name in MEASURES)]
        for method, runs in found.items()
    ]
    title = "Test accuracy in %, each client's test samples of all trials together, ± 95 %"
    return Table(title, ("method", *MEASURES), rows)


def _shown(limits: Interval) -> str:
    half = (limits.upper - limits.lower) / 2
    return f"{limits.estimate:.1f}" + (f" ± {half:.1f}" if np.isfinite(half) else "")


def _short(method: str) -> str:
    """Return a name that fits beside a figure."""
    return method.replace(EQUAL, ", equal")


def _drawn(found: Histories) -> str:
    """Draw the clients' accuracies from worst to best, each method in its own order."""
    lines = {}
    for method, runs in found.items():
        values = np.sort(percentages(runs), axis=1)
        place = np.arange(1, values.shape[1] + 1)
        lines[_short(method)] = Line(place, values.mean(0), values.min(0), values.max(0))
    return figure(
        lines, title="Clients from worst to best",
        x_label="place of the client (line: mean, band: all seeds)", y_label="test accuracy, %",
    )  # fmt: skip


def _drawn_together(found: Histories) -> str:
    """Draw the clients' accuracies over the test samples of all trials, from worst to best."""
    lines = {}
    for method, runs in found.items():
        values = np.sort(pooled(runs))
        lines[_short(method)] = Line(np.arange(1, len(values) + 1), values, dots=True)
    return figure(
        lines, title="Clients from worst to best, pooled",
        x_label="place of the client (test samples of all trials)", y_label="test accuracy, %",
    )  # fmt: skip


# -- checks ---------------------------------------------------------------------------------------


def by_seed(found: Histories, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the mean over seeds of a measure of every method, and how to show it."""
    values = {method: MEASURES[name](percentages(runs)) for method, runs in found.items()}
    means = {method: float(one.mean()) for method, one in values.items()}
    return means, {method: with_interval(one) for method, one in values.items()}


def together(found: Histories, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return a measure of every method's pooled accuracies, and how to show it."""
    values = {method: pooled_measure(runs, name) for method, runs in found.items()}
    shown = {method: _shown(one) for method, one in values.items()}
    return {method: one.estimate for method, one in values.items()}, shown


def _listed(shown: Mapping[str, str]) -> str:
    return ", ".join(f"{method} {text}" for method, text in shown.items())


def checks(found: Histories, source: str, measured: Measured = by_seed) -> list[Check]:
    """Compare with what the paper says about its Table 1."""
    (variance, shown_variance), (worst, shown_worst) = (
        measured(found, name) for name in ("variance", "worst 10 %")
    )
    averages = {m: MEASURES["average"](percentages(runs)) for m, runs in found.items()}
    change = paired_difference(averages["RC-FL"], averages["FedAvg"])
    seeds = len(averages["RC-FL"])
    limits = f" ({change.lower:+.1f} to {change.upper:+.1f})" if seeds > 1 else ""
    others = [method for method in found if method != "RC-FL"]
    return [
        Check(
            "RC-FL has the lowest variance of the test accuracies",
            source,
            f"{seeds} trials, ± 95 %: {_listed(shown_variance)}",
            all(variance["RC-FL"] < variance[one] for one in others),
        ),
        Check(
            "RC-FL serves the worst 10 % of clients best",
            source,
            f"accuracy in %, {seeds} trials, ± 95 %: {_listed(shown_worst)}",
            all(worst["RC-FL"] > worst[one] for one in others),
        ),
        Check(
            "RC-FL is fairer than FedAvg: lower variance, and more for the worst 10 %",
            source,
            f"RC-FL less FedAvg: variance {variance['RC-FL'] - variance['FedAvg']:+.0f}, worst "
            f"10 % {worst['RC-FL'] - worst['FedAvg']:+.1f} points",
            variance["RC-FL"] < variance["FedAvg"] and worst["RC-FL"] > worst["FedAvg"],
        ),
        Check(
            "RC-FL's average accuracy is at most slightly below FedAvg's",
            source,
            f"RC-FL less FedAvg within trials: {change.estimate:+.1f} points{limits}",
            change.estimate > -SAME_AVERAGE,
        ),
    ]


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


def _better_average(found: Histories, source: str) -> Check:
    average, shown = by_seed(found, "average")
    return Check(
        "with an LSTM and partial participation RC-FL also has the best average accuracy",
        source,
        f"accuracy in %: {_listed(shown)}",
        all(average["RC-FL"] > one for method, one in average.items() if method != "RC-FL"),
    )
