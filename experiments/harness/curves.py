"""Accuracy round by round: how soon the worst client is served, and figures of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equifed.training.history import History
from experiments.harness.drawing import Line, figure
from experiments.harness.running import Histories

Array = NDArray[np.float64]

LABELS = {"worst": "worst", "average": "average", "deviation": "standard deviation of"}


def series(history: History, what: str) -> tuple[NDArray[np.int64], Array]:
    """Return the evaluated rounds, and worst, average or deviation of the test accuracies in %."""
    rounds, values = history.series("accuracy", "test")
    reduced = {"worst": values.min(1), "average": values.mean(1), "deviation": values.std(1)}
    return rounds, 100 * reduced[what]


def rounds_to(history: History, target: float) -> float:
    """Return the first evaluated round at which every client has the accuracy, or infinity."""
    rounds, values = history.series("accuracy", "test")
    reached = np.flatnonzero(values.min(1) >= target)
    return float(rounds[reached[0]]) if len(reached) else float("inf")


def drawn(found: Histories, names: Sequence[str], what: str, title: str) -> str:
    """Draw the mean over seeds, in a band from the least to the largest seed."""
    lines = {}
    for name in names:
        if name not in found:
            continue
        runs = [series(history, what) for history in found[name].values()]
        values = np.array([v for _, v in runs])
        lines[name] = Line(runs[0][0], values.mean(0), values.min(0), values.max(0))
    return figure(
        lines, title=title, x_label="round (line: mean, band: all seeds)",
        y_label=f"{LABELS[what]} test accuracy, %",
    )  # fmt: skip
