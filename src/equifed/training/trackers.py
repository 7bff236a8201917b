"""Runs followed elsewhere: TensorBoard and MLflow, as callbacks of :func:`equifed.train`.

Both are optional: ``pip install equifed[tensorboard]`` or ``pip install equifed[mlflow]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.metrics.metric import find_metric
from equifed.training.callback import Callback
from equifed.training.history import History, MetricRecord, RoundRecord

if TYPE_CHECKING:
    from equifed.contract.algorithm import Info

MOST_CLIENTS = 50
"""Beyond this many clients only their summary is sent; a curve for each would drown the others."""


class MissingExtra(ImportError, ValueError):
    """An optional dependency that is not installed, and how to get it."""


class Tracker(Callback):
    """Turns what happens in a run into named numbers by round; :meth:`log` sends them on."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._bytes = 0

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Send finite numbers of one round."""
        raise NotImplementedError

    def start(self, history: History, rounds: int) -> None:
        """Remember the clients, and what a run that goes on had sent before."""
        self._names = history.names
        self._bytes = sum(r.bytes_up + r.bytes_down for r in history.rounds)

    def round(self, record: RoundRecord, info: Info) -> None:
        """Send what the round cost and where the objective stood."""
        self._bytes += record.bytes_up + record.bytes_down
        numbers = {
            "round/objective": math.nan if record.objective is None else record.objective,
            "round/seconds": record.seconds,
            "round/bytes_total": float(self._bytes),
            "round/largest_weight": float(np.max(info.weights)),
            **{f"round/{key}": value for key, value in record.numbers.items()},
        }
        self._log(record.round, numbers)

    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        """Send average, worst and spread over clients, and the clients if they are few."""
        numbers: dict[str, float] = {}
        for record in records:
            known = record.values[np.isfinite(record.values)]
            if not known.size:
                continue
            stem = f"{record.split}_{record.metric}"
            worst = known.min() if find_metric(record.metric).higher_is_better else known.max()
            numbers |= {
                f"{stem}/average": float(known.mean()),
                f"{stem}/worst": float(worst),
                f"{stem}/spread": float(np.ptp(known)),
            }
            if len(self._names) <= MOST_CLIENTS:
                each = zip(self._names, record.values, strict=True)
                numbers |= {f"{stem}/client/{name}": float(value) for name, value in each}
        self._log(round, numbers)

    def _log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.log(round, {key: value for key, value in numbers.items() if math.isfinite(value)})


class TensorBoard(Tracker):
    """Writes event files for TensorBoard.

    Parameters
    ----------
    folder : path
        Where to write; point TensorBoard at it or at a folder above.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Send numbers."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, round)

    def event(self, event: dict[str, Any]) -> None:
        """Send an event as text."""
        text = ", ".join(f"{key}: {value}" for key, value in event.items())
        self._writer.add_text("events", text, event.get("round", 0))

    def end(self, history: History) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(Tracker):
    """Sends a run to MLflow.

    Parameters
    ----------
    experiment : str
        Name of the experiment; made if it does not exist.
    run_name : str, optional
        Name of the run.
    uri : str, optional
        Tracking server or folder; MLflow's own setting if not given.
    parameters : mapping
        What to note about the run, as its configuration.
    """

    def __init__(
        self,
        experiment: str = "equifed",
        run_name: str | None = None,
        uri: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise _missing("mlflow") from error
        from mlflow.exceptions import MlflowException

        try:
            self._client: Any = MlflowClient(uri)
            found = self._client.get_experiment_by_name(experiment)
            home = found.experiment_id if found else self._client.create_experiment(experiment)
            self._run = self._client.create_run(home, run_name=run_name).info.run_id
        except MlflowException as error:
            raise ValueError(f"MLflow: {error}") from error
        for key, value in _flat(parameters or {}).items():
            self._client.log_param(self._run, _allowed(key), str(value)[:500])

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Send numbers in one message."""
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_allowed(key), value, now, round) for key, value in numbers.items()]
        for i in range(0, len(metrics), 1000):  # the most that one message may hold
            self._client.log_batch(self._run, metrics=metrics[i : i + 1000])

    def event(self, event: dict[str, Any]) -> None:
        """Count events of each kind as tags."""
        kind = _allowed(f"event.{event['event']}")
        tags = self._client.get_run(self._run).data.tags
        self._client.set_tag(self._run, kind, str(int(tags.get(kind, "0")) + 1))

    def end(self, history: History) -> None:
        """Say that the run ended."""
        self._client.set_terminated(self._run)


def tensorboard(folder: Path, config: Mapping[str, Any]) -> TensorBoard:
    """Return event files in the run folder."""
    return TensorBoard(folder / "tensorboard")


def mlflow(folder: Path, config: Mapping[str, Any]) -> MLflow:
    """Return a run named after its folder, on the server that MLflow is set to."""
    return MLflow(run_name=folder.name, parameters=config)


def _missing(extra: str) -> MissingExtra:
    return MissingExtra(f"{extra} is not installed; get it with: pip install 'equifed[{extra}]'")


def _flat(table: Mapping[str, Any], stem: str = "") -> dict[str, Any]:
    """Return a nested table with dotted keys.

    >>> _flat({"model": {"l2": 0.1}, "rounds": 5})
    {'model.l2': 0.1, 'rounds': 5}
    """
    out: dict[str, Any] = {}
    for key, value in table.items():
        inner = f"{stem}{key}"
        out |= _flat(value, inner + ".") if isinstance(value, Mapping) else {inner: value}
    return out


def _allowed(key: str) -> str:
    """Return a name that MLflow takes: letters, digits and ``_-. /``, others as an underscore.

    >>> _allowed("test_accuracy/client/T-shirt & <b>")
    'test_accuracy/client/T-shirt _ _b_'
    """
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_-. /") else "_" for c in key)
    return kept[:250].strip("/")
