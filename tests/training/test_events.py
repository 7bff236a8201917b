"""A run says at its end what did not train; a model that is not finite is no result."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.problems import regression
from tests.report.synthetic import history as make_history
from torch import nn

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FedAvg,
    FedEBA,
    RFedFair,
    Scaffold,
    tilted_erm,
)
from equifed.contract.algorithm import Info
from equifed.contract.evaluation import Evaluation, Hits
from equifed.contract.local import LocalSGD
from equifed.data import standardise
from equifed.data.federation import Federation
from equifed.engines.evaluate import measure_scales
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.report import as_json, as_methods, build
from equifed.training.events import (
    PRIVACY,
    ROUNDING,
    check_against_start,
    check_descent,
    check_finite,
    check_scales,
    find_warnings,
    tell_touches,
)
from equifed.training.final_model import Kept
from equifed.training.folder import RunFolder
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.loop import TrainingError, train
from equifed.training.show import describe_events
from equifed.training.tables import pack_hits, unpack_hits

pytestmark = pytest.mark.long

numbers = st.floats(0.01, 100)


def make_rounds(*objectives: float | None, gap: float | None = None) -> History:
    told = {} if gap is None else {"gap": gap}
    rounds = [RoundRecord(r, o, 1, 1, 1, 0.1, told) for r, o in enumerate(objectives, start=1)]
    return History(("a", "b"), rounds=rounds)


def make_course(metric: str, split: str, *rows: list[float]) -> History:
    sizes = np.full(len(rows[0]), 10)
    records = [MetricRecord(r, split, metric, np.array(v), sizes) for r, v in enumerate(rows)]
    return History(tuple("abcdefgh"[: len(rows[0])]), metrics=records)


# -- the checks are functions of what was recorded ----------------------------------------------


@given(start=numbers, ratio=st.floats(0.1, 3.0), middle=numbers)
def test_an_objective_that_is_not_below_its_start_is_said(start, ratio, middle):
    assume(abs(abs(ratio - 1) - ROUNDING) > 1e-12)  # not at the edge itself
    end = start * ratio
    found = check_descent(make_rounds(start, middle, end))
    assert (found is None) == (end < start - ROUNDING * start)
    if found is not None:
        assert ("larger step" in found) == (end <= start * (1 + ROUNDING))


def test_rounding_is_no_descent_and_one_round_is_no_course():
    assert check_descent(make_rounds(1.0, 1.0 - 1e-9)) is not None
    assert check_descent(make_rounds(1.0)) is None
    assert check_descent(make_rounds(None, None)) is None
    assert check_descent(make_rounds(1.0, math.nan)) is not None
    assert check_descent(make_rounds(1.0, math.inf)) is not None


def test_a_run_that_began_at_its_certified_optimum_has_nothing_to_descend():
    assert check_descent(make_rounds(1.0, 1.0, gap=1e-6)) is None
    assert check_descent(make_rounds(1.0, 1.0, gap=0.5)) is not None


@given(rows=hnp.arrays(np.float64, (3, 4), elements=numbers))
def test_without_an_objective_the_average_training_loss_counts(rows):
    found = check_descent(make_course("loss", "train", *rows.tolist()))
    start, end = rows[0].mean(), rows[-1].mean()
    assert (found is None) == (end < start - ROUNDING * start)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@given(rows=hnp.arrays(np.float64, (2, 4), elements=st.integers(0, 10).map(lambda k: k / 10)))
def test_a_model_below_the_untrained_one_is_said(metric, rows):
    found = check_against_start(make_course(metric, "test", *rows.tolist()))
    start, end = rows.mean(axis=1)
    worse = end < start if metric == "accuracy" else end > start
    assert (found is not None) == (worse and not math.isclose(start, end))


def test_clients_that_were_not_measured_twice_do_not_count():
    run = make_course("accuracy", "test", [0.9, 0.1], [math.nan, 0.2])
    assert check_against_start(run) is None


@given(
    scales=hnp.arrays(np.float64, 3, elements=st.floats(0.01, 10)),
    factor=st.sampled_from([1.0, 10.0, 1e4]),
)
def test_features_of_different_scales_are_said(scales, factor):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 4)) * np.append(scales, scales[0] * factor)
    inputs = np.column_stack([inputs, np.full(60, 7.0)])  # a constant feature has no scale
    measured = inputs[:, :4].std(axis=0)
    ratio = measured.max() / measured.min()
    assert (check_scales(measure_scales(inputs)) is not None) == (ratio > 100)


def test_images_and_tokens_have_no_units():
    assert measure_scales(np.zeros((5, 2, 2))) is None
    assert measure_scales(np.zeros((5, 3), dtype=np.int64)) is None
    assert check_scales(None) is None and check_scales(np.full(2, np.nan)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_parameter_that_is_not_finite_is_named(value):
    good = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    assert check_finite(good) is None
    assert "weight" in str(check_finite({**good, "weight": torch.tensor([1.0, value])}))


# -- and training records them ------------------------------------------------------------------


def make_federation(scale: float = 1.0, classes: int = 2) -> Federation:
    rng = np.random.default_rng(0)
    clients = {}
    for name in "abc":
        inputs = rng.normal(size=(20, 3)) * np.array([1.0, 1.0, scale])
        clients[name] = (inputs, (inputs[:, 0] > 0).astype(np.int64))
    return Federation.from_clients(clients, classes=classes).split(test=0.4, seed=0)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def run(federation: Federation, lr: float = 0.1, engine=LoopClients, **options) -> History:
    clients = engine(federation, nn.Linear(3, 2), cross_entropy, dtype=torch.float64)
    algorithm = FedAvg(LocalSGD(lr=lr, steps=3))
    return train(algorithm, clients, rounds=4, evaluate=("train", "test"), **options)


def warned(history: History) -> list[str]:
    return [e["reason"] for e in history.events if e["event"] == "warning"]


@pytest.mark.parametrize("engine", [LoopClients, StackedClients])
def test_a_good_run_has_no_warning_and_a_bad_one_says_why(engine):
    assert not warned(run(make_federation(), engine=engine))
    scaled = run(make_federation(scale=1e4), engine=engine)
    assert any("feature 2" in w and "standardise" in w for w in warned(scaled))
    assert not any("feature" in w for w in warned(run(standardise(make_federation(1e4)))))
    good = torch.tensor([-9.0, 0, 0, 9, 0, 0, 0, 0], dtype=torch.float64)  # weight, then bias
    uphill = warned(run(make_federation(scale=1e4), x=good, engine=engine))
    assert any("did not lower" in w for w in uphill) and any("below" in w for w in uphill)


LOCAL = [FedAvg, Scaffold, AFL, DRFA, DeltaFL, AgnosticFedAvg, tilted_erm, RFedFair, FedEBA]


@pytest.mark.parametrize("make", LOCAL, ids=lambda make: make.__name__)
def test_every_algorithm_says_that_it_did_not_train_though_nothing_was_measured(make):
    """Also those that know neither objective nor losses: before 0.2 nobody said anything."""
    data, start, said = regression(), torch.zeros(4, dtype=torch.float64), {}
    for lr in (1e-14, 0.002, 2.0):
        clients = LoopClients(data, nn.Linear(3, 1), "squared", dtype=start.dtype)
        history = train(make(LocalSGD(lr=lr, steps=3)), clients, rounds=4, x=start)
        said[lr] = [w for w in warned(history) if "did not lower" in w]
    assert said[0.002] == []
    assert "larger step sizes" in said[1e-14][0] and "smaller step sizes" in said[2.0][0]


@given(rows=hnp.arrays(np.float64, (2, 4), elements=numbers))
def test_losses_that_fell_on_average_or_at_the_worst_client_are_training(rows):
    found = check_descent(History(tuple("abcd")), lambda: (rows[0], rows[1]))
    fell = any(f(rows[1]) < f(rows[0]) * (1 - ROUNDING) for f in (np.mean, np.max))
    assert (found is None) == fell


def test_warnings_are_shown_by_terminal_summary_and_report(tmp_path):
    federation = make_federation(scale=1e4)
    folder = RunFolder(tmp_path / "run", federation.names)
    folder.create()
    history = run(federation, folder=folder)
    (sentence,) = [w for w in warned(history) if "feature" in w]
    assert f"warning: {sentence}" in describe_events(history)
    assert sentence in history.summary()["warnings"]
    again = History.load(tmp_path / "run")
    told = as_json(build(as_methods({"fedavg": again})))["headline"]["warnings"]
    assert f"fedavg: {sentence}" in told


def test_a_report_warns_of_runs_that_did_not_know_how_to():
    good, bad = make_history(), make_history()
    for record in bad.metrics:
        if record.round:
            record.values[:] = 0.0
    told = as_json(build(as_methods({"good": good, "bad": bad})))["headline"]["warnings"]
    assert len(told) == 1 and told[0].startswith("bad: ") and "before training" in told[0]


def test_a_private_run_that_learns_nothing_is_not_told_to_change_its_steps():
    history = make_history()
    history.rounds[:] = [replace(r, objective=1.0 + r.round) for r in history.rounds]
    (plain,) = [w for w in find_warnings(history) if "did not lower" in w]
    history.events.append({"event": PRIVACY, "round": 1, "ledgers": []})
    (private,) = [w for w in find_warnings(history) if "did not lower" in w]
    assert "smaller step sizes" in plain and "step sizes" not in private
    assert "larger epsilon" in private


@pytest.mark.parametrize("lr", [1e200, 1e308])
def test_a_model_that_is_not_finite_never_ends_well(tmp_path, lr):
    federation = make_federation()
    folder = RunFolder(tmp_path / "run", federation.names)
    folder.create()
    with pytest.raises(TrainingError):
        run(federation, lr=lr, folder=folder)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert History.load(tmp_path / "run").events[-1]["event"] == "stopped"


class Spoilt(LoopClients):
    """Clients that all answer, to a model that is not finite."""

    def parameters(self, x):
        return {name: p * math.inf for name, p in super().parameters(x).items()}


def test_a_non_finite_model_is_refused_though_all_clients_answered():
    with pytest.raises(TrainingError, match=r"not finite.*weight.*smaller step"):
        run(make_federation(), engine=Spoilt)


# -- the hits of single samples -----------------------------------------------------------------


@pytest.mark.parametrize("engine", [LoopClients, StackedClients])
def test_hits_are_those_of_the_final_model(engine):
    federation = make_federation()
    history = run(federation, engine=engine)
    weight, bias = (history.parameters[name] for name in ("weight", "bias"))
    for split in ("train", "test"):
        data = getattr(federation, split)
        answers = (torch.as_tensor(data.inputs) @ weight.T + bias).argmax(1).numpy()
        hits = history.hits[split]
        np.testing.assert_array_equal(hits.correct, answers == data.targets)
        means = [c.mean() for c in np.split(hits.correct, data.offsets[1:-1])]
        np.testing.assert_allclose(means, history.last("accuracy", split).values)


def test_checksums_tell_whose_samples_differ():
    one, two = (run(make_federation()).hits["test"].checksums for _ in range(2))
    np.testing.assert_array_equal(one, two)
    federation = make_federation()
    federation.test.inputs[0, 0] += 1e-9
    changed = run(federation).hits["test"].checksums
    assert (changed != one).tolist() == [True, False, False]


@given(correct=hnp.arrays(np.bool_, st.integers(0, 40)), n=st.integers(1, 5))
def test_hits_survive_their_file(correct, n):
    hits = {"test": Hits(correct, np.arange(n) + 2**31)}
    again = unpack_hits(pack_hits(hits))["test"]
    for name in ("correct", "checksums"):
        np.testing.assert_array_equal(getattr(again, name), getattr(hits["test"], name))
    assert pack_hits(hits) == pack_hits(hits)


def test_a_history_with_hits_survives_its_folder(tmp_path):
    history = run(make_federation())
    history.save(tmp_path / "run")
    again = History.load(tmp_path / "run")
    np.testing.assert_array_equal(again.hits["test"].correct, history.hits["test"].correct)
    for name in (
        "hits.npz",
        "summary.json",
    ):  # as a run that has not ended, of before there were any
        (tmp_path / "run" / name).unlink()
    assert History.load(tmp_path / "run").hits == {}


# -- accuracies that no client can have ---------------------------------------------------------


@given(value=st.one_of(st.floats(1.001, 1e6), st.floats(-1e6, -1e-9), st.just(math.inf)))
def test_an_accuracy_outside_the_unit_interval_is_refused(value):
    record = MetricRecord(3, "test", "accuracy", np.array([0.5, value]), np.array([2, 2]))
    with pytest.raises(ValueError, match=r"Client b .*must lie in \[0, 1\].*divide percentages"):
        History(("a", "b"), metrics=[record])
    evaluation = Evaluation("test", record.sizes, {"accuracy": record.values})
    with pytest.raises(ValueError, match="Client b"):
        History(("a", "b")).add_evaluation(3, [evaluation])
    appended = History(("a", "b"))
    appended.metrics.append(record)
    with pytest.raises(ValueError, match="Client b"):
        as_methods(appended)


def test_an_accuracy_of_seven_is_refused_when_a_folder_is_read(tmp_path):
    folder = make_history(("a", "b")).save(tmp_path / "run")
    table = folder / "metrics.csv"
    lines = table.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if ",b,test,accuracy," in line)
    fields = lines[at].split(",")
    fields[4] = "7.0"
    table.write_text("\n".join([*lines[:at], ",".join(fields), *lines[at + 1 :]]) + "\n")
    (folder / "summary.json").unlink()  # else its checksum tells
    with pytest.raises(ValueError, match=r"Client b has a test accuracy of 7 .*\[0, 1\]"):
        History.load(folder)


def test_losses_and_missing_accuracies_are_not_refused():
    sizes = np.array([0, 3])
    records = [
        MetricRecord(0, "test", "accuracy", np.array([math.nan, 1.0]), sizes),
        MetricRecord(0, "test", "loss", np.array([math.nan, 7.0]), sizes),
    ]
    assert len(History(("a", "b"), metrics=records).metrics) == 2


def test_a_run_without_anything_to_say_says_nothing():
    assert find_warnings(History(("a",))) == []


@pytest.mark.parametrize(
    ("weights", "rounds", "told"),
    [
        ((0.6, 0.2, 0.2), 5, [5]),
        ((0.6, 0.2, 0.2), 4, []),
        ((-0.9, 0.4, 0.4), 12, [5]),  # signed weights count by their size, and once
        ((0.5, 0.25, 0.25), 9, []),  # not more than half
        ((0.9, 0.1), 9, []),  # of two clients one always has half
    ],
)
def test_who_has_more_than_half_of_the_weight_for_five_rounds_is_told_once(
    weights: tuple[float, ...], rounds: int, told: list[int]
) -> None:
    history, found = History(tuple("abc"[: len(weights)])), list[int]()

    def tell(kind: str, r: int, reason: str, client: str) -> None:
        assert (kind, client) == ("watch", "a") and "dominates" in reason
        found.append(r)

    kept = Kept()
    for r in range(1, rounds + 1):
        kept = tell_touches(kept, history, r, Info(np.array(weights)), tell)
    assert found == told
    swung = tell_touches(kept, history, rounds + 1, Info(np.full(len(weights), 0.1)), tell)
    assert (swung.leader, swung.leads) == (-1, 0)
