"""What a run folder holds: the names of its files, their records, and how they are read."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import platform
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Index, Losses, Weights, to_cell
from equifed.contract.evaluation import Details, Hits
from equifed.metrics.metric import find_metric
from equifed.training.files import Damaged, RunFolderError, StoredRun, reading

TABLES = {
    "rounds.csv": (
        "round", "objective", "exchanges", "bytes_up", "bytes_down", "seconds", "numbers", "clients"
    ),
    "metrics.csv": ("round", "client", "split", "metric", "value", "n"),
    "weights.csv": ("round", "client", "lambda"),
}  # fmt: skip
CLIENTS, EVENTS, SUMMARY, CHECKSUMS = (
    "clients.json", "events.jsonl", "summary.json", "checksums.json"
)  # fmt: skip
MODEL, OWN, HITS, DETAILS = "model.safetensors", "own.safetensors", "hits.npz", "details.json"
ALONE = "alone.csv"
# Files that are written whole, by the field of the history that they hold
PARTS = {
    "hits": HITS, "details": DETAILS, "alone": ALONE, "without_own": "without_own.csv",
    "average": "average.csv", "parameters": MODEL, "own": OWN,
}  # fmt: skip
CONFIG, RUN, PREPARATION, SPLIT = "config.toml", "run.json", "preparation.json", "split.csv"
# Of a signed folder, and of an evidence pack
SIGNATURE, SUMS, SUMS_SIGNATURE = "signature.json", "SHA256SUMS", "SHA256SUMS.signature"
DESCRIBED = (CONFIG, RUN, PREPARATION, SPLIT)
# What the checksums of a complete run are of, where it is there
FILES = (*TABLES, EVENTS, CLIENTS, *PARTS.values(), *DESCRIBED)

FORMAT = 2  # of run folders and checkpoints; those of version 0.1 carry no number
# What an event must have, by its kind
TOLD = {
    **dict.fromkeys(("quarantine", "guard", "watch"), ("client", "round", "reason")),
    **dict.fromkeys(("warning", "note", "stopped"), ("reason",)),
}
PACKAGES = ("equifed", "torch", "numpy", "scipy")  # what numbers depend on


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


# -- rounds, metrics, weights, events -----------------------------------------------------------


@dataclass(frozen=True)
class RoundRecord:
    """One line of ``rounds.csv``: what a round cost and where the objective stood before it."""

    round: int
    objective: float | None
    exchanges: int
    bytes_up: int
    bytes_down: int
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)
    clients: tuple[int, ...] | None = None  # positions of those who took part; None: all

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
        wrong = np.flatnonzero((self.values < 0) | (self.values > 1 + 1e-9))
        if find_metric(self.metric).is_fraction and len(wrong):
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


@dataclass(frozen=True)
class GivenOut:
    """What a run gave out; see ``give_out`` of :func:`equifed.train` for the kinds."""

    kind: Literal["last", "certified", "average", "validation"]
    round: int  # it is the model after this many rounds
    gap: float | None = None
    distance: float | None = None
    objective: float | None = None
    capped: bool = False  # the gap says no more than that objectives have a smallest value

    def __post_init__(self) -> None:
        numbers = (self.gap, self.distance, self.objective)
        kinds = ("last", "certified", "average", "validation")
        whole = isinstance(self.round, int) and isinstance(self.capped, bool)
        right = whole and all(isinstance(x, int | float | None) for x in numbers)
        if not right or self.kind not in kinds or (self.kind == "certified" and self.gap is None):
            raise ValueError(f"it returned {str(self.kind)[:60]!r}, which no run does")

    def __str__(self) -> str:
        which = {
            "last": f"the last model, that of round {self.round}",
            "average": f"the mean of the models up to round {self.round}, later ones weighted more",
        }
        why = "whose worst client is served best on validation data"
        why = self.proof() if self.kind == "certified" else why
        return f"returned {which.get(self.kind, f'the model of round {self.round}, {why}')}"

    def proof(self) -> str:
        """Say what its certificate proves."""
        if self.capped:
            itself = "itself" if self.objective is None else f"itself, {self.objective:.3g}"
            return (
                f"nothing is proved yet: the bound on the gap is not below the objective {itself}"
            )
        assert self.gap is not None
        share = f"{self.gap:.3g}"
        if self.objective:
            share = f"{100 * self.gap / abs(self.objective):.2g} % ({self.gap:.3g})"
        return f"proved to be within {share} of the optimum"


def certified(record: RoundRecord) -> GivenOut:
    """Return what a round with a certificate proves about the model that it started from."""
    gap, distance = record.numbers["gap"], record.numbers.get("distance")
    capped = "uncapped_gap" in record.numbers
    return GivenOut("certified", record.round - 1, gap, distance, record.objective, capped)


def read_names(run: StoredRun) -> tuple[str, ...]:
    """Return the clients of ``clients.json``."""
    names = run.json(CLIENTS, list)
    if not all(isinstance(name, str) for name in names):
        raise Damaged(f"{run / CLIENTS} is damaged: it does not hold a list of names.")
    return tuple(names)


def read_rounds(run: StoredRun) -> list[RoundRecord]:
    """Return the records of ``rounds.csv``."""
    with reading(run / "rounds.csv"):
        return [RoundRecord.from_row(row) for row in _read_rows(run, "rounds.csv")]


def read_metrics(
    run: StoredRun, names: Sequence[str], table: str = "metrics.csv"
) -> list[MetricRecord]:
    """Return the records of ``metrics.csv``, or of another table of its form."""
    position = {to_cell(name): i for i, name in enumerate(names)}
    records: dict[tuple[int, str, str], MetricRecord] = {}
    with reading(run / table):
        for round, client, split, metric, value, n in _read_rows(run, table):
            key = (int(round), split, metric)
            if key not in records:
                empty = np.full(len(names), np.nan), np.zeros(len(names), dtype=np.int64)
                records[key] = MetricRecord(*key, *empty)
            records[key].values[position[client]] = float(value)
            records[key].sizes[position[client]] = int(n)
    return list(records.values())


def read_weights(run: StoredRun, names: Sequence[str]) -> dict[int, Weights]:
    """Return the weights of ``weights.csv`` by round."""
    position = {to_cell(name): i for i, name in enumerate(names)}
    weights: dict[int, Weights] = {}
    with reading(run / "weights.csv"):
        for round, client, weight in _read_rows(run, "weights.csv"):
            weights.setdefault(int(round), np.zeros(len(names)))[position[client]] = float(weight)
    return weights


def read_events(run: StoredRun) -> list[dict[str, Any]]:
    """Return the events of ``events.jsonl``."""
    with reading(run / EVENTS):
        events = [json.loads(line) for line in _whole_lines(run, EVENTS).split("\n") if line]
        for event in events:
            needed = ("event", *TOLD.get(str(event["event"]), ()))
            for key, kind in {"event": str, "reason": str, "client": str, "round": int}.items():
                if not isinstance(event.get(key), kind if key in needed else kind | None):
                    raise ValueError(f"an event has {str(event.get(key))[:60]!r} as its {key}")
            if event["event"] == "given out":
                _ = GivenOut(**event["given_out"])
        return events


def _read_rows(run: StoredRun, table: str) -> list[list[str]]:
    """Return the whole lines of a CSV file after its header; none if it does not exist."""
    return list(csv.reader(io.StringIO(_whole_lines(run, table))))[1:]


def _whole_lines(run: StoredRun, table: str) -> str:
    """Return a table's text; half a line that a killed run has left is not a record yet."""
    text = run.read(table).decode() if table in run else ""
    return text[: text.rfind("\n") + 1]


def write_rows(rows: Sequence[Sequence[str]]) -> bytes:
    """Return the lines of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


# -- files that are written whole ---------------------------------------------------------------


def pack_part(name: str, part: Any, names: Sequence[str]) -> bytes:
    """Return the content of a file that holds one part of a history."""
    if name.endswith(".csv"):
        return write_rows([TABLES["metrics.csv"], *part.to_rows(names)])
    if name == DETAILS:
        return (json.dumps(part.to_dict()) + "\n").encode()
    if name == HITS:
        return pack_hits(part)
    from safetensors.torch import save

    return save(part)


def read_part(run: StoredRun, name: str, names: Sequence[str] = ()) -> Any:
    """Return what such a file holds; None if it is not there."""
    if name not in run:
        return None
    with reading(run / name):
        if name.endswith(".csv"):
            return next(iter(read_metrics(run, names, name)), None)
        if name == DETAILS:
            return Details.from_dict(run.json(name))
        if name == HITS:
            return unpack_hits(run.read(name))
        from safetensors.torch import load

        return load(run.read(name))


def pack_hits(hits: Mapping[str, Hits]) -> bytes:
    """Return the content of ``hits.npz``: eight samples to a byte."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, found in hits.items():
        arrays[f"{split}/correct"] = np.packbits(found.correct)
        arrays[f"{split}/total"] = np.array(len(found.correct))
        arrays[f"{split}/checksums"] = found.checksums
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def unpack_hits(content: bytes) -> dict[str, Hits]:
    """Read the content of ``hits.npz``."""
    _check_sizes(content)
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        splits = dict.fromkeys(name.partition("/")[0] for name in arrays.files)
        found = {}
        for split in splits:
            packed, total = arrays[f"{split}/correct"], int(arrays[f"{split}/total"])
            if not 0 <= total <= 8 * len(packed):
                raise ValueError(f"{split} says that it has {total} samples")
            correct = np.unpackbits(packed, count=total) > 0
            found[split] = Hits(correct, arrays[f"{split}/checksums"])
        return found


def _check_sizes(content: bytes) -> None:
    """Refuse an ``.npz`` of arrays that are larger than the file, before any is made."""
    with zipfile.ZipFile(io.BytesIO(content)) as pack:
        for info in pack.infolist():
            with pack.open(info) as file:
                np.lib.format.read_magic(file)  # what np.savez writes is of version 1.0
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                told = math.prod(shape) * dtype.itemsize
            stored = info.compress_type == zipfile.ZIP_STORED and info.file_size <= len(content)
            if not stored or told > info.file_size:
                raise ValueError(f"{info.filename} says that it has {told} bytes")
            if info.filename.endswith("/total.npy") and shape:
                raise ValueError(f"{info.filename} is not a number")


# -- what the run was made of -------------------------------------------------------------------


def describe_value(value: Any) -> Any:
    """Return a value in words that JSON has; an object by its class and its fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe_value(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [describe_value(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"name": type(value).__name__, **describe_value(fields)}
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return str(name)  # not repr: it may hold an address in memory


def read_provenance(run: StoredRun) -> dict[str, Any]:
    """Return what a folder tells of its run; nothing if it has no ``run.json``."""
    told = dict(run.json(RUN)) if RUN in run else {}
    if CONFIG not in run:
        return told
    table = run.toml(CONFIG)
    known = {key: table[key] for key in ("seed", "algorithm") if key in table}
    return {**told, **known, "config": table}


def share_of_method(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the runs of one method have in common: all but seed and checksums of files."""
    apart = ("seed", "sha256", CONFIG, "replaced")
    config = {key: value for key, value in told.get("config", {}).items() if key != "seed"}
    return {**{k: v for k, v in told.items() if k not in (*apart, "config")}, "config": config}


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return versions of packages and Python; a missing one is "not installed"."""
    return {**{name: _version(name) for name in packages}, "python": platform.python_version()}


@cache  # reading what is installed takes as long as a round of a small problem
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
