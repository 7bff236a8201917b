"""The tables of a run: what is recorded, and the files of a run folder that hold it.

Tables are only ever appended to; a summary at the end says that the run is complete.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.evaluation import Hits
from equifed.metrics.metric import find_metric
from equifed.training.hits import HITS, pack_hits

if TYPE_CHECKING:
    import torch

FORMAT = 2
"""Of run folders and checkpoints; those of version 0.1 carry no number."""

TABLES = {
    "rounds.csv": (
        "round", "objective", "exchanges", "bytes_up", "bytes_down", "seconds", "numbers", "clients"
    ),
    "metrics.csv": ("round", "client", "split", "metric", "value", "n"),
    "weights.csv": ("round", "client", "lambda"),
}  # fmt: skip
CLIENTS, EVENTS, SUMMARY, MODEL, OWN = (
    "clients.json", "events.jsonl", "summary.json", "model.safetensors", "own.safetensors"
)  # fmt: skip


class RunFolderError(RuntimeError):
    """The folder cannot be used, and what to do."""


@dataclass(frozen=True)
class RoundRecord:
    """One line of ``rounds.csv``: what a round cost and where the objective stood at its start.

    ``clients`` are the positions of those who took part; None means that all did.
    """

    round: int
    objective: float | None
    exchanges: int
    bytes_up: int
    bytes_down: int
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)
    clients: tuple[int, ...] | None = None

    def to_row(self) -> list[str]:
        """Return the line of the CSV file."""
        objective = "" if self.objective is None else repr(self.objective)
        counts = [str(c) for c in (self.exchanges, self.bytes_up, self.bytes_down)]
        numbers = json.dumps(self.numbers, sort_keys=True) if self.numbers else ""
        clients = "" if self.clients is None else " ".join(map(str, self.clients))
        return [str(self.round), objective, *counts, f"{self.seconds:.6f}", numbers, clients]

    @classmethod
    def from_row(cls, row: Sequence[str]) -> RoundRecord:
        """Read the line of the CSV file."""
        objective = float(row[1]) if row[1] else None
        numbers = json.loads(row[6]) if row[6] else {}
        exchanges, up, down = map(int, row[2:5])
        clients = tuple(map(int, row[7].split())) if len(row) > 7 and row[7] else None
        return cls(int(row[0]), objective, exchanges, up, down, float(row[5]), numbers, clients)


@dataclass(frozen=True, eq=False)
class MetricRecord:
    """One metric of all clients on one split after one round; NaN for a client without samples."""

    round: int
    split: str
    metric: str
    values: Losses
    sizes: Index

    def check(self, names: Sequence[str]) -> None:
        """Refuse fractions outside [0, 1]."""
        if not find_metric(self.metric).is_fraction:
            return
        wrong = np.flatnonzero((self.values < 0) | (self.values > 1 + 1e-9))
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(
                f"Client {names[i]} has a {self.split} {self.metric} of {self.values[i]:.6g} after "
                f"round {self.round}; it is a fraction and must lie in [0, 1]: divide percentages "
                "by 100, and counts by the number of samples."
            )

    def to_rows(self, names: Sequence[str]) -> list[list[str]]:
        """Return the lines of ``metrics.csv``; a client without samples in the split has none."""
        head = str(self.round)
        return [
            [head, name, self.split, self.metric, repr(float(value)), str(int(n))]
            for name, value, n in zip(names, self.values, self.sizes, strict=True)
            if n > 0
        ]


class Tables:
    """Writes the tables of one run.

    Parameters
    ----------
    path : Path
        The folder.
    names : sequence of str
        The clients.
    writes : bool
        Whether this process writes anything at all; of several that share a run, one does.
    """

    def __init__(self, path: str | Path, names: Sequence[str], writes: bool = True) -> None:
        self.path, self.names, self.writes = Path(path), tuple(names), writes

    def create(self, overwrite: bool = False) -> None:
        """Make the folder with empty tables; refuse one that holds a run."""
        if not self.writes:
            return
        refuse_existing(self.path, overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (*TABLES, EVENTS, HITS, SUMMARY, MODEL, OWN):
            (self.path / name).unlink(missing_ok=True)
        (self.path / CLIENTS).write_text(json.dumps(list(self.names)), encoding="utf-8")
        for name, columns in TABLES.items():
            self._append(name, [columns])
        (self.path / EVENTS).touch()

    def round(self, record: RoundRecord) -> None:
        """Append a round."""
        self._append("rounds.csv", [record.to_row()])

    def evaluation(self, records: Sequence[MetricRecord]) -> None:
        """Append an evaluation."""
        for record in records:
            self._append("metrics.csv", record.to_rows(self.names))

    def weights(self, round: int, weights: Weights) -> None:
        """Append the clients' weights."""
        pairs = zip(self.names, weights, strict=True)
        self._append("weights.csv", [[str(round), name, repr(float(w))] for name, w in pairs])

    def event(self, event: dict[str, Any]) -> None:
        """Append an event; its time is added here."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write(EVENTS, json.dumps({**event, "time": now}) + "\n")

    def hits(self, hits: Mapping[str, Hits]) -> None:
        """Replace what is known about single samples."""
        if self.writes and hits:
            write_file(self.path / HITS, pack_hits(hits))

    def finish(
        self,
        summary: Mapping[str, Any],
        parameters: dict[str, torch.Tensor] | None,
        own: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the model and then the summary, whose presence says that the run is complete."""
        if not self.writes:
            return
        for name, values in ((MODEL, parameters), (OWN, own)):
            if values is not None:
                from safetensors.torch import save

                write_file(self.path / name, save(values))
        write_file(self.path / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())

    def _append(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._write(name, text.getvalue())

    def _write(self, name: str, text: str) -> None:
        if self.writes:
            with (self.path / name).open("a", encoding="utf-8", newline="") as file:
                file.write(text)


def is_complete(folder: Path) -> bool:
    """Tell whether a folder holds a run that has ended."""
    return (folder / SUMMARY).exists()


def refuse_existing(folder: Path, overwrite: bool, *more: str) -> None:
    """Refuse a folder that cannot be one, or that holds a run: its tables, or one of ``more``."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; choose a folder.")
    if not overwrite and any((folder / name).exists() for name in ("rounds.csv", *more)):
        raise RunFolderError(
            f"{folder} already holds a run; choose another folder, pass --overwrite to replace it, "
            f"or continue it with: equifed resume {folder}"
        )


def check_format(told: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with what another version wrote, given what the file says of itself."""
    found = told.get("format")
    if found == FORMAT:
        return
    who = f"a later equifed (format {found}, known here: {FORMAT})"
    if found is None:
        who = "equifed 0.1, whose names and checkpoints differ"
    raise RunFolderError(
        f"{folder} was written by {who}. It can be read and reported, but not resumed: start it "
        f"again, or resume it with {'0.1' if found is None else 'that version'}."
    )


def read_rows(path: Path) -> list[list[str]]:
    """Return the whole lines of a CSV file after its header; none if it does not exist."""
    return list(csv.reader(io.StringIO(_whole_lines(path))))[1:]


def read_metrics(path: Path, names: Sequence[str]) -> list[MetricRecord]:
    """Return the records of ``metrics.csv``."""
    position = {name: i for i, name in enumerate(names)}
    records: dict[tuple[int, str, str], MetricRecord] = {}
    for round, client, split, metric, value, n in read_rows(path):
        key = (int(round), split, metric)
        if key not in records:
            empty = np.full(len(names), np.nan), np.zeros(len(names), dtype=np.int64)
            records[key] = MetricRecord(*key, *empty)
        records[key].values[position[client]] = float(value)
        records[key].sizes[position[client]] = int(n)
    return list(records.values())


def read_weights(path: Path, names: Sequence[str]) -> dict[int, Weights]:
    """Return the weights of ``weights.csv`` by round."""
    position = {name: i for i, name in enumerate(names)}
    weights: dict[int, Weights] = {}
    for round, client, weight in read_rows(path):
        weights.setdefault(int(round), np.zeros(len(names)))[position[client]] = float(weight)
    return weights


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of ``events.jsonl``."""
    return [json.loads(line) for line in _whole_lines(path).splitlines() if line]


def _whole_lines(path: Path) -> str:
    """Return a table's text; half a line that a killed run has left is not a record yet."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1]


def write_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: temporary name, flush to the disk, rename, flush the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
