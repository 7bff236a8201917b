"""What the server app says: Flower carries its lines to whoever follows the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from equifed.contract.algorithm import Info
from equifed.flower.hello import StartError
from equifed.flower.joining import JOINS
from equifed.training.folder import RunFolder
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.play_round import TrainingError
from equifed.training.trackers import Callback

GOOD_EVENTS = ("given out", "resume", "stop")
"""Events that are no warning."""


def say(text: str) -> None:
    """Print a line; Flower carries it to whoever follows the run."""
    print(f"equifed: {text}", flush=True)


def explain_end(error: Exception) -> str:
    """Return the reason of an end on one line: our own words, or what went wrong unexpectedly."""
    text = " ".join(str(error).split())
    ours = isinstance(error, StartError | TrainingError | ValueError | RuntimeError)
    return text if ours and text else f"{type(error).__name__}: {text}"


class RoundLog(Callback):
    """Says in the log how the run goes, and writes down who is left out of it.

    Parameters
    ----------
    events : list of dict
        What was noticed about clients since it was last read.
    folder : RunFolder, optional
        Where events are kept.
    """

    def __init__(
        self, events: list[dict[str, Any]] | None = None, folder: RunFolder | None = None
    ) -> None:
        self.events, self.folder = [] if events is None else events, folder
        self.history: History | None = None

    @override
    def start(self, history: History, rounds: int) -> None:
        self.history = history
        say(f"{rounds} rounds with {', '.join(history.names)}")
        self._take_events(history.rounds[-1].round if history.rounds else 0)

    def _take_events(self, r: int) -> None:
        while self.events and self.history is not None:
            event = {"round": r, **self.events.pop(0)}
            self.history.events.append(event)
            if self.folder is not None:
                self.folder.event(event)
            self.event(event)

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        self._take_events(record.round)
        objective = "" if record.objective is None else f" objective {record.objective:.6g},"
        cost = f"{record.exchanges} exchanges, {record.seconds:.1f} s"
        say(f"round {record.round}:{objective} {cost}")

    @override
    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        self._take_events(round)

    @override
    def event(self, event: dict[str, Any]) -> None:
        kind, good = str(event["event"]), JOINS in str(event.get("reason"))
        told = "" if good or kind in GOOD_EVENTS else "WARNING: "
        who = f" of {event['client']}" if event.get("client") else ""
        why = f": {event['reason']}" if event.get("reason") else ""
        say(f"{told}round {event.get('round', 0)}: {kind}{who}{why}")
