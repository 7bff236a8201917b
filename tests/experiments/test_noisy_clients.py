"""Clients with wrong labels: flipped where they are said to be, and told apart by excess risk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experiments.harness.experiment import EXPERIMENTS

import equifed as ef

MODULE: Any = EXPERIMENTS["noisy-clients"].module


def federation(samples: int = 400) -> ef.Federation:
    """Return four clients of one rule, split in three."""
    draw, clients = np.random.default_rng(0), {}
    for name in "abcd":
        x = draw.normal(size=(samples, 3))
        clients[name] = (x, (x[:, 0] + 0.3 * draw.normal(size=samples) > 0).astype(int))
    return ef.Federation.from_clients(clients).split(validation=0.2, test=0.3)


def test_labels_are_flipped_in_training_and_validation_of_the_named_clients() -> None:
    before = federation()
    after = MODULE.flip_labels(before, [1, 3], 0.3, seed=5)
    for name, split in after.splits().items():
        for i in range(4):
            (x, y), (old_x, old_y) = split.client(i), before.splits()[name].client(i)
            np.testing.assert_array_equal(x, old_x)
            changed = float((y != old_y).mean())
            if name != "test" and i in (1, 3):
                assert changed == pytest.approx(0.3, abs=4 * (0.21 / len(y)) ** 0.5)
            else:
                assert changed == 0.0


def test_excess_risk_leaves_wrong_labels_their_share_of_the_weight() -> None:
    """With one rule for all nobody is served worse than alone, whatever the loss is."""
    data = MODULE.flip_labels(federation(), [2], 0.4, seed=1)
    settings = {"rounds": 60, "gap": 1e-3}
    losses = ef.alone(data, "logistic", "logistic", l2=1e-2, tune=False).losses
    plain = ef.objectives.WorstCase()
    for objective, least, most in (
        (plain, 0.9, 1.0),
        (ef.objectives.ExcessRisk(tuple(losses.tolist()), plain), 0.0, 0.8),
    ):
        one = MODULE.train(settings, data, 1e-2, objective)
        assert least <= one["weights"][2] <= most
        assert one["gap"] is not None


def test_measures_are_of_the_clients_with_right_and_with_wrong_labels() -> None:
    one = {"test": [0.5, None, 0.9, 0.7], "noisy": [0, 1], "weights": [0.1, 0.2, 0.3, 0.4]}
    found = {name: measure(one) for name, measure in MODULE.MEASURES.items()}
    assert list(found.values()) == pytest.approx([80.0, 70.0, 50.0, 30.0])


def test_validation_samples_choose_the_penalty() -> None:
    told = [([0.5, 0.9], 1.0), ([0.8, 0.8], 0.0)]
    tries = [{"noisy": [0], "models": {"A": {"validation": held, "test": [test]}}}
             for held, test in told]  # fmt: skip
    one = MODULE.chosen(tries, "A")
    assert (one["place"], one["test"], one["scores"]) == (1, [0.0], pytest.approx([0.6, 0.8]))
