"""Helpers of the contract: shares of those present, merged losses, indices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equifed.contract.clients import MissingClients, Traffic, check_index
from equifed.contract.participation import carry_over, scale_to_present

positive = arrays(np.float64, 6, elements=st.floats(0.01, 1))
subsets = st.sets(st.integers(0, 5), min_size=1).map(lambda s: np.array(sorted(s)))


@given(weights=positive, index=subsets)
def test_shares_keep_the_total_and_the_proportions(weights: np.ndarray, index: np.ndarray) -> None:
    out = scale_to_present(weights, index)
    assert out.sum() == pytest.approx(weights.sum())
    assert out * weights[index][0] == pytest.approx(weights[index] * out[0])


def test_everybody_present_keeps_the_very_weights() -> None:
    weights = np.array([0.1, 0.2, 0.7])
    assert scale_to_present(weights, np.arange(3)) is weights


def test_when_those_with_weight_are_absent_the_others_share_it() -> None:
    assert scale_to_present(np.array([1.0, 0.0, 0.0]), np.array([1, 2])).tolist() == [0.5, 0.5]


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
