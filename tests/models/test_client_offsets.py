"""Own offsets: against the joint normal density, a search for the likeliest, and Bayes' rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, norm
from torch import nn

from equifed.models.client_offsets import FLOOR, Beside, fit_offsets, leading_components

Samples = tuple[np.ndarray, np.ndarray, np.ndarray]


def samples(seed: int, clients: int = 6, classes: int = 3, d: int = 2, m: int = 25) -> Samples:
    """Samples of classes in clients that have offsets; numbers of samples differ."""
    draw = np.random.default_rng(seed)
    means, offsets = 2 * draw.normal(size=(classes, d)), draw.normal(size=(clients, d))
    owners = np.repeat(np.arange(clients), draw.integers(1, m, clients))
    labels = draw.integers(0, classes, len(owners))
    noise = draw.normal(size=(len(owners), d)) @ (np.eye(d) + 0.3 * draw.normal(size=(d, d)))
    return means[labels] + offsets[owners] + noise, labels, owners


@pytest.mark.parametrize("seed", range(4))
def test_logits_move_by_what_the_clients_samples_say_of_a_new_one(seed: int) -> None:
    t, labels, owners = samples(seed)
    found = fit_offsets(t, labels, owners, 6, 3)
    weight, bias = found.shifts()
    new = np.random.default_rng(seed + 100).normal(size=2)
    for i in range(6):
        held, its = t[owners == i], labels[owners == i]
        m = len(held)
        cov = np.kron(np.eye(m + 1), found.within) + np.kron(np.ones((m + 1,) * 2), found.between)
        known = multivariate_normal(found.means[its].ravel(), cov[: 2 * m, : 2 * m])
        gained = []
        for y in range(3):
            centre = np.concatenate([found.means[its].ravel(), found.means[y]])
            both = multivariate_normal(centre, cov).logpdf(np.concatenate([held.ravel(), new]))
            alone = multivariate_normal(found.means[y], found.within + found.between).logpdf(new)
            gained.append(both - known.logpdf(held.ravel()) - alone)
        ours = weight[i] @ new + bias[i]
        np.testing.assert_allclose(ours - ours[0], np.array(gained) - gained[0], atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_the_model_is_the_likeliest_one(seed: int) -> None:
    t, labels, owners = samples(seed, clients=8, classes=2, d=1, m=40)

    n = np.bincount(owners, minlength=8)

    def unlikely(given: np.ndarray) -> float:
        """The density of r I + e 11' for every client's residuals, written out."""
        e, r = np.exp(given[2:])
        rest = t[:, 0] - given[labels]
        sums = np.bincount(owners, rest, minlength=8)
        squares = (rest @ rest - (e / (r + n * e)) @ sums**2) / r
        return 0.5 * float(squares + ((n - 1) * np.log(r) + np.log(r + n * e)).sum())

    best = minimize(unlikely, np.zeros(4))
    found = fit_offsets(t, labels, owners, 8, 2)
    ours = [*found.means[:, 0], np.log(found.between.item()), np.log(found.within.item())]
    assert unlikely(np.array(ours)) == pytest.approx(best.fun, abs=5e-3)
    np.testing.assert_allclose(ours, best.x, atol=0.05)


def test_a_medium_stroke_is_a_capital_from_a_fine_pen() -> None:
    """Where offsets are as large as what tells classes apart, knowing them is worth as much."""
    draw = np.random.default_rng(0)
    pens = draw.normal(size=40)
    owners = np.repeat(np.arange(40), 200)
    labels = draw.integers(0, 2, len(owners))
    ink = 1.5 * labels + pens[owners] + 0.5 * draw.normal(size=len(owners))
    trained = np.arange(len(owners)) % 2 == 0
    found = fit_offsets(ink[trained, None], labels[trained], owners[trained], 40, 2)
    weight, bias = found.shifts()
    t, y, i = ink[~trained], labels[~trained], owners[~trained]
    shared = norm.logpdf(t, 1.5, np.sqrt(1.25)) - norm.logpdf(t, 0, np.sqrt(1.25))
    moved = t * (weight[i, 1, 0] - weight[i, 0, 0]) + bias[i, 1] - bias[i, 0]
    oracle = norm.logpdf(t, 1.5 + pens[i], 0.5) - norm.logpdf(t, pens[i], 0.5)
    before, after, best = (np.mean((z > 0) == y) for z in (shared, shared + moved, oracle))
    assert before < 0.8 and best > 0.92 and after > best - 0.005


@given(st.integers(0, 50), st.permutations(range(4)), st.permutations(range(3)))
@settings(max_examples=25, deadline=None)
def test_names_and_units_do_not_matter(seed: int, clients: list[int], classes: list[int]) -> None:
    t, labels, owners = samples(seed, clients=4)
    weight, bias = fit_offsets(t, labels, owners, 5, 4).shifts()
    assert np.isfinite(weight).all() and np.isfinite(bias).all()
    assert not weight[4].any() and not bias[4].any()  # a client without samples
    many = fit_offsets(t, labels, owners, 500, 4).shifts()  # nor do they say anything of others
    np.testing.assert_allclose(many[1][:5], bias, atol=1e-8)
    renamed = fit_offsets(t, np.array(classes)[labels], np.array(clients)[owners], 5, 4).shifts()
    places = np.ix_([*clients], [*classes])
    np.testing.assert_allclose(renamed[0][places], weight[:4, :3], atol=1e-8)
    np.testing.assert_allclose(renamed[1][places], bias[:4, :3], atol=1e-8)
    other = fit_offsets(3 * t - 5, labels, owners, 5, 4).shifts()
    for i, at in enumerate(np.random.default_rng(seed).normal(size=(5, 2))):
        ours, theirs = (w[i] @ x + b[i] for (w, b), x in
                        (((weight, bias), at), (other, 3 * at - 5)))  # fmt: skip
        np.testing.assert_allclose(theirs - theirs[0], ours - ours[0], atol=1e-5)


def test_nothing_moves_where_clients_do_not_differ_and_odd_samples_do_no_harm() -> None:
    draw = np.random.default_rng(0)
    labels, owners = draw.integers(0, 3, 6000), np.arange(6000) % 30
    t = draw.normal(size=(6000, 4)) + labels[:, None]
    weight, bias = fit_offsets(t, labels, owners, 30, 3).shifts()
    moved = np.einsum("md,mkd->mk", t, weight[owners]) + bias[owners]
    assert np.abs(moved - moved.mean(1, keepdims=True)).mean() < 0.1
    none = fit_offsets(np.zeros((0, 2)), np.zeros(0, int), np.zeros(0, int), 3, 2).shifts()
    assert not none[0].any() and not none[1].any()
    labels, owners = np.arange(2000) % 2, np.arange(2000) // 1000
    exact = fit_offsets(np.stack([labels + owners, owners], 1) * 1.0, labels, owners, 2, 2).shifts()
    assert 1e3 < np.abs(exact[0]).max() < 10 / FLOOR  # no noise at all, and yet no certainty
    same = fit_offsets(np.ones((10, 2)), np.zeros(10, int), np.arange(10) % 2, 2, 1).shifts()
    assert np.isfinite(same[0]).all() and np.isfinite(same[1]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_components_are_those_of_the_singular_values(dtype: type) -> None:
    draw = np.random.default_rng(0)
    inputs = (20 * draw.random((60, 3, 4)) * np.arange(1, 5)).astype(dtype)
    found = leading_components(inputs, 5)
    seen = found.of(inputs)
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(np.cov(seen.T, bias=True), np.eye(5), atol=1e-4)
    flat = inputs.reshape(60, -1).astype(np.float64)
    u = np.linalg.svd(flat - flat.mean(0), full_matrices=False)[0][:, :5] * np.sqrt(60)
    np.testing.assert_allclose(np.abs(seen), np.abs(u), atol=1e-3)
    again = leading_components(inputs, 5)
    assert np.array_equal(again.axes, found.axes)
    assert len(leading_components(inputs, 100).axes) == 12  # all that there are
    flat_ones = np.ones((8, 4), dtype)
    flat_ones[:, 0] = np.arange(8)
    assert len(leading_components(flat_ones, 3).axes) == 1
    assert len(leading_components(np.ones((8, 4), dtype), 3).axes) == 0


def test_beside_adds_and_is_nothing_to_begin_with() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    x = torch.randn(5, 2, 3)
    both = Beside(network, torch.ones(6), torch.randn(2, 6), 3)
    assert torch.equal(both(x), network(x))
    with torch.no_grad():
        both.linear.bias += torch.tensor([1.0, 2.0, 3.0])
        both.linear.weight += 1
    t = (x.flatten(1) - 1) @ both.axes.T
    wanted = network(x) + torch.tensor([1.0, 2.0, 3.0]) + t.sum(1, keepdim=True)
    torch.testing.assert_close(both(x), wanted)
