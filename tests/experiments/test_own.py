"""The experiments about own parts, in tiny forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.plan import STARTED
from experiments.harness.running import reproduce

from equifed.runs import personalise as fine_tune

pytestmark = pytest.mark.long


def test_hospitals_are_compared_with_their_own_models(tmp_path: Path) -> None:
    outcome = reproduce("own-hospitals", tmp_path, quick=True, changes={"splits": 1})
    rows = {row[0]: row[1:] for row in outcome.tables["accuracy"].rows}
    assert {"own model", "majority class", "shared, average", "own intercept, worst-case"} <= set(
        rows
    )
    assert all(0 <= float(v) <= 100 for row in rows.values() for v in row)  # type: ignore[arg-type]
    gaps = [row[-1] for row in outcome.tables["chosen"].rows]
    assert max(gaps) <= definition("own-hospitals")["gap"]  # type: ignore[type-var]
    stored = sorted((tmp_path / "runs").glob("*.json"))
    before = [path.stat().st_mtime_ns for path in stored]
    reproduce("own-hospitals", tmp_path, quick=True, changes={"splits": 1})
    assert [path.stat().st_mtime_ns for path in stored] == before  # it goes on where it was


def test_a_hospital_chooses_by_its_own_validation_patients() -> None:
    module = EXPERIMENTS["own-hospitals"].module
    tries = [
        {"validation": [0.1, 0.9, float("nan")], "test": [0.1, 0.2, 0.3], "gap": 0.0},
        {"validation": [0.4, 0.5, float("nan")], "test": [0.4, 0.5, 0.6], "gap": 1e-5},
    ]
    split = {"clients": ["a", "b", "c"], "chosen": {}, "accuracy": {}, "gaps": {},
             "tries": {"m": tries}}  # fmt: skip
    found = module.chosen(split, [0.01, 0.1])
    assert found["accuracy"]["m"] == [0.4, 0.5, 0.6]  # one for all: 0.45 below 0.5
    assert found["accuracy"]["m, each chooses"] == [0.1, 0.5, 0.6]  # c has nobody to choose by
    assert found["chosen"]["m, each chooses"] == [0.01, 0.1, 0.1]


def test_the_correction_for_shared_patients_widens_the_interval() -> None:
    """Nadeau and Bengio: (1/J + test/train) in the place of 1/J."""
    module = EXPERIMENTS["own-hospitals"].module
    draw = np.random.default_rng(0)
    found = [
        {"clients": ["a"], "train": [50], "test": [30],
         "accuracy": {"own model": [0.5], "m": [float(draw.random())]}}
        for _ in range(10)
    ]  # fmt: skip
    ((plain, wide),) = module.differences(found, "m")
    ratio = (wide.upper - wide.lower) / (plain.upper - plain.lower)
    assert ratio == pytest.approx(np.sqrt((1 / 10 + 30 / 50) / (1 / 10)))


def test_scanners_shift_features_and_leave_labels(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "nowhere"))  # the short form needs no files
    outcome = reproduce("own-shift", tmp_path, quick=True, jobs=2)
    rows = {row[0]: row[1:] for row in outcome.tables["accuracy"].rows}
    assert {"shared", "own norms", "own first layer", "own head", "alone"} <= set(rows)
    stored = sorted((tmp_path / "runs").glob("*.json"))
    before = [path.stat().st_mtime_ns for path in stored]
    again = reproduce("own-shift", tmp_path, quick=True)  # side by side or in turn: the same
    assert [path.stat().st_mtime_ns for path in stored] == before
    assert again.tables["clients"].rows == outcome.tables["clients"].rows
    with pytest.raises(ValueError, match=r"computed with other settings; .* delete that file"):
        reproduce("own-shift", tmp_path, quick=True, changes={"training": {"l2": 1.0}})


def test_a_scanner_is_blur_response_gain_and_offset() -> None:
    module = EXPERIMENTS["own-shift"].module
    image = np.zeros((1, 1, 28, 28))
    image[0, 0, 14, 14] = 0.25
    plain = {"inverted": 0.0, "gain": 2.0, "offset": 0.5, "gamma": 0.5, "blur": 0.0}
    seen = module.scan(image, plain)
    assert seen[0, 0, 14, 14] == pytest.approx(2 * np.sqrt(0.25) + 0.5)
    assert seen[0, 0, 0, 0] == pytest.approx(0.5)
    dark = module.scan(image, plain | {"inverted": 1.0})
    assert dark[0, 0, 14, 14] == pytest.approx(2 * (1 - np.sqrt(0.25)) + 0.5)
    soft = module.scan(image, plain | {"blur": 1.0, "gamma": 1.0, "offset": 0.0, "gain": 1.0})
    assert soft.sum() == pytest.approx(image.sum()) and soft.max() < 0.1


def test_the_round_is_chosen_by_validation_images_alone() -> None:
    module = EXPERIMENTS["own-shift"].module
    tries = [
        {"rounds": [1, 2], "validation": [[0.1, 0.3], [0.5, 0.4]], "test": [[1, 1], [0.2, 0.3]]},
        {"rounds": [1, 2], "validation": [[0.4, 0.4], [0.1, 0.1]], "test": [[1, 1], [0.9, 0.9]]},
    ]
    assert module.choose(tries, [0.03, 0.1]) == {"lr": 0.03, "round": 2, "test": [0.2, 0.3]}


def read_runs(folder: Path) -> list[dict[str, Any]]:
    paths = (path for path in (folder / "runs").glob("*.json") if path.name != STARTED)
    return [json.loads(path.read_text()) for path in paths]


def test_label_skew_with_networks_counts_every_run(tmp_path: Path, monkeypatch) -> None:
    """Each seed's own bias after training comes from the run that it is compared with."""
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "nowhere"))  # the short form needs no files
    trained, fair = "FedAvg, server momentum", "tuned SCAFF-PD, averaged"
    changes: dict[str, Any] = {"run": {"data": {"path": str(tmp_path / "images.npz")}},
                               "groups": [[trained, fair], ["alone"]], "seeds": [0]}  # fmt: skip
    outcome = reproduce("own-cifar", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    table = outcome.tables["methods"]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    row = f"{trained}, own bias after training"
    assert set(rows) == {trained, fair, "alone", row, "ours", "majority class"}
    assert all((row["runs begun"], row["runs ended"]) == (3, 3) for row in rows.values())
    files = read_runs(tmp_path)
    held_out = "validation, own bias after training"
    tries = [one["splits"] for one in files if held_out in one["splits"]]
    assert len(tries) == 4  # fitted to other validation images than they are judged by
    for one in tries:
        held, plain = one[held_out], one["validation"]
        assert held["sizes"] == plain["sizes"] and "test" not in str(one.keys())
        hits = [v * n for v, n in zip(held["accuracy"], held["sizes"], strict=True) if n]
        np.testing.assert_allclose(hits, np.round(hits), atol=1e-9)
    fitted = [one for one in files if "test, own bias after training" in one["splits"]]
    assert sorted(one["method"] for one in fitted) == [trained, fair]
    fitted = [one for one in fitted if one["method"] == trained]
    shown = [np.mean([v for v in one["splits"]["test, own bias after training"]["accuracy"]
                      if v is not None]) for one in fitted]  # fmt: skip
    after = rows[row]
    assert after["average, %"] == pytest.approx(100 * np.mean(shown), abs=0.006)
    with np.load(tmp_path / "images.npz") as stored:
        assert (len(stored["x_train"]), len(stored["x_test"])) == (400, 200)
    (majority,) = [one["splits"]["test, majority class"] for one in fitted]
    correct = [v * n for v, n in zip(majority["accuracy"], majority["sizes"], strict=True) if n]
    np.testing.assert_allclose(correct, np.round(correct), atol=1e-9)
    assert np.mean([v for v in majority["accuracy"] if v is not None]) > 0.15  # of ten classes
    tested = [row[-1] for row in outcome.tables["clients"].rows if row[0] == "ours"]
    assert sum(map(int, tested)) == 200  # type: ignore[arg-type]


def test_validation_samples_choose_between_own_biases_and_fine_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(fine_tune, "RATES", (0.03,))
    monkeypatch.setattr(fine_tune, "STEPS", (5,))
    judged, score = [], fine_tune._score
    monkeypatch.setattr(fine_tune, "_score", lambda *given: judged.append(0) or score(*given))
    fair = "tuned SCAFF-PD, averaged"
    changes: dict[str, Any] = {"run": {"data": {"path": str(tmp_path / "images.npz")}},
                               "groups": [[fair]], "seeds": [0],
                               "personalise": {fair: ["bias", "all"]}}  # fmt: skip
    outcome = reproduce("own-cifar", tmp_path, quick=True, changes=changes)
    files = read_runs(tmp_path)
    words = next(row[1] for row in outcome.tables["choice"].rows if row[3] == "chosen")
    (chosen,) = [one for one in files if one["settings"] == words and "validation" in one["splits"]]
    (final,) = [one for one in files if "test" in one["splits"]]
    assert final["tuned"] == chosen["tuned"]
    assert len(judged) == 4  # no change and five steps, in two tries; the final run takes theirs
    kinds = {"own bias after training", "fine-tuned"}
    values = {k: np.array(chosen["splits"][f"validation, {k}"]["accuracy"], float) for k in kinds}
    scores = {k: np.nanmean(v) + np.nanmin(v) for k, v in values.items()}  # four clients
    rows = {row[0]: row for row in outcome.tables["methods"].rows}
    left = min(scores, key=lambda k: scores[k])
    if scores[left] < max(scores.values()):
        assert {"ours", f"{fair}, {left}"} < set(rows)
    assert len(rows) == 3  # with the shared network


def test_every_network_method_has_as_many_tries_and_one_penalty() -> None:
    settings = definition("own-cifar")
    named = [m for group in settings["groups"] for m in group]
    assert sorted(named) == sorted(settings["methods"]) == sorted(settings["tried"])
    assert len(settings["places"]) == 4
    for tried in settings["tried"].values():
        ((path, values),) = tried.items()
        if path == "model.own_l2":  # ten times the one before
            assert values == ["0.0003/n", "0.003/n", "0.03/n", "0.3/n"]
        else:
            assert len(values) == 4
            assert values == sorted({2 * v for v in values[:-1]} | {values[0]})
    owned = [one["model"] for one in settings["methods"].values() if "model" in one]
    assert len(owned) == 5 and {model["own_l2"] for model in owned} == {"3/n"}
    assert settings["tuning_seed"] not in settings["seeds"]
