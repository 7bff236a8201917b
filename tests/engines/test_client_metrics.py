"""Metrics that need a client's samples: measured by every engine, refused where they cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.flower.grid import convex, flower_clients, loop_clients, memory_grid, task

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.evaluation import ClientDetail, Details
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import DataError, Federation
from equifed.engines.simulate import simulate
from equifed.flower.messenger import SecureSums
from equifed.metrics import METRICS, Metric, wilson_interval
from equifed.metrics.metric import as_metrics
from equifed.models.losses import cross_entropy, weigh_classes
from equifed.training.history import History, MetricRecord
from equifed.training.loop import train

pytestmark = pytest.mark.long

ASKED = ("balanced_accuracy", "recall", "f1", "auroc", "brier")
PLAIN = FedAvg(LocalSGD(lr=0.1, steps=3))


def clinics(seed: int = 0, one_class: int | None = 1) -> Federation:
    """Three clients with groups; the test samples of one of them are all of one class."""
    rng = np.random.default_rng(seed)
    parts: dict[str, dict[str, tuple[np.ndarray, ...]]] = {"train": {}, "test": {}}
    for i, name in enumerate(("a", "b", "c")):
        for split, m in (("train", 30 + 9 * i), ("test", 24 + 5 * i)):
            x = rng.normal(size=(m, 3))
            y = (x[:, 0] + rng.normal(size=m) > 0).astype(int)
            if i == one_class and split == "test":
                y[:] = 0
            parts[split][name] = (x, y, rng.choice(["f", "m"], size=m))
    return Federation.from_clients(parts["train"], test=parts["test"])


def values() -> Federation:
    rng = np.random.default_rng(2)
    data = {name: (rng.normal(size=(20, 2)), rng.normal(size=20)) for name in ("a", "b")}
    return Federation.from_clients(data).split(test=0.5)


def run(federation: Federation, metrics=(), engine="loop", **more) -> History:
    model = "logistic" if federation.classes else "linear"
    clients = simulate(federation, model, engine=engine, dtype=torch.float64, **more)
    return train(PLAIN, clients, rounds=3, evaluate=("train", "test"), metrics=metrics)


def answer(federation: Federation, history: History, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Return targets and outputs of a client's test samples, computed by hand."""
    assert federation.test is not None and history.parameters is not None
    x, y = federation.test.client(i)
    weight, bias = (value.numpy() for value in history.parameters.values())
    return y, x @ weight.T + bias


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_metrics_are_those_of_the_model_given_out(engine):
    federation = clinics()
    history = run(federation, ASKED, engine)
    for i, name in enumerate(federation.names):
        y, outputs = answer(federation, history, i)
        score = outputs[:, 1] - outputs[:, 0]
        given = {"score": score, "prediction": (score > 0).astype(int)}
        given["probability"] = 1 / (1 + np.exp(-score))
        for metric in as_metrics(ASKED):
            expected = metric.measure(y, given[metric.needs])
            found = history.last(metric.name, "test").values[i]
            assert found == pytest.approx(expected, abs=1e-10, nan_ok=True), (name, metric.name)


def test_a_client_with_one_class_has_no_auroc_and_is_left_out_by_name():
    history = run(clinics(), ["auroc"])
    assert set(history.per_client("auroc")) == {"a", "c"}
    told = history.summary()["metrics"]["test"]["auroc"]
    assert told["undefined_for"] == ["b"]
    assert told["worst"] == min(history.per_client("auroc").values())


def test_engines_measure_the_same(tmp_path: Path):
    federation = clinics()
    loop, stacked = (run(federation, ASKED, engine) for engine in ("loop", "stacked"))
    for one, other in zip(loop.metrics, stacked.metrics, strict=True):
        assert one.metric == other.metric
        assert other.values == pytest.approx(one.values, abs=1e-10, nan_ok=True)
    loop.save(tmp_path / "run")
    back = History.load(tmp_path / "run")
    assert back.details is not None and loop.details is not None
    assert back.details.to_dict() == loop.details.to_dict()
    for one, other in zip(loop.metrics, back.metrics, strict=True):
        assert np.array_equal(one.values, other.values, equal_nan=True)


def test_flower_measures_the_same(tmp_path: Path):
    federation, the_task = convex(classes=2), task()
    grid = memory_grid(federation, the_task, tmp_path)
    flower, loop = flower_clients(grid, the_task), loop_clients(federation, the_task)
    asked = {"rounds": 2, "evaluate": ("train", "test"), "metrics": ASKED}
    one, other = (train(PLAIN, clients, **asked) for clients in (loop, flower))
    for a, b in zip(one.metrics, sorted(other.metrics, key=one_order(one)), strict=True):
        assert (a.metric, a.split, a.round) == (b.metric, b.split, b.round)
        assert b.values == pytest.approx(a.values, abs=1e-9, nan_ok=True)
    assert one.details is not None and other.details is not None
    for mine, theirs in zip(one.details.clients, other.details.clients, strict=True):
        assert mine is not None and theirs is not None
        assert theirs.majority == mine.majority
        assert theirs.limits.keys() == mine.limits.keys()
        for name, ends in mine.limits.items():
            assert theirs.limits[name] == pytest.approx(ends, abs=1e-9)


def one_order(history: History):
    places = [(r.round, r.split, r.metric) for r in history.metrics]
    return lambda record: places.index((record.round, record.split, record.metric))


def test_flower_sends_no_functions(tmp_path: Path):
    federation, the_task = convex(classes=2), task()
    clients = flower_clients(memory_grid(federation, the_task, tmp_path), the_task)

    def miss_rate(y, predicted):
        return float(np.mean(y != predicted))

    with pytest.raises(ValueError, match="miss_rate is a function of your own"):
        train(PLAIN, clients, rounds=1, evaluate=["test"], metrics=[miss_rate])


def test_own_functions_are_measured_and_said_to_be_losses():
    def miss_rate(y, predicted):
        return float(np.mean(y != predicted))

    def hit_score(y, predicted):
        return float(np.mean(y == predicted))

    history = run(clinics(), [miss_rate, hit_score])
    accuracy = history.per_client("accuracy", "test")
    for name, value in history.per_client("miss_rate").items():
        assert value == pytest.approx(1 - accuracy[name])
    notes = [e["reason"] for e in history.events if e["event"] == "note"]
    assert any(note.startswith("miss_rate: its name does not show") for note in notes)
    assert not any(note.startswith("hit_score") for note in notes)
    worst = history.summary()["metrics"]["test"]
    assert worst["miss_rate"]["worst_client"] == worst["hit_score"]["worst_client"]


def test_a_function_that_fails_is_named_with_the_client():
    def broken_error(y, predicted):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match=r"Client 'a', train: The metric broken_error failed"):
        run(clinics(), [broken_error])


@pytest.mark.parametrize(
    ("make", "metrics", "more", "told"),
    [
        (clinics, ["mae"], {}, "mae is about values; these data have classes"),
        (values, ["auroc"], {}, "auroc is about classes; these data have values"),
        (clinics, ["brier"], {"loss": "hinge"}, "the loss hinge gives scores alone"),
        (clinics, ["aurok"], {}, "known are accuracy, mse"),
    ],
)
def test_metrics_that_the_data_lack_are_refused_before_training(make, metrics, more, told):
    federation = make()
    clients = simulate(federation, "logistic" if federation.classes else "linear", **more)
    with pytest.raises(ValueError, match=told):
        train(PLAIN, clients, rounds=1, evaluate=["test"], metrics=metrics)
    with pytest.raises(ValueError, match="name them in evaluate"):
        train(PLAIN, clients, rounds=1, metrics=["loss"])


def test_a_margin_loss_has_an_auroc():
    history = run(clinics(), ["auroc", "f1"], loss="hinge")
    assert len(history.per_client("auroc")) == 2
    assert history.details is not None
    assert not any(c is not None and c.calibration for c in history.details.clients)


def test_regression_is_about_mse():
    history = run(values(), ["rmse", "r2"])
    assert history.main_metric() == ("mse", "test")
    assert history.per_client() == history.per_client("mse", "test")
    loss, mse = history.last("loss", "test"), history.last("mse", "test")
    assert mse.values == pytest.approx(loss.values)  # one target: the squared loss is the MSE
    roots = history.last("rmse", "test").values
    assert roots**2 == pytest.approx(mse.values)
    with pytest.raises(ValueError, match="accuracy was not evaluated in this run; loss, mse"):
        history.per_client("accuracy")


def test_the_mse_of_several_targets_is_their_mean():
    rng = np.random.default_rng(0)
    data = {"a": (rng.normal(size=(9, 2)), rng.normal(size=(9, 3)))}
    history = run(Federation.from_clients(data))
    loss, mse = (history.last(name, "train").values for name in ("loss", "mse"))
    assert 3 * mse == pytest.approx(loss)


# -- what single samples say --------------------------------------------------------------------


def test_details_are_those_of_the_samples():
    federation = clinics()
    history = run(federation, ["auroc"])
    assert history.details is not None and federation.test is not None
    for i, found in enumerate(history.details.clients):
        y, outputs = answer(federation, history, i)
        predicted = (outputs[:, 1] > outputs[:, 0]).astype(int)
        groups = federation.test.client_groups(i)
        assert found is not None and groups is not None
        assert found.majority == np.bincount(y).max() / len(y)
        lower, upper = wilson_interval([(y == predicted).sum()], [len(y)])
        assert found.limits["accuracy"] == pytest.approx((lower[0], upper[0]))
        assert ("auroc" in found.limits) == (found.classes == 2)
        for group in ("f", "m"):
            inside = groups == group
            assert found.groups[group].size == inside.sum()
            share = np.mean(y[inside] == predicted[inside])
            assert found.groups[group].values["accuracy"] == pytest.approx(share)
        chances = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
        sure, hit, error = chances.max(axis=1), y == predicted, 0.0
        for k in range(10):
            place = (sure >= k / 10) & (sure < (k + 1) / 10 if k < 9 else sure <= 1)
            error += abs(sure[place].sum() - hit[place].sum()) / len(y)
        assert found.calibration is not None
        assert found.calibration.error() == pytest.approx(error)


def test_details_survive_the_way_through_a_file():
    history = run(clinics(), ["auroc"])
    assert history.details is not None
    told = json.loads(json.dumps(history.details.to_dict()))
    assert Details.from_dict(told).to_dict() == history.details.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1}, {"size": "3"}, {"majority": 7.0}, {"majority": math.nan},
        {"limits": {"accuracy": [0.9, 0.1]}}, {"limits": {"accuracy": [0.1]}}, {"limits": None},
        {"calibration": {"count": [1], "confidence": [0.5], "correct": [1]}},
        {"groups": {"f": {"size": 1}}}, {"groups": []}, {"decision": {"predicted": 0.5}},
        {"decision": {"predicted": 0.5, "observed": 0.4, "error": math.inf}},
    ],
    ids=str,
)  # fmt: skip
def test_details_that_are_none_are_refused(change):
    honest = {"size": 3, "limits": {"accuracy": [0.1, 0.9]}, "majority": 0.6, "classes": 2}
    assert ClientDetail.from_dict(honest) == ClientDetail(3, {"accuracy": (0.1, 0.9)}, 0.6, 2)
    assert {**honest, "groups": {}, "decision": {}} == json.loads(
        json.dumps(ClientDetail.from_dict(honest).to_dict())
    )
    with pytest.raises(ValueError):
        ClientDetail.from_dict(honest | change)


# -- groups in the data -------------------------------------------------------------------------


def test_groups_go_where_their_samples_go():
    federation = clinics()
    part = federation.subset(["c", "a"])
    assert federation.test is not None and part.test is not None
    assert part.test.client_groups(0).tolist() == federation.test.client_groups(2).tolist()
    held = Federation.from_clients(
        {"a": (np.arange(10.0)[:, None], np.zeros(10), np.arange(10))}
    ).split(test=0.4)
    for split in (held.train, held.test):
        assert split is not None
        assert split.groups.tolist() == [str(int(v)) for v in split.inputs[:, 0]]
    plain = {"a": (np.arange(10.0)[:, None], np.zeros(10))}
    assert Federation.from_clients(plain).checksum() != held.checksum()


@pytest.mark.parametrize(
    ("groups", "told"),
    [(["f"], "one text or number for each of 2"), (["f", None], "has no group"),
     ([1.0, math.nan], "has no group"), (["f", " "], "has no group")],
)  # fmt: skip
def test_groups_that_are_none_are_refused_with_the_client(groups, told):
    with pytest.raises(DataError, match=rf"Client 'a': train: .*{told}"):
        Federation.from_clients({"a": ([[0.0], [1.0]], [0, 1], groups)})


def test_groups_of_some_clients_only_are_refused():
    data = {"a": ([[0.0], [1.0]], [0, 1], ["f", "m"]), "b": ([[0.0], [1.0]], [0, 1])}
    with pytest.raises(DataError, match="Client 'b': train has no groups"):
        Federation.from_clients(data)


# -- class weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_class_weights_multiply_the_losses_of_the_classes(engine):
    federation = clinics(one_class=None)
    weights = {0: 0.5, 1: 3.0}
    clients = simulate(federation, "logistic", engine=engine, class_weights=weights)
    x = torch.full((clients.model.size,), 0.3)
    found, _ = clients.value_and_gradient(x, Stream(0))
    for i in range(3):
        inputs, targets = (torch.as_tensor(part) for part in federation.train.client(i))
        outputs = clients.model.outputs(x, inputs.float())
        each = cross_entropy(outputs, targets) * torch.tensor([0.5, 3.0])[targets]
        assert found[i] == pytest.approx(float(each.mean()), rel=1e-5)


def test_balanced_weights_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    federation = clinics(one_class=None)
    y = federation.train.targets
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=y)
    found = weigh_classes(cross_entropy, "balanced", federation)
    assert found.weights.tolist() == pytest.approx(expected.tolist())
    assert found.weights.numpy()[y].mean() == pytest.approx(1)


def test_class_weights_go_by_name():
    data = {"a": ([[0.0], [1.0]], ["ill", "well"])}
    federation = Federation.from_clients(data)
    assert weigh_classes(cross_entropy, {"well": 4.0}, federation).weights.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("weights", "told"),
    [("equal", "'balanced' or a mapping"), ({2: 1.0}, "there is no class 2"),
     ({0: -1.0}, "positive number"), ({0: True}, "positive number")],
)  # fmt: skip
def test_class_weights_that_cannot_be_are_refused(weights, told):
    with pytest.raises(ValueError, match=told):
        simulate(clinics(), "logistic", class_weights=weights)


def test_class_weights_of_absent_classes_or_of_values_are_refused():
    lacking = Federation.from_clients({"a": ([[0.0], [1.0]], [0, 1])}, classes=3)
    with pytest.raises(ValueError, match="no client has a training sample of class 2"):
        weigh_classes(cross_entropy, "balanced", lacking)
    with pytest.raises(ValueError, match="regression data without classes"):
        weigh_classes(cross_entropy, "balanced", values())


def test_an_own_metric_with_a_direction_is_kept_in_the_folder(tmp_path: Path):
    def hit(y, p):
        return float((y == p).mean())

    history = run(clinics(), [Metric("hit_score", True, compute=hit)])
    history.alone = MetricRecord(
        0, "test", "accuracy", np.array([0.5, 1.0, 0.25]), np.array([24, 29, 34])
    )
    history.save(tmp_path / "run")
    back = History.load(tmp_path / "run")
    assert back.per_client("hit_score") == history.per_client("accuracy", "test")
    assert back.alone is not None and back.alone.values.tolist() == [0.5, 1.0, 0.25]
    assert set(METRICS) >= {"accuracy", "mse"}


def test_an_own_function_that_refuses_few_samples_does_not_end_the_run():
    def picky_error(y, predicted):
        if len(np.unique(y)) < 2:
            raise ValueError("needs two classes")
        return float(np.mean(y != predicted))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)), np.arange(20) % 2
    federation = Federation.from_clients({"a": (x, y, y)})  # every group is of one class
    history = run(federation, [picky_error])
    assert history.details is not None and history.details.clients[0] is not None
    groups = history.details.clients[0].groups
    assert all(math.isnan(group.values["picky_error"]) for group in groups.values())
    assert "picky_error" in history.details.clients[0].limits


def test_flower_with_hidden_sums_tells_metrics_and_no_details(tmp_path: Path):
    federation, the_task = convex(classes=2), task()
    grid = memory_grid(federation, the_task, tmp_path)
    clients = flower_clients(grid, the_task, hidden=SecureSums())
    history = train(PLAIN, clients, rounds=1, evaluate=["test"], metrics=["auroc"])
    assert history.per_client("auroc") and history.details is None
