"""SCAFF-PD-IA's networks: measures on numbers by hand, the reading of the paper, a tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.harness.choice import alternatives
from experiments.harness.experiment import definition
from experiments.harness.ia_networks import MEASURES, checks, measured, outside
from experiments.harness.measures import validation_score
from experiments.harness.running import Histories, configured, reproduce
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from equifed.training.history import History, MetricRecord

pytestmark = pytest.mark.long

BOTH = ("ia-mnist", "ia-cifar10")
TRAINED = {"ia-mnist": 480, "ia-cifar10": 400}
"""Training samples of the average client: 80 % of the images over 100 clients."""


def history(accuracies: list[float], losses: list[float], split: str = "test") -> History:
    """Return a made-up run that ended with these numbers."""
    sizes = np.where(np.isnan(accuracies), 0, 10)
    out = History(tuple(f"client {i}" for i in range(len(losses))))
    for metric, values in (("accuracy", accuracies), ("loss", losses)):
        out.metrics.append(MetricRecord(1, split, metric, np.array(values), sizes))
    return out


# -- measures -------------------------------------------------------------------------------------


def test_the_measures_are_the_columns_of_the_table() -> None:
    found = measured(history([0.9, 0.5, 0.7, 0.8, 0.6], [1.0, 4.0, 2.0, 2.0, 1.0]))
    # Lorenz: sum over pairs of |difference| is 2 * (0+1+1+3 + 1+1+3 + 0+2 + 2) = 28; n sum 2 = 100
    np.testing.assert_allclose(found, [0.7, 0.5, 0.9, 4.0, 28 / (2 * 5 * 10)])


def test_clients_without_samples_count_for_nothing() -> None:
    full = measured(history([0.9, 0.5], [1.0, 2.0]))
    nan = float("nan")
    np.testing.assert_array_equal(measured(history([0.9, nan, 0.5], [1.0, nan, 2.0])), full)


def test_the_choice_looks_at_validation_samples_alone() -> None:
    one = history([0.25, 0.75], [1.0, 1.0], "validation")
    assert validation_score(one) == 0.5
    one.metrics += history([0.0, 0.0], [9.0, 9.0], "test").metrics
    assert validation_score(one) == 0.5


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), seeds=st.integers(2, 8), factor=st.sampled_from([0.99, 1.01]))
def test_a_number_is_outside_when_one_more_seed_would_not_give_it(
    seed: int, seeds: int, factor: float
) -> None:
    values = np.random.default_rng(seed).standard_normal((seeds, len(MEASURES)))
    half = student.ppf(0.975, seeds - 1) * values.std(0, ddof=1) * np.sqrt(1 + 1 / seeds)
    found = outside(values, (values.mean(0) + factor * half).tolist())
    assert found == ([] if factor < 1 else list(MEASURES))


# -- checks ---------------------------------------------------------------------------------------


def made_up(table: dict[str, Any], worst_loss: dict[str, float]) -> Histories:
    """Return two seeds of every method; all clients have loss 1 but for one."""
    return {
        name: {
            seed: history(
                [0.5, 0.6, 0.7, 0.8, 0.9], [1.0, 1.0, 1.0, 1.0, worst_loss.get(name, 3.0) + seed]
            )
            for seed in (0, 1)
        }
        for name in table["methods"]
    }


@pytest.mark.parametrize(("loss", "agrees"), [(2.0, True), (4.0, False)])
def test_the_order_of_the_methods_decides(loss: float, agrees: bool) -> None:
    table = definition("ia-mnist")
    found = checks(made_up(table, {"SCAFF-PD-IA": loss}), table)
    first, second = list(table["groups"])
    by = {(one.claim, one.source.partition("; ")[2]): one for one in found}
    for words in ("the smallest relative unfairness index", "the smallest Gini coefficient"):
        assert by[f"SCAFF-PD-IA has {words} of the six", first].agrees is agrees
        assert by[f"SCAFF-PD-IA has {words} of the six", second].agrees  # all equal there
    shown = by["SCAFF-PD-IA has the smallest relative unfairness index of the six", first]
    assert f"within seeds: {loss - 3:+.3f}" in shown.measured


def test_published_numbers_are_compared_with_the_spread_of_seeds() -> None:
    table = definition("ia-mnist")
    found = made_up(table, {})
    table["published"]["SAFL"] = measured(found["SAFL"][0]).tolist()
    numbers = {one.claim.partition(":")[0]: one for one in checks(found, table)}
    assert numbers["SAFL"].agrees
    assert not numbers["FedAvg"].agrees and "average" in numbers["FedAvg"].why
    one_seed = {name: {0: runs[0]} for name, runs in found.items()}
    lonely = {one.claim.partition(":")[0]: one for one in checks(one_seed, table)}
    assert not lonely["SAFL"].agrees and lonely["SAFL"].why == "one seed shows no spread"


def test_a_method_whose_runs_failed_is_left_out() -> None:
    table = definition("ia-cifar10")
    found = made_up(table, {})
    del found["SAFL"], found["SCAFF-PD-IA"]
    claims = [one.claim for one in checks(found, table)]
    assert not any(claim.startswith("SAFL") for claim in claims)
    assert sum(claim.startswith("SCAFF-PD-IA has") for claim in claims) == 3  # by epochs


# -- the reading of the paper ---------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_every_try_has_the_printed_learning_rates_and_five_passes(name: str) -> None:
    table = definition(name)
    for method in table["methods"]:
        for _, variant in alternatives(table, method).values():
            config = configured(table, variant, 1).algorithm
            local, pd = config["local"], config["name"].startswith("scaff-pd")
            assert local["lr"] == (0.01 if pd else 0.1)
            batches = max(
                1.0, TRAINED[name] / local["batch_size"]
            )  # in a pass of the average client
            if config["name"] == "drfa":
                assert local["steps"] == pytest.approx(5 * batches, abs=1)
                times = 1 if "gamma" in method else local["steps"]  # the two readings of gamma
                assert times * config["dual_step"] == pytest.approx(1e-3, rel=1e-3)
            else:
                assert local["steps"] == 1 if method == "SAFL" else local["epochs"] == 5
            if pd:
                times = batches if method.endswith("by epochs") else 1.0
                assert config["steps"]["primal"] == pytest.approx(0.025 * times)
                assert config["steps"]["dual"] == 1e-3


@pytest.mark.parametrize("name", BOTH)
def test_every_group_is_the_six_of_the_table(name: str) -> None:
    table = definition(name)
    for group in table["groups"].values():
        assert [one.partition(",")[0] for one in group] == list(table["published"])
        assert set(group) <= set(table["methods"])
    assert table["highest_worst"] == max(
        table["published"], key=lambda method: table["published"][method][1]
    )
    assert table["run"]["rounds"] == 100
    assert table["run"]["data"]["partition"] == {"name": "dirichlet", "clients": 100, "alpha": 0.5}


# -- a tiny run -----------------------------------------------------------------------------------


def test_a_tiny_form_gives_the_table_and_the_curves(tmp_path: Path) -> None:
    data = {"name": "fashion-three", "train": 40, "test": 20, "holdout": {"validation": 0.2}}
    changes = {
        "run": {"rounds": 2, "data": data, "evaluate": {"every": 1}},
        "places": [1, 2],
        "seeds": [0],
        "seeded": ["data.holdout.seed"],
    }
    outcome = reproduce("ia-mnist", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    rows = {row[0]: row for row in outcome.tables["table-1"].rows}
    assert len(rows) == 10
    assert rows["SCAFFOLD, by epochs"][2] == 0.7425  # the published number of the same method
    assert sum(row[3] == "chosen" for row in outcome.tables["choice"].rows) == 10
    assert {"figure-4-lorenz-1", "figure-4-lorenz-2"} < set(outcome.figures)
