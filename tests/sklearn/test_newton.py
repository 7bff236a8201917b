"""Newton's method: the optimum of another solver, in a few rounds; derivatives by autograd."""

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import (
    PROBLEMS,
    classification,
    convex_problem,
    drawn_objective,
    regression,
    rounds,
    start,
)
from torch import nn

from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.models.newton import inverse_root
from equifed.objectives import Average, QFair, RelativeFairness
from equifed.sklearn.solving import Newton
from equifed.training.loop import train

pytestmark = pytest.mark.long

DOUBLE = torch.float64


def hessian_by_autograd(clients, x, weights):
    def total(u):
        values = [clients.model.penalty(u) * float(w) for w in weights]
        for i, w in enumerate(weights):
            data, targets = map(torch.as_tensor, clients._federation.train.client(i))
            values.append(float(w) * clients.model.sample_losses(u, data, targets).mean())
        return sum(values)

    return torch.autograd.functional.hessian(total, x)


@pytest.mark.parametrize("penalise", ["all", "weights"])
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("loss", ["squared", "logistic", "cross_entropy"])
@pytest.mark.parametrize("balance", [None, {0: 0.3, 1: 2.0}])
def test_the_matrix_is_the_one_that_autograd_finds(balance, loss, frozen, penalise):
    if balance and loss == "squared":
        pytest.skip("its targets are no classes")
    data = regression(outputs=2) if loss == "squared" else classification(classes=2)
    layer = nn.Linear(3, 1 if loss == "logistic" else 2)
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    clients = simulate(
        data, layer, loss, l2=0.3, penalise=penalise, dtype=DOUBLE, class_weights=balance
    )
    x = torch.randn(clients.model.size, dtype=DOUBLE)
    weights = np.random.default_rng(1).dirichlet(np.ones(5))
    found = clients.curvature_sum(x, weights, "full").dense(len(x))
    torch.testing.assert_close(found, hessian_by_autograd(clients, x, weights))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7, 9, 11, 13, 16, 22])
def test_it_reaches_the_optimum_and_proves_it(seed):
    problem = convex_problem(seed)
    name, objective = drawn_objective(seed, problem.n)
    history = train(Newton(objective), problem.clients(), rounds=15)
    best, _ = interior_point(problem, objective)
    assert history.rounds[-1].objective <= best + 1e-7 * abs(best), name
    proof = history.certificate()
    assert proof["gap"] < 1e-9 * abs(best)


def test_with_the_average_it_is_newtons_method():
    problem = PROBLEMS["logistic"]
    x = start(problem)
    state, _ = rounds(Newton(Average()), problem.clients(), x, 1)
    gradient = np.mean([problem.gradient_of(i, x) for i in range(problem.n)], axis=0)
    hessian = np.mean([problem.hessian_of(i, x) for i in range(problem.n)], axis=0)
    np.testing.assert_allclose(state.x.numpy(), x - np.linalg.solve(hessian, gradient))


def test_units_that_differ_by_many_orders_do_not_matter():
    draw = np.random.default_rng(0)
    root, units = draw.standard_normal((5, 9)), 10.0 ** draw.integers(-9, 10, 5)
    matrix = (root @ root.T) * np.outer(units, units)
    vector = draw.standard_normal(5) * units
    inverse = inverse_root(torch.as_tensor(matrix)).numpy()
    inside = inverse.T @ vector
    wanted = np.linalg.solve(root @ root.T, vector / units)
    np.testing.assert_allclose(inverse @ inside * units, wanted, rtol=1e-9)
    np.testing.assert_allclose(inside @ inside, vector / units @ wanted, rtol=1e-9)


def test_weights_that_may_be_negative_or_sum_to_anything_are_refused():
    for objective in (RelativeFairness(0.5), QFair(1.0)):
        with pytest.raises(ValueError, match="weights >= 0 that sum to one"):
            Newton(objective)


def test_networks_and_absent_clients_are_refused():
    clients = simulate(regression(), "mlp", dtype=DOUBLE)
    with pytest.raises(ValueError, match="the model is not linear; use SCAFF-PD"):
        train(Newton(Average()), clients, rounds=1)
    clients = PROBLEMS["logistic"].clients()
    algorithm, x = Newton(Average()), clients.initial(Stream(0))
    with pytest.raises(ValueError, match="needs an answer of every client"):
        algorithm.round(algorithm.init(clients, x), clients.subset([0, 1]), Stream(0))
