"""``ef.fit`` with a network: what is chosen, on which rows, and what remains of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score
from tests.runs.test_fit import Stop, Watched
from torch import nn

import equifed as ef
from equifed.algorithms.shelf.reweighted import Reweighted
from equifed.contract.streams import Stream
from equifed.runs import fit as fitting
from equifed.runs import network_fit
from equifed.runs.candidates import BASE
from equifed.runs.personalise import FOLDS
from equifed.training import loop
from equifed.training.files import RunFolderError

WORK = ef.LocalSGD(lr=0.2, steps=5, batch_size=20)
ROUNDS = 12


def draw(shift: float, rows: int = 160, clients: int = 4, curve: float = 2.0) -> ef.Federation:
    """Draw clients with one curved rule, and other shares of the classes by ``shift``."""
    rng, found = np.random.default_rng(3), {}
    for i in range(clients):
        x = rng.normal(size=(rows, 3))
        scores = curve * (np.abs(x[:, 0]) - 0.8) + x[:, 1] + shift * (i - (clients - 1) / 2)
        found[f"c{i}"] = x, (scores + rng.logistic(size=rows) > 0).astype(int)
    return ef.Federation.from_clients(found, classes=2)


def fit(data: Any, **more: Any) -> Any:
    return ef.fit(data, **{"model": "mlp", "rounds": ROUNDS, "local": WORK, **more})


def log_loss(scores: Any, targets: Any) -> Any:
    """Return cross-entropy by numpy."""
    return np.logaddexp(*scores.T) - scores[np.arange(len(targets)), targets]


def hold_out_bias(scores: Any, targets: Any, client: str, choice: Any) -> float:
    """Return the mean loss of rows with a bias that scipy fits to the other folds."""
    t, penalty = choice.settings["temperature"], choice.settings["penalty"]
    if not choice.changes:
        return float(log_loss(scores, targets).mean())
    order = Stream(0).at("folds", client).generator().permutation(len(targets))
    found = np.empty(len(targets))
    for fold in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, fold)

        def cost(bias: Any, rest: Any = rest) -> float:
            fitted = log_loss(scores[rest] / t + bias, targets[rest]).sum()
            return float(fitted + penalty / 2 * bias @ bias)

        bias = t * minimize(cost, np.zeros(2), tol=1e-10).x
        found[fold] = log_loss(scores[fold] + bias, targets[fold])
    return float(found.mean())


def train_apart(data: ef.Federation) -> dict[float | None, Any]:
    """Train every candidate by itself."""
    runs: dict[float | None, Any] = {}
    for rho in (None, *network_fit.FAIR):
        run: Any = ef.FedAvg(WORK, weighting="uniform")
        if rho is not None:
            run = ef.Reweighted(ef.objectives.ChiSquare(rho), WORK)
        runs[rho] = ef.train(run, ef.simulate(data, "mlp"), rounds=ROUNDS, seed=5)
    return runs


@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_the_choice_is_the_smallest_validation_loss_of_candidates_trained_apart(
    shift: float,
) -> None:
    data = draw(shift).split(test=0.2, seed=1).split(validation=0.25, seed=2)
    plain, expected, made = replace(data, test=None), dict[Any, float](), dict[Any, Any]()
    assert plain.validation is not None and plain.validation.sizes.min() >= 20
    for rho, run in train_apart(plain).items():
        own = ef.personalise(run, plain)
        made[rho, False], made[rho, True] = run.predictor(), own.predictor
        shared, fitted = [], []
        for i, name in enumerate(data.names):
            x, y = plain.validation.client(i)
            scores = made[rho, False].answer(x)
            shared.append(log_loss(scores, y).mean())
            fitted.append(hold_out_bias(scores, y, name, own.choices["validation"]))
        expected[rho, False], expected[rho, True] = np.mean(shared), np.mean(fitted)
    served = fit(data, seed=5)
    best = min(expected, key=lambda k: expected[k])
    point = served.chosen.point
    assert (point.rho, point.own_l2 is not None) == best
    for family, one in served.chosen.best.items():
        known = expected[one.rho, one.own_l2 is not None]
        assert served.chosen.scores[family].mean == pytest.approx(known, abs=1e-5)
    for i, name in enumerate(data.names):
        x = data.train.client(i)[0]
        theirs = made[best].predict_proba(x, name)
        assert np.array_equal(served.predictor().predict_proba(x, name), theirs)
    assert (shift == 0.0) or best[1]


def test_numbers_on_test_rows_are_those_of_the_predictor() -> None:
    served = fit(draw(1.5).split(test=0.3, seed=1))
    data = draw(1.5).split(test=0.3, seed=1)
    assert data.test is not None
    for name, run in served.runs.items():
        told, made = run.per_client("accuracy", "test"), run.predictor()
        for i, client in enumerate(data.names):
            x, y = data.test.client(i)
            assert told[client] == pytest.approx((made.predict(x, client) == y.astype(str)).mean())
        row = next(row for row in served.rows if row["candidate"] == name)
        assert row["test"]["average"] == pytest.approx(np.mean([*told.values()]))
    assert {row["candidate"] for row in served.rows} >= {BASE, "own bias, average"}


def test_a_fair_objective_of_a_huge_strength_is_the_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_fit, "FAIR", (1e9,))
    scores = fit(draw(1.0).split(test=0.2)).chosen.scores
    assert scores["one shared model, fair"].mean == pytest.approx(scores[BASE].mean, rel=1e-4)


def test_no_test_row_is_read_before_the_choice_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = draw(0.5).split(test=0.2)
    assert data.test is not None
    watched = Watched(data.test.inputs, data.test.targets, data.test.offsets)
    data = replace(data, test=watched)
    monkeypatch.setattr(Watched, "choice", tmp_path / "run" / fitting.CHOICE)
    monkeypatch.setattr(Watched, "log", [])
    fit(data, out=tmp_path / "run")
    assert Watched.log and all(Watched.log)


def test_an_interrupted_fit_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, played, play = draw(1.5), list[int](), Reweighted.round

    def interrupt(*given: Any) -> Any:
        played.append(1)
        if len(played) == 7:
            raise Stop
        return play(*given)

    whole = fit(data, out=tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
        patched.setattr(Reweighted, "round", interrupt)
        fit(data, out=tmp_path / "halves")
    with pytest.raises(RunFolderError, match="results of other data or settings"):
        fit(data, out=tmp_path / "halves", rounds=ROUNDS + 1)
    again = fit(data, out=tmp_path / "halves")
    resumed = [e["round"] for e in again.runs[BASE].events if e["event"] == "resume"]
    assert resumed == [ROUNDS]  # not trained again
    fair = (tmp_path / "halves" / "tried" / "fair-1" / "events.jsonl").read_text().splitlines()
    assert [json.loads(e)["round"] for e in fair if '"resume"' in e] == [6]
    assert again.choice == whole.choice and again.gain == whole.gain
    for name in ("model.safetensors", "own.safetensors", "choice.json", "metrics.csv"):
        first, second = (tmp_path / run / name for run in ("whole", "halves"))
        assert first.read_bytes() == second.read_bytes()
    with pytest.raises(RunFolderError, match="already holds a run"):
        fit(data, out=tmp_path / "whole")
    other = fit(draw(1.4), out=tmp_path / "whole", overwrite=True)
    assert not any(e["event"] == "resume" for e in other.runs[BASE].events)


@pytest.mark.parametrize("named", [True, False])
def test_what_is_saved_predicts_the_same(tmp_path: Path, named: bool) -> None:
    data, net = draw(1.5), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    served = fit(data, out=tmp_path, **({} if named else {"model": net}))
    loaded = ef.load_predictor(tmp_path, **({} if named else {"model": net}))
    assert served.chosen.name.startswith("own bias")
    for i, name in enumerate(data.names):
        x = data.train.client(i)[0]
        mine = served.predictor().predict_proba(x, name)
        assert np.array_equal(loaded.predict_proba(x, name), mine)
    assert "own bias" in (tmp_path / fitting.REPORT).read_text()


def test_a_table_is_fitted_in_its_own_unit_and_a_step_size_is_measured() -> None:
    rng = np.random.default_rng(1)
    x, site = rng.normal(size=400), np.repeat([f"s{i}" for i in range(4)], 100)
    price = 1e6 + 1e3 * (np.abs(x) + np.repeat([0, 2, 4, 6], 100)) + 10 * rng.normal(size=400)
    table = {"site": site, "x": x, "price": price}
    served = ef.fit(table, client="site", target="price", model="mlp", rounds=60)
    assert served.history.main_metric() == ("mse", "test")
    assert served.chosen.name.startswith("own bias") and "Local work: LocalSGD" in served.notes[0]
    found = served.predictor().predict({"x": [0.0, 1.0], "site": ["s3", "s0"]})
    assert found == pytest.approx([1.006e6, 1.001e6], abs=700)


def test_auroc_stands_beside_accuracy_where_a_class_is_rare() -> None:
    data = draw(0.0, rows=300)
    x = data.train.inputs
    rare = (x[:, 0] + np.random.default_rng(0).logistic(size=len(x)) > 2.8).astype(int)
    data = replace(data, train=replace(data.train, targets=rare)).split(test=0.3)
    served, areas = fit(data), []
    for i, name in enumerate(data.names):
        rows, y = data.test.client(i)
        areas.append(roc_auc_score(y, served.predictor().predict_proba(rows, name)[:, 1]))
    chosen = next(row for row in served.rows if row["chosen"])
    assert chosen["test"]["auroc"] == pytest.approx(np.mean(areas))


def test_clients_with_few_or_no_validation_rows_are_served() -> None:
    data = draw(1.0, rows=60)
    sizes = [slice(0, 60), slice(60, 120), slice(120, 150), slice(180, 182)]
    parts = {f"c{i}": (data.train.inputs[s], data.train.targets[s]) for i, s in enumerate(sizes)}
    served = fit(ef.Federation.from_clients(parts, classes=2), test=0.0)
    assert "no test rows" in served.gain and np.isfinite(served.rows[0]["train"]["loss"])
    assert np.isnan(served.chosen.scores[BASE].loss).tolist() == [False, False, False, True]
    assert "c3" in served.predictor().clients
    assert any("those of 0 of 4 clients" in note for note in served.notes)


def test_clients_of_one_class_are_named() -> None:
    data = draw(0.0)
    targets = data.train.targets.copy()
    targets[: data.train.offsets[1]] = 1
    served = fit(replace(data, train=replace(data.train, targets=targets)))
    assert any(note.startswith("c0: training rows of one class only") for note in served.notes)


def test_a_linear_model_takes_the_path_without_a_model() -> None:
    data = draw(1.0, curve=0.0)
    plain = ef.fit(data)
    for model in ("logistic", nn.Linear(3, 2)):
        other = ef.fit(data, model=model)
        assert other.choice == plain.choice and other.to_dict() == plain.to_dict()
        for name, values in plain.history.parameters.items():
            assert np.array_equal(values, other.history.parameters[name])


def test_what_does_not_fit_is_refused() -> None:
    data = draw(0.0)
    privacy = ef.Privacy(epsilon=8.0, rows=4.0, loss=3.0, rounds=6)
    for more, error, words in (
        ({"privacy": privacy}, ValueError, "no network under privacy="),
        ({"keep_own": True}, ValueError, "keep_own is about linear own models"),
        ({"model": "logistic"}, ValueError, "rounds and local are of a network"),
        ({"local": 0.1}, TypeError, "must be ef.LocalSGD"),
        ({"rounds": 0}, ValueError, "rounds must be a whole number of at least 1"),
    ):
        with pytest.raises(error, match=words):
            fit(data, **more)
    with pytest.raises(ValueError, match="only one, 'c0'"):
        fit(draw(0.0, clients=1))
    bare = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with pytest.raises(ValueError, match="the bias of the last layer"):
        fit(data, model=bare)
