"""A look at a run while it goes on, from its folder alone: another process writes it."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from equifed.metrics.metric import find_metric
from equifed.training.files import RunFolderError, is_worked_on, refuse_links
from equifed.training.folder import is_complete
from equifed.training.history import History
from equifed.training.show import format_metric
from equifed.training.tables import (
    CLIENTS,
    CONFIG,
    EVENTS,
    read_events,
    read_metrics,
    read_names,
    read_rounds,
)

__all__ = ["Look", "follow", "look_at"]

FEDERATION = "flower.json"
Stage = Literal["running", "complete", "interrupted"]


@dataclass(frozen=True, eq=False)
class Look:
    """What a folder tells at one moment.

    Attributes
    ----------
    stage : {"running", "complete", "interrupted"}
        Whether somebody works on it; a real federation's server does not say so, and counts as
        running until it has ended.
    planned : int, optional
        Rounds of its configuration; None where there is none.
    history : History
        Rounds, metrics and events so far, without weights.
    """

    stage: Stage
    planned: int | None
    history: History

    @property
    def round(self) -> int:
        """The last round that is recorded."""
        return self.history.rounds[-1].round if self.history.rounds else 0

    def describe_objective(self) -> str:
        """Return where the objective stood when the last round began."""
        known = [r.objective for r in self.history.rounds if r.objective is not None]
        return f"{known[-1]:.6g}" if known else "not known"

    def describe_gap(self) -> str:
        """Return the newest certificate, or why there is none."""
        last = self.history.rounds[-1].numbers if self.history.rounds else {}
        if "gap" in last:
            return f"{last['gap']:.3g}" + (", nothing proved yet" if "uncapped_gap" in last else "")
        found = self.history.certificate()
        return found if isinstance(found, str) else "none in this round"

    def describe_worst(self) -> str:
        """Return who is served worst, how well, and when that was measured."""
        chosen = self.history.main_metric()
        record = None if chosen is None else self.history.last(*chosen)
        if record is None or np.isnan(record.values).all():
            return "not evaluated yet"
        sign = find_metric(record.metric).sign
        worst = int(np.nanargmin(sign * record.values))
        value = format_metric(float(record.values[worst]), record.metric)
        name = self.history.names[worst]
        return f"{name}: {value} ({record.split} {record.metric} after round {record.round})"

    def list_missing(self) -> list[str]:
        """Return who gave no usable answer in the last round."""
        found = (
            str(e.get("client"))
            for e in self.history.events
            if e["event"] == "quarantine" and e.get("round") == self.round
        )
        return list(dict.fromkeys(found))

    def describe_missing(self) -> str:
        """Return who is missing, and who else did not take part."""
        missing = self.list_missing()
        part = self.history.rounds[-1].clients if self.history.rounds else None
        asked = "" if part is None else f" ({len(part)} of {len(self.history.names)} took part)"
        return (", ".join(missing) or "nobody") + asked

    def to_line(self) -> str:
        """Return the look in one line."""
        of = "" if self.planned is None else f"/{self.planned}"
        return (
            f"round {self.round}{of}  objective {self.describe_objective()}  gap "
            f"{self.describe_gap()}  worst {self.describe_worst()}  missing "
            f"{self.describe_missing()}"
        )


def look_at(folder: str | Path) -> Look:
    """Read what a run has written so far; half a line is not a record yet."""
    path = Path(folder)
    if not (path / "rounds.csv").exists():
        raise RunFolderError(
            f"{path} holds no run yet: rounds.csv is missing. Start it with: equifed run CONFIG "
            f"--out {path}"
        )
    refuse_links(path)
    busy = is_worked_on(path) or (path / FEDERATION).exists()  # asked first: it may end now
    stage: Stage = "complete" if is_complete(path) else "running" if busy else "interrupted"
    names = read_names(path / CLIENTS)
    history = History(
        names,
        read_rounds(path / "rounds.csv"),
        read_metrics(path / "metrics.csv", names),
        events=read_events(path / EVENTS),
    )
    return Look(stage, _read_rounds_planned(path / CONFIG), history)


def _read_rounds_planned(path: Path) -> int | None:
    try:
        planned: Any = tomllib.loads(path.read_text(encoding="utf-8")).get("rounds")
    except (OSError, ValueError):
        return None
    return planned if isinstance(planned, int) else None


def follow(
    folder: str | Path, every: float = 1.0, wait: Callable[[float], object] = time.sleep
) -> Iterator[Look]:
    """Look again and again, until the run has ended or nobody works on it any more."""
    while True:
        look = look_at(folder)
        yield look
        if look.stage != "running":
            return
        wait(every)
