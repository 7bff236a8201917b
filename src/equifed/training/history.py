"""What happened in a run: rounds, per-client metrics, weights, events, and the final model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.metrics.metric import METRICS, find_metric
from equifed.training import tables
from equifed.training.given_out import GivenOut, certified
from equifed.training.hits import HITS, read_hits
from equifed.training.notebook import render_clients
from equifed.training.tables import MetricRecord, RoundRecord, RunFolderError

if TYPE_CHECKING:
    import torch

    from equifed.contract.evaluation import Evaluation, Hits

__all__ = ["History", "MetricRecord", "RoundRecord"]


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
        Quarantines, missing clients, resumes, warnings, why the run stopped, what it gave out.
    parameters : dict of tensors, optional
        The model that was given out by parameter name.
    hits : dict of Hits
        By split, which samples the model of the last evaluation answers correctly.

    A round's record tells of the model that the round started from. The weights and metrics of a
    round are of the model after it; those of the last round are of the model that was given out.
    """

    names: tuple[str, ...]
    rounds: list[RoundRecord] = field(default_factory=list)
    metrics: list[MetricRecord] = field(default_factory=list)
    weights: dict[int, Weights] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] | None = None
    hits: dict[str, Hits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that no client can have, as an accuracy of 7.0."""
        for record in self.metrics:
            record.check(self.names)

    def add_evaluation(self, round: int, evaluations: Sequence[Evaluation]) -> list[MetricRecord]:
        """Record an evaluation after a round, and return the new records."""
        new = [
            MetricRecord(round, e.split, metric, values, e.sizes)
            for e in evaluations
            for metric, values in e.metrics.items()
        ]
        for record in new:
            record.check(self.names)
        self.metrics.extend(new)
        self.hits = {e.split: e.hits for e in evaluations if e.hits is not None}
        return new

    def evaluation(self, round: int) -> list[MetricRecord]:
        """Return the newest evaluation if it is of this round."""
        newest = itertools.takewhile(lambda record: record.round == round, reversed(self.metrics))
        return list(newest)[::-1]

    def forget_evaluation(self, round: int) -> None:
        """Forget the newest evaluation if it is of this round: another model takes its place."""
        del self.metrics[len(self.metrics) - len(self.evaluation(round)) :]

    @property
    def given_out(self) -> GivenOut | None:
        """What the run gave out; None as long as it has not ended."""
        found = (e["given_out"] for e in reversed(self.events) if e["event"] == "given out")
        told = next(found, None)
        return None if told is None else GivenOut(**told)

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
        given = self.given_out
        out: dict[str, Any] = {
            "clients": len(self.names),
            "rounds": self.rounds[-1].round if self.rounds else 0,
            "given_out": None if given is None else asdict(given),
            "objective": self._objective(),
            "exchanges": sum(r.exchanges for r in self.rounds),
            "bytes_up": sum(r.bytes_up for r in self.rounds),
            "bytes_down": sum(r.bytes_down for r in self.rounds),
            "quarantines": sum(e["event"] == "quarantine" for e in self.events),
            "certificate": self.certificate(),
            "warnings": [e["reason"] for e in self.events if e["event"] == "warning"],
            "metrics": {},
        }
        for split, metric in dict.fromkeys((r.split, r.metric) for r in self.metrics):
            out["metrics"].setdefault(split, {})[metric] = self._spread(metric, split)
        return out

    def certificate(self) -> dict[str, float] | str | None:
        """Return the certificate of the model given out, or why there is none, if known.

        It has a gap, the round of the model (it is the model after so many rounds) and, where it is
        known, a bound on the distance from the best model. Of a run that has not ended it is the
        smallest one so far.
        """
        given = self.given_out
        best = self._smallest_gap() if given is None or given.gap is None else given
        if best is None or best.gap is None:
            notes = (e["reason"] for e in self.events if e["event"] == "note")
            return next((note for note in notes if note.startswith("no certificate")), None)
        if best.capped:
            return f"no certificate: {best.proof()}"
        if given is not None and given is not best:
            return f"no certificate: {given}; that of round {best.round} was {best.proof()}"
        more = {} if best.distance is None else {"distance": best.distance}
        return {"round": best.round, "gap": best.gap, **more}

    def describe_certificate(self) -> str | None:
        """Return in words what is proved about the model given out, or why nothing is."""
        found = self.certificate()
        if not isinstance(found, dict):
            return found
        about = self.given_out
        if about is None or about.gap is None:
            about = self._smallest_gap()
        assert about is not None
        which = "best model so far" if self.given_out is None else "model given out"
        return f"the {which}, that of round {about.round}, is {about.proof()}"

    def _smallest_gap(self) -> GivenOut | None:
        """Return the best certificate of the rounds since the objective has last changed."""
        changed = [i for i, r in enumerate(self.rounds) if "new_objective" in r.numbers]
        since = self.rounds[changed[-1] if changed else 0 :]
        proved = [r for r in since if "gap" in r.numbers]
        best = min(proved, key=lambda r: r.numbers["gap"], default=None)
        return None if best is None else certified(best.round, best.numbers, best.objective)

    def _objective(self) -> float | None:
        """Return the objective of the model given out, or where it stood when it last was known."""
        if self.given_out is not None and self.given_out.objective is not None:
            return self.given_out.objective
        return next((r.objective for r in reversed(self.rounds) if r.objective is not None), None)

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
        out = tables.Tables(folder, self.names)
        out.create()
        for record in self.rounds:
            out.round(record)
        out.evaluation(self.metrics)
        for round, weights in self.weights.items():
            out.weights(round, weights)
        for event in self.events:
            out.event(event)
        out.hits(self.hits)
        out.finish(self.summary(), self.parameters)
        return out.path

    @classmethod
    def load(cls, folder: str | Path, *, model: bool = True) -> History:
        """Read a run folder, complete or not; the model, which needs torch, only if asked for."""
        path = Path(folder)
        if not (path / "rounds.csv").exists():
            raise RunFolderError(f"{path} holds no run: rounds.csv is missing.")
        names = tuple(json.loads((path / tables.CLIENTS).read_text(encoding="utf-8")))
        history = cls(
            names,
            [RoundRecord.from_row(row) for row in tables.read_rows(path / "rounds.csv")],
            tables.read_metrics(path / "metrics.csv", names),
            tables.read_weights(path / "weights.csv", names),
            tables.read_events(path / tables.EVENTS),
            hits=read_hits(path / HITS),
        )
        if model and (path / tables.MODEL).exists():
            from safetensors.torch import load_file

            history.parameters = load_file(path / tables.MODEL)
        return history

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the clients, the worst served first."""
        chosen = self.main_metric()
        record = None if chosen is None else self.last(*chosen)
        return render_clients(self.names, record, len(self.rounds))
