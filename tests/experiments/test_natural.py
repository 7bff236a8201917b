"""Experiments on natural clients: what is chosen, what is compared, and that they can disagree."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.harness import natural
from experiments.harness.choice import alternatives, chosen_in_each_trial
from experiments.harness.experiment import EXPERIMENTS, Context, definition
from experiments.harness.measures import (
    accuracy_table,
    answers,
    own_checks,
    percentages,
    validation_score,
)
from experiments.harness.running import reproduce
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from rich.console import Console
from scipy.stats import binom

from equifed import Federation
from equifed.contract.streams import Stream
from equifed.metrics import mean_interval
from equifed.models.architectures import build, initialise
from equifed.report import slug
from equifed.runs import merge_tables
from equifed.training.history import History, MetricRecord, RoundRecord

VEHICLE = EXPERIMENTS["rc-vehicle"].module
pytestmark = pytest.mark.long

HEART = {"name": "heart-disease", "holdout": {"validation": 0.2}}


def told(
    accuracies: Mapping[int, Sequence[float]],
    split: str = "test",
    sizes: ArrayLike | None = None,
    metric: str = "accuracy",
) -> History:
    """Return a history with these values of the clients after these rounds."""
    n = len(next(iter(accuracies.values())))
    history = History(tuple(f"client {i}" for i in range(n)))
    held = np.full(n, 10) if sizes is None else np.asarray(sizes, dtype=np.int64)
    for at, values in accuracies.items():
        record = MetricRecord(at, split, metric, np.array(values, dtype=np.float64), held)
        history.metrics.append(record)
    history.rounds.append(RoundRecord(max(accuracies), None, 1, 0, 0, 0.1))
    return history


# -- measures ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_pooled_accuracy_is_correct_answers_over_questions(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 9, size=(4, 3))
    right = draw.integers(0, sizes + 1)
    runs = {k: told({5: right[k] / sizes[k]}, sizes=sizes[k]) for k in range(4)}
    expected = 100 * right.sum(0) / sizes.sum(0)
    np.testing.assert_allclose(VEHICLE.pooled(answers(runs)), expected)


def test_scores_look_at_validation_samples_only() -> None:
    history = told({3: [0.2, 0.6, 1.0, 1.0]}, split="validation")
    assert validation_score(history) == pytest.approx(0.7)
    for tail in (0, 0.25):  # a quarter of four is one
        assert validation_score(history, tail) == pytest.approx((0.2 + 0.7) / 2)
    assert validation_score(history, 0.5) == pytest.approx((0.4 + 0.7) / 2)
    history.metrics += told({3: [0.0] * 4}).metrics
    assert validation_score(history) == pytest.approx(0.7)
    assert validation_score(history, 0) == pytest.approx((0.2 + 0.7) / 2)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    pair=st.sampled_from([(0.05, 0.5), (0.2, 0.05), (1.0, 0.3)]),
    weighting=st.sampled_from(["size", "uniform"]),
)
def test_one_client_has_its_own_tail_and_none_is_below_its_share(
    seed: int, pair: tuple[float, float], weighting: str
) -> None:
    draw = np.random.default_rng(seed)
    losses, sizes = draw.random(6), draw.integers(1, 100, 6)
    before = {"FedAvg": told({9: losses}, "train", sizes, "loss")}
    variant = {"algorithm": {"name": "rfedfair", "tails": list(pair), "weighting": weighting}}
    tails = VEHICLE.one_tail_apart(variant, before)["algorithm"]["tails"]
    share = sizes / sizes.sum() if weighting == "size" else 1 / 6
    wanted = np.where(np.arange(6) == losses.argmax(), *pair)
    np.testing.assert_array_equal(tails, np.maximum(wanted, share))
    other = {"algorithm": {"name": "fedavg"}}
    assert VEHICLE.one_tail_apart(other, before) == other


def test_rounds_to_the_level_that_the_other_method_ends_with() -> None:
    ours = told({0: [0.1, 0.9], 5: [0.55, 0.9], 10: [0.4, 0.9]})
    theirs = told({0: [0.1, 0.9], 5: [0.3, 0.9], 10: [0.5, 0.9]})
    assert natural.rounds_to_level(ours, theirs) == (5, 10)
    assert natural.rounds_to_level(told({10: [0.2, 0.9]}), theirs) == (np.inf, 10)
    for k in range(1, 181):  # rounding: a share times 100 over 100 may be more than the share
        own = told({10: [k / 181, 1.0]})
        assert natural.rounds_to_level(own, own) == (10, 10)


def _drfa(worst: float) -> dict[str, dict[int, History]]:
    ends = {"DRFA": worst, "AFL": 0.5, "q-FedAvg": 0.5, "FedAvg": 0.4}
    return {m: {s: told({0: [0.1, 0.8], 9: [w, 0.8]}) for s in (0, 1)} for m, w in ends.items()}


def test_drfa_can_disagree_with_the_paper() -> None:
    assert [one.agrees for one in natural.drfa_checks(_drfa(0.2))] == [False] * 6
    better = natural.drfa_checks(_drfa(0.6))
    # Everybody gets there in the same evaluated round, so "sooner" does not hold.
    assert [one.agrees for one in better] == [False, False, True, True, True, True]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_the_jackknife_of_the_average_is_the_interval_of_the_mean(seed: int) -> None:
    draw = np.random.default_rng(seed)
    runs = {k: told({5: draw.random(3)}) for k in range(6)}  # equal test parts in all trials
    found = VEHICLE.pooled_measure(answers(runs), "average")
    usual = mean_interval(percentages(runs).mean(1))
    assert found.estimate == pytest.approx(usual.estimate)
    assert found.lower == pytest.approx(usual.lower)
    assert found.upper == pytest.approx(usual.upper)


def _rc(ours: Sequence[float]) -> dict[str, dict[int, History]]:
    plain = [0.3, 0.8, 0.9, 1.0]
    ends = {"FedAvg": plain, "AFL": plain, "q-FFL": plain, "RC-FL": ours}
    return {m: {s: told({9: v}) for s in (0, 1)} for m, v in ends.items()}


def test_rc_can_disagree_with_the_paper() -> None:
    fair = natural.rc_checks(_rc([0.7, 0.75, 0.75, 0.8]), "source")
    assert [one.agrees for one in fair] == [True] * 4
    poor = natural.rc_checks(_rc([0.1, 0.5, 0.9, 0.9]), "source")
    assert [one.agrees for one in poor] == [False] * 4


def test_own_parts_and_own_models_stand_beside_the_methods_with_their_floor() -> None:
    ends = {"FedAvg": [0.5, 0.9], "FedAvg, own bias": [0.7, 0.8], "SCAFF-PD": [0.6, 0.8],
            "SCAFF-PD, own bias": [0.65, 0.85]}  # fmt: skip
    found = {m: {s: told({9: v}) for s in (0, 1)} for m, v in ends.items()}
    alone = {s: (np.array([0.9, 0.6]), np.array([10.0, 10.0])) for s in (0, 1)}
    measures = {"worst": lambda values: values.min(1)}
    table = accuracy_table(found, measures, fraction=0.5, alone=alone)
    assert table.columns == ["method", "seeds", "worst", "floor", "spread beyond chance"]
    assert [row[0] for row in table.rows] == [*ends, "alone"]
    assert "10 to 10 test samples a client" in table.title
    x = binom.sf(np.arange(10), 10, 0.7)  # the smaller of two that are served equally
    assert str(table.rows[0][3]).startswith(f"{10 * (x**2).sum():.1f}")
    checks = {one.claim: one for one in own_checks(found, alone, 0.5)}
    serves = " serves the worst client at least as well as "
    agree = {claim: one.agrees for claim, one in checks.items()}
    assert agree == {
        f"SCAFF-PD, own bias{serves}FedAvg, own bias": False,
        f"SCAFF-PD{serves}FedAvg": True,
        f"FedAvg, own bias{serves}FedAvg": True,
        f"SCAFF-PD, own bias{serves}SCAFF-PD": True,
        f"FedAvg, own bias{serves}alone": True,
        f"SCAFF-PD, own bias{serves}alone": True,
    }
    assert "-5.0 points" in checks[f"SCAFF-PD, own bias{serves}FedAvg, own bias"].measured


def test_own_machines_are_exact_and_one_class_is_answered() -> None:
    x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    parts = {"two": (x, [0, 0, 1, 1]), "one": (x, [1, 1, 1, 1])}
    data = Federation.from_clients(parts, validation=parts, test=parts)
    values, sizes = VEHICLE.own_machines(data, [1e-3, 1.0])
    np.testing.assert_array_equal(values, [1.0, 1.0])
    np.testing.assert_array_equal(sizes, [4, 4])


# -- the recurrent model ----------------------------------------------------------------------


def test_the_recurrent_model_reads_the_recent_tokens_only() -> None:
    name = "experiments.harness.networks:recent_lstm"
    module = initialise(build(name, (12,), 7, recent=5, hidden=6), Stream(1))
    tokens = torch.randint(7, (4, 12), generator=torch.Generator().manual_seed(0))
    early, late = tokens.clone(), tokens.clone()
    early[:, :7] = 0
    late[:, 7] = (late[:, 7] + 1) % 7
    assert torch.equal(module(tokens), module(early))
    assert not torch.allclose(module(tokens), module(late))
    with pytest.raises(ValueError, match=r"recent must lie in 1\.\.12"):
        build(name, (12,), 7, recent=13)


# -- tiny forms -------------------------------------------------------------------------------


def test_drfa_chooses_on_validation_and_compares_on_test_samples(tmp_path: Path) -> None:
    changes = {"run": {"rounds": 6, "data": HEART}, "seeds": [0, 1]}
    outcome = reproduce("drfa-adult", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    assert [row[0] for row in outcome.tables["accuracy"].rows] == [
        "DRFA", "AFL", "q-FedAvg", "FedAvg", "SCAFF-PD", "FedAvg, own bias", "SCAFF-PD, own bias",
        "alone",
    ]  # fmt: skip
    for method in ("DRFA", "AFL", "q-FedAvg", "FedAvg"):
        rows = [row for row in outcome.tables["grid"].rows if row[0] == method]
        best = max(float(str(row[2])) for row in rows)
        assert [row[2] for row in rows if row[3] == "chosen"] == [best]
    assert set(outcome.figures) == {"worst-accuracy", "average-accuracy", "standard-deviation"}


def test_every_trial_chooses_on_its_own_validation_samples(tmp_path: Path) -> None:
    changes = {
        "run": {"rounds": 5, "data": HEART, "evaluate": {"every": 5}},
        "seeded": ["data.holdout.seed"],
        "grid": {"RC-FL": {"algorithm.tails": [[0.4, 0.6], [0.5, 1.0]]}},
    }
    table = merge_tables(definition("rc-vehicle", quick=True), changes)
    context = Context(table, tmp_path, Console(quiet=True))
    found, variants, searched, problems = chosen_in_each_trial(
        context, VEHICLE.score, VEHICLE.one_tail_apart
    )
    assert not problems
    for method, runs in found.items():
        for seed, chosen in runs.items():
            names = alternatives(table, method)
            stored = [History.load(tmp_path / "runs" / slug(n) / f"seed-{seed}") for n in names]
            assert len(stored) == 2
            assert VEHICLE.score(chosen) == max(map(VEHICLE.score, stored))
            name = variants[method][seed]["algorithm"]["name"]
            assert name == table["methods"][method]["algorithm"]["name"]
    assert sum(int(str(row[3])) for row in searched.rows) == len(found) * len(table["seeds"])
    published = VEHICLE.beside(found, table["published"])
    assert [row[1] for row in published.rows] == [87.3, 84.3, 87.7, 87.6, 87.3, 87.6]


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folder of the data files, or skip."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("EQUIFED_DATA", beside))
    if not (folder / "shakespeare").exists():
        pytest.skip(f"no data files: set EQUIFED_DATA (looked at {folder})")
    monkeypatch.setenv("EQUIFED_DATA", str(folder))


@pytest.mark.parametrize("name", ["drfa-shakespeare", "rc-shakespeare"])
def test_roles_of_shakespeare_train_an_lstm(real_data: None, name: str, tmp_path: Path) -> None:
    small = {"rounds": 2, "data": {"roles": 3}, "model": {"hidden": 4, "recent": 4}}
    axes = definition(name, quick=True)["grid"]
    one_each = {m: {path: values[:1] for path, values in axes[m].items()} for m in axes}
    changes = {"run": small, "grid": one_each}
    outcome = reproduce(name, tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    assert len(outcome.tables["accuracy"].rows) == 4
    assert all(one.measured for one in outcome.checks)
