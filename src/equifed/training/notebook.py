"""A run as a notebook shows it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.contract.names import show_text
from equifed.metrics import correct_counts, find_metric, wilson_interval
from equifed.training.tables import MetricRecord

MOST_ROWS = 20


def render_clients(
    names: Sequence[str],
    record: MetricRecord | None,
    rounds: int,
    majorities: Losses | None = None,
) -> str:
    """Return a table (HTML) of how the clients are served, the worst first."""
    head = f"{_count(len(names), 'client')}, {_count(rounds, 'round')}"
    if record is None:
        return f"<p>{head}; not evaluated.</p>"
    order = np.argsort(find_metric(record.metric).sign * record.values, kind="stable")
    spans = _intervals(record)
    shares = None if majorities is None else [format_metric(m, "accuracy") for m in majorities]
    lines = [
        _row("td", names[i], format_metric(record.values[i], record.metric), spans[i],
             str(int(record.sizes[i])), *([] if shares is None else [shares[i]]))
        for i in order[:MOST_ROWS].tolist()
    ]  # fmt: skip
    shown = f"the worst served {MOST_ROWS} of them shown"
    head += f", {shown if len(names) > MOST_ROWS else 'worst served first'}"
    what = f"{record.split} {find_metric(record.metric).label}"
    more = [] if shares is None else ["majority class"]
    columns = _row("th", "client", what, "95 % interval", "samples", *more)
    return (
        f"<table><caption>{escape(head)}</caption><thead>{columns}</thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def describe_history(history: Any) -> str:
    """Return a :class:`History` in three lines: what ran, who is served how, what was given out."""
    told = history.provenance
    done = history.rounds[-1].round if history.rounds else 0
    head = f"{_count(len(history.names), 'client')}, {_count(done, 'round')}"
    data = told.get("data", {}).get("name")
    known = [f" of {history.method}" if "algorithm" in told else "", f" on {data}" if data else ""]
    seed = "" if history.seed is None else f", seed {history.seed}"
    chosen, served = history.main_metric(), "not evaluated"
    clients = history.per_client(*chosen) if chosen is not None else {}
    if chosen is not None and clients:
        kind = find_metric(chosen[0])
        worst = min(clients, key=lambda name: kind.sign * clients[name])
        average = format_metric(float(np.mean(list(clients.values()))), chosen[0])
        low = format_metric(clients[worst], chosen[0])
        served = f"{chosen[1]} {kind.label}: average {average}, worst {low} ({show_text(worst)})"
    given = "has not ended" if history.given_out is None else str(history.given_out)
    return f"<History: {head}{''.join(known)}{seed}\n {served}\n {given}>"


def format_metric(value: float | None, metric: str) -> str:
    """Return a metric's value as tables show it.

    >>> format_metric(0.7631, "accuracy"), format_metric(0.51239, "loss"), format_metric(None, "")
    ('76.3 %', '0.5124', '-')
    """
    if value is None or not np.isfinite(value):
        return "-"
    return find_metric(metric).write(value)


def _intervals(record: MetricRecord) -> list[str]:
    """Return Wilson's limits of every client's accuracy; a dash where there are none."""
    spans = ["-"] * len(record.values)
    some = np.flatnonzero((record.sizes > 0) & np.isfinite(record.values))
    if not find_metric(record.metric).is_fraction or not len(some):
        return spans
    try:
        correct: Losses = correct_counts(record.values[some], record.sizes[some])
    except ValueError:  # accuracies that are no counts: weighted, or rounded by their source
        return spans
    lower, upper = wilson_interval(correct, record.sizes[some])
    for i, a, b in zip(some, lower, upper, strict=True):
        spans[i] = f"{100 * a:.1f} to {100 * b:.1f} %"
    return spans


def _row(kind: str, *cells: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
