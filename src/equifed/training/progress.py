"""What a terminal shows while a run goes on, and when it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.loop import Callback
from equifed.training.notebook import format_metric

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from equifed.contract.algorithm import Info

PLAIN_SECONDS = 10.0
"""Time between two lines where the output is no terminal."""

SHOWN_EVENTS, SHOWN_CLIENTS = 10, 40


class ProgressBar(Callback):
    """Round, objective, worst client, rounds a second and time left; plain lines off a terminal.

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
        self._task: TaskID | None = None
        self._names: tuple[str, ...] = ()
        self._worst, self._rounds = "", 0
        self._said = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def start(self, history: History, rounds: int) -> None:
        """Draw the bar."""
        self._names, self._rounds = history.names, rounds
        if not self._console.is_terminal:
            return
        self._bar = _bar(self._console)
        done = history.rounds[-1].round if history.rounds else 0
        self._task = self._bar.add_task(self._title, total=rounds, completed=done, details="")
        self._bar.start()

    def round(self, record: RoundRecord, info: Info) -> None:
        """Move the bar, or write a line if the last one is some time ago."""
        parts = [] if record.objective is None else [f"objective {record.objective:.4g}"]
        if "gap" in record.numbers:
            parts.append(f"certified gap {record.numbers['gap']:.2g}")
        details = "  ".join([*parts, self._worst])
        if self._bar is not None:
            assert self._task is not None
            self._bar.update(self._task, completed=record.round, details=details)
        elif not self._console.is_terminal and time.monotonic() - self._said >= PLAIN_SECONDS:
            self._said = time.monotonic()
            self._print(f"{self._title}: round {record.round}/{self._rounds}  {details}")

    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        """Remember the worst client, on test data only if nothing else is evaluated."""
        best = {"accuracy": 2, "loss": 0}
        split = {"test": 0, "validation": 1, "train": 0.5}
        found = max(records, key=lambda r: best.get(r.metric, -1) + split.get(r.split, 0))
        if found.metric not in best or np.isnan(found.values).all():
            return
        accuracy = found.metric == "accuracy"
        worst = int(np.nanargmin(found.values) if accuracy else np.nanargmax(found.values))
        value = float(found.values[worst])
        shown = f"{value:.1%}" if accuracy else f"{found.metric} {value:.4g}"
        self._worst = f"worst {self._names[worst]} {shown} ({found.split})"

    def event(self, event: dict[str, Any]) -> None:
        """Say that a client was quarantined or that a run goes on."""
        if event["event"] == "resume":
            self._print(f"{self._title}: going on after round {event['round']}")
        elif event["event"] == "note":
            self._print(f"{self._title}: {event['reason']}")

    def end(self, history: History) -> None:
        """Put the bar away."""
        self.__exit__()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
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

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[details]}", markup=False),
        console=console,
        transient=True,
    )


def clients_table(histories: dict[str, History], title: str = "") -> Table:
    """Return a table: a row per client, a column per run, the average and the worst below.

    The metric is accuracy where there is one, else loss; the split is test where there is one. Of
    more than forty clients only the worst of the last run are shown.
    """
    from rich.table import Table
    from rich.text import Text

    first = next(iter(histories.values()))
    chosen = first.main_metric()
    assert chosen is not None
    metric, split = chosen
    table = Table(title=title or f"{split} {metric} per client", show_footer=False)
    table.add_column("client")
    for name in histories:
        table.add_column(name, justify="right")
    columns = [history.per_client(metric, split) for history in histories.values()]
    worst = [_worst(column, metric) for column in columns]
    rows = list(first.names)
    if len(rows) > SHOWN_CLIENTS:
        sign, last = (1.0 if metric == "accuracy" else -1.0), columns[-1]
        rows.sort(key=lambda name: sign * last.get(name, sign * np.inf))
    for client in rows[:SHOWN_CLIENTS]:
        cells = [
            Text(format_metric(c.get(client), metric), style="bold" if client == w else "")
            for c, w in zip(columns, worst, strict=True)
        ]
        table.add_row(Text(client), *cells)
    if len(rows) > SHOWN_CLIENTS:
        table.add_row(f"and {len(rows) - SHOWN_CLIENTS} better served")
    table.add_section()
    averages = [float(np.mean(list(c.values()))) if c else None for c in columns]
    table.add_row("average", *(format_metric(a, metric) for a in averages))
    lowest = [c.get(w) if w else None for c, w in zip(columns, worst, strict=True)]
    table.add_row("worst", *(format_metric(value, metric) for value in lowest))
    return table


def _worst(clients: dict[str, float], metric: str) -> str | None:
    pick = min if metric == "accuracy" else max
    return pick(clients, key=lambda name: clients[name]) if clients else None


def event_lines(history: History) -> list[str]:
    """Return what happened besides rounds: quarantines by client, and why the run stopped."""
    quarantined: dict[str, list[dict[str, Any]]] = {}
    for event in history.events:
        if event["event"] == "quarantine":
            quarantined.setdefault(event["client"], []).append(event)
    lines = [
        f"client {client} was left out of {len({e['round'] for e in events})} round(s), first in "
        f"round {events[0]['round']}: {events[0]['reason']}"
        for client, events in quarantined.items()
    ]
    if len(lines) > SHOWN_EVENTS:
        more = len(lines) - SHOWN_EVENTS
        lines = [*lines[:SHOWN_EVENTS], f"and {more} more clients; see events.jsonl"]
    stopped = [e for e in history.events if e["event"] == "stopped"]
    return [*lines, *(f"stopped after round {e['round']}: {e['reason']}" for e in stopped[-1:])]
