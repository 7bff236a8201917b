"""One client's answers: clipped as declared, entered before they leave, and with their noise."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from equifed.contract.streams import Stream
from equifed.models.flat import FlatModel
from equifed.models.losses import binary_logistic, cross_entropy, squared
from equifed.models.own_part import OwnPart
from equifed.privacy.clients import Privacy
from equifed.privacy.ledger import Ledger, OverBudget, Planned, compose, delta_of
from equifed.privacy.noise import GRID, SecretNoise, StreamNoise, discrete_gaussian
from equifed.privacy.site import PrivateSite, Unanswered, flatten_symmetric, unflatten_symmetric

M, D = 6, 3
PRIVACY = Privacy(epsilon=2.0, rows=1.5, loss=0.8, rounds=4)
PLANNED = Planned(moments=1, losses=4, gradients=4, steps=8)
LOSSES = {"cross_entropy": (cross_entropy, 3), "logistic": (binary_logistic, 1)}


class NoNoise(StreamNoise):
    """Answers as they are before their noise."""

    def add(self, value, sensitivity, sigma, *where):
        return value


def draw_rows(generator, loss, outputs, m=M):
    inputs = torch.as_tensor(generator.standard_normal((m, D)) * 10.0 ** generator.uniform(-2, 2))
    if loss is squared:
        return inputs, torch.as_tensor(generator.standard_normal((m, outputs)) * 3)
    return inputs, torch.as_tensor(generator.integers(0, max(outputs, 2), m))


def make_model(kind, loss, outputs, l2=0.0):
    torch.manual_seed(0)
    layers = {
        "linear": [nn.Linear(D, outputs)],
        "clipped": [nn.Linear(D, outputs)],
        "free": [nn.Linear(D, outputs, bias=False)],
        "bias": [nn.Linear(D, outputs)],
        "own": [nn.Linear(D, outputs)],
        "network": [nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, outputs)],
        "own head": [nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, outputs)],
    }[kind]
    names = {"own": ("0.bias",), "own head": ("2.weight", "2.bias")}.get(kind)
    own = None if names is None else OwnPart(names, "joint", 0.0)
    if kind == "bias":  # alone is trained
        layers[0].weight.requires_grad_(False)
    example = torch.zeros(3, D, dtype=torch.float64)
    return FlatModel(nn.Sequential(*layers), loss, example, l2=l2, dtype=torch.float64, own=own)


def make_site(model, rows, noise=None, privacy=PRIVACY, planned=PLANNED):
    ledger = Ledger(privacy.epsilon, privacy.delta, unit=privacy.unit, name="north")
    return PrivateSite(privacy, ledger, model, *rows, noise or NoNoise(Stream(0)), planned)


ANSWERS = {
    "losses": lambda site, x: torch.tensor([site.losses(x)], dtype=torch.float64),
    "gradients": lambda site, x: site.gradient(x),
    "steps": lambda site, x: site.step_gradients(2, None)(x),
    "moments": lambda site, x: flatten_symmetric(site.moments()),
}
CASES = [
    (kind, name, answer)
    for kind in ("linear", "clipped", "free", "bias", "own", "network", "own head")
    for name in LOSSES
    for answer in ANSWERS
    if kind not in ("network", "own head") or answer != "moments"
] + [(kind, "squared", "moments") for kind in ("linear", "own")]


def share_moments(*sites):
    """Let sites have told the same moments, with noise: what comes after follows from these."""
    if not (sites[0].linear and sites[0].settles):
        return
    told = sites[0].mean_moments()
    told = told + 0.05 * torch.ones_like(told)
    for site in sites:
        site._sigmas["moments"] = 0.1
        site._told = [told]


@pytest.mark.parametrize(("kind", "name", "answer"), CASES)
def test_replacing_a_row_moves_an_answer_by_its_sensitivity_at_most(kind, name, answer):
    loss, outputs = LOSSES.get(name, (squared, 2))
    short = kind in ("network", "own head", "clipped")
    bound = dataclasses.replace(PRIVACY, gradient=0.7 if short else None)
    model, generator = make_model(kind, loss, outputs), np.random.default_rng(1)
    for _ in range(20):
        x = torch.as_tensor(generator.standard_normal(model.size + model.own_size) * 5)
        rows = draw_rows(generator, loss, outputs)
        others = tuple(part.clone() for part in rows)
        place = generator.integers(M)
        for part, new in zip(others, draw_rows(generator, loss, outputs), strict=True):
            part[place] = new[place]
        sites = [make_site(model, some, privacy=bound) for some in (rows, others)]
        if answer != "moments":
            share_moments(*sites)
        one, two = (ANSWERS[answer](site, x) for site in sites)
        (entry,) = sites[0].ledger.entries
        assert entry.kind == answer
        assert float((one - two).norm()) <= entry.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["linear", "network"])
def test_single_precision_does_not_round_by_more_than_a_row_moves(kind):
    """Of very many rows one moves less than single precision rounds: noise is added in double."""
    torch.manual_seed(0)
    m, layers = 200_000 if kind == "linear" else 50_000, [nn.Linear(1, 1, bias=False)]
    if kind == "network":
        layers.append(nn.Identity()), layers.insert(0, nn.ELU())
    model = FlatModel(nn.Sequential(*layers), binary_logistic, torch.zeros(3, 1))
    x = torch.full((model.size,), 0.3)
    bound = dataclasses.replace(PRIVACY, rows=1.0, gradient=1.0)
    rows, told = torch.full((m, 1), 0.7), []
    for shift in (0.0, 1e-3):
        rows[0] += shift
        site = make_site(model, (rows.clone(), torch.ones(m, dtype=torch.int64)), privacy=bound)
        told.append(site.mean_gradient(x))
    moved = float((told[1] - told[0]).abs())
    assert 0 < moved <= 1e-3 / m  # one row's gradient moves by less than its input


@pytest.mark.parametrize("name", LOSSES)
def test_sensitivities_are_attained(name):
    loss, outputs = LOSSES[name]
    model, zeros = make_model("free", loss, outputs), torch.zeros(M, dtype=torch.int64)
    angles = torch.zeros(M, dtype=torch.float64)

    def site(angle, label):
        angles[0], labels = angle, zeros.clone()
        labels[0] = label
        rows = PRIVACY.rows * torch.stack([angles.cos(), angles.sin(), 0 * angles], dim=1)
        return make_site(model, (rows, labels))

    one, other = site(0.0, 0), site(math.pi / 2, 0)
    moved = flatten_symmetric(one.mean_moments() - other.mean_moments()).norm()
    assert float(moved) == pytest.approx(one.price("moments").sensitivity, rel=1e-5)
    x = torch.zeros(model.size, dtype=torch.float64)
    sure = {"logistic": [1e6], "cross_entropy": [0.0, 1e6, 5e5]}[name]  # on both sides, and wrong
    x.view(-1, D)[:, 1] = torch.tensor(sure)
    moved = site(1e-3, 0).mean_gradient(x) - site(-1e-3, 1).mean_gradient(x)
    assert float(moved.norm()) == pytest.approx(one.price("gradients").sensitivity, rel=1e-4)


@pytest.mark.parametrize("kind", ["linear", "own"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_without_its_noise_is_noticed(answer, kind, monkeypatch):
    """What is told of the same rows again and again spreads as the ledger says; else it fails.

    Of an own bias, too: each number of the gradient, those of the bias among them.
    """
    model = make_model(kind, cross_entropy, 3)
    rows = draw_rows(np.random.default_rng(0), cross_entropy, 3)
    x = torch.zeros(model.size + model.own_size, dtype=torch.float64)

    def spread():
        told = []
        for seed in range(60):
            site = make_site(model, rows, StreamNoise(Stream(seed)))
            site.tidy = lambda gradient: gradient  # what is known of all gradients
            if answer != "moments":
                share_moments(site)
            told.append(ANSWERS[answer](site, x))
        (entry,) = site.ledger.entries
        each = torch.stack(told).std(dim=0) / entry.sigma
        own = each[model.size :] if answer in ("gradients", "steps") and kind == "own" else each
        return float(each.square().mean().sqrt()), float(own.square().mean().sqrt())

    assert all(0.8 < found < 1.2 for found in spread())
    add = StreamNoise.add

    def forget(self, value, sensitivity, sigma, kind, turn):
        return value if kind == answer else add(self, value, sensitivity, sigma, kind, turn)

    monkeypatch.setattr(StreamNoise, "add", forget)
    assert not any(0.8 < found < 1.2 for found in spread())


def test_all_that_is_planned_meets_the_budget_and_one_more_is_refused():
    model = make_model("linear", cross_entropy, 3)
    site = make_site(model, draw_rows(np.random.default_rng(0), cross_entropy, 3))
    x = torch.zeros(model.size, dtype=torch.float64)
    for _ in range(4):
        site.losses(x), site.gradient(x), site.moments(), site.step_gradients(2, None)
    assert site.ledger.spent == pytest.approx(PRIVACY.epsilon, rel=1e-9)
    assert compose(site.ledger.entries, PRIVACY.delta) <= PRIVACY.epsilon * (1 + 1e-9)
    for ask in (site.losses, site.gradient):
        with pytest.raises(OverBudget, match="north"):
            ask(x)


def test_what_is_not_planned_is_refused_by_name():
    rows = draw_rows(np.random.default_rng(0), cross_entropy, 3)
    model = make_model("linear", cross_entropy, 3)
    site = make_site(model, rows, planned=Planned(gradients=1))
    with pytest.raises(Unanswered, match="north: losses are not in the plan"):
        site.losses(torch.zeros(model.size, dtype=torch.float64))
    assert site.ledger.entries == []
    with pytest.raises(Unanswered, match="gradient="):
        make_site(make_model("network", cross_entropy, 3), rows)


def test_a_linear_gradient_is_that_of_autograd():
    generator = np.random.default_rng(3)
    for name, (loss, outputs) in LOSSES.items():
        model = make_model("linear", loss, outputs)
        rows = draw_rows(generator, loss, outputs)
        rows = (rows[0] / rows[0].norm(dim=1, keepdim=True), rows[1])  # not clipped
        x = torch.as_tensor(generator.standard_normal(model.size)).requires_grad_()
        value = model.sample_losses(x, *rows).mean()
        (wanted,) = torch.autograd.grad(value, x)
        found = make_site(model, rows).mean_gradient(x.detach())
        assert torch.allclose(found, wanted, atol=1e-12), name


@pytest.mark.parametrize("name", [*LOSSES, "squared"])
def test_an_own_bias_is_kept_for_rows_minus_their_told_mean(name):
    """Loss and gradient in (weight, kept bias) are those of autograd through the change of bias."""
    generator, (loss, outputs) = np.random.default_rng(5), LOSSES.get(name, (squared, 2))
    model = make_model("own", loss, outputs, l2=0.1)
    inputs, targets = draw_rows(generator, loss, outputs)
    rows = inputs / inputs.norm(dim=1, keepdim=True) / 4, targets
    site = make_site(model, rows, privacy=dataclasses.replace(PRIVACY, loss=99.0, gradient=99.0))
    site.own_l2 = 0.3
    site.moments()
    site._sigmas["moments"] = 1e-3  # little is taken for noise
    x = torch.as_tensor(generator.standard_normal(model.size + model.own_size)).requires_grad_()
    weight, kept = x[: model.size].reshape(outputs, D), x[model.size :]
    bias = kept - weight @ site.centre()
    assert float(site.centre().norm()) > 0.01
    assert torch.allclose(site.uncentre(x.detach())[model.size :], bias.detach())
    value = model.sample_losses(torch.cat([x[: model.size], bias]), *rows).mean()
    value = value + 0.05 * weight.square().sum() + 0.15 * bias.square().sum()
    (wanted,) = torch.autograd.grad(value, x)
    assert site.losses(x.detach()) == pytest.approx(value.item(), rel=1e-9)
    for found in (site.gradient(x.detach()), site.step_gradients(1, None)(x.detach())):
        assert torch.allclose(found, wanted, atol=1e-9)


def test_an_own_bias_has_the_curvature_of_rows_minus_their_mean():
    rows = draw_rows(np.random.default_rng(6), binary_logistic, 1)
    site = make_site(make_model("own", binary_logistic, 1), rows)
    kept = site._inputs[:, :-1]
    wanted = np.cov(kept.numpy().T, bias=True) / 4
    site.moments()
    site._sigmas["moments"] = 0.0  # the mean as it is
    assert np.allclose(site.hessian().numpy(), wanted, atol=1e-12)


def test_squared_losses_follow_from_moments_that_are_told_once():
    generator = np.random.default_rng(4)
    model = make_model("linear", squared, 2, l2=0.1)
    inputs, targets = draw_rows(generator, squared, 2)
    rows = inputs / inputs.norm() / 4, targets / targets.norm() / 4
    site = make_site(model, rows, planned=Planned(moments=1))
    x = torch.as_tensor(generator.standard_normal(model.size)).requires_grad_()
    value = model.sample_losses(x, *rows).mean() + model.penalty(x)
    (wanted,) = torch.autograd.grad(value, x)
    assert site.losses(x.detach()) == pytest.approx(value.item(), rel=1e-9)
    assert torch.allclose(site.gradient(x.detach()), wanted, atol=1e-9)
    assert torch.allclose(site.step_gradients(3, None)(x.detach()), wanted, atol=1e-9)
    assert [(entry.kind, entry.steps) for entry in site.ledger.entries] == [("moments", 1)]


def test_persons_cost_as_many_rows_as_they_may_have():
    model = make_model("linear", cross_entropy, 3)
    rows = draw_rows(np.random.default_rng(0), cross_entropy, 3)
    persons = dataclasses.replace(PRIVACY, unit="person", most_rows=3)
    sites = [make_site(model, rows, privacy=p) for p in (PRIVACY, persons)]
    for site in sites:
        site.losses(torch.zeros(model.size, dtype=torch.float64))
    (one,), (other,) = (site.ledger.entries for site in sites)
    assert other.sensitivity == 3 * one.sensitivity
    assert other.sigma == pytest.approx(3 * one.sigma)
    with pytest.raises(Unanswered, match="samples of persons"):
        sites[1].step_gradients(1, 2)


def test_a_symmetric_matrix_is_a_vector_of_the_same_length():
    matrix = torch.as_tensor(np.random.default_rng(0).standard_normal((4, 4)))
    matrix = matrix + matrix.T
    flat = flatten_symmetric(matrix)
    assert float(flat.norm()) == pytest.approx(float(matrix.norm()))
    assert torch.allclose(unflatten_symmetric(flat, 4), matrix)


@pytest.mark.parametrize("z", [0.5, 2.0, 10.0])
def test_noise_on_the_grid_costs_what_the_formula_says(z):
    """One number of sensitivity 1: the grid has 1,024 steps of it, the noise z times as many."""
    steps, sigma = round(1 / GRID), z / GRID
    places = np.arange(-40 * steps * math.ceil(z), 40 * steps * math.ceil(z) + 1)
    here = np.exp(-(places**2) / (2 * sigma**2))
    there = np.exp(-((places - steps) ** 2) / (2 * sigma**2))
    for epsilon in (0.1, 1.0, 3.0):
        found = np.maximum(here - math.exp(epsilon) * there, 0).sum() / here.sum()
        assert found == pytest.approx(delta_of(epsilon, 1 / z), rel=1e-4, abs=1e-12)


def test_recurrent_networks_have_gradients_of_single_rows():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.say = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, rows):
            return self.say(self.read(rows)[0][:, -1])

    torch.manual_seed(0)
    rows = torch.randn(M, 4, 2, dtype=torch.float64), torch.arange(M) % 2
    model = FlatModel(Reads(), cross_entropy, rows[0][:3], dtype=torch.float64)
    x = model.flatten(model.module).requires_grad_()
    (wanted,) = torch.autograd.grad(model.sample_losses(x, *rows).mean(), x)
    wide = dataclasses.replace(PRIVACY, rows=100.0, gradient=100.0)
    found = make_site(model, rows, privacy=wide).mean_gradient(x.detach())
    assert torch.allclose(found, wanted, atol=1e-10)


def test_secret_noise_is_a_discrete_gaussian_on_a_grid():
    drawn = discrete_gaussian(2.5, 40_000)
    places = np.arange(-12, 13)
    wanted = np.exp(-(places**2) / (2 * 2.5**2))
    seen = (drawn[:, None] == places).mean(axis=0)
    assert np.abs(seen - wanted / wanted.sum()).max() < 0.012
    value, noise = torch.zeros(20_000, dtype=torch.float64), SecretNoise()
    step = 2.0**-10 * 1.0 / math.sqrt(len(value))
    told = noise.add(value + 0.3, 1.0, 2.0, "losses", 0)
    assert torch.allclose(told / step, torch.round(told / step), atol=1e-3)
    assert float(told.std()) == pytest.approx(2.0, rel=0.05)
    assert float(told.mean()) == pytest.approx(0.3, abs=0.1)
    assert len(set(noise.draw(5, 9, 0).tolist())) == 5
