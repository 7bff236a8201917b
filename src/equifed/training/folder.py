"""The folder of a run: tables that grow, checkpoints, and at the end the summary and the model.

Tables are only ever appended to. A checkpoint remembers how long they were, so a resumed run cuts
off what was written after it and goes on to the same bytes that an uninterrupted run writes.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equifed.training.history import (
    METRIC_COLUMNS,
    ROUND_COLUMNS,
    WEIGHT_COLUMNS,
    History,
    MetricRecord,
    RoundRecord,
    metric_rows,
    read_rows,
    weight_rows,
)

TABLES = {
    "rounds.csv": ROUND_COLUMNS,
    "metrics.csv": METRIC_COLUMNS,
    "weights.csv": WEIGHT_COLUMNS,
}
EVENTS = "events.jsonl"


class RunFolderError(RuntimeError):
    """The folder cannot be used, and what to do."""


class RunFolder:
    """Writes one run; see the module's text for how.

    Parameters
    ----------
    path : Path
        The folder.
    names : sequence of str
        The clients.
    """

    def __init__(self, path: str | Path, names: Sequence[str]) -> None:
        self.path, self.names = Path(path), tuple(names)
        self._saved_at = time.monotonic()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoint"

    def create(self, overwrite: bool = False) -> None:
        """Make the folder with empty tables; refuse one that holds a run."""
        if (self.path / "rounds.csv").exists() and not overwrite:
            raise RunFolderError(
                f"{self.path} already holds a run; choose another folder, pass --overwrite to "
                f"replace it, or continue it with: equifed resume {self.path}"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (*TABLES, EVENTS, "summary.json", "model.safetensors"):
            (self.path / name).unlink(missing_ok=True)
        if self.checkpoints.exists():
            for file in self.checkpoints.iterdir():
                file.unlink()
        (self.path / "clients.json").write_text(json.dumps(list(self.names)), encoding="utf-8")
        for name, columns in TABLES.items():
            self._append(name, [list(columns)])
        (self.path / EVENTS).touch()

    def round(self, record: RoundRecord) -> None:
        """Append a round."""
        self._append("rounds.csv", [record.row()])

    def evaluation(self, records: Sequence[MetricRecord]) -> None:
        """Append an evaluation."""
        for record in records:
            self._append("metrics.csv", metric_rows(record, self.names))

    def weights(self, round: int, weights: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Append the clients' weights."""
        self._append("weights.csv", weight_rows(round, weights, self.names))

    def event(self, event: dict[str, Any]) -> None:
        """Append an event; its time is added here."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write(EVENTS, json.dumps({**event, "time": now}) + "\n")

    def due(self, seconds: float) -> bool:
        """Tell whether the last checkpoint is at least that old."""
        return time.monotonic() - self._saved_at >= seconds

    def save(self, round: int, state: Any) -> None:
        """Flush the tables and write a checkpoint."""
        from equifed.training import checkpoints

        lengths = {}
        for name in (*TABLES, EVENTS):
            with (self.path / name).open("ab") as file:
                os.fsync(file.fileno())
                lengths[name] = file.tell()
        checkpoints.save(self.checkpoints, round, state, {"lengths": lengths})
        self._saved_at = time.monotonic()

    def restore(self, template: Any, owner: object) -> tuple[int, Any]:
        """Return round and state of the newest checkpoint, and cut the tables back to it."""
        from equifed.training import checkpoints

        round, state, extra = checkpoints.load(self.checkpoints, template, owner)
        for name in (*TABLES, EVENTS):
            length = extra["lengths"][name]
            if (self.path / name).stat().st_size < length:
                raise RunFolderError(
                    f"{self.path / name} is shorter than its checkpoint says: damaged."
                )
            os.truncate(self.path / name, length)
        return round, state

    def finish(self, history: History) -> None:
        """Write the model and then the summary, whose presence says that the run is complete."""
        from safetensors.torch import save as save_tensors

        from equifed.training.checkpoints import write_file

        if history.parameters is not None:
            write_file(self.path / "model.safetensors", save_tensors(history.parameters))
        summary = json.dumps(history.summary(), indent=2) + "\n"
        write_file(self.path / "summary.json", summary.encode())

    @property
    def complete(self) -> bool:
        """Whether the run has ended."""
        return (self.path / "summary.json").exists()

    def _append(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._write(name, text.getvalue())

    def _write(self, name: str, text: str) -> None:
        with (self.path / name).open("a", encoding="utf-8", newline="") as file:
            file.write(text)


def write_history(history: History, path: Path) -> Path:
    """Write a history that was made without a folder."""
    folder = RunFolder(path, history.names)
    folder.create()
    for record in history.rounds:
        folder.round(record)
    folder.evaluation(history.metrics)
    for round, weights in history.weights.items():
        folder.weights(round, weights)
    for event in history.events:
        folder.event(event)
    folder.finish(history)
    return path


def read_history(path: Path, *, model: bool = True) -> History:
    """Read a run folder, complete or not; the model, which needs torch, only if asked for."""
    if not (path / "rounds.csv").exists():
        raise RunFolderError(f"{path} holds no run: rounds.csv is missing.")
    names = tuple(json.loads((path / "clients.json").read_text(encoding="utf-8")))
    position = {name: i for i, name in enumerate(names)}
    history = History(names)
    history.rounds = [RoundRecord.from_row(row) for row in read_rows(path / "rounds.csv")]
    records: dict[tuple[int, str, str], MetricRecord] = {}
    for round, client, split, metric, value, n in read_rows(path / "metrics.csv"):
        key = (int(round), split, metric)
        if key not in records:
            empty = np.full(len(names), np.nan), np.zeros(len(names), dtype=np.int64)
            records[key] = MetricRecord(*key, *empty)
        records[key].values[position[client]] = float(value)
        records[key].sizes[position[client]] = int(n)
    history.metrics = list(records.values())
    for round, client, weight in read_rows(path / "weights.csv"):
        weights = history.weights.setdefault(int(round), np.zeros(len(names)))
        weights[position[client]] = float(weight)
    events = path / EVENTS
    if events.exists():
        text = events.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        history.events = [json.loads(line) for line in lines if line]
    if model and (path / "model.safetensors").exists():
        from safetensors.torch import load_file

        history.parameters = load_file(path / "model.safetensors")
    return history
