"""An L2 penalty that leaves biases free: the same on every engine, and honest about curvature."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification, regression, rounds
from torch import nn

from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.curvature import Curvature, CurvatureSum
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.objectives import Average, ChiSquare
from equifed.runs.build import build_run
from equifed.runs.config import RunConfig
from equifed.training.loop import train

pytestmark = pytest.mark.long

DOUBLE = torch.float64
L2 = 0.7


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def both(data, model, loss, **options):
    given = {"l2": L2, "penalise": "weights", "dtype": DOUBLE, **options}
    return [simulate(data, model, loss, engine=engine, **given) for engine in ("loop", "stacked")]


def test_the_penalty_is_that_of_everything_but_biases() -> None:
    model = module().double()
    clients = simulate(classification(), model, l2=L2, penalise="weights", dtype=DOUBLE)
    x = clients.flatten(model)
    parameters = model.state_dict().items()
    weights = sum(float(p.square().sum()) for n, p in parameters if "bias" not in n)
    assert float(clients.model.penalty(x)) == pytest.approx(L2 / 2 * weights)


@pytest.mark.parametrize("memory", [1, 1 << 30])
@pytest.mark.parametrize("case", ["network", "least squares", "logistic"])
def test_engines_agree(case, memory) -> None:
    data = regression() if case == "least squares" else classification(classes=3)
    model = module() if case == "network" else nn.Linear(3, 1 if case == "least squares" else 3)
    loop = both(data, model, "auto")[0]
    given = {"l2": L2, "penalise": "weights", "dtype": DOUBLE, "memory": memory}
    stacked = simulate(data, model, engine="stacked", **given)
    x, stream, weights = loop.flatten(model), Stream(1), np.linspace(0.1, 0.3, 5)
    work = LocalSGD(lr=0.05, steps=6)
    found = []
    for clients in (loop, stacked):
        losses, gradients = clients.value_and_gradient(x, stream)
        target = gradients.weighted_sum(weights)
        moved = clients.local_steps(x, work, stream, control=gradients, target=target)
        plain = clients.local_steps(x, work, stream)
        sums = [v.displacement.weighted_sum(weights).numpy() for v in (moved, plain)]
        found.append([losses, clients.losses(x, stream), target.numpy(), *sums])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("features", [2, 30])
@pytest.mark.parametrize("shift", [0.0, 3.0, 100.0])
def test_bounds_on_least_squares_hold_and_say_something(features, shift) -> None:
    data = regression(features=features)
    data = data.with_inputs({"train": data.train.inputs + shift})
    known = both(data, nn.Linear(features, 1), "squared")[0].curvature()
    assert isinstance(known, Curvature)
    for i, m in enumerate(data.train.sizes):
        a = np.column_stack([data.train.client(i)[0], np.ones(m)])
        penalty = L2 * np.diag([*np.ones(features), 0.0])
        values = np.linalg.eigvalsh(2 * a.T @ a / m + penalty)
        assert 0 < known.strong_convexity[i] <= values[0] * (1 + 1e-9)
        assert known.smoothness[i] >= values[-1] * (1 - 1e-9)


def test_a_free_bias_leaves_logistic_regression_without_a_certificate() -> None:
    data = classification(sizes=(9, 9), classes=2)
    for penalise, proved in (("all", True), ("weights", False)):
        clients = simulate(data, "logistic", l2=L2, penalise=penalise, dtype=DOUBLE)
        history = train(ScaffPD(Average()), clients, rounds=5)
        assert isinstance(history.certificate(), dict) == proved
        assert proved or "on all parameters" in str(history.certificate())
    free = simulate(data, nn.Linear(3, 2, bias=False), l2=L2, penalise="weights", dtype=DOUBLE)
    assert free.curvature().strong_convexity.tolist() == [L2, L2]


@pytest.mark.parametrize("form", ["full", "blocks", "diagonal"])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_sums_of_hessians_have_no_penalty_on_biases(loss: Any, form: Any) -> None:
    """The difference to a sum without any penalty is that of the weights alone."""
    data = regression() if loss == "squared" else classification(classes=2)
    module, share = nn.Linear(3, 1 if loss == "squared" else 2), np.full(5, 0.2)
    given = {"engine": "loop", "dtype": DOUBLE}
    made = [simulate(data, module, loss, l2=l2, penalise="weights", **given) for l2 in (L2, 0.0)]
    x = torch.linspace(-1, 1, made[0].model.size, dtype=DOUBLE)
    penalised, free = (clients.curvature_sum(x, share, form) for clients in made)
    assert isinstance(penalised, CurvatureSum) and isinstance(free, CurvatureSum)
    left = penalised.blocks - free.blocks
    diagonal = left if form == "diagonal" else left.diagonal(dim1=-2, dim2=-1)
    one = torch.tensor([L2, L2, L2, 0.0], dtype=DOUBLE)
    expected = one.repeat(len(diagonal[0]) // 4).expand_as(diagonal)
    torch.testing.assert_close(diagonal, expected, rtol=0, atol=1e-12)
    if form != "diagonal":
        assert float((left - torch.diag_embed(diagonal)).abs().max()) < 1e-12
    assert penalised.penalty == 0.0  # none that all coordinates share


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_fair_newton_solves_with_free_biases(loss: Any) -> None:
    data = regression() if loss == "squared" else classification(classes=2, sizes=(9, 9, 9))
    module = nn.Linear(3, 1 if loss == "squared" else 2)
    clients = simulate(data, module, loss, l2=L2, penalise="weights", dtype=DOUBLE)
    state, infos = rounds(FairNewton(ChiSquare(0.1)), clients, np.zeros(clients.model.size), 15)
    _, gradients = clients.value_and_gradient(state.x, Stream(0))
    assert float(gradients.weighted_sum(infos[-1].weights).norm()) < 1e-6
    assert infos[-1].numbers["curvature_sums"] >= 1


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ValueError, match="penalise is 'all' or 'weights', got 'bias'"):
        simulate(classification(), "logistic", penalise="bias")


def test_a_configuration_can_say_it() -> None:
    table = {
        "rounds": 1,
        "data": {"name": "fashion-three", "train": 5},
        "model": {"name": "logistic", "l2": 0.1, "penalise": "weights"},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
    }
    config = RunConfig.from_dict(table)
    assert RunConfig.from_dict(config.to_dict()).model["penalise"] == "weights"
    clients = build_run(config).clients
    assert clients.model.penalised is not None
    biases = int((clients.model.penalised == 0).sum())
    assert biases == clients.model.shapes["1.bias"].numel()


@pytest.mark.parametrize("case", ["squared", "logistic"])
def test_second_derivatives_know_it(case) -> None:
    data = regression() if case == "squared" else classification(classes=2)
    clients = both(data, nn.Linear(3, 1), case)[1]
    x, weights = torch.randn(4, dtype=DOUBLE), np.linspace(0.1, 0.3, 5)
    every = simulate(data, nn.Linear(3, 1), case, l2=L2, dtype=DOUBLE)
    free, penalised = (c.curvature_sum(x, weights, "full").dense(4) for c in (clients, every))
    ridge = torch.diag(torch.tensor([0.0, 0.0, 0.0, L2 * weights.sum()], dtype=DOUBLE))
    torch.testing.assert_close(penalised - free, ridge)
