"""RC-FL on clients that nobody had to make: vehicle sensors and roles of Shakespeare.

RC-FL's Table 1 has both average and spread of the test accuracies for 23 vehicle sensors (a linear
SVM, everybody takes part) and for 1,101 Twitter accounts (two LSTM layers, ten clients a round).
We have 1,860 of some 43,700 samples of the sensors, so the order of the methods is compared and not
the numbers. The tweets are not to be had: the same path, an LSTM with ten clients a round, runs on
roles of Shakespeare, and the claims about it are compared only in kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.compare import merged
from equifed.history import History
from equifed.metrics import best_fraction, paired_difference, worst_fraction
from equifed.reproduce.choice import (
    Measure,
    accuracy_table,
    chosen_in_each_trial,
    chosen_methods,
    percentages,
    tail_score,
    with_interval,
)
from equifed.reproduce.drawing import Line, figure
from equifed.reproduce.experiment import Check, Context, Outcome, Settings, Table
from equifed.reproduce.running import Histories, run_variants

Array = NDArray[np.float64]
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
    source = "RC-FL, Table 1, Vehicle (43,700 samples there, 1,860 here)"
    out = [*checks(found, source), _order(found, published, source)]
    return Outcome(out, tables, {"clients": _drawn(found)}, problems)


def shakespeare(context: Context) -> Outcome:
    """Run the roles of Shakespeare with an LSTM and ten clients a round."""
    variants, searched = chosen_methods(context, tail_score)
    found, problems = run_variants(context, variants, context.settings["seeds"])
    tables = {"accuracy": accuracy_table(found, MEASURES), "grid": searched}
    source = "RC-FL, Table 1, Sent140 (tweets there, roles of Shakespeare here)"
    out = [*checks(found, source), _better_average(found, source)]
    return Outcome(out, tables, {"clients": _drawn(found)}, problems)


def one_tail_apart(variant: Settings, before: Mapping[str, History]) -> Settings:
    """Give a client a tail alpha_1 of its own and all others alpha_2, as RC-FL does for Vehicle.

    A grid holds the pair. The paper does not say which client: here the one with the largest
    training loss under FedAvg in the same trial. No tail is below the client's share of the
    samples, as RC-FL wants it.
    """
    pair = variant["algorithm"].get("tails")
    if pair is None:
        return variant
    losses = before["FedAvg"].last("loss", "train")
    assert losses is not None
    tails = np.full(len(losses.values), float(pair[1]))
    tails[int(np.argmax(losses.values))] = pair[0]
    share = losses.sizes / losses.sizes.sum()
    return merged(variant, {"algorithm": {"tails": np.maximum(tails, share).tolist()}})


def beside(found: Histories, published: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the published table with ours in the columns between."""
    rows = []
    for method, runs in found.items():
        ours = [with_interval(measure(percentages(runs))) for measure in MEASURES.values()]
        theirs = [published[method][name] for name in MEASURES]
        rows.append([method, *itertools.chain(*zip(theirs, ours, strict=True))])
    columns = ["method"]
    for name in MEASURES:
        columns += [f"{name}, published", f"{name}, here"]
    return Table("Published and measured test accuracy in %, ± 95 % here", columns, rows)


def pooled(runs: Mapping[int, History]) -> Array:
    """Return each client's accuracy in % over the test samples of all trials together.

    A sensor with seven samples has one in the test part; trials draw other ones, so that together
    they say more about the sensor than each alone.
    """
    records = [history.last("accuracy", "test") for history in runs.values()]
    sizes = np.array([record.sizes for record in records if record is not None])
    values = np.array([record.values for record in records if record is not None])
    return np.asarray(100 * (values * sizes).sum(0) / sizes.sum(0))


def pooled_table(found: Histories) -> Table:
    """Return the measures of the pooled accuracies: less noise of small test parts in them."""
    rows = [
        [method, *(float(measure(pooled(runs)[None])[0]) for measure in MEASURES.values())]
        for method, runs in found.items()
    ]
    title = "Test accuracy in %, each client's test samples of all trials taken together"
    return Table(title, ("method", *MEASURES), rows)


def _drawn(found: Histories) -> str:
    """Draw the clients' accuracies from worst to best, each method in its own order."""
    lines = {}
    for method, runs in found.items():
        values = np.sort(percentages(runs), axis=1)
        place = np.arange(1, values.shape[1] + 1)
        lines[method] = Line(place, values.mean(0), values.min(0), values.max(0))
    return figure(
        lines, title="Test accuracy of the clients, from worst to best",
        x_label="place of the client (line: mean, band: all seeds)", y_label="test accuracy, %",
    )  # fmt: skip


# -- checks ---------------------------------------------------------------------------------------


def measured(found: Histories, name: str) -> dict[str, Array]:
    """Return a measure of every method, one number for each seed."""
    return {method: MEASURES[name](percentages(runs)) for method, runs in found.items()}


def _shown(values: Mapping[str, Array]) -> str:
    return ", ".join(f"{method} {with_interval(one)}" for method, one in values.items())


def checks(found: Histories, source: str) -> list[Check]:
    """Compare with what the paper says about its Table 1."""
    variance, worst = measured(found, "variance"), measured(found, "worst 10 %")
    average = measured(found, "average")
    others = [method for method in found if method != "RC-FL"]
    change = paired_difference(average["RC-FL"], average["FedAvg"])
    seeds = len(average["RC-FL"])
    limits = f" ({change.lower:+.1f} to {change.upper:+.1f})" if seeds > 1 else ""
    return [
        Check(
            "RC-FL has the lowest variance of the test accuracies",
            source,
            f"mean over {seeds} seeds ± 95 %: {_shown(variance)}",
            all(variance["RC-FL"].mean() < variance[one].mean() for one in others),
        ),
        Check(
            "RC-FL serves the worst 10 % of clients best",
            source,
            f"accuracy in %: {_shown(worst)}",
            all(worst["RC-FL"].mean() > worst[one].mean() for one in others),
        ),
        Check(
            "RC-FL is fairer than FedAvg: lower variance, and more for the worst 10 %",
            source,
            "RC-FL less FedAvg within seeds: variance "
            f"{(variance['RC-FL'] - variance['FedAvg']).mean():+.0f}, worst 10 % "
            f"{(worst['RC-FL'] - worst['FedAvg']).mean():+.1f} points",
            bool(
                variance["RC-FL"].mean() < variance["FedAvg"].mean()
                and worst["RC-FL"].mean() > worst["FedAvg"].mean()
            ),
        ),
        Check(
            "RC-FL's average accuracy is at most slightly below FedAvg's",
            source,
            f"RC-FL less FedAvg within seeds: {change.estimate:+.1f} points{limits}",
            change.estimate > -SAME_AVERAGE,
        ),
    ]


def _order(found: Histories, published: Mapping[str, Mapping[str, Any]], source: str) -> Check:
    here = {method: float(one.mean()) for method, one in measured(found, "variance").items()}
    there = {method: float(published[method]["variance"]) for method in found}
    ours, theirs = (sorted(one, key=lambda m: -one[m]) for one in (here, there))
    return Check(
        f"variance, from high to low: {', '.join(theirs)}",
        source,
        f"here: {', '.join(ours)}",
        ours == theirs,
    )


def _better_average(found: Histories, source: str) -> Check:
    average = measured(found, "average")
    return Check(
        "with an LSTM and partial participation RC-FL also has the best average accuracy",
        source,
        f"accuracy in %: {_shown(average)}",
        all(average["RC-FL"].mean() > one.mean() for m, one in average.items() if m != "RC-FL"),
    )
