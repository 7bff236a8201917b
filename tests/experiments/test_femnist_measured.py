"""Own shares and offsets of femnist-cnn: against integrals, densities, searches and Bayes' rule."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import multivariate_normal, norm

import equifed as ef
from equifed.algorithms import FedAvg

measured = importlib.import_module("experiments.femnist-cnn.measured")
FLOOR, fit_offsets = measured.FLOOR, measured.fit_offsets
leading_components, share_shifts = measured.leading_components, measured.share_shifts

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


@pytest.mark.long
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


# -- own shares ------------------------------------------------------------------------------------


def integrated(counts: np.ndarray) -> np.ndarray:
    """The same for two classes by numerical integration, and search for the part that differs."""
    n = counts.sum(1)
    p = (counts / n[:, None]).mean(0)
    alike = [p[0] ** a * p[1] ** b for a, b in counts]
    differ = [quad(lambda s, a=a, b=b: s**a * (1 - s) ** b, 0, 1)[0] for a, b in counts]
    mean = [quad(lambda s, a=a, b=b: s ** (a + 1) * (1 - s) ** b, 0, 1)[0] for a, b in counts]

    def unlikely(part: float) -> float:
        return -sum(np.log(part * d + (1 - part) * a) for a, d in zip(alike, differ, strict=True))

    part = minimize_scalar(unlikely, bounds=(1e-6, 1 - 1e-6), options={"xatol": 1e-10}).x
    first = np.array([(part * m + (1 - part) * a * p[0]) / (part * d + (1 - part) * a)
                      for a, d, m in zip(alike, differ, mean, strict=True)])  # fmt: skip
    return np.log(np.stack([first, 1 - first], axis=1) / p)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_posterior_mean_of_the_shares(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shares = np.where(draw.random(12) < 0.4, draw.random(12), 0.7)
    n = draw.integers(5, 40, 12)
    first = draw.binomial(n, shares)
    counts = np.stack([first, n - first], axis=1)
    np.testing.assert_allclose(share_shifts(counts), integrated(counts), atol=2e-3)


@pytest.mark.long
@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=8),
       st.permutations(range(4)))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_names_of_classes_and_kinds_do_not_matter(
    counts: list[list[int]], order: list[int]
) -> None:
    held, kinds = np.array(counts), [0, 1, 1, 2]
    shifts = share_shifts(held, kinds)
    assert np.isfinite(shifts).all()
    np.testing.assert_array_equal(shifts[:, 1], shifts[:, 2])
    turned = share_shifts(held[:, order], [kinds[k] for k in order])
    np.testing.assert_allclose(turned, shifts[:, order], atol=1e-12)
    named = share_shifts(held, [7, 3, 3, 5])  # numbers need not begin at 0
    np.testing.assert_allclose(named, shifts, atol=1e-12)
    merged = np.stack([held[:, 0], held[:, 1] + held[:, 2], held[:, 3]], axis=1)
    np.testing.assert_allclose(share_shifts(merged), shifts[:, [0, 1, 3]], atol=1e-12)
    assert not shifts[held.sum(1) == 0].any()


def test_chance_moves_nobody_and_much_data_tell_all() -> None:
    draw = np.random.default_rng(0)
    alike = draw.multinomial(100, [0.5, 0.3, 0.2], 50)
    counted = np.log(alike / 100 / alike.mean(0) * 100)
    assert np.abs(share_shifts(alike)).mean() < 0.1 * np.abs(counted).mean()
    counts = np.array([[9_000, 1_000], [1_000, 9_000], [5_000, 5_000]])
    expected = np.log(counts / 10_000 / 0.5)
    np.testing.assert_allclose(share_shifts(counts)[:2], expected[:2], atol=1e-3)
    without = share_shifts(np.array([[70, 30, 0]] * 30 + [[0, 60, 0], [0, 0, 0]]))
    assert without[-2, 0] < -3 and without[-2, 1] > 0.5  # it has none of the first
    assert not without[:, 2].any() and not without[-1].any()  # a class and a client without samples
    assert not share_shifts(np.zeros((3, 4))).any()


def test_shifted_logits_are_the_clients_bayes_rule() -> None:
    draw = np.random.default_rng(1)
    shares = np.array([0.1, 0.5, 0.5, 0.5, 0.9])  # of the class at +1; the other is at -1
    counts = np.array([[round(400 * (1 - s)), round(400 * s)] for s in shares])
    shifts = share_shifts(counts)
    x = 2 * draw.random(20_000) - 1
    pooled = norm.logpdf(x, 1) - norm.logpdf(x, -1)  # shares are 1/2 on average
    for s, moved in zip(shares, shifts, strict=True):
        bayes = pooled + np.log(s / (1 - s)) > 0
        ours = pooled + moved[1] - moved[0] > 0
        assert np.mean(ours == bayes) > 0.98
        assert s == 0.5 or np.mean(ours == bayes) > np.mean((pooled > 0) == bayes) + 0.1


# -- what is chosen -------------------------------------------------------------------------------


def with_pens(
    spread: float = 1.5, noise: float = 0.5, shares: tuple[float, ...] = (0.5,) * 8
) -> tuple[ef.Federation, ef.History]:
    """Two classes that differ in what clients differ in, too: how much ink there is."""
    draw, data = np.random.default_rng(0), {}
    for i, (pen, share) in enumerate(zip(spread * draw.normal(size=8), shares, strict=True)):
        labels = (draw.random(240) < share).astype(np.int64)
        ink = 1.5 * labels + pen + noise * draw.normal(size=240)
        data[f"client {i}"] = (np.stack([ink, draw.normal(size=240)], axis=1), labels)
    federation = ef.Federation.from_clients(data, classes=2).split(validation=0.25, test=0.5)
    clients = ef.simulate(federation, "mlp")
    return federation, ef.train(FedAvg(ef.LocalSGD(lr=0.1, steps=5)), clients, rounds=5)


def fitted(
    data: ef.Federation, history: ef.History, kind: str, how: dict[str, float] | None = None
) -> tuple[dict[str, float], np.ndarray]:
    chosen, values, sizes = measured.fit(history, data, kind, how, "cpu", [1, 1], offsets=5)
    assert data.test is not None and sizes.tolist() == data.test.sizes.tolist()
    return chosen, values


def accuracy(data: ef.Federation, history: ef.History, moved: list[np.ndarray]) -> list[float]:
    assert data.test is not None
    told = (data.test.client(i) for i in range(len(data.names)))
    return [float(np.mean((history.predictor().answer(x) + m).argmax(1) == y))
            for (x, y), m in zip(told, moved, strict=True)]  # fmt: skip


def test_own_shares_move_logits_and_nothing_else() -> None:
    data, history = with_pens(0.0, 1.5, (0.05, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.95))
    chosen, values = fitted(data, history, "shares")
    assert chosen == {"lr": 0.0, "steps": 0, "shares": True}
    counts = [np.bincount(data.train.client(i)[1], minlength=2) for i in range(8)]
    wanted = accuracy(data, history, list(share_shifts(np.stack(counts))))
    assert values == pytest.approx(wanted)
    plain = accuracy(data, history, [np.zeros(2)] * 8)
    assert min(values[[0, 7]] - np.array(plain)[[0, 7]]) > 0.02


@pytest.mark.long
def test_validation_samples_choose_how_far_offsets_are_trusted() -> None:
    data, history = with_pens()
    chosen, values = fitted(data, history, "offsets")
    trust = chosen["trust"]
    assert trust >= 0.5 and chosen["steps"] == 0
    seen = leading_components(data.train.inputs, 2)
    owners = np.repeat(np.arange(8), data.train.sizes)
    weight, bias = fit_offsets(
        seen.of(data.train.inputs), data.train.targets, owners, 8, 2
    ).shifts()
    assert data.test is not None
    counts = np.stack([np.bincount(data.train.client(i)[1], minlength=2) for i in range(8)])
    moved = [s + trust * (seen.of(data.test.client(i)[0]) @ weight[i].T + bias[i])
             for i, s in enumerate(share_shifts(counts))]  # fmt: skip
    assert values == pytest.approx(accuracy(data, history, moved))
    assert np.mean(values) > np.mean(accuracy(data, history, [np.zeros(2)] * 8)) + 0.02
    again, same = fitted(data, history, "offsets", chosen)
    assert again == chosen and np.array_equal(same, values)
    assert data.validation is not None  # where labels are drawn anew, nothing is trusted
    labels = np.random.default_rng(1).permutation(data.validation.targets)
    held = type(data.validation)(data.validation.inputs, labels, data.validation.offsets)
    history.provenance = {}
    strange = ef.Federation(data.name, data.names, data.train, held, data.test, classes=2)
    assert "trust" not in fitted(strange, history, "offsets")[0]


@pytest.mark.long
def test_local_steps_are_chosen_with_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    data, history = with_pens()
    monkeypatch.setattr(measured, "RATES", (0.05, 1e30))  # the second one diverges
    monkeypatch.setattr(measured, "STEPS", (20,))
    monkeypatch.setattr(measured, "TRUSTS", (0.0, 0.25))
    chosen, values = fitted(data, history, "all")
    assert chosen["lr"] == 0.05 and chosen["steps"] == 20 and chosen["trust"] > 0
    again, same = fitted(data, history, "all", chosen)
    assert again == chosen and np.array_equal(same, values)
    plain = history.personalise(data, own="all", lr=0.05, steps=20)
    steps, alone = fitted(data, history, "all", {"lr": 0.05, "steps": 20})
    assert steps == {"lr": 0.05, "steps": 20} and alone == pytest.approx(plain.after)
    with pytest.raises(ValueError, match="give a smaller lr"):
        fitted(data, history, "all", {"lr": 1e30, "steps": 20})
