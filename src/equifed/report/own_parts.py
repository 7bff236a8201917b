"""Own parts in a report: what clients keep, how far apart it is, and what it is worth to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from equifed.contract.arrays import Losses
from equifed.report import svg
from equifed.report.figures import Figure
from equifed.report.methods import Method
from equifed.report.scales import Scale, capital, plural
from equifed.training.files import Damaged
from equifed.training.history import History
from equifed.training.tables import OWN

MOST_DRAWN = 60
"""Own numbers that have a place of their own in the figure."""
FEW_TOLD = 12
"""Own numbers that a model card lists."""


@dataclass(frozen=True, eq=False)
class OwnTable:
    """Own parameters of every client, flat: (N, p) with a name for each number."""

    parameters: tuple[str, ...]
    names: tuple[str, ...]
    values: Losses

    @property
    def describe(self) -> str:
        """Say in words what clients keep.

        >>> OwnTable(("1.bias",), ("1.bias",), np.zeros((3, 1))).describe
        'own part: 1.bias, 1 number per client'
        """
        count = plural(self.values.shape[1], "number")
        return f"own part: {', '.join(self.parameters)}, {count} per client"

    def list_spread(self, most: int = FEW_TOLD) -> str:
        """Write mean and standard deviation over clients of the first numbers."""
        mean, spread = self.values.mean(axis=0), self.values.std(axis=0)
        told = [
            f"{name} {m:.3g} ± {s:.2g}"
            for name, m, s in zip(self.names[:most], mean, spread, strict=False)
        ]
        left = len(self.names) - most
        return ", ".join(told) + (f" and {left:,} more" if left > 0 else "")


def read_own(history: History) -> OwnTable | None:
    """Return the own parts that a history or its folder has; None: there are none."""
    found = {} if history.own is None else {n: np.asarray(v) for n, v in history.own.items()}
    path = None if history.folder is None else Path(history.folder) / OWN
    if not found and path is not None and path.exists():
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            found = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise Damaged(f"{path} is damaged: it cannot be read ({error}).") from None
    rows = [v.reshape(len(v), -1).astype(np.float64) for v in found.values()]
    if not rows or len(rows[0]) != len(history.names):
        return None
    names = [
        name if part.shape[1] == 1 else f"{name}[{k}]"
        for name, part in zip(found, rows, strict=True)
        for k in range(part.shape[1])
    ]
    return OwnTable(tuple(found), tuple(names), np.concatenate(rows, axis=1))


def find_note(history: History) -> str:
    """Return what training said about own parts, with the strength of their penalty."""
    notes = (str(e["reason"]) for e in history.events if e["event"] == "note")
    return next((note for note in notes if note.startswith("own part ")), "")


def describe_own(method: Method, scale: Scale) -> list[str]:
    """Say what the clients of a method keep, and what it is worth beside the shared model alone."""
    history = method.runs[0].history
    table, note, out = read_own(history), find_note(history), []
    if table is None and not note:
        return []
    known = "own parts" if table is None else table.describe
    how = note.partition(" by ")[2].rpartition(";")[0]
    out.append(f"{capital(known)}{f'; {how}' if how else ''}.")
    shared, whole = history.without_own, history.last(scale.metric, scale.split)
    if shared is not None and whole is not None and shared.metric == scale.metric:
        both = np.isfinite(shared.values) & np.isfinite(whole.values)
        if both.any():
            pick = np.min if scale.higher_is_better else np.max
            ours, theirs = whole.values[both], shared.values[both]
            gain = scale.kind.sign * (ours - theirs)
            out.append(
                f"With its own part, a client has a {scale.label} of {scale.text(ours.mean())} on "
                f"average, the worst {scale.text(pick(ours))}; with the shared model and the mean "
                f"of the own parts, which is what a new client gets, {scale.text(theirs.mean())} "
                f"and {scale.text(pick(theirs))}. {int((gain > 0).sum())} of "
                f"{plural(int(both.sum()), 'client')} are served better with their own part, "
                f"{int((gain < 0).sum())} worse."
            )
    return out


def draw_own(method: Method, m: int) -> Figure | None:
    """Return mean and spread of every own number over the clients; None: there are none."""
    table = read_own(method.runs[0].history)
    if table is None:
        return None
    values = table.values[:, :MOST_DRAWN]
    mean, spread = values.mean(axis=0), values.std(axis=0)
    p = values.shape[1]
    up = svg.limits(values, mean - spread, mean + spread)
    write = lambda v: f"{v:g}" if v == int(v) and 1 <= v <= p else ""  # noqa: E731
    plot = svg.frame((0.5, p + 0.5), up, x_label="own number", y_label="value", write_x=write)
    for k in range(p):
        tip = (
            f"{table.names[k]}: mean {mean[k]:.3g}, standard deviation {spread[k]:.2g}, from "
            f"{values[:, k].min():.3g} to {values[:, k].max():.3g}"
        )
        ends = [values[:, k].min(), values[:, k].max()]
        plot.line([k + 1] * 2, ends, class_="line thin grey", data_tip=tip)
        near = [mean[k] - spread[k], mean[k] + spread[k]]
        plot.line([k + 1] * 2, near, class_="line accent", data_tip=tip)
        plot.dot(k + 1, float(mean[k]), 3.6, class_="dot accent", data_tip=tip)
    left = table.values.shape[1] - p
    caption = (
        f"{capital(table.describe)}. Dots: mean over clients; thick: one standard deviation; "
        f"thin: from the smallest to the largest client."
        + (f" {left:,} more numbers are in the file." if left else "")
    )
    alt = f"{capital(table.describe)}; mean and standard deviation: {table.list_spread()}."
    rows = [
        [client, name, float(v)]
        for client, row in zip(method.clients, table.values, strict=True)
        for name, v in zip(table.names, row, strict=True)
    ]
    title = "Own parts" if m == 0 else f"Own parts, {method.name}"
    columns = ["client", "number", "value"]
    return Figure(f"own-part-{m}", title, caption, alt, plot, columns, rows)
