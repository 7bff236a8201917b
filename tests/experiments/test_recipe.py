"""One recipe against all methods: equal tries, choices without test samples, honest verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.network_parts import load_table, pool, split_again, with_constant
from experiments.harness.recipe import (
    OWN_SOLVED,
    SOLVED,
    Found,
    Network,
    Trial,
    difference,
    is_ahead,
    network_verdicts,
    read_network,
    read_spread,
)
from experiments.harness.recipe_table import checks, choice_table, pieces_table
from experiments.harness.running import reproduce

from equifed.metrics import variance_beyond_chance
from equifed.runs import RunConfig, merge_tables

pytestmark = pytest.mark.long
SETTINGS = {"wanted": 1, "data": {"set": {}}}
SCALE = {"lr": 0.03, "tried": [0.001 * 2**k for k in range(9)], "l2": 0.02}


def test_the_short_form_compares_and_goes_on_where_it_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "nowhere"))  # the short form needs no files
    outcome = reproduce("one-recipe", tmp_path, quick=True)
    assert not outcome.problems
    rows = {(row[0], row[1]) for row in outcome.tables["methods"].rows}
    own = ("FedAvg, own part", OWN_SOLVED, "alone")
    assert {("penguins", m) for m in ("FedAvg", "ours", SOLVED, *own)} <= rows
    assert not {("fashion-three", m) for m in own} & rows
    stored = sorted((tmp_path / "runs").glob("*.json"))
    before = [path.stat().st_mtime_ns for path in stored]
    again = reproduce("one-recipe", tmp_path, quick=True)
    assert [path.stat().st_mtime_ns for path in stored] == before
    assert again.tables["against"].rows == outcome.tables["against"].rows
    stored[[path.stem for path in stored].index("penguins-afl-1")].unlink()
    some = reproduce("one-recipe", tmp_path, quick=True, changes={"finish": False})
    assert some.problems == ["penguins: not all splits, so left out: AFL (1 of 2)"]
    assert ("penguins", "AFL") not in {(row[0], row[1]) for row in some.tables["methods"].rows}


@pytest.mark.parametrize("name", definition("one-recipe")["sets"])
def test_every_method_has_as_many_tries_and_each_can_be_run(name: str) -> None:
    module, settings = EXPERIMENTS["one-recipe"].module, definition("one-recipe")
    data = settings["data"][name]["data"]
    if "features" in data:
        data = {**data, "path": "features.npz"}
        del data["features"]
    methods = module.set_methods(settings, name, SCALE)
    own = settings["data"][name].get("own", True)
    assert {len(tries) for tries in methods.values()} == {len(settings["places"])}
    for method, tries in methods.items():
        variants = [variant for _, variant in tries]
        assert all(a != b for i, a in enumerate(variants) for b in variants[:i]), method
        for variant in variants:
            table = merge_tables(settings["run"], {"data": module.seeded(data, 7)})
            config = RunConfig.from_dict(merge_tables(table, variant))
            solved = method in ("ours", "SCAFF-PD", "FairNewton", OWN_SOLVED, SOLVED)
            assert (config.model["l2"] == SCALE["l2"]) != solved
            has_own = config.model.get("own") is not None
            assert has_own == (own and method in ("ours", "FedAvg, own part", OWN_SOLVED))


def test_the_step_sizes_are_neighbours_and_the_smallest_of_equally_good_ones() -> None:
    choose = EXPERIMENTS["one-recipe"].module.choose_scale
    rates = [0.1 * 2**k for k in range(10)]  # scores are known of the four in the middle
    scale = {"lr": rates, "l2": [0.0, 1.0], "points": 0.01}
    small = {"lr": rates[4], "tried": rates[:9]}
    large = {"lr": rates[5], "tried": rates[1:]}
    scores = {(lr, l2): 0.7 for lr in rates[3:-3] for l2 in scale["l2"]}
    assert choose(scores, scale) == small | {"l2": 0.0}
    assert choose(scores | {(rates[6], 1.0): 0.71}, scale) == small | {"l2": 0.0}
    assert choose(scores | {(rates[6], 1.0): 0.76}, scale) == large | {"l2": 1.0}
    assert choose(scores | {(rates[3], 0.0): -math.inf}, scale) == small | {"l2": 1.0}


def told(validation: list[Any], test: list[Any]) -> dict[str, Any]:
    sizes = [10] * len(test)
    return {"settings": str(validation), "validation": validation, "test": test,
            "test samples": sizes, "train samples": sizes}  # fmt: skip


def test_validation_samples_choose_whatever_test_samples_say() -> None:
    tries = [told([0.6, 0.8], [1.0, 1.0]), {"failed": "diverged"}, told([0.7, 0.8], [0.5, None])]
    chosen = Trial.of({"tries": tries})
    assert chosen is not None
    assert (chosen.place, chosen.failed) == (2, 1)
    assert chosen.accuracy.tolist() == [0.5]  # nobody is served who has no test samples
    tied = Trial.of({"tries": [told([0.7], [test]) for test in (0.1, 0.2, 0.9)]})
    assert tied is not None and tied.place == 1  # no end where nothing speaks for it
    assert Trial.of({"tries": [{"failed": "diverged"}]}) is None


def test_every_try_is_told_with_how_often_it_was_chosen() -> None:
    """In the form that `python -m experiments edges` judges."""
    splits = ([0.6, 0.7, 0.5], [0.9, 0.8, 0.7], [0.3, 0.5, 0.4])
    tries = [[told([v], [v]) | {"settings": f"q = {k}"} for k, v in enumerate(s)] for s in splits]
    found: Found = {"set": {"A": {s: Trial.of({"tries": one}) for s, one in enumerate(tries)}}}
    table = choice_table(found)
    assert table.columns == ("method", "settings", "trials that chose it")
    assert table.rows == [["set: A", "q = 0", 1], ["set: A", "q = 1", 2], ["set: A", "q = 2", 0]]


def trials(worst: list[float]) -> dict[int, Trial | None]:
    sizes = np.full(4, 50.0)
    return {
        s: Trial(0, "", 0, np.array([w, 0.9, 0.92, 0.94]), sizes, ratio=0.6)
        for s, w in enumerate(worst)
    }


def test_ours_leads_only_beyond_the_interval_of_every_published_method() -> None:
    methods = {
        "FedAvg": trials([0.50, 0.52, 0.54]),
        "AFL": trials([0.60, 0.58, 0.62]),
        "FedAvg, own part": trials([0.9] * 3),
        "ours": trials([0.66, 0.68, 0.70]),
    }
    plain, wider = difference(methods, "AFL", "worst")
    assert plain.estimate == pytest.approx(8.0)
    assert (wider.upper - wider.lower) / (plain.upper - plain.lower) == pytest.approx(
        np.sqrt((1 / 3 + 0.6) / (1 / 3))
    )
    assert is_ahead(methods)  # the own part is no published method
    assert not is_ahead({**methods, "AFL": trials([0.69, 0.58, 0.62])})
    found: Found = {"set": methods}
    own, first, *_ = checks(found, SETTINGS, [])
    assert not own.agrees and first.agrees


def test_what_is_solved_for_the_average_is_no_published_method_and_tells_the_pieces() -> None:
    methods = {
        "FedAvg": trials([0.50, 0.52, 0.54]),
        "FairNewton": trials([0.60, 0.62, 0.64]),
        SOLVED: trials([0.80, 0.82, 0.84]),
        OWN_SOLVED: trials([0.70, 0.72, 0.74]),
        "ours": trials([0.66, 0.68, 0.70]),
    }
    found: Found = {"set": methods}
    fair, first, *_ = checks(found, SETTINGS, [])
    assert not fair.agrees and "set -4.0" in fair.measured
    assert first.agrees and "against FairNewton" in first.measured
    told = {row[2]: row[3] for row in pieces_table(found, SETTINGS).rows}
    assert told[f"ours minus {OWN_SOLVED}"].startswith("-4.0")
    assert told[f"FairNewton minus {SOLVED}"].startswith("-20.0")
    assert told[f"{OWN_SOLVED} minus {SOLVED}"].startswith("-10.0")
    assert told[f"{SOLVED} minus FedAvg"].startswith("+30.0")
    shared = {"wanted": 1, "data": {"set": {"own": False}}}  # ours has no own part either
    fair, *_ = checks({"set": {m: methods[m] for m in ("FedAvg", SOLVED, "ours")}}, shared, [])
    assert "set -14.0" in fair.measured


METHODS = """method,seeds,"average, %","worst 20 %, %",spread beyond chance
FedAvg,5,70.0,50.0,5.0
AFL,{seeds},69.0,56.0,4.0
ours,5,72.0,60.0,3.0
"FedAvg, server momentum, averaged, own bias",5,72.0,90.0,3.0
"""
AGAINST = """methods,seeds,"average, %","worst 20 %, %"
ours minus FedAvg,5,'+2.0 (+1.0 to +3.0),'+10.0 (+8.0 to +12.0)
ours minus AFL,5,'+3.0 (+1.0 to +5.0),'+4.0 ({low} to +8.5)
"ours minus FedAvg, server momentum, averaged, own bias",5,'+0.0 (-1.0 to +1.0),'-30.0 (-31 to -29)
AFL minus FedAvg,5,'-1.0 (-2.0 to +0.0),'+6.0 (+4.0 to +8.0)
"""


def stored(
    root: Path, *, low: str = "-0.5", seeds: str = "5", published: Sequence[str] = ("FedAvg", "AFL")
) -> Network:
    (root / "methods.csv").write_text(METHODS.format(seeds=seeds), encoding="utf-8")
    (root / "against.csv").write_text(AGAINST.format(low=low), encoding="utf-8")
    clients = [f"FedAvg,{s},c{i},{0.5 + 0.1 * i + 0.01 * s},100" for s in (0, 1) for i in range(4)]
    text = "\n".join(["method,seed,client,test accuracy,test images", *clients])
    (root / "clients.csv").write_text(text, encoding="utf-8")
    return read_network("net", published, root)


def test_a_network_counts_if_every_published_method_is_told_apart(tmp_path: Path) -> None:
    one = stored(tmp_path)
    assert one.is_spread and not one.is_ahead and not one.absent and not one.fewer
    assert (one.best(), one.best("average")) == ("AFL", "FedAvg")
    found: Found = {"set": {"FedAvg": trials([0.5, 0.52]), "ours": trials([0.7, 0.72])}}
    own, first, counted, new = checks(found, {**SETTINGS, "wanted": 2}, [one])
    assert not own.agrees and "net -30.0" in own.measured
    assert first.agrees and "net +4.0 (-0.5 to +8.5) against AFL" in first.measured
    assert not counted.agrees and counted.measured == "1 of 2: set"
    ahead = stored(tmp_path, low="+0.1")
    assert ahead.is_ahead and not stored(tmp_path, low="+0.0").is_ahead  # 0.0 may be below 0
    *_, counted, new = checks(found, {**SETTINGS, "wanted": 2}, [ahead])
    assert counted.agrees and counted.measured == "2 of 2: set, net"
    assert not new.agrees  # networks have no such interval
    assert stored(tmp_path, seeds="3").fewer == ["AFL (3)"]  # on the seeds that both have


def test_a_network_that_lacks_a_method_is_named_and_not_counted(tmp_path: Path) -> None:
    nothing = read_network("net", ["FedAvg"], tmp_path)
    assert nothing.absent == ["no table of methods with FedAvg and ours is stored"]
    short = stored(tmp_path, low="+0.1", published=("FedAvg", "AFL", "DRFA"))
    assert short.absent == ["not run: DRFA"] and short.is_ahead
    found: Found = {"set": {"FedAvg": trials([0.5, 0.52]), "ours": trials([0.7, 0.72])}}
    *_, counted, _ = checks(found, SETTINGS, [short, nothing])
    assert counted.measured == "1 of 1: set" and "not counted (not run: DRFA)" in counted.why
    (tmp_path / "against.csv").unlink()
    (tmp_path / "clients.csv").unlink()
    untold = read_network("net", ["FedAvg", "AFL"], tmp_path)
    assert untold.absent == ["no stored difference: FedAvg, AFL", "no stored accuracies of: FedAvg"]
    widths = {len(line) for line in network_verdicts([nothing, short, untold]).rows}
    assert widths == {len(network_verdicts([]).columns)}


def test_the_spread_of_writers_is_that_of_their_counts(tmp_path: Path) -> None:
    sizes, correct = np.array([60.0, 120.0, 45.0, 165.0]), np.array([30.0, 110.0, 40.0, 151.0])
    shares = 100 * correct / sizes
    lines = [f"w{i},{n:g},{v:.1f}" for i, (n, v) in enumerate(zip(sizes, shares, strict=True))]
    text = "\n".join(["writer,test images,FedAvg", *lines])
    (tmp_path / "writers.csv").write_text(text, encoding="utf-8")
    told = read_spread(tmp_path)
    assert told is not None
    assert told.estimate == pytest.approx(1e4 * variance_beyond_chance(correct, sizes))
    assert told.lower < told.estimate < told.upper


def test_splitting_again_moves_every_sample_once_and_scales_by_training_ones() -> None:
    whole, again = pool("penguins"), split_again("penguins", seed=3, scaled=4)
    assert set(whole.splits()) == {"train"} and len(again.splits()) == 3
    assert sum(s.sizes for s in again.splits().values()).tolist() == whole.train.sizes.tolist()
    np.testing.assert_allclose(again.train.inputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(again.train.inputs.std(0), 1, rtol=1e-5)
    plain = split_again("penguins", seed=3)  # the same split, as the pool scales it
    for i in range(len(whole.names)):
        rows = np.concatenate([s.client(i)[0] for s in plain.splits().values()])
        np.testing.assert_array_equal(np.sort(rows, 0), np.sort(whole.train.client(i)[0], 0))
    other = split_again("penguins", seed=4)
    assert not np.array_equal(other.train.inputs, plain.train.inputs)


def test_an_own_bias_that_is_held_to_the_shared_one_is_the_shared_model() -> None:
    """With a strong penalty the own distance is nothing, and the constant's weight is the bias."""
    module = EXPERIMENTS["one-recipe"].module
    data = {"name": "penguins", "test": 0.3, "validation": 0.2, "seed": 1}
    whole, more = load_table(data), with_constant(data)
    np.testing.assert_array_equal(more.train.inputs[:, :-1], whole.train.inputs)
    assert (more.train.inputs[:, -1] == 1).all()
    fair = {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 1.0}}
    run = {"rounds": 30, "evaluate": {"every": 30, "splits": ["validation", "test"]},
           "stop": {"at_relative_gap": 1e-4}, "model": {"name": "logistic", "l2": 0.01},
           "algorithm": fair}  # fmt: skip
    shared, held = (module.train(data, run, {"model": m})
                    for m in ({}, {"own": "bias", "own_l2": 1e4}))  # fmt: skip
    assert held["test"] == shared["test"] and held["gap"] <= 1e-4
