"""Weighted sums of Hessians: automatic differentiation as the oracle, engines that agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.problems import classification, regression
from torch import nn
from torch.autograd.functional import hessian

from equifed.contract.arrays import multiply_rows
from equifed.contract.clients import MissingClients
from equifed.contract.curvature import CurvatureSum, check_curvature
from equifed.contract.streams import Stream
from equifed.engines.distributed import DistributedClients
from equifed.engines.in_process import InProcessClients
from equifed.engines.simulate import simulate

DOUBLE = torch.float64
CASES = {
    "squared": lambda **o: simulate(regression(outputs=2), nn.Linear(3, 2), "squared", **o),
    "one-hot": lambda **o: simulate(classification(), "linear", "squared", **o),
    "logistic": lambda **o: simulate(
        classification(classes=2), nn.Linear(3, 1, bias=False), "logistic", **o
    ),
    "softmax": lambda **o: simulate(classification(), "logistic", **o),
    "images": lambda **o: simulate(classification(shape=(2, 2)), "logistic", **o),
    "weighted, free biases": lambda **o: simulate(
        classification(), "logistic", class_weights={0: 0.3, 1: 2.0}, penalise="weights", **o
    ),
    "bias alone": lambda **o: simulate(classification(), frozen(nn.Linear(3, 3)), **o),
}
WEIGHTS = np.array([0.1, 0.0, 0.5, 0.3, 0.2])


def frozen(layer: nn.Linear) -> nn.Linear:
    torch.nn.init.ones_(layer.weight).requires_grad_(False)
    return layer


def engine(case: str, kind: str = "stacked") -> InProcessClients:
    return CASES[case](l2=0.01, dtype=DOUBLE, engine=kind)


def point(clients: InProcessClients) -> torch.Tensor:
    return torch.randn(clients.model.size, dtype=DOUBLE)


def true_hessian(clients: InProcessClients, x: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
    """The Hessian of sum w_i f_i by automatic differentiation of the model's own losses."""
    model, train = clients.model, clients._federation.train

    def total(u: torch.Tensor) -> torch.Tensor:
        out = u.new_zeros(())
        for i, weight in enumerate(weights):
            inputs, targets = (torch.as_tensor(v) for v in train.client(i))
            out = out + weight * model.sample_losses(u, inputs, targets).mean()
        return out + float(weights.sum()) * model.penalty(u)

    return hessian(total, x)


def dense(found: CurvatureSum, d: int) -> torch.Tensor:
    """The blocks where they belong."""
    out = torch.zeros(d, d, dtype=DOUBLE)
    for k, places in enumerate(found.places):
        out[places[:, None], places] = found.blocks[k if len(found.blocks) > 1 else 0]
    return out


@pytest.mark.long
@pytest.mark.parametrize("kind", ["loop", "stacked"])
@pytest.mark.parametrize("case", CASES)
def test_the_full_sum_is_the_hessian(case: str, kind: str) -> None:
    clients = engine(case, kind)
    x = point(clients)
    found = clients.curvature_sum(x, WEIGHTS, "full")
    assert isinstance(found, CurvatureSum) and found.exact
    torch.testing.assert_close(dense(found, len(x)), true_hessian(clients, x, WEIGHTS))
    torch.testing.assert_close(found.blocks, found.blocks.mT)


@pytest.mark.parametrize("case", ["softmax", "images"])
def test_blocks_of_softmax_bound_the_hessian(case: str) -> None:
    clients = engine(case)
    for scale in (0.0, 1.0, 10.0):
        x = scale * point(clients)
        found = clients.curvature_sum(x, WEIGHTS)
        assert isinstance(found, CurvatureSum) and not found.exact
        above = dense(found, len(x)) - true_hessian(clients, x, WEIGHTS)
        assert float(torch.linalg.eigvalsh(above)[0]) > -1e-12


OWN = {
    "squared": lambda **o: simulate(regression(outputs=2), nn.Linear(3, 2), "squared", **o),
    "logistic": lambda **o: simulate(classification(classes=2), nn.Linear(3, 1), "logistic", **o),
    "softmax": CASES["softmax"],
}


@pytest.mark.parametrize(
    ("case", "own"), [*((c, None) for c in CASES), *((c, "bias") for c in OWN)]
)
def test_thin_products_and_diagonals_are_those_of_the_blocks(case: str, own: str | None) -> None:
    clients = (CASES | OWN if own else CASES)[case](l2=0.01, dtype=DOUBLE, own=own)
    x = point(clients)
    blocks = clients.curvature_sum(x, WEIGHTS).blocks
    thin = torch.randn(blocks.shape[1], 2, dtype=DOUBLE)
    torch.testing.assert_close(clients.curvature_sum(x, WEIGHTS, thin=thin).blocks, blocks @ thin)
    diagonal = clients.curvature_sum(x, WEIGHTS, "diagonal").blocks
    torch.testing.assert_close(diagonal, blocks.diagonal(dim1=1, dim2=2))
    mean = clients.curvature_sum(x, WEIGHTS, "mean").blocks
    torch.testing.assert_close(mean, blocks.mean(dim=0, keepdim=True))
    projected = clients.curvature_sum(x, WEIGHTS, "projected", thin).blocks
    torch.testing.assert_close(projected, thin.T @ blocks @ thin)


def profile_hessian(clients: InProcessClients, x: torch.Tensor) -> torch.Tensor:
    """Differences of the profile gradients that the engine tells, each with its own best bias."""
    step, rows = 1e-5, []
    for direction in torch.eye(len(x), dtype=DOUBLE):
        ends = [
            clients.value_and_gradient(x + sign * step * direction, Stream(0))[1]
            for sign in (1, -1)
        ]
        there, back = (end.weighted_sum(WEIGHTS) for end in ends)
        rows.append((there - back) / (2 * step))
    return torch.stack(rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["loop", "stacked"])
@pytest.mark.parametrize("case", OWN)
def test_profile_losses_have_the_schur_complement(
    case: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equifed.engines.in_process.PIECE", 100)
    clients = OWN[case](l2=0.01, dtype=DOUBLE, own="bias", engine=kind)
    x = point(clients)
    found = clients.curvature_sum(x, WEIGHTS, "full")
    assert isinstance(found, CurvatureSum) and found.exact
    fast = OWN[case](l2=0.01, dtype=DOUBLE, own="bias", engine="stacked")  # gradients agree
    truth = profile_hessian(fast, x)
    torch.testing.assert_close(dense(found, len(x)), truth, rtol=1e-6, atol=1e-7)
    above = dense(clients.curvature_sum(x, WEIGHTS), len(x)) - truth
    assert float(torch.linalg.eigvalsh(above)[0]) > -1e-7


def test_a_group_of_processes_has_the_same_schur_complement() -> None:
    options = {"l2": 0.01, "dtype": DOUBLE, "own": "bias"}
    alone = OWN["softmax"](**options)
    x, group = point(alone), DistributedClients(classification(), "logistic", **options)
    sums = [clients.curvature_sum(x, WEIGHTS, "full").blocks for clients in (alone, group)]
    torch.testing.assert_close(*sums)


def test_own_parts_that_move_by_local_steps_have_no_hessian() -> None:
    clients = OWN["softmax"](dtype=DOUBLE, own="bias", own_steps="joint")
    assert "own parameters" in clients.curvature_sum(point(clients), WEIGHTS)


@pytest.mark.parametrize("form", ["full", "blocks", "diagonal", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_engines_agree_and_book_the_same(
    case: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also piece by piece, and for some of the clients."""
    monkeypatch.setattr("equifed.engines.in_process.PIECE", 100)
    loop, stacked = (engine(case, kind).subset([0, 2, 3]) for kind in ("loop", "stacked"))
    x, weights = point(loop), np.array([0.2, 0.5, 0.3])
    sums = [clients.curvature_sum(x, weights, form) for clients in (loop, stacked)]
    torch.testing.assert_close(sums[0].blocks, sums[1].blocks)
    assert loop.traffic.totals() == stacked.traffic.totals()
    exchanges, up, down = loop.traffic.totals()
    b, q = sums[0].blocks.shape[:2]
    numbers = b * q if form == "diagonal" else b * q * (q + 1) // 2
    assert (exchanges, up, down) == (1, 3 * 8 * numbers, 3 * 8 * len(x))
    assert loop.traffic.up[1] == 0  # who does not take part sends nothing


@pytest.mark.parametrize("form", ["full", "blocks", "diagonal"])
def test_a_group_of_processes_agrees(form: str) -> None:
    """A group of one: sums and inner products go through the group all the same."""
    own = {"l2": 0.01, "dtype": DOUBLE}
    alone = simulate(classification(), "logistic", **own)
    group = DistributedClients(classification(), "logistic", **own)
    x = point(alone)
    found = [c.curvature_sum(x, WEIGHTS, form).blocks for c in (alone, group)]
    torch.testing.assert_close(*found)
    assert alone.traffic.totals() == group.traffic.totals()
    gradients = [c.value_and_gradient(x, Stream(0))[1] for c in (alone, group)]
    products = [
        c.inner_products(g, multiply_rows) for c, g in zip((alone, group), gradients, strict=True)
    ]
    np.testing.assert_allclose(*products)


def test_single_precision_is_near() -> None:
    exact, rough = (CASES["softmax"](l2=0.01, dtype=t) for t in (DOUBLE, torch.float32))
    x = point(exact)
    blocks = rough.curvature_sum(x.float(), WEIGHTS).blocks
    torch.testing.assert_close(blocks, exact.curvature_sum(x, WEIGHTS).blocks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "loss", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), "cross_entropy", "not linear"),
        (nn.Linear(3, 3), lambda o, t: o.square().sum(1), "not known"),
        (nn.Linear(3, 1), "hinge", "loss hinge is not known"),
    ],
)
def test_what_has_no_known_hessian_is_declined(module: nn.Module, loss: str, reason: str) -> None:
    classes = 2 if loss == "hinge" else 3
    clients = simulate(classification(classes=classes), module, loss, dtype=DOUBLE)
    assert reason in clients.curvature_sum(point(clients), WEIGHTS)
    assert clients.traffic.exchanges == 0


@pytest.mark.parametrize("weights", [np.ones(4), -np.ones(5), np.full(5, np.nan)])
def test_weights_that_make_no_sum_are_refused(weights: np.ndarray) -> None:
    clients = engine("softmax")
    with pytest.raises(ValueError, match="one weight of at least 0"):
        clients.curvature_sum(point(clients), weights)


def test_a_thin_matrix_goes_with_blocks() -> None:
    clients = engine("softmax")
    with pytest.raises(ValueError, match="multiplied with blocks"):
        clients.curvature_sum(point(clients), WEIGHTS, "full", torch.eye(4, dtype=DOUBLE))


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_a_client_whose_curvature_is_not_finite_is_named(kind: str) -> None:
    clients = CASES["squared"](dtype=torch.float32, engine=kind)
    clients._inputs[clients._offsets[2]] = 1e30  # its square is not finite
    with pytest.raises(MissingClients, match="client 2: trace of its curvature is inf") as lost:
        clients.curvature_sum(torch.zeros(8), WEIGHTS)
    assert list(lost.value.reasons) == [2]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ([[1.0, 0.0], [0.0, 2.0]], None),
        ([[1.0, 0.0], [0.0, 0.0]], None),  # no sample there: rank one
        ([[1.0, float("nan")], [0.0, 2.0]], "not finite"),
        ([[1.0, 0.5], [0.0, 2.0]], "not symmetric"),
        ([[1.0, 0.0], [0.0, -2.0]], "negative eigenvalue -2"),
        ([[-1.0, 0.0], [0.0, -1.0]], "negative eigenvalue -1"),
        ([[0.0, 0.0], [0.0, 0.0]], None),
        ([[1.0, 3.0], [3.0, 1.0]], "negative eigenvalue -2"),  # no entry is negative
    ],
)
def test_a_hostile_hessian_is_recognised(block: list[list[float]], reason: str | None) -> None:
    said = check_curvature(torch.tensor([block], dtype=DOUBLE))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("case", CASES)
def test_an_honest_hessian_passes_in_every_form(case: str, dtype: torch.dtype) -> None:
    """Also of a client with fewer samples than parameters, whose eigenvalues are partly zero."""
    clients = CASES[case](l2=0.0, dtype=dtype)
    x, alone = point(clients).to(dtype), np.eye(5)[2]
    for form in ("full", "blocks", "diagonal"):
        blocks = clients.curvature_sum(x, alone, form).blocks.to(dtype)
        assert check_curvature(blocks) is None
    q = clients.curvature_sum(x, alone).blocks.shape[1]
    thin = torch.randn(q, 2, dtype=dtype)
    product = clients.curvature_sum(x, alone, thin=thin).blocks.to(dtype)
    assert check_curvature(product, thin) is None
    assert "eigenvalue" in str(check_curvature(-product, thin=thin))
    if q > 1:
        swapped = product[..., [1, 0]]
        assert "not symmetric" in str(check_curvature(swapped, thin=thin))


def test_inner_products_are_those_of_the_gradients() -> None:
    clients = engine("softmax")
    x = point(clients)
    _, gradients = clients.value_and_gradient(x, Stream(0))
    rows, half = gradients.dense(), torch.full((len(x),), 2.0, dtype=DOUBLE)
    found = clients.inner_products(gradients, lambda v: v @ (v / half).T)
    np.testing.assert_allclose(found, (rows @ rows.T / 2).numpy())
    small = simulate(classification(), "logistic", dtype=DOUBLE, memory=1)
    _, lazy = small.value_and_gradient(x, Stream(0))
    every = small.inner_products(lazy, multiply_rows)  # whatever the engine keeps
    np.testing.assert_allclose(every, (lazy.dense() @ lazy.dense().T).numpy())
