"""``ef.fit``: what is chosen, on which rows, and what remains when it is interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import equifed as ef
from equifed.data.split import Split
from equifed.runs import candidates, outcome
from equifed.runs import fit as fitting
from equifed.runs.candidates import FOLDS, Point, Score, hold_out, pool, read_score, solve
from equifed.runs.linear_paths import LinearPaths, measure
from equifed.runs.load import evaluate
from equifed.training.files import RunFolderError

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {"L2": (1e-2, 1e-1), "RHOS": (0.3,), "OWN_L2": (1e-1, 1e-2)}.items():
        monkeypatch.setattr(candidates, name, values)
    monkeypatch.setattr(candidates, "OWN_RHOS", (0.3,))


def draw(shift: float, seed: int = 0, clients: int = 6, rows: int = 100) -> ef.Federation:
    """Draw clients that differ in how frequent the second class is, by ``shift``."""
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(clients):
        x = rng.normal(size=(rows, 3))
        scores = x @ [1.0, -1.0, 0.5] + shift * (i - (clients - 1) / 2)
        found[f"c{i}"] = x, (scores + rng.logistic(size=rows) > 0).astype(int)
    return ef.Federation.from_clients(found, classes=2)


def predict(served: Any, data: ef.Federation) -> list[Array]:
    made = served.predictor()
    return [made.predict_proba(data.train.client(i)[0], n) for i, n in enumerate(data.names)]


# -- what is chosen ---------------------------------------------------------------------------


def test_skewed_clients_get_a_bias_of_their_own_and_are_served_better() -> None:
    served = ef.fit(draw(shift=1.0, rows=200))
    rows = {row["candidate"]: row["test"] for row in served.rows}
    chosen = next(row for row in served.rows if row["chosen"])
    assert chosen["candidate"].startswith("own bias")
    assert chosen["test"]["worst_fifth"] > rows[candidates.BASE]["worst_fifth"]
    assert "within chance" not in served.gain and "better off alone" not in served.gain


def test_clients_that_are_alike_are_told_so() -> None:
    found = [ef.fit(draw(shift=0.0, seed=seed)).gain for seed in range(3)]
    assert all("one shared model serves all" in gain.lower() for gain in found)


def test_clients_of_opposite_signs_are_all_better_off_alone() -> None:
    rng = np.random.default_rng(0)
    made = {}
    for i, sign in enumerate((1.0, -1.0, 1.0, -1.0)):
        x = rng.normal(size=(200, 2))
        made[f"c{i}"] = x, (3 * sign * x[:, 0] + rng.logistic(size=200) > 0).astype(int)
    served = ef.fit(ef.Federation.from_clients(made, classes=2))
    assert "You would all be better off alone" in served.gain


def test_the_choice_is_the_smallest_mean_loss_and_each_score_is_that_of_its_model() -> None:
    """Oracle: every candidate solved apart, its loss on the held-out rows taken by hand."""
    data = draw(shift=0.7).split(validation=0.2, seed=3)
    points = [Point(l2, own, rho) for l2 in candidates.L2 for own in (None, *candidates.OWN_L2)
              for rho in ((None, 0.3) if own is None else (None,))]  # fmt: skip
    found = {}
    for point in points:
        predictor = next(solve(data, [point], ())).predictor()
        losses = []
        for i, name in enumerate(data.names):
            x, y = data.validation.client(i)
            chances = predictor.predict_proba(x, name)
            losses.append(-np.log(chances[np.arange(len(y)), y]).mean())
        found[point] = float(np.mean(losses))
    choice = candidates.choose(data, 3, None, lambda _: None)
    assert choice.scores[choice.point.family].mean <= min(found.values()) + 1e-4
    for family, point in choice.best.items():
        if point in found:
            assert choice.scores[family].mean == pytest.approx(found[point], abs=1e-4)


@pytest.mark.parametrize("regression", [False, True])
def test_paths_on_arrays_are_those_of_fair_newton(regression: bool) -> None:
    data = draw(shift=0.7).split(validation=0.2)
    if regression:
        splits = {k: replace(s, targets=s.inputs @ [1.0, 2.0, 0.5] + s.targets)
                  for k, s in data.splits().items()}  # fmt: skip
        data = replace(data, classes=None, **splits)
    points = [Point(1e-2), Point(1e-2, rho=1.0), Point(1e-2, rho=0.1), Point(1e-3, 0.1),
              Point(1e-3, 0.1, 0.3)]  # fmt: skip
    walk = LinearPaths(data).walk(points)
    for at, history in zip(walk, solve(data, points, ("validation",)), strict=True):
        found = read_score(history, "validation")
        for mine, theirs in zip(measure(data, at, "validation"), found, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_a_client_keeps_its_own_model_where_that_halves_its_loss() -> None:
    data = draw(shift=0.0, clients=5, rows=200)
    x, _ = data.train.client(4)
    targets = data.train.targets.copy()
    targets[data.train.offsets[4] :] = x[:, 2] > 0  # another rule, without noise
    data = replace(data, train=replace(data.train, targets=targets))
    plain = ef.fit(data, test=0.25)
    assert plain.chosen.keepers == () and any("Own models of c4" in note for note in plain.notes)
    served = ef.fit(data, test=0.25, keep_own=True)
    assert served.chosen.keepers == ("c4",) and "c4 keep" in served.choice
    whole = data.split(test=0.25, seed=0)
    right = served.predictor().predict(whole.test.client(4)[0], "c4") == [
        str(y) for y in whole.test.client(4)[1]
    ]
    assert served.history.per_client("accuracy", "test")["c4"] == np.mean(right)
    others = ef.fit(data.subset(["c0", "c1"]), keep_own=True).chosen.keepers
    assert others == ()


def test_own_models_are_kept_from_half_the_loss_and_enough_rows_on() -> None:
    data = draw(0.0, clients=3)
    alone, shared = (
        Score(np.array([0.2, 0.2, 0.3]), np.zeros(3)),
        Score(np.full(3, 0.4), np.ones(3)),
    )
    assert candidates.find_keepers(data, np.array([10.0, 9.0, 50.0]), alone, shared) == ("c0",)


# -- rows -------------------------------------------------------------------------------------


class Watched(Split):
    """A split that tells when its rows are read."""

    log: list[bool] = []  # noqa: RUF012
    choice: Path | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("inputs", "targets") and Watched.choice is not None:
            Watched.log.append(Watched.choice.exists())
        return super().__getattribute__(name)


def test_no_test_row_is_read_before_the_choice_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = draw(shift=0.5).split(test=0.2)
    assert data.test is not None
    watched = Watched(data.test.inputs, data.test.targets, data.test.offsets)
    data = replace(data, test=watched)
    monkeypatch.setattr(Watched, "choice", tmp_path / "run" / fitting.CHOICE)
    monkeypatch.setattr(Watched, "log", [])
    ef.fit(data, out=tmp_path / "run")
    assert Watched.log and all(Watched.log)


def test_other_test_rows_change_nothing_of_the_choice(tmp_path: Path) -> None:
    data, stored = draw(shift=0.5).split(test=0.2), []
    assert data.test is not None
    other = replace(data, test=replace(data.test, targets=1 - data.test.targets))
    for k, given in enumerate((data, other)):
        served = ef.fit(given)
        stored.append((served.choice, [p.tolist() for p in predict(served, data)]))
        assert k == 0 or stored[0] == stored[1]


def test_folds_hold_every_row_out_once_and_pooled_rows_are_all_rows() -> None:
    data = draw(0.0, clients=2, rows=11)
    folds, rows = hold_out(data, seed=0)
    assert len(folds) == FOLDS and "22 training rows" in rows
    held = np.concatenate([fold.validation.client(1)[0] for fold in folds])
    assert sorted(held[:, 0]) == sorted(data.train.client(1)[0][:, 0])
    back = pool(folds[2])
    assert sorted(back.train.client(0)[0][:, 1]) == sorted(data.train.client(0)[0][:, 1])
    assert back.validation is None


# -- folders ----------------------------------------------------------------------------------


class Stop(Exception):
    pass


def test_an_interrupted_fit_ends_as_one_that_was_not(tmp_path: Path) -> None:
    data, told = draw(shift=0.8), list[str]()

    def interrupt(what: str) -> None:
        told.append(what)
        if len(told) == 4:
            raise Stop

    whole = ef.fit(data, out=tmp_path / "whole")
    with pytest.raises(Stop):
        ef.fit(data, out=tmp_path / "halves", tell=interrupt)
    kept = {f: f.stat().st_mtime_ns for f in (tmp_path / "halves" / "tried").iterdir()}
    assert len(kept) == 3
    again = ef.fit(data, out=tmp_path / "halves")
    assert {f: f.stat().st_mtime_ns for f in kept} == kept  # not computed again
    assert again.choice == whole.choice and again.gain == whole.gain
    first, second = (tmp_path / n / "model.safetensors" for n in ("whole", "halves"))
    assert first.read_bytes() == second.read_bytes()


def test_a_fit_that_is_killed_while_it_saves_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = draw(shift=0.8)
    with monkeypatch.context() as patched:
        patched.setattr(fitting.Served, "to_dict", lambda self: 1 / 0)  # the run is written then
        with pytest.raises(ZeroDivisionError):
            ef.fit(data, out=tmp_path / "killed")
    (tmp_path / "killed" / "summary.json").unlink()
    ef.fit(data, out=tmp_path / "killed")
    ef.fit(data, out=tmp_path / "plain")
    for name in ("model.safetensors", "metrics.csv", "choice.json"):
        both = [(tmp_path / run / name).read_bytes() for run in ("killed", "plain")]
        assert both[0] == both[1]
    with pytest.raises(RunFolderError, match="already holds a run"):
        ef.fit(data, out=tmp_path / "plain")


def test_new_rows_are_measured_as_a_run_of_the_command_line_is(tmp_path: Path) -> None:
    """A folder without a configuration; rows without a label are left out, and counted."""
    rng = np.random.default_rng(0)
    table = {"site": [f"s{k % 3}" for k in range(240)], "x": rng.normal(size=240).tolist(),
             "y": rng.integers(0, 2, 240).tolist()}  # fmt: skip
    served = ef.fit(table, client="site", target="y", out=tmp_path / "run")
    table["y"][7] = None
    with pytest.warns(ef.data.DataWarning, match=r"1 of 240 row\(s\) without a value in 'y'"):
        found = {drift.metric: drift for drift in evaluate(tmp_path / "run", table)}
    made, rows = served.predictor(), [k for k in range(240) if k % 3 == 1 and k != 7]
    cells = {name: [column[k] for k in rows] for name, column in table.items()}
    right = made.predict(cells) == np.array([str(v) for v in cells["y"]])
    assert found["accuracy"].rows[1]["now"] == pytest.approx(right.mean())


def test_new_rows_are_measured_by_the_models_that_clients_keep(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    site, (a, b) = [s for s in "pqrst" for _ in range(60)], rng.normal(size=(2, 300))
    high = np.where(np.array(site) == "t", b, a + 0.3 * rng.normal(size=300)) > 0
    table = {"site": site, "a": a.tolist(), "b": b.tolist(), "y": [f"{v}" for v in high]}
    told = {"client": "site", "target": "y", "keep_own": True, "out": tmp_path / "run"}
    served = ef.fit(table, **told)
    assert "t" in served.chosen.keepers
    found = {drift.metric: drift for drift in evaluate(tmp_path / "run", table)}
    right = served.predictor().predict(table) == np.array(table["y"])
    for row in found["accuracy"].rows:
        assert row["now"] == pytest.approx(right[np.array(site) == row["client"]].mean())


def test_a_folder_of_other_data_is_refused_and_replaced_if_asked(tmp_path: Path) -> None:
    def stop(what: str) -> None:
        if "own" in what:
            raise Stop

    with pytest.raises(Stop):
        ef.fit(draw(0.5), out=tmp_path, tell=stop)
    with pytest.raises(RuntimeError, match="results of other data or settings"):
        ef.fit(draw(0.5, seed=1), out=tmp_path)
    ef.fit(draw(0.5, seed=1), out=tmp_path, overwrite=True)
    with pytest.raises(RuntimeError, match="already holds a run"):
        ef.fit(draw(0.5, seed=1), out=tmp_path)


def test_what_is_saved_predicts_the_same(tmp_path: Path) -> None:
    data = draw(shift=1.0, rows=60)
    served = ef.fit(data, out=tmp_path)
    loaded = ef.load_predictor(tmp_path)
    for i, name in enumerate(data.names):
        rows = data.train.client(i)[0]
        mine = served.predictor().predict_proba(rows, name)
        assert np.array_equal(loaded.predict_proba(rows, name), mine)
    assert json.loads((tmp_path / fitting.CHOICE).read_text())["choice"] == served.choice
    assert (tmp_path / fitting.REPORT).exists()


# -- tables and messages ----------------------------------------------------------------------


def test_a_table_is_read_fitted_and_predicted_in_its_own_unit() -> None:
    rng = np.random.default_rng(1)
    site = np.repeat([f"s{i}" for i in range(5)], 60)
    level = np.repeat([0, 100, 200, 300, 400], 60)
    x = rng.normal(size=300)
    table = {"site": site, "x": x, "price": 1e6 + 1e3 * (x + level / 50) + rng.normal(size=300)}
    served = ef.fit(table, client="site", target="price")
    assert served.history.main_metric() == ("mse", "test")
    found = served.predictor().predict({"x": [0.0], "site": ["s4"]})
    assert found == pytest.approx(1e6 + 8e3, abs=100)


def test_clients_of_one_class_and_few_rows_are_named() -> None:
    data = draw(shift=0.5, clients=4, rows=40)
    targets = data.train.targets.copy()
    targets[: data.train.offsets[1]] = 1
    served = ef.fit(replace(data, train=replace(data.train, targets=targets)), keep_own=True)
    assert any("c0: training rows of one class only" in note for note in served.notes)
    assert "c0" not in served.chosen.keepers
    few = ef.fit(draw(shift=0.5, clients=4, rows=10))
    assert any("4 of 4 clients have fewer than 10 held-out rows" in note for note in few.notes)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6])
def test_clients_of_a_few_rows_are_folded_and_every_row_is_held_out_once(rows: int) -> None:
    data = draw(shift=0.5, clients=30, rows=rows)
    folds, told = hold_out(data, seed=0)
    assert len(folds) == min(rows, FOLDS) and f"in {len(folds)} folds" in told
    assert sum(len(fold.validation) for fold in folds) == len(data.train)
    served = ef.fit(data)
    split = "test" if rows > 2 else "train"  # a quarter of two rows is none
    assert len(served.predictor().clients) == 30 and np.isfinite(served.rows[0][split]["loss"])


def test_clients_of_one_class_are_not_said_to_be_better_off_alone() -> None:
    """Alone they answer their class and are right; that is no model."""
    data = draw(shift=0.0, clients=6, rows=80)
    targets = data.train.targets.copy()
    cut = data.train.offsets
    for i in range(6):
        targets[cut[i] : cut[i + 1]] = i % 2
    data = replace(data, train=replace(data.train, targets=targets))
    served = ef.fit(data)
    assert "better off alone" not in served.gain
    assert all(row["test"].get("better_alone", 0) == 0 for row in served.rows)


@pytest.mark.parametrize("regression", [False, True])
def test_a_client_without_test_rows_is_served_and_not_measured(regression: bool) -> None:
    data = draw(shift=0.5, clients=3, rows=60)
    x, y = data.train.inputs, data.train.targets
    given = {f"c{i}": (x[rows], y[rows] * 1.0 if regression else y[rows])
             for i, rows in enumerate((slice(0, 60), slice(60, 120), slice(120, 122)))}  # fmt: skip
    data = ef.Federation.from_clients(given, classes=None if regression else 2)
    served = ef.fit(data)
    measured = served.history.per_client(served.history.main_metric()[0], "test")
    assert list(measured) == ["c0", "c1"] and "c2" in served.predictor().clients


def test_auroc_stands_beside_accuracy_where_a_class_is_rare(tmp_path: Path) -> None:
    rng, found = np.random.default_rng(0), {}
    for name in "abc":
        x = rng.normal(size=(300, 2))
        found[name] = x, (x[:, 0] + rng.logistic(size=300) > 2.8).astype(int)
    served = ef.fit(ef.Federation.from_clients(found, classes=2))
    data = ef.Federation.from_clients(found, classes=2).split(test=0.25, seed=0)
    made, areas = served.predictor(), []
    for i, name in enumerate("abc"):
        x, y = data.test.client(i)
        areas.append(roc_auc_score(y, made.predict_proba(x, name)[:, 1]))
    chosen = next(row for row in served.rows if row["chosen"])
    assert chosen["test"]["auroc"] == pytest.approx(np.mean(areas))
    assert "AUROC" in str(served.table)
    assert "AUROC" in served.report(tmp_path / "report.html").read_text()
    assert "AUROC" not in str(ef.fit(draw(0.0)).table)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="A table needs client="):
        ef.fit({"x": [1.0]}, target="x")
    with pytest.raises(ValueError, match="leave out target"):
        ef.fit(draw(0.0), target="x")
    with pytest.raises(ValueError, match="only one, 'c0'"):
        ef.fit(draw(0.0, clients=1))
    with pytest.raises(ValueError, match="Every client has a single row"):
        ef.fit(draw(0.0, clients=9, rows=1), test=0.0)
    alike = {"who": ["a", "b"] * 20, "x": np.arange(40) % 7, "y": [2.5] * 40}
    with pytest.raises(ValueError, match=r"Every training row has the target 2\.5"):
        ef.fit(alike, client="who", target="y")


def test_the_chance_of_a_gain_is_uniform_where_there_is_none() -> None:
    rng = np.random.default_rng(0)
    found = [
        outcome.tell_apart(*[[rng.normal(size=20) for _ in range(8)] for _ in range(2)])
        for _ in range(400)
    ]
    # The mean of a gain below zero counts as 1: half of the draws.
    assert np.mean(np.array(found) < 0.05) == pytest.approx(0.05, abs=0.03)
    assert np.mean(np.array(found) == 1.0) == pytest.approx(0.5, abs=0.1)
