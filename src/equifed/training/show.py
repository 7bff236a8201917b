"""A run (a :class:`History`) shown: in a terminal, in a notebook, as a data frame, as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equifed.contract.arrays import show_text
from equifed.metrics.metric import DASH, find_metric

BASELINE = "solved for the average"
COLUMNS = ("method", "seed", "client", "split", "metric", "round", "value")
MOST_LINES, MOST_ROWS, SHOWN_EVENTS, SHOWN_CLIENTS = 10, 20, 10, 40


def find_worst(clients: Mapping[str, float], metric: str) -> str:
    """Return the client that a metric serves worst; an empty name if there is none."""
    sign = find_metric(metric).sign
    return min(clients, key=lambda name: sign * clients[name], default="")


def describe_history(history: Any) -> str:
    """Return a run in three lines: what ran, who is served how, what was given out."""
    told = history.provenance
    done = history.rounds[-1].round if history.rounds else 0
    head = f"{_count(len(history.names), 'client')}, {_count(done, 'round')}"
    data = told.get("data", {}).get("name")
    known = [f" of {history.method}" if "algorithm" in told else "", f" on {data}" if data else ""]
    seed = "" if history.seed is None else f", seed {history.seed}"
    chosen, served = history.main_metric(), "not evaluated"
    clients = history.per_client(*chosen) if chosen is not None else {}
    if clients:
        worst, metric = find_worst(clients, chosen[0]), find_metric(chosen[0])
        average = metric.write(float(np.mean(list(clients.values()))))
        what = f"{chosen[1]} {metric.label}: average {average}"
        served = f"{what}, worst {metric.write(clients[worst])} ({show_text(worst)})"
    given = "has not ended" if history.given_out is None else str(history.given_out)
    return f"<History: {head}{''.join(known)}{seed}\n {served}\n {given}>"


# -- terminals ----------------------------------------------------------------------------------


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: nothing in it is markup, and a terminal may break it anywhere."""
    console.print(show_text(text), style=style, markup=False, highlight=False, soft_wrap=True)


def tabulate_clients(histories: Mapping[str, Any]) -> Table:
    """Return a table: a row per client, a column per run, the average and the worst below.

    Of more than forty clients only those whom the last run serves worst are shown.
    """
    first = next(iter(histories.values()))
    metric, split = first.main_metric()
    kind = find_metric(metric)
    table = Table(title=f"{split} {kind.label} per client")
    columns = {name: history.per_client(metric, split) for name, history in histories.items()}
    if len(histories) == 1 and first.average is not None:
        told = zip(first.names, first.average.values.tolist(), strict=True)
        columns[BASELINE] = {name: value for name, value in told if value == value}
    worst = {name: find_worst(column, metric) for name, column in columns.items()}
    beside = _list_beside(first, metric, split, further=len(histories) == 1)
    table.add_column("client")
    for name in (*columns, *beside):
        table.add_column(Text(show_text(name)), justify="right")
    rows = list(first.names)
    if len(rows) > SHOWN_CLIENTS:
        last = columns[[*histories][-1]]
        rows.sort(key=lambda name: kind.sign * last.get(name, kind.sign * np.inf))
    for client in rows[:SHOWN_CLIENTS]:
        cells = [
            Text(kind.write(c.get(client, math.nan)), "bold" if client == worst[name] else "")
            for name, c in columns.items()
        ]
        others = (texts.get(client, DASH) for texts in beside.values())
        table.add_row(Text(show_text(client)), *cells, *others)
    if len(rows) > SHOWN_CLIENTS:
        table.add_row(f"and {len(rows) - SHOWN_CLIENTS} better served")
    table.add_section()
    averages = (float(np.mean(list(c.values()))) if c else math.nan for c in columns.values())
    lowest = (c.get(worst[name], math.nan) for name, c in columns.items())
    table.add_row("average", *map(kind.write, averages))
    table.add_row("worst", *map(kind.write, lowest))
    return table


def _list_beside(history: Any, metric: str, split: str, further: bool) -> dict[str, dict[str, str]]:
    """Return further columns by their labels: what stands there for every client that has it."""
    out, details = {}, history.details
    if metric == "accuracy" and details is not None and details.split == split:
        shares = zip(history.names, details.majorities(), strict=True)
        out["majority class"] = {k: find_metric(metric).write(v) for k, v in shares}
    names = dict.fromkeys(r.metric for r in history.metrics if r.split == split) if further else ()
    for name in names:
        if name not in (metric, "loss"):
            kind, values = find_metric(name), history.per_client(name, split).items()
            out[kind.label] = {k: kind.write(v) for k, v in values}
    return out


def describe_events(history: Any) -> list[str]:
    """Return what happened besides rounds: quarantines, guards, warnings, why it stopped."""
    of = history.list_events
    lines = [
        *_describe_clients(of("quarantine"), "was left out of"),
        *_describe_clients(of("guard"), "was kept in bounds in"),
        *(f"client {e['client']} stood out in round {e['round']}: {e['reason']}"
          for e in of("watch")[:SHOWN_EVENTS]),
        *(f"warning: {e['reason']}" for e in of("warning")),
        *(f"stopped after round {e['round']}: {e['reason']}" for e in of("stopped")[-1:]),
    ]  # fmt: skip
    given, proved = history.given_out, history.describe_certificate()
    if given is not None and given.kind != "last":
        lines.append(str(given))
    elif proved is not None and given is not None:
        lines.append(proved)
    return lines


def _describe_clients(events: list[dict[str, Any]], fate: str) -> list[str]:
    """Return a line for each client that events are about, and why it first was."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault(event["client"], []).append(event)
    lines = [
        f"client {client} {fate} {len({e['round'] for e in its})} round(s), first in "
        f"round {its[0]['round']}: {its[0]['reason']}"
        for client, its in found.items()
    ]
    more = len(lines) - SHOWN_EVENTS
    told = [f"and {more} more clients; see events.jsonl"] if more > 0 else []
    return [*lines[:SHOWN_EVENTS], *told]


# -- notebooks ----------------------------------------------------------------------------------


def render_clients(history: Any) -> str:
    """Return a table (HTML) of how the clients are served, the worst first."""
    chosen, names = history.main_metric(), history.names
    head = f"{_count(len(names), 'client')}, {_count(len(history.rounds), 'round')}"
    if chosen is None:
        return f"<p>{head}; not evaluated.</p>"
    record, metric = history.last(*chosen), find_metric(chosen[0])
    columns = {
        "client": names,
        f"{record.split} {metric.label}": [*map(metric.write, record.values)],
        "samples": [str(int(n)) for n in record.sizes],
    }
    if history.details is not None and history.details.split == record.split:
        limits = history.details.limits(metric.name)
        columns["95 % interval"] = [" to ".join(map(metric.write, ends)) for ends in limits]
    for label, texts in _list_beside(history, chosen[0], chosen[1], further=True).items():
        columns[label] = [texts.get(name, DASH) for name in names]
    order = np.argsort(metric.sign * record.values, kind="stable")[:MOST_ROWS]
    lines = [_row("td", [column[i] for column in columns.values()]) for i in order]
    shown = f"the worst served {MOST_ROWS} of them shown"
    head += f", {shown if len(names) > MOST_ROWS else 'worst served first'}"
    return (
        f"<table><caption>{escape(head)}</caption><thead>{_row('th', columns)}</thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


# -- frames and figures -------------------------------------------------------------------------


def tabulate_history(history: Any, method: str | None = None) -> Any:
    """Return a tidy data frame: method, seed, client, split, metric, round, value.

    A client without samples in a split has no row; NaN is a metric that is not defined.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError('Frames need pandas: pip install "equifed[data]".') from error
    method = history.method if method is None else method
    rows = [
        (method, history.seed, name, record.split, record.metric, record.round, float(value))
        for record in history.metrics
        for name, value, n in zip(history.names, record.values, record.sizes, strict=True)
        if n > 0
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def draw_history(
    history: Any, metric: str | None = None, split: str | None = None, ax: Any = None
) -> Any:
    """Draw a metric over the rounds (matplotlib) and return the axes.

    By default it is the main metric. More than ten clients are drawn as their worst, average and
    best.
    """
    record = history.last(metric, split)
    if record is None:
        why = "the run was not evaluated; train with evaluate=['test']."
        if history.metrics:
            why = f"{metric} on {split} was not evaluated."
        raise ValueError(f"There is nothing to draw: {why}")
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
