"""RC-FL on clients that nobody had to make: vehicle sensors and roles of Shakespeare.

RC-FL's Table 1 has both average and spread of the test accuracies for 23 vehicle sensors (a linear
SVM, everybody takes part) and for 1,101 Twitter accounts (two LSTM layers, ten clients a round).
We have 1,860 of some 43,700 samples of the sensors, so the order of the methods is compared and not
the numbers. The tweets are not to be had: the same path, an LSTM with ten clients a round, runs on
roles of Shakespeare, and the claims about it are compared only in kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from equifed.metrics import best_fraction, paired_difference, worst_fraction
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check
from experiments.harness.measures import Measure, percentages, with_interval, with_limits
from experiments.harness.running import Histories

Measured = Callable[[Histories, str], tuple[dict[str, float], dict[str, str]]]
"""Maps the runs and the name of a measure to a number and a text for each method."""

EQUAL = ", equal weights"
"""Marks methods whose p_i are equal and not the clients' shares of the samples."""

TAIL = 0.25
"""Worst fraction of the clients in the choice: they have few validation samples each."""

SAME_AVERAGE = 2.0
"""Points of average accuracy that count as a slight reduction."""

MEASURES: dict[str, Measure] = {
    "average": lambda values: values.mean(1),
    "worst 10 %": lambda values: np.asarray(worst_fraction(values, 0.1, higher_is_better=True)),
    "best 10 %": lambda values: np.asarray(best_fraction(values, 0.1, higher_is_better=True)),
    "variance": lambda values: values.var(1),
}


def shortened(method: str) -> str:
    """Return a name that fits beside a figure."""
    return method.replace(EQUAL, ", equal")


def draw_clients(found: Histories) -> str:
    """Draw the clients' accuracies from worst to best, each method in its own order."""
    lines = {}
    for method, runs in found.items():
        values = np.sort(percentages(runs), axis=1)
        place = np.arange(1, values.shape[1] + 1)
        lines[shortened(method)] = Line.of_seeds(place, values)
    return figure(
        lines, title="Clients from worst to best",
        x_label="place of the client (line: mean, band: all seeds)", y_label="test accuracy, %",
    )  # fmt: skip


# -- checks ---------------------------------------------------------------------------------------


def by_seed(found: Histories, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the mean over seeds of a measure of every method, and how to show it."""
    values = {method: MEASURES[name](percentages(runs)) for method, runs in found.items()}
    means = {method: float(one.mean()) for method, one in values.items()}
    return means, {method: with_interval(one) for method, one in values.items()}


def listed(shown: Mapping[str, str]) -> str:
    """Return what is shown of each method, in one line."""
    return ", ".join(f"{method} {text}" for method, text in shown.items())


def checks(found: Histories, source: str, measured: Measured = by_seed) -> list[Check]:
    """Compare with what the paper says about its Table 1."""
    (variance, shown_variance), (worst, shown_worst) = (
        measured(found, name) for name in ("variance", "worst 10 %")
    )
    averages = {m: MEASURES["average"](percentages(runs)) for m, runs in found.items()}
    change = paired_difference(averages["RC-FL"], averages["FedAvg"])
    seeds = len(averages["RC-FL"])
    others = [method for method in found if method != "RC-FL"]
    return [
        Check(
            "RC-FL has the lowest variance of the test accuracies",
            source,
            f"{seeds} trials, ± 95 %: {listed(shown_variance)}",
            all(variance["RC-FL"] < variance[one] for one in others),
        ),
        Check(
            "RC-FL serves the worst 10 % of clients best",
            source,
            f"accuracy in %, {seeds} trials, ± 95 %: {listed(shown_worst)}",
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
            f"RC-FL less FedAvg within trials: {with_limits(change, ' points')}",
            change.estimate > -SAME_AVERAGE,
        ),
    ]
