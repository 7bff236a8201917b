"""What a terminal shows while a run goes on, and when it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from equifed.contract.names import show_text
from equifed.metrics.metric import find_metric
from equifed.training.callback import Callback
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.notebook import format_metric

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from equifed.contract.algorithm import Info

PLAIN_SECONDS = 10.0
"""Time between two lines where the output is no terminal."""

SHOWN_EVENTS, SHOWN_CLIENTS = 10, 40


class ProgressBar(Callback):
    """Round, objective, worst client, rounds per second and time left; plain lines off a terminal.

    Use it as a context manager, so that the bar is put away also when training fails.

    Parameters
    ----------
    console : rich.console.Console
        Where to write, usually standard error.
    title : str
        What is running.
    """

    def __init__(self, console: Console, title: str = "training") -> None:
        self._console, self._title = console, title
        self._bar: Progress | None = None
        self._names: tuple[str, ...] = ()
        self._worst, self._rounds = "", 0
        self._said = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @override
    def start(self, history: History, rounds: int) -> None:
        self._names, self._rounds = history.names, rounds
        if self._console.is_terminal or self._console.is_jupyter:
            done = history.rounds[-1].round if history.rounds else 0
            self._bar = draw_bar(self._console, self._title, rounds, done)

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        parts = [] if record.objective is None else [f"objective {record.objective:.4g}"]
        if "gap" in record.numbers and "uncapped_gap" not in record.numbers:
            parts.append(f"certified gap {record.numbers['gap']:.2g}")
        details = "  ".join([*parts, self._worst])
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record.round, details=details)
        elif not self._console.is_terminal and time.monotonic() - self._said >= PLAIN_SECONDS:
            self._said = time.monotonic()
            self._print(f"round {record.round}/{self._rounds}  {details}")

    @override
    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        best = {"accuracy": 4, "mse": 2, "loss": 0}
        split = {"test": 0, "validation": 1, "train": 0.5}  # test if nothing else is evaluated
        found = max(records, key=lambda r: best.get(r.metric, -1) + split.get(r.split, 0))
        if found.metric not in best or np.isnan(found.values).all():
            return
        accuracy = find_metric(found.metric).higher_is_better
        worst = int(np.nanargmin(found.values) if accuracy else np.nanargmax(found.values))
        value = float(found.values[worst])
        text = f"{value:.1%}" if accuracy else f"{find_metric(found.metric).label} {value:.4g}"
        self._worst = f"worst {self._names[worst]} {text} ({found.split})"

    @override
    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "resume":
            self._print(f"going on after round {event['round']}")
        elif event["event"] == "note":
            self._print(event["reason"])

    @override
    def end(self, history: History) -> None:
        self.__exit__()

    def _print(self, text: str) -> None:
        print_line(self._console, f"{self._title}: {text}")


def follow_by_default(callbacks: Sequence[Callback], wanted: bool | None) -> ProgressBar | None:
    """Return a bar if it is wanted; by default where a person looks on and sees no other."""
    if wanted is False or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return None
    from rich.console import Console

    console = Console(stderr=True)
    seen = console.is_terminal or console.is_jupyter
    if wanted is None and (not seen or "PYTEST_CURRENT_TEST" in os.environ):
        return None
    return ProgressBar(console)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: nothing in it is markup, and a terminal may break it anywhere."""
    console.print(show_text(text), style=style, markup=False, highlight=False, soft_wrap=True)


def draw_bar(console: Console, title: str, total: int, done: int = 0) -> Progress:
    """Draw a bar over rounds, with room for ``details`` behind it; :meth:`stop` puts it away."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.1f} rounds/s" if speed else "")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[details]}", markup=False),
    )
    bar = Progress(*columns, console=console, transient=True)
    bar.add_task(title, total=total, completed=done, details="")
    bar.start()
    return bar


def tabulate_clients(histories: dict[str, History], title: str = "") -> Table:
    """Return a table: a row per client, a column per run, the average and the worst below.

    The metric is the first run's main one; beside accuracies stands the share of every client's
    majority class, and beside a single run its further metrics. Of more than forty clients only the
    worst of the last run are shown.
    """
    from rich.table import Table
    from rich.text import Text

    first = next(iter(histories.values()))
    chosen = first.main_metric()
    assert chosen is not None
    metric, split = chosen
    higher = find_metric(metric).higher_is_better
    table = Table(title=title or f"{split} {find_metric(metric).label} per client")
    beside = _list_beside(first, metric, split, further=len(histories) == 1)
    table.add_column("client")
    for name in (*histories, *(label for label, _ in beside)):
        table.add_column(Text(show_text(name)), justify="right")
    columns = [history.per_client(metric, split) for history in histories.values()]
    worst = [(min if higher else max)(c, key=c.__getitem__, default="") for c in columns]
    rows = list(first.names)
    if len(rows) > SHOWN_CLIENTS:
        sign, last = find_metric(metric).sign, columns[-1]
        rows.sort(key=lambda name: sign * last.get(name, sign * np.inf))
    for client in rows[:SHOWN_CLIENTS]:
        cells = [
            Text(format_metric(c.get(client), metric), style="bold" if client == w else "")
            for c, w in zip(columns, worst, strict=True)
        ]
        others = (texts.get(client, "-") for _, texts in beside)
        table.add_row(Text(show_text(client)), *cells, *others)
    if len(rows) > SHOWN_CLIENTS:
        table.add_row(f"and {len(rows) - SHOWN_CLIENTS} better served")
    table.add_section()
    averages = [float(np.mean(list(c.values()))) if c else None for c in columns]
    lowest = [c.get(w) for c, w in zip(columns, worst, strict=True)]
    table.add_row("average", *(format_metric(value, metric) for value in averages))
    table.add_row("worst", *(format_metric(value, metric) for value in lowest))
    return table


def _list_beside(
    history: History, metric: str, split: str, further: bool
) -> list[tuple[str, dict[str, str]]]:
    """Return further columns: a label, and what stands there for every client that has it."""
    out = []
    details = history.details
    if metric == "accuracy" and details is not None and details.split == split:
        shares = zip(history.names, details.majorities(), strict=True)
        out.append(("majority class", {k: format_metric(v, metric) for k, v in shares}))
    names = dict.fromkeys(r.metric for r in history.metrics if r.split == split) if further else ()
    for name in names:
        if name not in (metric, "loss"):
            values = history.per_client(name, split)
            label = find_metric(name).label
            out.append((label, {k: format_metric(v, name) for k, v in values.items()}))
    return out


def describe_events(history: History) -> list[str]:
    """Return what happened besides rounds: quarantines, guards, warnings, why it stopped."""
    lines = [
        *_describe_clients(history, "quarantine", "was left out of"),
        *_describe_clients(history, "guard", "was kept in bounds in"),
        *(f"client {e['client']} stood out in round {e['round']}: {e['reason']}"
          for e in [e for e in history.events if e["event"] == "watch"][:SHOWN_EVENTS]),
    ]  # fmt: skip
    lines += [f"warning: {e['reason']}" for e in history.events if e["event"] == "warning"]
    stopped = [e for e in history.events if e["event"] == "stopped"]
    lines += [f"stopped after round {e['round']}: {e['reason']}" for e in stopped[-1:]]
    given, proved = history.given_out, history.describe_certificate()
    if given is not None and given.kind != "last":
        lines.append(str(given))
    elif proved is not None and given is not None:
        lines.append(proved)
    return lines


def _describe_clients(history: History, kind: str, fate: str) -> list[str]:
    """Return a line for each client that events of a kind are about, and why it first was."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in history.events:
        if event["event"] == kind:
            found.setdefault(event["client"], []).append(event)
    lines = [
        f"client {client} {fate} {len({e['round'] for e in events})} round(s), first in "
        f"round {events[0]['round']}: {events[0]['reason']}"
        for client, events in found.items()
    ]
    if len(lines) > SHOWN_EVENTS:
        more = len(lines) - SHOWN_EVENTS
        lines = [*lines[:SHOWN_EVENTS], f"and {more} more clients; see events.jsonl"]
    return lines
