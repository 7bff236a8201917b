"""Metrics: directions, agreement with scikit-learn and fairlearn, limits."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.metrics.vectors import vectors

import equifed as ef
from equifed.contract.streams import Stream
from equifed.engines.evaluate import SampleScores
from equifed.metrics import (
    METRICS,
    Metric,
    as_metric,
    best_fraction,
    find_metric,
    worst,
)
from equifed.metrics.metric import as_metrics, limit_mean
from sklearn import metrics as theirs

pytestmark = pytest.mark.long


def draw(seed: int, classes: int, m: int = 40, ties: bool = False) -> SampleScores:
    """Return samples of which every class is there."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(m) % classes)
    outputs = rng.normal(size=(m, classes)) + np.eye(classes)[y]
    outputs = outputs.round() if ties else outputs
    return SampleScores(y, rng.exponential(size=m), outputs, classes)


def macro(function, **more):
    return lambda y, p: function(
        y, p, average="macro", labels=np.unique(y), zero_division=0, **more
    )


BINARY = {
    "accuracy": (theirs.accuracy_score, "prediction"),
    "balanced_accuracy": (theirs.balanced_accuracy_score, "prediction"),
    "recall": (theirs.recall_score, "prediction"),
    "precision": (theirs.precision_score, "prediction"),
    "f1": (theirs.f1_score, "prediction"),
    "auroc": (theirs.roc_auc_score, "score"),
    "brier": (theirs.brier_score_loss, "probability"),
}
SEVERAL = {
    "accuracy": (theirs.accuracy_score, "prediction"),
    "balanced_accuracy": (theirs.balanced_accuracy_score, "prediction"),
    "recall": (macro(theirs.recall_score), "prediction"),
    "precision": (macro(theirs.precision_score), "prediction"),
    "f1": (macro(theirs.f1_score), "prediction"),
    "auroc": (lambda y, p: theirs.roc_auc_score(y, p, multi_class="ovr"), "probability"),
    "brier": (theirs.brier_score_loss, "probability"),
}
VALUES = {
    "mse": theirs.mean_squared_error,
    "rmse": theirs.root_mean_squared_error,
    "mae": theirs.mean_absolute_error,
    "r2": theirs.r2_score,
}


def test_every_metric_by_name_is_compared():
    assert set(METRICS) == set(BINARY) | set(VALUES) | {"loss"}


@pytest.mark.parametrize("name", BINARY)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), ties=st.booleans())
def test_metrics_of_two_classes_agree_with_scikit_learn(name, seed, ties):
    samples, (reference, needs) = draw(seed, 2, ties=ties), BINARY[name]
    found = METRICS[name].measure(samples.targets, samples.answer(METRICS[name].needs))
    assert found == pytest.approx(reference(samples.targets, samples.answer(needs)), abs=1e-12)


@pytest.mark.parametrize("name", SEVERAL)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_metrics_of_several_classes_agree_with_scikit_learn(name, seed):
    samples, (reference, needs) = draw(seed, 4), SEVERAL[name]
    found = METRICS[name].measure(samples.targets, samples.answer(METRICS[name].needs))
    assert found == pytest.approx(reference(samples.targets, samples.answer(needs)), abs=1e-12)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 3)], ids=str)
def test_metrics_of_values_agree_with_scikit_learn(name, shape):
    rng = np.random.default_rng(1)
    y = rng.normal(size=shape)
    predicted = y + rng.normal(size=shape)
    samples = SampleScores(y, np.zeros(30), predicted.reshape(30, -1), None)
    found = METRICS[name].measure(y, samples.answer("prediction"))
    assert found == pytest.approx(VALUES[name](y, predicted), abs=1e-12)


def test_metrics_by_client_and_by_group_agree_with_fairlearn():
    fairlearn = pytest.importorskip("fairlearn.metrics")
    samples = draw(3, 2, m=300)
    rng = np.random.default_rng(4)
    clients, sex = rng.integers(3, size=300), rng.choice(["f", "m"], size=300)
    predicted = samples.answer("prediction")
    names = ("accuracy", "balanced_accuracy", "recall", "precision", "f1")
    frame = fairlearn.MetricFrame(
        metrics={name: BINARY[name][0] for name in names},
        y_true=samples.targets, y_pred=predicted,
        sensitive_features={"client": clients, "sex": sex},
    )  # fmt: skip
    for (client, group), row in frame.by_group.iterrows():
        part = samples.take((clients == client) & (sex == group))
        for name in names:
            found = METRICS[name].measure(part.targets, part.answer(METRICS[name].needs))
            assert found == pytest.approx(row[name], abs=1e-12), (client, group, name)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_history_becomes_a_frame_of_fairlearn(grouped):
    fairlearn = pytest.importorskip("fairlearn.metrics")
    draw = np.random.default_rng(0)
    clients = {}
    for name, size in {"a": 20, "b": 31}.items():
        x = draw.normal(size=(size, 2))
        sex = [draw.choice(["f", "m"], size)] if grouped else []
        clients[name] = x, np.where(x[:, 0] > 0, "yes", "no"), *sex
    data = ef.Federation.from_clients(clients, test=clients)
    algorithm = ef.FedAvg(local=ef.LocalSGD(steps=5, lr=0.1))
    engine = ef.simulate(data, "logistic", own="bias")
    history = ef.train(algorithm, engine, rounds=2, evaluate=["test"])
    frame = history.to_metric_frame(
        data, {"accuracy": BINARY["accuracy"][0], "count": fairlearn.count}
    )
    counts, hits = frame.by_group["count"], frame.by_group["accuracy"] * frame.by_group["count"]
    level = "client" if grouped else frame.by_group.index.names
    assert counts.groupby(level=level).sum().to_dict() == {"a": 20, "b": 31}
    found = (hits.groupby(level=level).sum() / counts.groupby(level=level).sum()).to_dict()
    assert found == pytest.approx(history.per_client("accuracy", "test"))
    assert ("group" in frame.by_group.index.names) == grouped
    with pytest.raises(ValueError, match="no 'validation' split; there is train, test"):
        history.to_metric_frame(data, {}, "validation")


@pytest.mark.parametrize("name", ["auroc", "recall", "f1", "precision"])
def test_what_scikit_learn_warns_about_is_not_defined(name):
    y, score = np.zeros(6, dtype=int), -np.ones(6)
    assert math.isnan(METRICS[name].measure(y, score))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        reference, needs = BINARY[name]
        reference(y, score if needs == "score" else (score > 0).astype(int))
    assert told


@pytest.mark.parametrize("y", [np.array([2.0]), np.array([2.0, 2.0])], ids=["one", "constant"])
def test_r2_of_targets_that_do_not_vary_is_not_defined(y):
    assert math.isnan(METRICS["r2"].measure(y, y + 1))


def test_probabilities_far_out_stay_finite_and_exact():
    samples = SampleScores(np.array([1, 0]), np.zeros(2), np.array([[900.0], [-900.0]]), 2)
    assert samples.answer("probability").tolist() == [1.0, 0.0]
    assert METRICS["brier"].measure(samples.targets, samples.answer("probability")) == 0


# -- directions ----------------------------------------------------------------------------------


def test_the_sign_is_the_direction():
    assert all(metric.sign == (1 if metric.higher_is_better else -1) for metric in METRICS.values())


@pytest.mark.parametrize("name", ["accuracy", "loss"])
@given(values=vectors())
def test_the_sign_makes_larger_better(name, values):
    metric = find_metric(name)
    higher = metric.higher_is_better
    signed = metric.sign * np.asarray(values)
    assert metric.sign * signed.min() == worst(values, higher_is_better=higher)
    assert metric.sign * signed.max() == best_fraction(values, 1e-9, higher_is_better=higher)


def test_every_metric_is_known_by_its_name():
    assert all(find_metric(name) is metric for name, metric in METRICS.items())


def test_a_metric_of_ones_own_is_a_kind_of_loss():
    own, loss = find_metric("squared error"), find_metric("loss")
    assert own.name == "squared error"
    assert (own.sign, own.factor, own.unit) == (loss.sign, loss.factor, loss.unit)
    assert own.write(0.123456) == loss.write(0.123456)


def test_fractions_are_written_in_percent():
    accuracy = find_metric("accuracy")
    assert accuracy.write(0.5) == "50.0 %" == f"{accuracy.factor * 0.5:.1f}{accuracy.unit}"


# -- own metrics --------------------------------------------------------------------------------


def test_own_functions_say_by_their_arguments_what_they_need():
    assert as_metric(theirs.roc_auc_score).needs == "score"
    assert as_metric(theirs.roc_auc_score).higher_is_better
    assert as_metric(theirs.brier_score_loss).needs == "probability"
    assert not as_metric(theirs.brier_score_loss).higher_is_better
    assert as_metric(theirs.hamming_loss).needs == "prediction"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("auc", "known are accuracy, mse, loss"),
        (lambda y, p: 0.0, "has no name"),
        (7, "got 7"),
        (Metric("gain", True, compute=max), "gain_score"),
        (Metric("my_score", False, compute=max), "my_error"),
        (Metric("gain", False), "compute="),
        (Metric("auroc", True, compute=max), "known metric"),
    ],
)  # fmt: skip
def test_metrics_that_cannot_be_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        as_metric(given)


def test_a_metric_is_given_once_and_in_a_sequence():
    with pytest.raises(ValueError, match="more than once"):
        as_metrics(["auroc", "auroc"])
    with pytest.raises(ValueError, match="sequence"):
        as_metrics("auroc")


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "least"), [("auroc", 0.86), ("recall", 0.92), ("brier", 0.88)])
def test_limits_cover_the_metric_of_all_samples_there_are(name, least):
    rng = np.random.default_rng(5)
    y = rng.integers(2, size=40_000)
    score = rng.normal(size=len(y)) + 1.2 * y
    all_samples = SampleScores(y, y * 0.0, score[:, None], 2)
    metric = METRICS[name]
    truth = metric.measure(y, all_samples.answer(metric.needs))
    covered = 0
    for trial in range(100):
        part = all_samples.take(rng.choice(len(y), size=60, replace=False))
        lower, upper = metric.limits(part.targets, part.answer(metric.needs), Stream(trial))
        covered += lower <= truth <= upper
    assert covered >= 100 * least


def test_limits_are_those_of_the_same_samples_twice():
    samples = draw(0, 2)
    asked = samples.targets, samples.answer("score"), Stream(1)
    assert METRICS["auroc"].limits(*asked) == METRICS["auroc"].limits(*asked)


def test_samples_that_cannot_tell_give_no_limits():
    assert all(map(math.isnan, limit_mean(np.array([3.0]))))
    perfect = np.array([0, 0, 0, 1, 1, 1]), np.array([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0])
    assert all(map(math.isnan, METRICS["auroc"].limits(*perfect, Stream(0))))
    assert all(map(math.isnan, METRICS["recall"].limits(perfect[0] * 0, perfect[1], Stream(0))))
