"""Profile losses: the best own bias, its gradient, and what is known of the error that is left."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.problems import (
    LeastSquares,
    Problem,
    classification,
    least_squares,
    logistic,
    regression,
)

from equifed.algorithms import FairNewton
from equifed.contract.curvature import Inexactness
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import InProcessClients
from equifed.engines.own import LogisticOffsets, Offsets, SoftmaxOffsets, error_bounds
from equifed.engines.simulate import simulate
from equifed.models.losses import binary_logistic, cross_entropy
from equifed.objectives import Average
from equifed.training.loop import train

pytestmark = pytest.mark.long

SIZES = (12, 3, 7, 1, 9)
DATA = {
    "softmax": (classification(SIZES), "cross_entropy"),
    "logistic": (classification(SIZES, classes=2), "logistic"),
    "squared": (regression(SIZES), "squared"),
    "two targets": (regression(SIZES, outputs=2), "squared"),
    "one-hot": (classification(SIZES), "squared"),
}
STREAM = Stream(3)


def clients(kind: str, engine: str = "loop", **options: object) -> InProcessClients:
    data, loss = DATA[kind]
    given = {"l2": 0.05, "dtype": torch.float64, "own": "bias", **options}
    return simulate(data, "linear", loss, engine=engine, **given)  # type: ignore[arg-type]


def model(engine: InProcessClients, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(engine.model.size, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("kind", DATA)
def test_own_parts_are_the_best_ones(kind: str, engine: str) -> None:
    """Against scipy on the plain loss of every client, the module's own."""
    here = clients(kind, engine)
    u, own = model(here), here.own_parts(model(here))
    told = here.losses(u, STREAM)
    for i in range(len(SIZES)):
        rows = slice(*here._offsets[i : i + 2])

        def loss(v: np.ndarray, rows: slice = rows) -> float:
            y = torch.cat([u, torch.as_tensor(v)])
            each = here.model.sample_losses(y, here._inputs[rows], here._targets[rows])
            return float(each.mean() + here.model.penalty(y))

        best = minimize(loss, np.zeros(own.shape[1]), method="Nelder-Mead",
                        options={"xatol": 1e-7, "fatol": 1e-13, "maxiter": 4000})  # fmt: skip
        assert loss(own[i].numpy()) == pytest.approx(told[i], abs=1e-12)
        assert told[i] == pytest.approx(best.fun, abs=1e-9)
        assert told[i] <= best.fun + 1e-12


@pytest.mark.parametrize("kind", DATA)
def test_the_gradient_is_that_of_the_profile_loss(kind: str) -> None:
    here = clients(kind, "stacked")
    u, h = model(here), 1e-5
    _, gradients = here.value_and_gradient(u, STREAM)
    steps = h * torch.eye(len(u), dtype=torch.float64)
    ends = [here.losses(u + e, STREAM) - here.losses(u - e, STREAM) for e in steps]
    np.testing.assert_allclose(gradients.dense().numpy(), np.stack(ends, 1) / (2 * h), atol=2e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("offsets", [LogisticOffsets(1e-3), SoftmaxOffsets(1e-3)], ids=str)
@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_newton_arrives_wherever_the_outputs_are(
    offsets: Offsets, scale: float, dtype: torch.dtype
) -> None:
    """From any outputs, with absent classes: a decrement of rounding's size."""
    outputs, targets, weights = inner_problems(offsets, scale, dtype)
    wanted = offsets.wanted(outputs, targets, weights)
    v = offsets.solve(outputs, wanted, weights)
    _, decrement = offsets.newton(v, outputs, wanted, weights)
    assert float(decrement.max()) < 1e3 * torch.finfo(dtype).eps ** 2 / 1e-3
    if v.shape[1] > 1:  # what has no effect is left out
        assert float(v.sum(1).abs().max()) < 20 * torch.finfo(dtype).eps * float(v.abs().max())


def test_a_clients_own_part_does_not_depend_on_the_others() -> None:
    offsets = SoftmaxOffsets(1e-3)
    outputs, targets, weights = inner_problems(offsets, 5.0, torch.float64)
    outputs *= torch.logspace(-2, 1.5, 30, dtype=torch.float64)[:, None, None]  # some take longer
    wanted = offsets.wanted(outputs, targets, weights)
    together = offsets.solve(outputs, wanted, weights)
    alone = [
        offsets.solve(o[None], g[None], w[None])
        for o, g, w in zip(outputs, wanted, weights, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("away", [0.0, 1.0, 15.0])
@pytest.mark.parametrize("offsets", [LogisticOffsets(1e-3), SoftmaxOffsets(1e-3)], ids=str)
def test_derivatives_away_of_a_base_are_those_of_the_loss(offsets: Offsets, away: float) -> None:
    """Against autograd, at offsets near those of the base and far from them."""
    loss = binary_logistic if isinstance(offsets, LogisticOffsets) else cross_entropy
    outputs, targets, weights = inner_problems(offsets, 3.0, torch.float64)
    near, by = torch.randn(2, *outputs.shape[:2], dtype=torch.float64)
    by = offsets.project(away * by / by.abs().max())

    def mean_loss(v: torch.Tensor, i: int) -> torch.Tensor:
        return loss((outputs[i] + v[:, None]).T, targets[i]) @ weights[i]

    wanted = offsets.wanted(outputs, targets, weights)
    first, second = offsets.derivatives(offsets.base(outputs, near), by, wanted, weights)
    for i in range(0, 30, 7):
        v, once = near[i] + by[i], functools.partial(mean_loss, i=i)
        exact = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
        jac, hessian = (derive(once, v) for derive in exact)
        plain = second[i] - (1 / len(v) if len(v) > 1 else 0)  # where nothing changes
        torch.testing.assert_close(first[i], jac, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(plain, hessian, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("offsets", [LogisticOffsets(1e-3), SoftmaxOffsets(1e-3)], ids=str)
def test_the_error_bounds_hold_on_the_way(offsets: Offsets) -> None:
    """Losses and gradients of unfinished own parts are off by no more than is said."""
    loss = binary_logistic if isinstance(offsets, LogisticOffsets) else cross_entropy
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 30, 4, generator=draw, dtype=torch.float64)
    k = 1 if isinstance(offsets, LogisticOffsets) else 3
    map_ = torch.randn(k, 4, generator=draw, dtype=torch.float64)
    outputs = torch.einsum("kf,cbf->ckb", map_, inputs)
    targets = torch.randint(0, max(2, k), (20, 30), generator=draw)
    weights = torch.full((20, 30), 1 / 30, dtype=torch.float64)
    wanted = offsets.wanted(outputs, targets, weights)
    best = offsets.solve(outputs, wanted, weights)

    def at(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moved = outputs + v.unsqueeze(2)
        each = loss(moved.transpose(1, 2).flatten(0, 1), targets.flatten()).view(20, 30)
        value = (each * weights).sum(1) + 0.5 * offsets.l2 * v.square().sum(1)
        return value, torch.bmm(offsets.slopes(moved, targets, weights), inputs).flatten(1)

    bounded = 0
    for size in (1e-3, 1e-2, 0.1):
        v = best + size * offsets.project(torch.randn(20, k, generator=draw, dtype=torch.float64))
        _, decrement = offsets.newton(v, outputs, wanted, weights)
        mean_square = inputs.square().sum(2).mean(1)
        of_losses, of_gradients = error_bounds(decrement, offsets, mean_square)
        (value, gradient), (least, exact) = at(v), at(best)
        assert ((value - least >= -1e-15) & (value - least <= of_losses)).all()
        assert ((gradient - exact).norm(dim=1) <= of_gradients).all()
        bounded += int(torch.isfinite(of_losses).sum())
    assert bounded > 20


def inner_problems(
    offsets: Offsets, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of that size for 30 clients; some lack classes, some have one only."""
    draw, k = torch.Generator().manual_seed(0), 1 if isinstance(offsets, LogisticOffsets) else 5
    outputs = scale * torch.randn(30, k, 40, generator=draw, dtype=dtype)
    outputs += scale * torch.randn(30, k, 1, generator=draw, dtype=dtype)
    targets = torch.randint(0, max(k, 2), (30, 40), generator=draw)
    targets[:10], targets[10:20] = 0, targets[10:20] % 2
    return outputs, targets, torch.full((30, 40), 1 / 40, dtype=dtype)


@pytest.mark.parametrize(
    "problem", [least_squares(1), logistic(3, n=5)], ids=["squares", "logistic"]
)
def test_curvature_bounds_the_schur_complement(problem: Problem) -> None:
    """The Hessians of profile losses lie within what the engine says."""
    here = problem.clients_with_own("stacked")
    bounds, u, h = here.curvature(), torch.zeros(problem.d, dtype=torch.float64), 1e-4
    assert not isinstance(bounds, str)
    steps = h * torch.eye(problem.d, dtype=torch.float64)
    columns = [
        here.value_and_gradient(u + e, STREAM)[1].dense()
        - here.value_and_gradient(u - e, STREAM)[1].dense()
        for e in steps
    ]
    hessians = torch.stack(columns, 2).numpy() / (2 * h)
    for i, hessian in enumerate(hessians):
        ends = np.linalg.eigvalsh((hessian + hessian.T) / 2)
        assert bounds.strong_convexity[i] - 1e-6 <= ends[0]
        assert ends[-1] <= bounds.smoothness[i] + 1e-6
    if isinstance(problem, LeastSquares):  # without the ones, the bound would be too large
        a = problem.inputs[0]
        centred = a - a.mean(0)
        exact = 2 / len(a) * np.linalg.eigvalsh(centred.T @ centred)[0] + problem.l2
        assert bounds.strong_convexity[0] <= exact + 1e-9


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_minibatches_are_refused_by_name(engine: str) -> None:
    here = clients("softmax", engine)
    u = model(here)
    for ask in (
        lambda: here.losses(u, STREAM, 2),
        lambda: here.value_and_gradient(u, STREAM, 2),
        lambda: here.local_steps(u, LocalSGD(lr=0.1, steps=2, batch_size=2), STREAM),
    ):
        with pytest.raises(ValueError, match=r"batch_size=2: own_steps='profile'.*'joint'"):
            ask()


def test_clients_with_one_class_are_named() -> None:
    told = clients("softmax").warn_of_own()
    assert told is not None and "client 3" in told and "own_l2 = 0.001" in told
    assert clients("squared").warn_of_own() is None
    found = clients("softmax").inexactness(model(clients("softmax")))
    assert isinstance(found, Inexactness) and found.gradients.max() < 1e-12


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("kind", DATA)
def test_second_derivatives_are_those_of_profile_losses(kind: str, engine: str) -> None:
    """The Schur complement, against differences of gradients; a bound where outputs are apart."""
    here, fast = clients(kind, engine), clients(kind, "stacked")  # whose gradients agree
    u, h = model(here), 1e-5
    weights = np.array([0.5, 0.0, 0.2, 0.1, 0.2])
    steps = h * torch.eye(len(u), dtype=torch.float64)

    def gradient(at: torch.Tensor) -> torch.Tensor:
        return fast.value_and_gradient(at, STREAM)[1].weighted_sum(weights)

    exact = torch.stack([gradient(u + e) - gradient(u - e) for e in steps]) / (2 * h)
    full = here.curvature_sum(u, weights, "full")
    assert not isinstance(full, str)
    torch.testing.assert_close(full.dense(len(u)), (exact + exact.T) / 2, rtol=0, atol=1e-7)
    blocks = here.curvature_sum(u, weights, "blocks")
    diagonal = here.curvature_sum(u, weights, "diagonal")
    thin = torch.linalg.qr(torch.randn(3, 2, dtype=torch.float64))[0]
    product = here.curvature_sum(u, weights, "blocks", thin)
    assert not isinstance(blocks, str) and not isinstance(diagonal, str)
    assert not isinstance(product, str)
    above = blocks.dense(len(u)) - exact
    assert float(torch.linalg.eigvalsh((above + above.T) / 2)[0]) > -1e-7
    torch.testing.assert_close(blocks.blocks.diagonal(dim1=1, dim2=2), diagonal.blocks)
    torch.testing.assert_close(blocks.blocks @ thin, product.blocks)


def test_second_derivatives_are_declined_where_own_parts_move_by_local_steps() -> None:
    here = clients("softmax", own_steps="joint")
    x, weights = here.initial(Stream(0)), np.full(len(SIZES), 0.2)
    found = here.curvature_sum(x, weights)
    assert isinstance(found, str) and "own parameters" in found


def test_fair_newton_takes_steps_in_the_metric_of_profile_losses() -> None:
    """As many rounds as Newton's method for the average of squared losses: one, to rounding."""
    here = clients("squared", "stacked")
    history = train(FairNewton(Average()), here, rounds=3)
    gaps = [record.numbers["gap"] for record in history.rounds]
    assert gaps[1] < 1e-12 * history.rounds[1].objective
