"""What trackers receive, read back from their own files."""

import sys
import types

import numpy as np
import pytest
from tests.report.synthetic import history

from equifed.contract.algorithm import Info
from equifed.runs.catalogue import UnknownName
from equifed.runs.run import open_trackers
from equifed.training.trackers import MLflow, TensorBoard, Tracker, WandB

pytestmark = pytest.mark.long


def play(tracker, run):
    """Tell a tracker a history as training would have."""
    tracker.start(type(run)(run.names), len(run.rounds))
    info = Info(np.full(len(run.names), 1 / len(run.names)))
    for record in run.rounds:
        tracker.round(record, info)
        found = [m for m in run.metrics if m.round == record.round]
        if found:
            tracker.evaluation(record.round, found)
    tracker.end(run)


class Kept(Tracker):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def log(self, round, numbers):
        for key, value in numbers.items():
            self.seen.setdefault(key, {})[round] = value


def test_every_number_is_that_of_the_history():
    run, tracker = history(), Kept()
    play(tracker, run)
    rounds, values = run.series()
    for r, row in zip(rounds[1:], values[1:], strict=True):
        assert tracker.seen["test_accuracy/average"][r] == pytest.approx(row.mean())
        assert tracker.seen["test_accuracy/worst"][r] == row.min()
        assert tracker.seen["test_accuracy/client/b"][r] == row[1]
    losses = run.series("loss")[1]
    assert tracker.seen["test_loss/worst"][20] == losses[-1].max()
    total = sum(r.bytes_up + r.bytes_down for r in run.rounds)
    assert tracker.seen["round/bytes_total"][20] == total


def test_many_clients_are_summarised():
    tracker = Kept()
    play(tracker, history(tuple(f"c{i}" for i in range(60))))
    assert not [key for key in tracker.seen if "/client/" in key]


def test_unknown_numbers_are_not_sent():
    run, tracker = history(), Kept()
    for record in run.metrics:
        record.values[0] = np.nan
    play(tracker, run)
    assert "test_accuracy/client/a" not in tracker.seen
    assert np.isfinite(tracker.seen["test_accuracy/average"][20])


def test_tensorboard_reads_back_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = history()
    play(TensorBoard(tmp_path), run)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = {e.step: e.value for e in events.Scalars("test_accuracy/worst")}
    rounds, values = run.series()
    expected = {int(r): float(row.min()) for r, row in zip(rounds, values, strict=True) if r}
    assert written == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_mlflow_reads_back_what_was_written(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, run = (tmp_path / "mlruns").as_uri(), history()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = MLflow("fair", "one", {"rounds": 20, "model": {"name": "logistic"}})
    play(tracker, run)
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("fair").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params == {"rounds": "20", "model.name": "logistic"}
    written = client.get_metric_history(found.info.run_id, "test_accuracy/average")
    rounds, values = run.series()
    assert {m.step: m.value for m in written} == pytest.approx(
        {int(r): float(row.mean()) for r, row in zip(rounds, values, strict=True) if r}
    )


def test_a_tracking_server_that_refuses_is_one_clear_message(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    with pytest.raises(ValueError, match=r"where MLFLOW_TRACKING_URI says.*also set MLFLOW_ALLOW"):
        MLflow("fair", "one")


def test_weights_and_biases_receives_every_number(monkeypatch, tmp_path):
    logged, told = {}, []

    class Run:
        def log(self, numbers, step):
            logged.setdefault(step, {}).update(numbers)

        def finish(self):
            told.append("finished")

    def init(**given):
        told.append(given)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    (tracker,), run = open_trackers(["wandb"], tmp_path / "one", {"rounds": 20}), history()
    play(tracker, run)
    config = {"project": "equifed", "name": "one", "config": {"rounds": 20}}
    assert told == [config, "finished"]
    rounds, values = run.series()
    for r, row in zip(rounds[1:], values[1:], strict=True):
        assert logged[r]["test_accuracy/worst"] == row.min()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        WandB()


def test_trackers_by_name(tmp_path):
    pytest.importorskip("tensorboard")
    (tracker,) = open_trackers(["tensorboard"], tmp_path, {})
    tracker.end(history())
    assert list((tmp_path / "tensorboard").iterdir())
    with pytest.raises(UnknownName, match="tensorboard"):
        open_trackers(["tensorbord"], tmp_path, {})
