"""What happened in a run: rounds, per-client metrics, weights, events, and the final model."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.metrics.metric import METRICS, find_metric

if TYPE_CHECKING:
    import torch

    from equifed.contract.evaluation import Evaluation

ROUND_COLUMNS = (
    "round", "objective", "exchanges", "bytes_up", "bytes_down", "seconds", "numbers", "clients"
)  # fmt: skip
METRIC_COLUMNS = ("round", "client", "split", "metric", "value", "n")
WEIGHT_COLUMNS = ("round", "client", "lambda")


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

    def row(self) -> list[str]:
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


@dataclass
class History:
    """A run, as it is recorded; :func:`equifed.train` returns one and a run folder holds one.

    Attributes
    ----------
    names : tuple of str
        The clients.
    rounds : list of RoundRecord
    metrics : list of MetricRecord
    weights : dict of arrays
        Client weights by round, kept at the rounds that were evaluated.
    events : list of dict
        Quarantines, missing clients, resumes, and why the run stopped.
    parameters : dict of tensors, optional
        The final model by parameter name.
    """

    names: tuple[str, ...]
    rounds: list[RoundRecord] = field(default_factory=list)
    metrics: list[MetricRecord] = field(default_factory=list)
    weights: dict[int, Weights] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] | None = None

    def add_evaluation(self, round: int, evaluations: Sequence[Evaluation]) -> list[MetricRecord]:
        """Record an evaluation after a round, and return the new records."""
        new = [
            MetricRecord(round, e.split, metric, values, e.sizes)
            for e in evaluations
            for metric, values in e.metrics.items()
        ]
        self.metrics.extend(new)
        return new

    def last(self, metric: str = "accuracy", split: str = "test") -> MetricRecord | None:
        """Return the newest record of a metric on a split."""
        for record in reversed(self.metrics):
            if record.metric == metric and record.split == split:
                return record
        return None

    def series(self, metric: str = "accuracy", split: str = "test") -> tuple[Index, Losses]:
        """Return the evaluated rounds (k,) and the clients' values (k, N)."""
        found = [r for r in self.metrics if r.metric == metric and r.split == split]
        rounds = np.array([r.round for r in found], dtype=np.int64)
        return rounds, np.array([r.values for r in found]).reshape(len(found), len(self.names))

    def per_client(self, metric: str = "accuracy", split: str = "test") -> dict[str, float]:
        """Return the newest value of a metric for every client that has one."""
        record = self.last(metric, split)
        if record is None:
            return {}
        values = zip(self.names, record.values, strict=True)
        return {name: float(value) for name, value in values if not np.isnan(value)}

    def main_metric(self) -> tuple[str, str] | None:
        """Return the metric and split to show: accuracy before loss, test before others."""
        for metric in METRICS:
            for split in ("test", "validation", "train"):
                if self.last(metric, split) is not None:
                    return metric, split
        return None

    def summary(self) -> dict[str, Any]:
        """Return the run in a few numbers: its cost, each metric's average and worst client."""
        out: dict[str, Any] = {
            "clients": len(self.names),
            "rounds": self.rounds[-1].round if self.rounds else 0,
            "objective": next(
                (r.objective for r in reversed(self.rounds) if r.objective is not None), None
            ),
            "exchanges": sum(r.exchanges for r in self.rounds),
            "bytes_up": sum(r.bytes_up for r in self.rounds),
            "bytes_down": sum(r.bytes_down for r in self.rounds),
            "quarantines": sum(e["event"] == "quarantine" for e in self.events),
            "certificate": self.certificate(),
            "metrics": {},
        }
        for split, metric in dict.fromkeys((r.split, r.metric) for r in self.metrics):
            out["metrics"].setdefault(split, {})[metric] = self._spread(metric, split)
        return out

    def certificate(self) -> dict[str, float] | str | None:
        """Return the smallest certified gap with its round, or why there is none, if known."""
        proved = [r for r in self.rounds if "gap" in r.numbers]
        if proved:
            best = min(proved, key=lambda r: r.numbers["gap"])
            held = {k: v for k, v in best.numbers.items() if k in ("gap", "distance")}
            return {"round": best.round, **held}
        notes = (e["reason"] for e in self.events if e["event"] == "note")
        return next((note for note in notes if note.startswith("no certificate")), None)

    def _spread(self, metric: str, split: str) -> dict[str, Any]:
        record = self.last(metric, split)
        assert record is not None
        clients = self.per_client(metric, split)
        if not clients:
            return {"average": None, "worst": None, "worst_client": None, "round": record.round}
        worst = min(clients, key=lambda name: find_metric(metric).sign * clients[name])
        return {
            "average": float(np.mean(list(clients.values()))),
            "worst": clients[worst],
            "worst_client": worst,
            "round": record.round,
        }

    def save(self, folder: str | Path) -> Path:
        """Write the run's tables and model into a folder, in the form of a run folder."""
        from equifed.training.folder import write_history

        return write_history(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, *, model: bool = True) -> History:
        """Read a run folder; without its model where that is not needed."""
        from equifed.training.folder import read_history

        return read_history(Path(folder), model=model)


def metric_rows(record: MetricRecord, names: Sequence[str]) -> list[list[str]]:
    """Return the lines of ``metrics.csv``; a client without samples in the split has none."""
    head = str(record.round)
    return [
        [head, name, record.split, record.metric, repr(float(value)), str(int(n))]
        for name, value, n in zip(names, record.values, record.sizes, strict=True)
        if n > 0
    ]


def weight_rows(round: int, weights: Weights, names: Sequence[str]) -> list[list[str]]:
    """Return the lines of ``weights.csv``."""
    return [[str(round), name, repr(float(w))] for name, w in zip(names, weights, strict=True)]


def read_rows(path: Path) -> list[list[str]]:
    """Return the whole lines of a CSV file after its header; none if it does not exist.

    A run that was killed may have left half a line at the end; it is not a record yet.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))[1:]
