"""Helpers of the contract: shares of those present, merged losses, indices."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equifed.contract.absence import carry_over, scale_to_present, scatter
from equifed.contract.clients import MissingClients, Traffic, check_index

signed = arrays(np.float64, 6, elements=st.floats(-3, 3, allow_subnormal=False))
subsets = st.sets(st.integers(0, 5), min_size=1).map(lambda s: np.array(sorted(s)))


@given(weights=signed)
def test_the_mean_over_all_who_may_be_there_is_the_weights(weights: np.ndarray) -> None:
    """For every number of clients present, so for every way to be missing at random."""
    for size in range(1, 7):
        groups = [np.array(group) for group in itertools.combinations(range(6), size)]
        mean = np.mean([scatter(scale_to_present(weights, g), g, 6) for g in groups], axis=0)
        np.testing.assert_allclose(mean, weights, rtol=0, atol=1e-14 * (1 + np.abs(weights).max()))


@pytest.mark.long
@given(weights=signed, index=subsets)
def test_scaling_keeps_signs_and_proportions(weights: np.ndarray, index: np.ndarray) -> None:
    out = scale_to_present(weights, index)
    assert (np.sign(out) == np.sign(weights[index])).all()
    np.testing.assert_allclose(out * len(index), weights[index] * 6)


def test_only_members_count_as_missing() -> None:
    """Of four clients the last is no member; of the other three two are there."""
    weights = np.array([0.5, 0.2, 0.3, 0.0])
    out = scale_to_present(weights, np.array([0, 2]), members=np.array([0, 1, 2]))
    np.testing.assert_allclose(out, [0.75, 0.45])


def test_everybody_present_keeps_the_very_weights() -> None:
    weights = np.array([0.1, 0.2, 0.7])
    assert scale_to_present(weights, np.arange(3)) is weights


def test_without_those_who_have_weight_nobody_gets_it() -> None:
    assert scale_to_present(np.array([1.0, 0.0, 0.0]), np.array([1, 2])).tolist() == [0.0, 0.0]


def test_absent_clients_keep_their_last_loss_and_newcomers_take_the_mean() -> None:
    first = carry_over(None, np.array([0, 2]), np.array([1.0, 3.0]), 3)
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert carry_over(first, np.array([1]), np.array([9.0]), 3).tolist() == [1.0, 9.0, 3.0]


@pytest.mark.parametrize(
    ("index", "message"),
    [([], "at least one"), ([0, 3], r"0..2, got 0..3"), ([-1], "got -1"), ([1, 1], "no repeats")],
)
def test_wrong_subsets_are_refused(index: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_index(index, 3)


def test_missing_clients_are_named_with_the_reason() -> None:
    error = MissingClients({2: "loss is nan", 0: "silent"}, ["a", "b", "c"])
    assert str(error) == "2 client(s) missing: a: silent; c: loss is nan"


def test_the_ledger_adds_up() -> None:
    ledger = Traffic(3)
    ledger.record(np.array([0, 2]), down=10, up=4)
    ledger.record(np.array([2]), down=1, up=1)
    assert ledger.totals() == (2, 9, 21)
    assert ledger.up.tolist() == [4, 0, 5]
