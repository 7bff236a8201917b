"""The tables of a run: what is recorded, and the files of a run folder that hold it.

Tables are only ever appended to; a summary at the end says that the run is complete.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.evaluation import Details, Hits
from equifed.contract.names import to_cell
from equifed.metrics.metric import find_metric
from equifed.training.files import (
    Damaged,
    RunFolderError,
    check_file,
    digest,
    read_json,
    read_sealed,
    refuse_links,
    seal,
    write_file,
)
from equifed.training.hits import HITS, pack_hits
from equifed.training.provenance import CONFIG, FORMAT, PREPARATION, RUN

if TYPE_CHECKING:
    import torch

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
CHECKSUMS, DETAILS = "checksums.json", "details.json"
ALONE, WITHOUT_OWN = "alone.csv", "without_own.csv"
FILES = (
    *TABLES, EVENTS, CLIENTS, MODEL, OWN, HITS, DETAILS, ALONE, WITHOUT_OWN, CONFIG, RUN,
    PREPARATION,
)  # fmt: skip
"""What the checksums of a complete run are of, where it is there."""


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
    """One metric of all clients on one split after one round; NaN where it is not defined."""

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
            [head, to_cell(name), self.split, self.metric, repr(float(value)), str(int(n))]
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
        self._sums = {name: hashlib.sha256() for name in (*TABLES, EVENTS)}

    def create(self, overwrite: bool = False) -> None:
        """Make the folder with empty tables; refuse one that holds a run."""
        if not self.writes:
            return
        refuse_existing(self.path, overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (
            *TABLES,
            EVENTS,
            HITS,
            DETAILS,
            ALONE,
            WITHOUT_OWN,
            SUMMARY,
            CHECKSUMS,
            MODEL,
            OWN,
        ):
            (self.path / name).unlink(missing_ok=True)
        (self.path / CLIENTS).write_text(json.dumps(list(self.names)), encoding="utf-8")
        self._sums = {name: hashlib.sha256() for name in (*TABLES, EVENTS)}
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
        self._append(
            "weights.csv", [[str(round), to_cell(name), repr(float(w))] for name, w in pairs]
        )

    def event(self, event: dict[str, Any]) -> None:
        """Append an event; its time is added here."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write(EVENTS, json.dumps({**event, "time": now}) + "\n")

    def hits(self, hits: Mapping[str, Hits]) -> None:
        """Replace what is known about single samples."""
        if self.writes and hits:
            write_file(self.path / HITS, pack_hits(hits))

    def details(self, details: Details | None) -> None:
        """Write what single samples say about the model that was given out."""
        if self.writes and details is not None:
            write_file(self.path / DETAILS, json.dumps(details.to_dict()).encode() + b"\n")

    def alone(self, record: MetricRecord | None) -> None:
        """Write what the clients would have with models of their own, as in ``metrics.csv``."""
        self._replace(ALONE, record)

    def without_own(self, record: MetricRecord | None) -> None:
        """Write what the clients would have without their own parts, as in ``metrics.csv``."""
        self._replace(WITHOUT_OWN, record)

    def _replace(self, name: str, record: MetricRecord | None) -> None:
        if self.writes and record is not None:
            (self.path / name).unlink(missing_ok=True)
            self._append(name, [TABLES["metrics.csv"], *record.to_rows(self.names)])

    def finish(
        self,
        summary: Mapping[str, Any],
        parameters: dict[str, torch.Tensor] | None,
        own: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the model and then the summary, whose presence says that the run is complete.

        Before it come the checksums of all files of the run.
        """
        if not self.writes:
            return
        for name, values in ((MODEL, parameters), (OWN, own)):
            if values is not None:
                from safetensors.torch import save

                write_file(self.path / name, save(values))
        content = (json.dumps(summary, indent=2) + "\n").encode()
        there = (name for name in FILES if (self.path / name).exists())
        sums = {name: digest((self.path / name).read_bytes()) for name in there}
        write_file(self.path / CHECKSUMS, seal({**sums, SUMMARY: digest(content)}))
        write_file(self.path / SUMMARY, content)

    def _append(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._write(name, text.getvalue())

    def _write(self, name: str, text: str) -> None:
        if self.writes:
            content = text.encode()
            with (self.path / name).open("ab") as file:
                file.write(content)
            if name in self._sums:
                self._sums[name].update(content)


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
    if any((folder / name).exists() for name in ("rounds.csv", *more)):
        refuse_links(folder)  # what replaces the run would be written through them


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


def check_folder(folder: Path) -> None:
    """Refuse a folder with a file that is not what a run wrote.

    A complete run has checksums of everything; one that was interrupted has them for its tables up
    to a checkpoint. Those of version 0.1 have none.
    """
    if is_complete(folder):
        summary = read_json(folder / SUMMARY)
        if not (folder / CHECKSUMS).exists() and "format" not in summary:
            return
        for name, expected in read_sealed(folder / CHECKSUMS).items():
            _check_name(name, (*FILES, SUMMARY), folder / CHECKSUMS)
            check_file(folder / name, expected)
        return
    for path in sorted((folder / "checkpoint").glob("*.json"), reverse=True):
        try:
            manifest = read_sealed(path)
        except Damaged:
            continue  # damaged, or of version 0.1; an older one may do
        check_tables(folder, manifest["extra"])
        return


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model.safetensors``."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged: it cannot be read ({error}).") from None


def check_tables(folder: Path, extra: Mapping[str, Any]) -> None:
    """Refuse tables that do not begin with what they held at a checkpoint."""
    for name, length in extra["lengths"].items():
        _check_name(name, (*TABLES, EVENTS), folder)
        check_file(folder / name, extra["sums"][name], length)


def _check_name(name: str, known: Sequence[str], where: Path) -> None:
    """Refuse a name that is no file of a run: it might lead out of the folder."""
    if name not in known:
        raise Damaged(f"{where} is damaged: it has a checksum of {name!r}, which no run writes.")


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a table of wrong content may raise."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a table into one error that names it."""
    try:
        yield
    except UNREADABLE as error:
        reason = str(error) or type(error).__name__
        raise Damaged(f"{path} is damaged: it cannot be read ({reason}).") from None
    except csv.Error as error:
        raise Damaged(f"{path} is damaged: it cannot be read ({error}).") from None


def read_names(path: Path) -> tuple[str, ...]:
    """Return the clients of ``clients.json``."""
    names = read_json(path, list)
    if not all(isinstance(name, str) for name in names):
        raise Damaged(f"{path} is damaged: it does not hold a list of names.")
    return tuple(names)


def read_rounds(path: Path) -> list[RoundRecord]:
    """Return the records of ``rounds.csv``."""
    with _reading(path):
        return [RoundRecord.from_row(row) for row in _read_rows(path)]


def _read_rows(path: Path) -> list[list[str]]:
    """Return the whole lines of a CSV file after its header; none if it does not exist."""
    return list(csv.reader(io.StringIO(_whole_lines(path))))[1:]


def read_metrics(path: Path, names: Sequence[str]) -> list[MetricRecord]:
    """Return the records of ``metrics.csv``."""
    position = {to_cell(name): i for i, name in enumerate(names)}
    records: dict[tuple[int, str, str], MetricRecord] = {}
    with _reading(path):
        for round, client, split, metric, value, n in _read_rows(path):
            key = (int(round), split, metric)
            if key not in records:
                empty = np.full(len(names), np.nan), np.zeros(len(names), dtype=np.int64)
                records[key] = MetricRecord(*key, *empty)
            records[key].values[position[client]] = float(value)
            records[key].sizes[position[client]] = int(n)
    return list(records.values())


def read_details(path: Path) -> Details | None:
    """Return what single samples say; None: it was not asked."""
    if not path.exists():
        return None
    told = read_json(path)
    with _reading(path):
        return Details.from_dict(told)


def read_weights(path: Path, names: Sequence[str]) -> dict[int, Weights]:
    """Return the weights of ``weights.csv`` by round."""
    position = {to_cell(name): i for i, name in enumerate(names)}
    weights: dict[int, Weights] = {}
    with _reading(path):
        for round, client, weight in _read_rows(path):
            weights.setdefault(int(round), np.zeros(len(names)))[position[client]] = float(weight)
    return weights


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of ``events.jsonl``."""
    with _reading(path):
        events = [json.loads(line) for line in _whole_lines(path).split("\n") if line]
        return [{**event, "event": str(event["event"])} for event in events]


def _whole_lines(path: Path) -> str:
    """Return a table's text; half a line that a killed run has left is not a record yet."""
    text = path.read_bytes().decode() if path.exists() else ""
    return text[: text.rfind("\n") + 1]
