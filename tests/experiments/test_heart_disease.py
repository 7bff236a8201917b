"""All methods on four hospitals: equal effort, paired differences, checks that can say no."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.harness.choice import alternatives
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.measures import is_published, validation_score
from experiments.harness.running import configured, reproduce
from scipy.stats import binom

from equifed.runs.catalogue import ALGORITHMS
from equifed.training.history import History, MetricRecord

pytestmark = pytest.mark.long

HEART = EXPERIMENTS["heart-disease"].module


def history(accuracies: list[float], losses: list[float], split: str) -> History:
    """Return a made-up run that ended with these numbers."""
    out = History(tuple(f"client {i}" for i in range(len(losses))))
    sizes = np.full(len(losses), 10)
    for metric, values in (("accuracy", accuracies), ("loss", losses)):
        out.metrics.append(MetricRecord(1, split, metric, np.array(values), sizes))
    return out


def test_the_measures_agree_with_numbers_by_hand() -> None:
    found = HEART.measured(history([0.9, 0.5, 0.7, 0.8, 0.6], [1.0, 4.0, 2.0, 2.0, 1.0], "test"))
    above = binom.sf(np.arange(10), 10, 0.7) ** 5  # all of five clients that are served equally
    beyond = 0.025 - (0.09 + 0.25 + 0.21 + 0.16 + 0.24) / 5 / 9
    chance = [10 * above.sum(), 100 * np.sqrt(beyond)]
    np.testing.assert_allclose(found, [70, 50, 90, 100 * np.sqrt(0.02), *chance, 4.0, 0.28])
    assert len(found) == len(HEART.MEASURES)


def test_the_score_is_half_average_half_worst_on_validation_samples() -> None:
    one = history([0.9, 0.5, 0.7, 0.8, 0.6], [1.0] * 5, "validation")
    assert validation_score(one, HEART.TAIL) == pytest.approx((0.7 + 0.5) / 2)


# -- checks ---------------------------------------------------------------------------------------


def row(worst: float, unfairness: float = 2.0) -> np.ndarray:
    """Return the measures of a made-up run."""
    return np.array([80.0, worst, 90.0, 5.0, worst, 1.0, unfairness, 0.2])


def test_differences_are_taken_within_seeds_that_both_have() -> None:
    values = {"A": {0: row(50), 1: row(60), 2: row(70)}, "B": {1: row(55), 2: row(80), 3: row(9)}}
    np.testing.assert_array_equal(HEART.paired(values, "A", "B", HEART.WORST_FIFTH), [5.0, -10.0])


def made_up(scaff_pd: float, integrated: float) -> dict[str, dict[int, np.ndarray]]:
    """Return four methods over three seeds."""
    return {
        "FedAvg": {s: row(50 + s) for s in range(3)},
        "DRFA": {s: row(55 + s) for s in range(3)},
        "SCAFF-PD": {s: row(scaff_pd + s + 0.1 * s**2) for s in range(3)},
        "SCAFF-PD-IA": {s: row(52 + s, integrated + 0.1 * s) for s in range(3)},
    }


def test_a_tie_is_not_a_lead() -> None:
    values = {m: {s: row(1.0) for s in range(3)} for m in ("FedAvg", "DRFA", "SCAFF-PD")}
    assert not any(one.agrees for one in HEART.checks(values))


def test_the_checks_say_yes_and_no() -> None:
    worst_fifth, unfair, fair = HEART.checks(made_up(70, 1.0))
    assert worst_fifth.agrees and unfair.agrees and fair.agrees
    assert "best other DRFA" in worst_fifth.measured and worst_fifth.why == ""
    worst_fifth, unfair, fair = HEART.checks(made_up(45, 3.0))
    assert not (worst_fifth.agrees or unfair.agrees or fair.agrees)
    assert "SCAFF-PD -4." in fair.measured


def test_a_difference_within_the_noise_is_called_so() -> None:
    values = made_up(54.95, 1.0)
    assert "do not tell the two apart" in HEART.checks(values)[0].why


def test_methods_whose_runs_failed_are_left_out() -> None:
    values = made_up(70, 1.0)
    del values["SCAFF-PD"]
    assert [one.claim.partition(" ")[0] for one in HEART.checks(values)] == ["SCAFF-PD-IA", "every"]


# -- definitions ----------------------------------------------------------------------------------


def test_every_method_has_the_same_number_of_tries() -> None:
    table = definition("heart-disease")
    used = [one["algorithm"]["name"] for m, one in table["methods"].items() if is_published(m)]
    assert len(set(used)) == len(used) == 12 and set(used) <= set(ALGORITHMS)
    for method in table["methods"]:
        tries = alternatives(table, method).values()
        assert len({shown for shown, _ in tries}) == 30
        for _, variant in tries:
            local = configured(table, variant, 1).algorithm["local"]
            assert local["steps"] == 10 and local["batch_size"] == 32
    assert len(table["seeds"]) == 10


def test_a_tiny_form_gives_an_honest_table(tmp_path: Path) -> None:
    changes = {"run": {"rounds": 2}, "seeds": [0, 1]}
    outcome = reproduce("heart-disease", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    assert len(outcome.tables["methods"].rows) == 15
    assert len(outcome.tables["against-fedavg"].rows) == 14
    assert len(outcome.tables["clients"].columns) == 5
    assert len(outcome.checks) == 3 + 6
