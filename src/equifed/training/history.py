"""What happened in a run: rounds, per-client metrics, weights, events, and the final model."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.evaluation import Details, Evaluation, Hits
from equifed.metrics.metric import METRICS
from equifed.training import show, tables
from equifed.training.files import RunFolderError, StoredRun
from equifed.training.folder import RunFolder, open_run_folder, write_provenance
from equifed.training.tables import GivenOut, MetricRecord, RoundRecord, certified

if TYPE_CHECKING:
    import torch
    from torch import nn

    from equifed.models.predictor import Predictor

HELD = ("test", "validation", "train")  # splits, those that say most about new samples first

__all__ = ["History", "MetricRecord", "RoundRecord"]


@dataclass(repr=False, eq=False)
class History:
    """The record of a run: what :func:`equifed.train` returns and a run folder holds.

    Attributes
    ----------
    names : tuple of str
        The clients.
    rounds : list of RoundRecord
    metrics : list of MetricRecord
    weights : dict of arrays
        Client weights by round, kept in the first round and in those that were evaluated.
    events : list of dict
        Quarantines, missing clients, what guards did and saw, resumes, warnings, why the run
        stopped, what it gave out.
    parameters : dict of tensors, optional
        The model that was given out by parameter name; own parameters are the clients' means.
    own : dict of tensors, optional
        Own parameters of every client by name, clients first: (N, ...). A simulation has them.
    hits : dict of Hits
        By split, which samples the model of the last evaluation answers correctly.
    details : Details, optional
        What single samples say about the model that was given out: limits, groups, calibration.
    alone : MetricRecord, optional
        What every client would have with a model of its own, in the main metric on its split.
    without_own : MetricRecord, optional
        What every client would have with the shared model and the mean of all own parts.
    average : MetricRecord, optional
        What every client would have with the same model solved for the average of the clients.
    provenance : dict
        Seed, algorithm, model, loss, data and versions, as far as they are known.
    trained : Predictor, optional
        What :meth:`predictor` gives, where the engine knew the module.
    folder : Path, optional
        The run folder that the history was read from.

    A round's record tells of the model that the round started from. The weights and metrics of a
    round are of the model after it; those of the last round are of the model that was given out.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedAvg(), clients, rounds=20, evaluate=["test"], every=10)
    >>> history.summary()["metrics"]["test"]["accuracy"]["worst_client"], history.rounds[-1].round
    ('shirt', 20)
    >>> history.series("accuracy", "test")[0]  # the rounds after which it was evaluated
    array([ 0, 10, 20])
    """

    names: tuple[str, ...]
    rounds: list[RoundRecord] = field(default_factory=list)
    metrics: list[MetricRecord] = field(default_factory=list)
    weights: dict[int, Weights] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] | None = None
    hits: dict[str, Hits] = field(default_factory=dict)
    own: dict[str, torch.Tensor] | None = None
    details: Details | None = None
    alone: MetricRecord | None = None
    without_own: MetricRecord | None = None
    average: MetricRecord | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    trained: Any = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that no client can have, as an accuracy of 7.0."""
        beside = (one for one in (self.alone, self.average) if one is not None)
        for record in (*self.metrics, *beside):
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

    def list_events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def given_out(self) -> GivenOut | None:
        """What the run gave out; None as long as it has not ended."""
        told = [event["given_out"] for event in self.list_events("given out")]
        return GivenOut(**told[-1]) if told else None

    @property
    def model(self) -> nn.Module:
        """The module with the weights that were given out."""
        module: nn.Module = self.predictor().module
        return module

    def predictor(self, *, trust: bool = False) -> Predictor:
        """Return what predicts for new rows with the model that was given out.

        Rows are prepared as the training rows were. ``trust``: load the code that the folder of a
        loaded run names; see :func:`equifed.load_predictor`.
        """
        if self.trained is None and self.folder is not None:
            # A run folder describes the module in words that the parts above this one understand.
            load = importlib.import_module("equifed").load_predictor
            self.trained = load(self.folder, trust=trust)
        if self.trained is None:
            raise ValueError(
                "The module is not available: training has not ended, or the engine "
                "knows only vectors. Load `parameters` into your module, or give the run a folder "
                "and use equifed.load_predictor(folder)."
            )
        return cast("Predictor", self.trained)

    def personalise(
        self, data: Any = None, own: str | Sequence[str] = "bias", **options: Any
    ) -> Any:
        """Fit an own part to every client after training; see :func:`equifed.personalise`.

        ``data`` is the federation that the run was trained on; a run folder's configuration loads
        it. The result's ``predictor`` predicts for every client with its own part.
        """
        return importlib.import_module("equifed").personalise(self, data, own, **options)

    def last(self, metric: str | None = None, split: str | None = None) -> MetricRecord | None:
        """Return the newest record of a metric on a split; by default what the run is about."""
        wanted = self._choose(metric, split)
        found = (r for r in reversed(self.metrics) if (r.metric, r.split) == wanted)
        return next(found, None)

    def series(self, metric: str | None = None, split: str | None = None) -> tuple[Index, Losses]:
        """Return the evaluated rounds (k,) and the clients' values (k, N)."""
        wanted = self._choose(metric, split)
        found = [r for r in self.metrics if (r.metric, r.split) == wanted]
        rounds = np.array([r.round for r in found], dtype=np.int64)
        return rounds, np.array([r.values for r in found]).reshape(len(found), len(self.names))

    def per_client(self, metric: str | None = None, split: str | None = None) -> dict[str, float]:
        """Return the newest value of a metric for every client that has one.

        By default of the main metric (accuracy, or else MSE or the loss), on test data if it can.
        """
        record = self.last(metric, split)
        known = {r.metric for r in self.metrics}
        if record is None and metric is not None and known and metric not in known:
            raise ValueError(
                f"{metric} was not evaluated in this run; {', '.join(sorted(known))} were."
            )
        if record is None:
            return {}
        values = zip(self.names, record.values, strict=True)
        return {name: float(value) for name, value in values if not np.isnan(value)}

    def _choose(self, metric: str | None, split: str | None) -> tuple[str, str]:
        """Return metric and split, with what the run is about in place of what is not given."""
        if metric is not None and split is not None:
            return metric, split
        recorded = [(r.metric, r.split) for r in self.metrics]
        known = [r for r in recorded if metric in (None, r[0]) and split in (None, r[1])]
        names = [*METRICS, *dict.fromkeys(name for name, _ in known)]
        order = [(m, s) for m in names for s in HELD if (m, s) in known]
        return order[0] if order else (metric or "", split or "")

    def main_metric(self) -> tuple[str, str] | None:
        """Return the metric and split to show: accuracy, MSE, loss; test before others."""
        found = self._choose(None, None)
        return found if found[0] in METRICS else None

    def summary(self) -> dict[str, Any]:
        """Return the run in a few numbers: its cost, each metric's average and worst client."""
        given = self.given_out
        known = [r.objective for r in self.rounds if r.objective is not None]
        if given is not None and given.objective is not None:
            known.append(given.objective)
        out: dict[str, Any] = {
            "format": tables.FORMAT,
            "clients": len(self.names),
            "rounds": self.rounds[-1].round if self.rounds else 0,
            "given_out": None if given is None else asdict(given),
            "objective": known[-1] if known else None,
            "exchanges": sum(r.exchanges for r in self.rounds),
            "bytes_up": sum(r.bytes_up for r in self.rounds),
            "bytes_down": sum(r.bytes_down for r in self.rounds),
            "quarantines": len(self.list_events("quarantine")),
            "guarded": len(self.list_events("guard")),
            "certificate": self.certificate(),
            "warnings": [e["reason"] for e in self.list_events("warning")],
            "metrics": {},
        }
        for split, metric in dict.fromkeys((r.split, r.metric) for r in self.metrics):
            out["metrics"].setdefault(split, {})[metric] = self._spread(metric, split)
        return out

    def certificate(self) -> dict[str, float] | str | None:
        """Return gap, round and distance proved of the model given out, or why nothing is known.

        Of a run that has not ended it is the smallest gap so far.
        """
        best = self._proved()
        if not isinstance(best, GivenOut):
            return best
        told = {"round": best.round, "gap": best.gap, "distance": best.distance}
        return {name: value for name, value in told.items() if value is not None}

    def describe_certificate(self) -> str | None:
        """Return in words what is proved about the model given out, or why nothing is."""
        about = self._proved()
        if not isinstance(about, GivenOut):
            return about
        which = "best model so far" if self.given_out is None else "final model"
        return f"{which}: round {about.round}, {about.proof()}"

    def _proved(self) -> GivenOut | str | None:
        """Return what is proved about the model given out, or else the best one; or why nothing."""
        given = self.given_out
        best = given
        if given is None or given.gap is None:
            proved = [r for r in self.rounds if "gap" in r.numbers]
            smallest = min(proved, key=lambda r: r.numbers["gap"], default=None)
            best = None if smallest is None else certified(smallest)
        if best is None:
            notes = (e["reason"] for e in self.list_events("note"))
            return next((note for note in notes if note.startswith("no certificate")), None)
        if best.capped:
            return f"no certificate: {best.proof()}"
        if given is not None and given is not best:
            return f"no certificate: {given}; that of round {best.round} was {best.proof()}"
        return best

    def _spread(self, metric: str, split: str) -> dict[str, Any]:
        record = self.last(metric, split)
        assert record is not None
        clients = self.per_client(metric, split)
        if not clients:
            return {"average": None, "worst": None, "worst_client": None, "round": record.round}
        worst = show.find_worst(clients, metric)
        lost = np.isnan(record.values) & (record.sizes > 0)
        undefined = [self.names[i] for i in np.flatnonzero(lost)]
        return {
            "average": float(np.mean(list(clients.values()))),
            "worst": clients[worst],
            "worst_client": worst,
            "round": record.round,
            **({"undefined_for": undefined} if undefined else {}),
        }

    @property
    def method(self) -> str:
        """Name of the algorithm; ``run`` if it is not known."""
        return str(self.provenance.get("algorithm", {}).get("name", "run"))

    @property
    def algorithm(self) -> str | None:
        """What ran, wrappers included, with all its settings; None if it is not known."""
        return self.provenance.get("ran")

    @property
    def seed(self) -> int | None:
        """Seed of the run, if it is known."""
        return self.provenance.get("seed")

    def to_metric_frame(self, data: Any, metrics: Any, split: str = "test") -> Any:
        """Return fairlearn's ``MetricFrame`` of the final model with the client as the group.

        ``data`` is the :class:`equifed.Federation`, ``metrics`` are as for ``MetricFrame``. Where
        samples have groups (``report_by``) they are a control feature, ``group``.
        """
        held, frame = data.splits(), importlib.import_module("fairlearn.metrics").MetricFrame
        if split not in held:
            raise ValueError(f"The data have no {split!r} split; there is {', '.join(held)}.")
        predictor: Any = self.predictor()
        owners, targets, found = predictor.compare_split(held[split], data.names)
        groups = held[split].groups
        return frame(
            metrics=metrics, y_true=targets, y_pred=found, sensitive_features={"client": owners},
            control_features=None if groups is None else {"group": groups},
        )  # fmt: skip

    to_frame = show.tabulate_history
    plot = show.draw_history
    __repr__ = show.describe_history
    _repr_html_ = show.render_clients

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the run's tables and model into a folder, in the form of a run folder.

        ``run.json`` tells what the run was made of, ``config.toml`` its configuration if it had
        one, ``preparation.json`` how the data were prepared.
        """
        out = RunFolder(folder, self.names)
        out.create(overwrite, described=True)
        for record in self.rounds:
            out.round(record)
        out.evaluation(0, self.metrics)
        for round, weights in self.weights.items():
            out.weights(round, weights)
        for event in self.events:
            out.event(event)
        write_provenance(out.path, self.provenance, self.trained, self.folder)
        out.finish(self)
        return out.path

    @classmethod
    def load(cls, folder: str | Path, *, model: bool = True) -> History:
        """Read a run folder, complete or not; the model, which needs torch, only if asked for.

        A damaged file, and a symbolic link in the folder, is refused by its name.
        """
        if not (Path(folder) / "rounds.csv").exists():
            raise RunFolderError(f"{folder} holds no run: rounds.csv is missing.")
        run = open_run_folder(folder, data_only=True)
        history = cls.read_tables(run)
        for key, name in tables.PARTS.items():
            if model or name not in (tables.MODEL, tables.OWN):
                part = tables.read_part(run, name, history.names)
                setattr(history, key, part or getattr(history, key))
        history.check()
        return history

    @classmethod
    def read_tables(cls, run: StoredRun) -> History:
        """Read the tables of a run folder, without a look at their checksums."""
        names = tables.read_names(run)
        return cls(
            names, tables.read_rounds(run), tables.read_metrics(run, names),
            tables.read_weights(run, names), tables.read_events(run),
            provenance=tables.read_provenance(run), folder=run.path,
        )  # fmt: skip
