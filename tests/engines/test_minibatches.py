"""Properties of the clients' minibatches, and of the keys they come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equifed.contract.streams import Stream
from equifed.engines.minibatches import Minibatches


def minibatches(
    sizes: list[int],
    batch_size: int | None,
    seed: int = 0,
    first: int = 0,
    width: int | None = None,
) -> Minibatches:
    clients = torch.arange(first, first + len(sizes))
    given = (Stream(seed), clients, torch.tensor(sizes), batch_size, torch.float64)
    return Minibatches(*given, dropout=True, width=width)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=4),
    batch_size=st.none() | st.integers(1, 20),
)
def test_each_pass_uses_each_sample_once(sizes: list[int], batch_size: int | None) -> None:
    drawn, passes = minibatches(sizes, batch_size), 2
    per_pass = [-(-m // batch_size) if batch_size else 1 for m in sizes]
    used: list[list[int]] = [[] for _ in sizes]
    for step in range(passes * max(per_pass)):
        b = drawn.at(step)
        torch.testing.assert_close(b.weights.sum(1), torch.ones(len(sizes), dtype=torch.float64))
        for k in range(len(sizes)):
            if step < passes * per_pass[k]:
                used[k] += b.positions[k][b.weights[k] > 0].tolist()
    for m, seen in zip(sizes, used, strict=True):
        assert sorted(seen[:m]) == list(range(m))
        assert sorted(seen[m:]) == list(range(m))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=4),
    equal=st.booleans(),
    batch_size=st.integers(1, 20),
    width=st.integers(17, 40),
)
def test_padding_changes_no_sample(
    sizes: list[int], equal: bool, batch_size: int, width: int
) -> None:
    sizes = sizes[:1] * len(sizes) if equal else sizes
    plain, wide = minibatches(sizes, batch_size), minibatches(sizes, batch_size, width=width)
    for step in range(7):
        a, b = plain.at(step), wide.at(step)
        assert b.positions.shape == b.weights.shape
        assert b.positions.shape[1] == width
        assert a.keys is not None and b.keys is not None
        for k, m in enumerate(sizes):
            used, own = b.weights[k] > 0, a.weights[k] > 0
            assert b.positions[k][used].tolist() == a.positions[k][own].tolist()
            assert b.weights[k][used].tolist() == a.weights[k][own].tolist()
            assert b.keys[k][used].tolist() == a.keys[k][own].tolist()
            assert 0 <= int(b.positions[k].min()) <= int(b.positions[k].max()) < m


def test_full_batches_keep_the_order() -> None:
    b = minibatches([3, 5], None).at(4)
    assert b.positions[1].tolist() == [0, 1, 2, 3, 4]
    assert b.weights[0].tolist() == [1 / 3, 1 / 3, 1 / 3, 0, 0]


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5), batch_size=st.integers(1, 7))
def test_a_client_draws_the_same_alone(sizes: list[int], batch_size: int) -> None:
    together = minibatches(sizes, batch_size)
    alone = [minibatches([m], batch_size, first=k) for k, m in enumerate(sizes)]
    for step in range(6):
        b = together.at(step)
        for k, single in enumerate(alone):
            own = single.at(step)
            kept, mine = b.weights[k] > 0, own.weights[0] > 0
            assert b.positions[k][kept].tolist() == own.positions[0][mine].tolist()
            assert b.keys is not None and own.keys is not None
            assert b.keys[k][kept].tolist() == own.keys[0][mine].tolist()


def test_passes_seeds_and_clients_have_their_own_order() -> None:
    orders = {
        tuple(minibatches([40] * 3, 40, seed).at(step).positions[k].tolist())
        for seed in (0, 1)
        for step in (0, 1)
        for k in range(3)
    }
    assert len(orders) == 12


def test_every_sample_is_equally_likely_in_every_place() -> None:
    m, clients = 5, 20_000
    order = minibatches([m] * clients, m).at(0).positions.numpy()
    for place in range(m):
        counts = np.bincount(order[:, place], minlength=m)
        assert stats.chisquare(counts).pvalue > 1e-4
    pairs = np.bincount(order[:, 0] * m + order[:, 1], minlength=m * m).reshape(m, m)
    assert (np.diag(pairs) == 0).all()
    assert stats.chisquare(pairs[~np.eye(m, dtype=bool)]).pvalue > 1e-4


def test_keys_are_uniform_and_uncorrelated_between_neighbours() -> None:
    keys = Stream(3).at("round", 1).keys(torch.arange(200).unsqueeze(1), torch.arange(500))
    uniform = keys.numpy().astype(np.float64) / 2.0**63
    assert stats.kstest(uniform.reshape(-1), "uniform").pvalue > 1e-4
    for a, b in ((uniform[:, :-1], uniform[:, 1:]), (uniform[:-1], uniform[1:])):
        assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 4 / np.sqrt(a.size)
    assert len(np.unique(keys.numpy())) == keys.numel()
