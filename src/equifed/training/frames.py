"""A run (a :class:`History`) as a tidy data frame and as a figure."""

from __future__ import annotations

from typing import Any

import numpy as np

from equifed.metrics.metric import find_metric

COLUMNS = ("method", "seed", "client", "split", "metric", "round", "value")
MOST_LINES = 10
"""Clients that are drawn one by one."""


def tabulate_history(history: Any, method: str, seed: int | None) -> Any:
    """Return a data frame with one row per client, split, metric and evaluated round."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError('Frames need pandas: pip install "equifed[data]".') from error
    rows = [
        (method, seed, name, record.split, record.metric, record.round, float(value))
        for record in history.metrics
        for name, value, n in zip(history.names, record.values, record.sizes, strict=True)
        if n > 0
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def draw_history(history: Any, metric: str | None, split: str | None, ax: Any = None) -> Any:
    """Draw a metric over the rounds: every client, or of many the worst, average and best."""
    record = history.last(metric, split)
    if record is None:
        raise ValueError(
            "There is nothing to draw: "
            + ("the run was not evaluated; train with evaluate=['test']."
               if not history.metrics else f"{metric} on {split} was not evaluated.")
        )  # fmt: skip
    ax, kind = open_axes(ax), find_metric(record.metric)
    rounds, values = history.series(record.metric, record.split)
    some = ~np.isnan(values).all(axis=0)
    if some.sum() <= MOST_LINES:
        for i in np.flatnonzero(some):
            ax.plot(rounds, values[:, i], label=history.names[i])
    else:
        low, high = np.nanmin(values[:, some], axis=1), np.nanmax(values[:, some], axis=1)
        ends = (low, high) if kind.higher_is_better else (high, low)
        ax.plot(rounds, ends[1], ":", label="best client")
        ax.plot(rounds, np.nanmean(values[:, some], axis=1), "--", label="average")
        ax.plot(rounds, ends[0], "-", label="worst client")
    ax.set(xlabel="round", ylabel=f"{record.split} {kind.label}")
    ax.legend()
    return ax


def open_axes(ax: Any = None) -> Any:
    """Return the axes to draw into; new ones if none are given."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "equifed[plots]".') from error
    return plt.subplots(layout="constrained")[1] if ax is None else ax
