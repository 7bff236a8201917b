"""Mean predictions beside what was observed, and thresholds of the clients' own."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

import equifed as ef
from equifed.runs import candidates
from equifed.runs.candidates import Point, hold_out, read_score, solve
from equifed.runs.outcome import choose_thresholds, find_threshold

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {"L2": (1e-2,), "RHOS": (0.3,), "OWN_L2": (1e-1,)}.items():
        monkeypatch.setattr(candidates, name, values)
    monkeypatch.setattr(candidates, "OWN_RHOS", (0.3,))


def draw(shift: float = 0.0, rows: int = 200, clients: int = 6) -> ef.Federation:
    rng, found = np.random.default_rng(0), {}
    for i in range(clients):
        x = rng.normal(size=(rows, 3))
        scores = x @ [1.0, -1.0, 0.5] + shift * (i == 0)
        found[f"c{i}"] = x, (scores + rng.logistic(size=rows) > 0).astype(int)
    return ef.Federation.from_clients(found, classes=2)


def test_a_threshold_is_right_most_often_and_of_equals_the_nearest_to_a_half() -> None:
    """Oracle: every threshold between two scores, and beyond all of them, tried one by one."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(1, 12))
        scores, targets = rng.integers(-3, 4, n).astype(float), rng.integers(0, 2, n)
        levels = np.unique([0.0, *scores, *(scores + 0.5), *(scores - 0.5), -9.0, 9.0])
        right = np.array([((scores > level) == targets).sum() for level in levels])
        mine = find_threshold(scores, targets)
        assert ((expit(scores) > mine) == targets).sum() == right.max()
        if ((scores > 0) == targets).sum() == right.max():
            assert mine == 0.5


def test_thresholds_are_chosen_with_a_model_that_has_not_seen_their_rows() -> None:
    """Oracle: every fold solved apart by FairNewton."""
    data, point = draw(shift=2.0, rows=30), Point(1e-2)
    folds, _ = hold_out(data, 0)
    assert len(folds) > 1
    scores: list[list[float]] = [[] for _ in data.names]
    targets: list[list[int]] = [[] for _ in data.names]
    for fold in folds:
        model = next(solve(fold, [point], ())).predictor()
        assert fold.validation is not None
        for i in range(len(data)):
            inputs, wanted = fold.validation.client(i)
            scores[i] += model.decision_function(inputs).tolist()
            targets[i] += wanted.tolist()
    made = choose_thresholds(folds, point)
    for i in range(len(data)):
        expected = find_threshold(np.array(scores[i]), np.array(targets[i]))
        assert made[i] == pytest.approx(expected, abs=1e-4)


def test_what_is_told_is_what_the_predictor_says_of_test_rows(tmp_path: Path) -> None:
    data = draw(shift=2.0).split(test=0.25, seed=3)
    served = ef.fit(data, out=tmp_path / "run")
    made, test = served.predictor(), data.test
    assert test is not None and len(served.sites) == len(data)
    for i, told in enumerate(served.sites):
        inputs, targets = test.client(i)
        chance = made.predict_proba(inputs, data.names[i])[:, 1]
        assert told["predicted"] == pytest.approx(chance.mean())
        assert told["observed"] == pytest.approx(targets.mean())
        assert told["accuracy"] == pytest.approx(((chance > 0.5) == targets).mean())
        moved = ((chance > told["threshold"]) == targets).mean()
        assert told["accuracy_at_threshold"] == pytest.approx(moved)
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{100 * served.sites[0]['predicted']:.1f} %" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert served.to_dict()["sites"] == served.sites


def test_the_error_is_that_of_outcomes_drawn_with_the_stated_chances() -> None:
    """Oracle: outcomes drawn many times."""
    served = ef.fit(draw().split(test=0.25, seed=3))
    data = draw().split(test=0.25, seed=3)
    assert data.test is not None
    chance = served.predictor().predict_proba(data.test.client(0)[0], "c0")[:, 1]
    drawn = np.random.default_rng(0).random((20_000, len(chance))) < chance
    assert served.sites[0]["error"] == pytest.approx(drawn.mean(1).std(), rel=0.03)


def test_other_test_rows_change_no_threshold() -> None:
    data = draw(shift=1.0).split(test=0.25, seed=3)
    assert data.test is not None
    turned = replace(data.test, targets=1 - data.test.targets)
    both = [ef.fit(d).sites for d in (data, replace(data, test=turned))]
    pairs = [[one["threshold"] for one in sites] for sites in both]
    assert pairs[0] == pairs[1]
    assert [s["observed"] for s in both[0]] != [s["observed"] for s in both[1]]


def page_of(served: Any, tmp_path: Path) -> str:
    return unescape(served.report(tmp_path / "page.html").read_text())


def test_a_client_whose_rows_are_other_than_in_training_is_named_on_the_page(
    tmp_path: Path,
) -> None:
    data = draw(rows=400).split(test=0.5, seed=3)
    assert "No client's mean probability is off beyond chance" in page_of(ef.fit(data), tmp_path)
    assert data.test is not None
    shifted = data.test.targets.copy()
    shifted[: data.test.offsets[1]] = 1  # the first client: all of the second class
    moved = replace(data, test=replace(data.test, targets=shifted))
    assert "off beyond chance for 1 of 6 clients: c0" in page_of(ef.fit(moved), tmp_path)


def test_a_regression_tells_means_in_its_own_unit_and_no_thresholds() -> None:
    rng = np.random.default_rng(2)
    table = {"site": ["a", "b"] * 100, "x": rng.normal(size=200).tolist()}
    table["y"] = [1e4 + 300 * x + rng.normal() for x in table["x"]]
    served = ef.fit(table, client="site", target="y", task="regression")
    for told in served.sites:
        assert set(told) == {"client", "n", "predicted", "observed", "error"}
        assert told["predicted"] == pytest.approx(told["observed"], abs=4 * told["error"] + 1)
        assert 9_000 < told["observed"] < 11_000


def test_few_rows_and_kept_own_models_have_no_threshold() -> None:
    data = draw(rows=12).split(test=0.25, seed=0)
    served = ef.fit(data)
    assert all("threshold" not in told for told in served.sites)
    assert all(np.isnan(choose_thresholds(hold_out(data, 0)[0], served.chosen.point)))


def test_a_stored_choice_is_the_same_with_thresholds_beside_it() -> None:
    """The candidates and their losses are what they were: thresholds have no say in them."""
    data = draw(shift=1.0)
    served = ef.fit(data, seed=1)
    untested = replace(data.split(test=0.25, seed=1), test=None)
    fold = hold_out(untested, 1)[0][0]
    alone = read_score(next(solve(fold, [served.chosen.point], ("validation",))), "validation")
    assert served.chosen.scores[served.chosen.name].mean == pytest.approx(alone.mean, rel=1e-4)
