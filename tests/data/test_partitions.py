"""Partitions deal out every sample once, and as unevenly as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.contract.streams import Stream
from equifed.data import DataError
from equifed.data.partitions import (
    PARTITIONS,
    Dirichlet,
    Iid,
    Imbalance,
    OneClass,
    Shards,
    build_partition,
    draw_dirichlet,
)
from equifed.datasets.pooled import follow

few = settings(deadline=None, max_examples=30)
LABELS = np.random.default_rng(0).integers(10, size=3000)

EVERY = [
    Iid(7),
    Dirichlet(7, 0.3),
    Dirichlet(7, 1e-3),
    Dirichlet(50, 0.01),
    OneClass(),
    OneClass(25),
    Shards(12),
]


@pytest.mark.parametrize("partition", EVERY, ids=lambda p: repr(p)[:50])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_sample_has_exactly_one_owner(partition, seed):
    parts = partition.assign(LABELS, Stream(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all(len(rows) and (np.diff(rows) > 0).all() for rows in parts)


@pytest.mark.parametrize("partition", EVERY[:-1], ids=lambda p: repr(p)[:50])
def test_the_same_address_gives_the_same_parts_and_another_seed_others(partition):
    first, again, other = (partition.assign(LABELS, Stream(s)) for s in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other)) or partition == OneClass()


@few
@given(st.integers(1, 40), st.integers(40, 400))
def test_iid_sizes_differ_by_at_most_one(clients, samples):
    sizes = [len(r) for r in Iid(clients).assign(np.zeros(samples, int), Stream(0))]
    assert max(sizes) - min(sizes) <= 1


@few
@given(st.floats(0.005, 10), st.integers(2, 30), st.integers(1, 20))
def test_dirichlet_keeps_its_promise_of_samples(alpha, clients, least):
    parts = Dirichlet(clients, alpha, least).assign(LABELS, Stream(3))
    assert min(map(len, parts)) >= least


def test_small_alpha_is_skewed_and_large_alpha_is_not():
    def purity(alpha):
        parts = Dirichlet(10, alpha).assign(LABELS, Stream(0))
        return np.mean(
            [np.bincount(LABELS[rows], minlength=10).max() / len(rows) for rows in parts]
        )

    assert purity(0.05) > 0.4
    assert purity(1000.0) < 0.2


@pytest.mark.long
def test_dirichlet_draws_have_the_moments_of_the_law():
    """Mean 1/K and variance (K - 1)/(K^2 (K alpha + 1)) of every share."""
    draw, size = np.random.default_rng(0), 5
    for alpha in (0.05, 0.5, 5.0):
        shares = np.array([draw_dirichlet(draw, alpha, size) for _ in range(20000)])
        np.testing.assert_allclose(shares.sum(1), 1)
        variance = (size - 1) / (size**2 * (size * alpha + 1))
        assert np.abs(shares.mean(0) - 1 / size).max() < 5 * np.sqrt(variance / 20000)
        np.testing.assert_allclose(shares.var(0), variance, rtol=0.1)


def test_dirichlet_survives_an_alpha_whose_gammas_underflow():
    shares = draw_dirichlet(np.random.default_rng(0), 1e-6, 4)
    assert np.isfinite(shares).all() and shares.sum() == pytest.approx(1) and shares.max() > 0.999


def test_without_topping_up_the_shares_of_a_class_are_the_draw():
    """One class: the sizes are the Dirichlet shares, rounded."""
    labels = np.zeros(10000, int)
    parts = Dirichlet(4, 50.0, min_samples=1).assign(labels, Stream(1))
    draw = Stream(1).at("dirichlet").generator()
    draw.permutation(10000)
    expected = draw_dirichlet(draw, 50.0, 4) * 10000
    assert np.abs(np.array([len(r) for r in parts]) - expected).max() <= 1


def test_one_class_clients_have_one_class():
    for partition in (OneClass(), OneClass(23)):
        for i, rows in enumerate(partition.assign(LABELS, Stream(0))):
            assert set(LABELS[rows]) == {i % 10}


def test_shards_bound_the_number_of_classes():
    labels = np.repeat(np.arange(10), 100)
    for rows in Shards(50, 2).assign(labels, Stream(0)):
        assert len(rows) == 20 and len(set(labels[rows])) <= 2


@pytest.mark.parametrize("base", [Iid(20), Dirichlet(20, 0.05)], ids=repr)
def test_imbalance_takes_seventy_percent_from_thirty_percent(base):
    before = base.assign(LABELS, Stream(4))
    after = Imbalance(base).assign(LABELS, Stream(4))
    lost = [i for i in range(20) if len(after[i]) < len(before[i])]
    assert len(lost) == 6
    for i in range(20):
        assert set(after[i]) <= set(before[i])
        if i in lost:
            assert len(after[i]) == len(before[i]) - round(0.7 * len(before[i]))


@few
@given(st.integers(0, 50), st.integers(2, 12), st.floats(0.05, 5))
def test_held_out_samples_follow_the_training_proportions(seed, clients, alpha):
    parts = Dirichlet(clients, alpha).assign(LABELS, Stream(seed))
    held_labels = np.random.default_rng(seed).integers(10, size=900)
    held = follow(parts, LABELS, held_labels, Stream(seed))
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(900))
    for k in range(10):
        share = np.array([np.sum(LABELS[r] == k) for r in parts]) / np.sum(k == LABELS)
        count = np.array([np.sum(held_labels[r] == k) for r in held])
        assert np.abs(count - share * np.sum(held_labels == k)).max() <= 1


def test_held_out_samples_of_a_class_nobody_trains_on_are_left_out():
    held = follow([np.array([0, 1])], np.array([0, 0]), np.array([0, 1, 1]), Stream(0))
    assert held[0].tolist() == [0]


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "imbalance"])
def test_partitions_are_built_by_name(name):
    given = {"dirichlet": {"alpha": 0.5}}.get(name, {})
    built = build_partition({"name": name, "clients": 12, **given})
    assert built == PARTITIONS[name](clients=12, **given)
    assert build_partition(built) is built


def test_imbalance_thins_a_described_partition():
    spec = {"name": "imbalance", "base": {"name": "iid", "clients": 4}}
    assert build_partition(spec) == Imbalance(Iid(4), 0.3, 0.7)
    assert build_partition(spec | {"samples": 0.1}) == Imbalance(Iid(4), 0.3, 0.1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Dirichlet(3, 0.0), "alpha must be a positive"),
        (lambda: Dirichlet(3, 1.0, 0), "min_samples must be at least 1"),
        (lambda: Dirichlet(300, 1.0).assign(LABELS[:100], Stream(0)), "needs 3000 samples"),
        (lambda: Iid(0).assign(LABELS, Stream(0)), "at least 1 client"),
        (lambda: Shards(3, 0).assign(LABELS, Stream(0)), "at least 1 shard"),
        (lambda: OneClass(3).assign(LABELS, Stream(0)), "at least 10 clients"),
        (lambda: Imbalance(Iid(3), 1.5), r"clients must lie in \[0, 1\]"),
        (lambda: build_partition("dirichelt"), "no partition 'dirichelt'; there are iid"),
        (lambda: build_partition({"name": "iid", "alpha": 1}), "takes clients; got"),
        (lambda: build_partition("dirichlet"), "takes clients, alpha"),
    ],
)
def test_wrong_partitions_are_refused(act, message):
    with pytest.raises(DataError, match=message):
        act()
