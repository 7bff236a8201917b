"""Metrics and class weights in configurations: named, refused, written into the folder."""

import csv

import pytest

from equifed.runs.build import build_run
from equifed.runs.config import ConfigError, RunConfig
from equifed.runs.run import resume, run
from equifed.training.history import History

pytestmark = pytest.mark.long

TABLE = {
    "rounds": 2,
    "data": {"name": "heart-disease"},
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}},
}


def configure(base=None, **more):
    return RunConfig.from_dict({**TABLE, **more}, base)


def test_metrics_are_in_the_tables_of_the_folder(tmp_path):
    asked = ["auroc", "balanced_accuracy"]
    history = run(configure(evaluate={"metrics": asked}), tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for name in asked:
        written = {
            r["client"]: float(r["value"]) for r in rows
            if (r["metric"], r["split"], r["round"]) == (name, "test", "2")
        }  # fmt: skip
        known = {client: value for client, value in written.items() if value == value}
        assert known == history.per_client(name, "test")
    back = resume(tmp_path / "run")
    assert back.details is not None and history.details is not None
    assert back.details.to_dict() == history.details.to_dict()
    assert RunConfig.read(tmp_path / "run" / "config.toml").evaluate.metrics == tuple(asked)


def test_own_functions_are_loaded_from_beside_the_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def miss_error(y, predicted):\n    return float((y != predicted).mean())\n"
    )
    history = run(configure(tmp_path, evaluate={"metrics": ["mine:miss_error"]}), tmp_path / "run")
    accuracy = history.per_client("accuracy", "test")
    for client, value in history.per_client("miss_error", "test").items():
        assert value == pytest.approx(1 - accuracy[client])
    assert History.load(tmp_path / "run").per_client("miss_error", "test")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"evaluate": {"metrics": ["aurok"]}}, "did you mean 'auroc'.*choose from accuracy, mse"),
        ({"evaluate": {"metrics": [3]}}, r"evaluate.metrics\[0\]: must be text"),
        ({"stop": {"target": 0.5, "metric": "aurok"}}, "known are accuracy"),
        ({"model": {"name": "logistic", "class_weights": "equal"}}, "'balanced' or a table"),
    ],
)
def test_what_is_not_known_is_refused_when_the_file_is_read(more, told):
    with pytest.raises((ConfigError, ValueError), match=told):
        configure(**more)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"evaluate": {"metrics": ["mae"]}}, "mae is about values"),
        ({"model": {"name": "logistic", "class_weights": {"9": 2.0}}}, "there is no class '9'"),
        ({"stop": {"target": 0.5, "metric": "auroc", "split": "test"}}, "not in evaluate.metrics"),
    ],
)
def test_what_the_data_do_not_have_is_refused_before_training(more, told):
    with pytest.raises(ConfigError, match=told):
        build_run(configure(**more))


def test_training_stops_at_a_metric_that_was_asked_for():
    stop = {"target": 0.01, "metric": "f1", "split": "train", "of": "average"}
    history = run(configure(rounds=5, stop=stop, evaluate={"metrics": ["f1"]}))
    assert len(history.rounds) < 5
    assert any("train f1 (average) reached" in str(e.get("reason")) for e in history.events)


def test_class_weights_of_a_file_are_used():
    plain, weighted = (
        run(configure(model={"name": "logistic", **more}, evaluate={"metrics": ["recall"]}))
        for more in ({}, {"class_weights": {"1": 50.0}})
    )
    before, after = (sum(h.per_client("recall", "test").values()) for h in (plain, weighted))
    assert after > before
