"""Configurations at random: each is run to a finite model, or refused in words."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scripts.trust.configurations import Generator, try_one

from equifed.runs.catalogue import SECTIONS

CASES = 150
DRAWN = {"name": "synthetic-regression"}


@pytest.mark.long
def test_no_configuration_ends_in_an_unexpected_way() -> None:
    names: Counter[tuple[str, str]] = Counter()
    found: dict[str, list[str]] = {}
    for seed in range(CASES):
        table = Generator(np.random.default_rng(seed), names).configuration()
        outcome, words = try_one(table, seconds=120)
        found.setdefault(outcome, []).append(f"seed {seed}: {words}")
    wrong = {key: found[key] for key in found if key not in ("trained", "accepted", "refused")}
    assert not wrong
    assert len(found["trained"]) > 10 and len(found["refused"]) > 10
    assert all(names["algorithms", name] for name in SECTIONS["algorithms"].entries())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": {"name": "fedavg", "local": {"steps": 10**40}}}, "at most 10,000,000"),
        ({"algorithm": {"name": "safeguarded", "algorithm": "fedavg"}}, "it is for SCAFF-PD"),
        ({"model": {"name": "linear", "l2": 1e308, "dtype": "float64"}}, "no step size can be"),
        ({"data": {"name": "synthetic-regression", "clients": 2**63}}, "ask for fewer"),
        ({"data": {**DRAWN, "clients": 10**9, "samples": 1, "features": 1}}, "at most 10,000,000"),
        ({"data": {"name": "synthetic-regression", "scale": float("inf")}}, "must be finite"),
        ({"data": {**DRAWN, "seed": -1}}, "of at least 0, got -1"),
        ({"evaluate": {"metrics": 3}}, "evaluate.metrics: must be an array"),
        ({"model": {"name": "mlp", "hidden": [10**40]}}, "at most 1,048,576"),
        ({"model": {"name": "mlp", "hidden": [1] * 5000}}, "got 5000 numbers"),
    ],
)
def test_absurd_numbers_are_refused_by_name(settings: dict[str, object], words: str) -> None:
    usual = {
        "rounds": 2,
        "data": "synthetic-regression",
        "model": {"name": "linear", "l2": 0.1},
        "algorithm": {"name": "fedavg"},
    }
    outcome, found = try_one({**usual, **settings}, seconds=120)
    assert outcome == "refused" and words in found
