"""Who is told what happens in a run: the progress bar, TensorBoard, MLflow, W&B.

The trackers are optional: ``pip install equifed[tensorboard]`` or ``pip install equifed[mlflow]``.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import progress
from rich.console import Console
from typing_extensions import override

from equifed.contract import Info
from equifed.metrics.metric import find_metric
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.show import find_worst, print_line

# Beyond this many clients only their summary is sent; a curve for each would drown the others
MOST_CLIENTS = 50
PLAIN_SECONDS = 10.0  # time between two lines where the output is no terminal


class Callback:
    """Base class of what follows a run: progress bars, trackers. Every method is optional.

    >>> import equifed as ef
    >>> class Tell(ef.Callback):
    ...     def round(self, record, info):
    ...         print(record.round, info.weights.round(2))
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> _ = ef.train(ef.FedAvg(), clients, rounds=2, callbacks=[Tell()])
    1 [0.33 0.33 0.33]
    2 [0.33 0.33 0.33]
    """

    def start(self, history: History, rounds: int) -> None:
        """Hear that training begins, or begins again with a history."""

    def round(self, record: RoundRecord, info: Info) -> None:
        """Hear that a round ended."""

    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        """Hear that the model was evaluated after a round."""

    def event(self, event: dict[str, Any]) -> None:
        """Hear that a client was quarantined, a run resumed or stopped."""

    def end(self, history: History) -> None:
        """Hear that training ended."""


class ProgressBar(Callback):
    """Round, objective, worst client and time left; a context manager, plain off terminals."""

    def __init__(self, console: Console, title: str = "training") -> None:
        self._console, self._title = console, title
        self._bar: progress.Progress | None = None
        self._history, self._rounds, self._worst = History(()), 0, ""
        self._said = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @override
    def start(self, history: History, rounds: int) -> None:
        self._history, self._rounds = history, rounds
        if not (self._console.is_terminal or self._console.is_jupyter):
            return
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[details]}", markup=False),
            console=self._console,
            transient=True,
        )
        done = history.rounds[-1].round if history.rounds else 0
        self._bar.add_task(self._title, total=rounds, completed=done, details="")
        self._bar.start()

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        parts = [] if record.objective is None else [f"objective {record.objective:.4g}"]
        if "gap" in record.numbers and "uncapped_gap" not in record.numbers:
            parts.append(f"certified gap {record.numbers['gap']:.2g}")
        details = "  ".join([*parts, self._worst])
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record.round, details=details)
        elif not self._console.is_terminal and time.monotonic() - self._said >= PLAIN_SECONDS:
            self._said = time.monotonic()
            self._print(f"round {record.round}/{self._rounds}  {details}")

    @override
    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        metric, _ = self._history.main_metric() or ("", "")
        splits = {record.split for record in records} if metric else set()
        for split in ("test", "train", "validation"):  # the last one is shown
            if clients := self._history.per_client(metric, split) if split in splits else {}:
                worst, kind = find_worst(clients, metric), find_metric(metric)
                value = f"{kind.label} {kind.write(clients[worst])}"
                self._worst = f"worst {worst}: {value} ({split})"

    @override
    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "resume":
            self._print(f"resumed after round {event['round']}")
        elif event["event"] == "note":
            self._print(event["reason"])

    @override
    def end(self, history: History) -> None:
        self.__exit__()

    def _print(self, text: str) -> None:
        print_line(self._console, f"{self._title}: {text}")


def follow_by_default(callbacks: Sequence[Callback], wanted: bool | None) -> ProgressBar | None:
    """Return a bar if it is wanted; by default where a person looks on and sees no other."""
    if wanted is False or any(isinstance(callback, ProgressBar) for callback in callbacks):
        return None
    console = Console(stderr=True)
    seen = console.is_terminal or console.is_jupyter
    if wanted is None and (not seen or "PYTEST_CURRENT_TEST" in os.environ):
        return None
    return ProgressBar(console)


class Tracker(Callback):
    """Turns what happens in a run into named numbers by round; :meth:`log` sends them on."""

    _names: tuple[str, ...] = ()
    _bytes = 0

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Send finite numbers of one round."""
        raise NotImplementedError

    @override
    def start(self, history: History, rounds: int) -> None:
        self._names = history.names
        self._bytes = sum(r.bytes_up + r.bytes_down for r in history.rounds)

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        self._bytes += record.bytes_up + record.bytes_down
        numbers = {
            "objective": math.nan if record.objective is None else record.objective,
            "seconds": record.seconds,
            "bytes_total": float(self._bytes),
            "largest_weight": float(np.max(info.weights)),
            **record.numbers,
        }
        self._log(record.round, "round", numbers)

    @override
    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        for record in records:
            known = record.values[np.isfinite(record.values)]
            if known.size:
                sign = find_metric(record.metric).sign
                numbers = {"average": known.mean(), "worst": sign * (sign * known).min()}
                if len(self._names) <= MOST_CLIENTS:
                    each = zip(self._names, record.values, strict=True)
                    numbers |= {f"client/{name}": value for name, value in each}
                self._log(round, f"{record.split}_{record.metric}", numbers)

    def _log(self, round: int, stem: str, numbers: Mapping[str, float]) -> None:
        finite = ((key, value) for key, value in numbers.items() if math.isfinite(value))
        self.log(round, {f"{stem}/{key}": float(value) for key, value in finite})


class TensorBoard(Tracker):
    """Writes event files for TensorBoard; point it at the folder, or at one above.

    >>> import tempfile
    >>> import equifed as ef
    >>> folder = Path(tempfile.mkdtemp())
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> _ = ef.train(ef.FedAvg(), clients, rounds=2, callbacks=[TensorBoard(folder)])
    >>> len(list(folder.glob("events*")))
    1
    """

    def __init__(self, folder: str | Path) -> None:
        writers = _load("torch.utils.tensorboard", "tensorboard", "'equifed[tensorboard]'")
        self._writer = writers.SummaryWriter(str(folder))

    @override
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, round)

    @override
    def end(self, history: History) -> None:
        self._writer.close()


class MLflow(Tracker):
    """Sends a run to the tracking server that MLflow is set to (``MLFLOW_TRACKING_URI``).

    The experiment is made if it does not exist; ``parameters`` are what to note about the run, as
    its configuration.

    >>> tracker = MLflow(run_name="hospitals", parameters={"rounds": 20})  # doctest: +SKIP
    >>> ef.train(algorithm, clients, callbacks=[tracker])  # doctest: +SKIP
    """

    def __init__(
        self, experiment: str = "equifed", run_name: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        mlflow = _load("mlflow", "mlflow", "'equifed[mlflow]'")
        try:
            self._client = mlflow.tracking.MlflowClient()
            found = self._client.get_experiment_by_name(experiment)
            home = found.experiment_id if found else self._client.create_experiment(experiment)
            self._run = self._client.create_run(home, run_name=run_name).info.run_id
        except mlflow.exceptions.MlflowException as error:
            raise ValueError(
                f"MLflow: {error} Runs go where MLFLOW_TRACKING_URI says: to a server (http://...) "
                "or a file, sqlite:///mlflow.db (needs pip install sqlalchemy alembic). For a "
                "plain folder also set MLFLOW_ALLOW_FILE_STORE=true."
            ) from error
        for key, value in _flat(parameters or {}).items():
            self._client.log_param(self._run, _allowed(key), str(value)[:500])

    @override
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_allowed(key), value, now, round) for key, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)  # at most 1000: see MOST_CLIENTS

    @override
    def end(self, history: History) -> None:
        self._client.set_terminated(self._run)


class WandB(Tracker):
    """Sends a run to a project of Weights & Biases; offline with ``WANDB_MODE=offline``.

    ``parameters`` are what to note about the run, as its configuration.
    """

    def __init__(
        self, project: str = "equifed", run_name: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        wandb = _load("wandb", "wandb", "wandb")
        self._run = wandb.init(project=project, name=run_name, config=dict(parameters or {}))

    @override
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    @override
    def end(self, history: History) -> None:
        self._run.finish()


def tensorboard(folder: Path, config: Mapping[str, Any]) -> TensorBoard:
    """Return event files in the run folder."""
    return TensorBoard(folder / "tensorboard")


def mlflow(folder: Path, config: Mapping[str, Any]) -> MLflow:
    """Return a run named after its folder, on the server that MLflow is set to."""
    return MLflow(run_name=folder.name, parameters=config)


def wandb(folder: Path, config: Mapping[str, Any]) -> WandB:
    """Return a run of Weights & Biases named after its folder."""
    return WandB(run_name=folder.name, parameters=config)


def _load(module: str, name: str, wanted: str) -> Any:
    """Return the module of a tracker, or say what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{name} is not installed; get it with: pip install {wanted}") from error


def _flat(table: Mapping[str, Any], stem: str = "") -> dict[str, Any]:
    """Return a nested table with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        inner = f"{stem}{key}"
        out |= _flat(value, inner + ".") if isinstance(value, Mapping) else {inner: value}
    return out


def _allowed(key: str) -> str:
    """Return a name that MLflow takes: letters, digits and ``_-. /``, others as an underscore."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_-. /") else "_" for c in key)
    return kept[:250].strip("/")
