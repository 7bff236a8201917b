"""What trackers receive, read back from their own files."""

import json
import sys

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


def read_offline(folder):
    """Return what W&B wrote without a network: the run's settings, and its numbers by step."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,), store, run, steps = folder.rglob("*.wandb"), DataStore(), None, {}
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record.FromString(bytes(data))
        if record.WhichOneof("record_type") == "run":
            run = record.run
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            steps[row["_step"]] = row
    store.close()
    return run, steps


def test_weights_and_biases_writes_every_number(monkeypatch, tmp_path):
    package = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for what in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{what}", str(tmp_path))
    (tracker,), run = open_trackers(["wandb"], tmp_path / "one", {"rounds": 20}), history()
    play(tracker, run)
    package.teardown()  # its process writes the file
    told, written = read_offline(tmp_path)
    assert (told.project, told.display_name) == ("equifed", "one")
    assert {c.key: c.value_json for c in told.config.update}["rounds"] == "20"
    rounds, values = run.series()
    for r, row in zip(rounds[1:], values[1:], strict=True):
        assert written[r]["test_accuracy/worst"] == row.min()


def test_without_weights_and_biases_the_message_says_what_to_install(monkeypatch):
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
