"""Bounds on curvature hold for the Hessians that autograd finds, or are not given."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import classification, regression
from torch import nn
from torch.nn.utils import parametrizations

from equifed.contract.curvature import Curvature
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.models.architectures import build

pytestmark = pytest.mark.long

DOUBLE = torch.float64


class Quadrupled(nn.Linear):
    """Not what it says."""

    def forward(self, x):
        return 4 * super().forward(x)


class Stretched(nn.Sequential):
    def forward(self, x):
        return super().forward(5 * x)


class Stack(nn.Flatten):
    def forward(self, x):
        return 3 * super().forward(x)


def hooked(kind: str) -> nn.Module:
    layer = nn.Linear(3, 1)
    if kind == "forward":
        layer.register_forward_hook(lambda module, given, out: 6 * out)
    elif kind == "before":
        layer.register_forward_pre_hook(lambda module, given: (7 * given[0],))
    else:
        layer.register_full_backward_hook(lambda module, below, above: below)
    return layer


def replaced() -> nn.Module:
    layer = nn.Linear(3, 1)
    layer.forward = lambda x: nn.functional.linear(9 * x, layer.weight, layer.bias)
    return layer


def in_sequence(make):
    return lambda: nn.Sequential(nn.Identity(), make())


KNOWN = {
    "linear": lambda: nn.Linear(3, 1),
    "no bias": lambda: nn.Linear(3, 1, bias=False),
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 1)),
    "flattened after": lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten()),
    "identity": lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 1), nn.Identity()),
    "named": lambda: build("linear", (3,), 1),
    "weight frozen": lambda: freeze(nn.Linear(3, 1), "weight"),
    "bias frozen": lambda: freeze(nn.Linear(3, 1), "bias"),
}
UNKNOWN = {
    "subclass": lambda: Quadrupled(3, 1),
    "subclass of sequence": lambda: Stretched(nn.Linear(3, 1)),
    "subclass of flatten": lambda: nn.Sequential(Stack(), nn.Linear(3, 1)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 1)),
    "spectral": lambda: parametrizations.orthogonal(nn.Linear(3, 1)),
    "forward hook": lambda: hooked("forward"),
    "hook before": lambda: hooked("before"),
    "backward hook": lambda: hooked("backward"),
    "own forward": replaced,
    "two layers": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
    "activation": lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh()),
}
UNKNOWN |= {f"{name}, in a sequence": in_sequence(make) for name, make in UNKNOWN.items()}


def freeze(module: nn.Module, name: str) -> nn.Module:
    getattr(module, name).requires_grad_(False)
    return module


def hessians(clients, x: torch.Tensor) -> list[np.ndarray]:
    """Return the second derivatives of every client's loss, by autograd."""
    found = []
    for i in range(len(clients.names)):
        data, targets = clients._federation.train.client(i)

        def loss(u, data=data, targets=targets):
            inputs, wanted = torch.as_tensor(data), torch.as_tensor(targets)
            return clients.model.sample_losses(u, inputs, wanted).mean() + clients.model.penalty(u)

        found.append(torch.autograd.functional.hessian(loss, x).numpy())
    return found


def refuse_wrong_bounds(clients, seed: int) -> None:
    known = clients.curvature()
    if isinstance(known, str):
        return
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(clients.model.size, generator=draw, dtype=DOUBLE)
    for i, hessian in enumerate(hessians(clients, x)):
        values = np.linalg.eigvalsh(hessian)
        assert values[-1] <= known.smoothness[i] * (1 + 1e-9) + 1e-9
        assert values[0] >= known.strong_convexity[i] - 1e-9


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([*KNOWN, *UNKNOWN]),
    st.sampled_from(["squared", "logistic"]),
    st.integers(0, 99),
    st.sampled_from(["loop", "stacked"]),
)
def test_bounds_hold_for_whatever_module_is_drawn(name, loss, seed, engine):
    data = regression(seed=seed) if loss == "squared" else classification(classes=2, seed=seed)
    engine = engine if name in KNOWN else "loop"  # torch cannot batch all of the others
    module = (KNOWN | UNKNOWN)[name]().double()
    clients = simulate(data, module, loss, engine=engine, dtype=DOUBLE, l2=0.1)
    refuse_wrong_bounds(clients, seed)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_torch_does_not_vouch_for_has_no_bounds(name):
    known = simulate(regression(), UNKNOWN[name](), "squared", engine="loop").curvature()
    assert isinstance(known, str) and "not linear" in known


@pytest.mark.parametrize("name", KNOWN)
def test_nothing_that_is_linear_loses_its_bounds(name):
    """Tight ones for the squared loss: they are the ends of the Hessian's spectrum."""
    clients = simulate(regression(), KNOWN[name]().double(), "squared", l2=0.1, dtype=DOUBLE)
    known = clients.curvature()
    assert isinstance(known, Curvature) and known.tight
    for i, hessian in enumerate(hessians(clients, clients.initial(Stream(0)))):
        values = np.linalg.eigvalsh(hessian)
        np.testing.assert_allclose(known.smoothness[i], values[-1])
        np.testing.assert_allclose(known.strong_convexity[i], values[0], atol=1e-9)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_the_models_of_the_catalogue_keep_their_bounds(name):
    clients = simulate(classification(shape=(2, 3)), name, l2=0.1, dtype=DOUBLE)
    assert isinstance(clients.curvature(), Curvature)
    refuse_wrong_bounds(clients, 0)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
def test_a_layer_applied_to_several_rows_of_a_sample_has_no_bounds(shape):
    """The rows of a sample share the weights: what looks like 3 columns has the curvature of 12."""
    federation = classification(shape=shape, classes=int(np.prod(shape[:-1])))
    module = nn.Sequential(nn.Linear(3, 1), nn.Flatten())
    known = simulate(federation, module, "cross_entropy", dtype=DOUBLE).curvature()
    assert isinstance(known, str) and "not linear" in known
    for wrong in (nn.Flatten(1, 1), nn.Flatten(0, 0)):
        known = simulate(federation, nn.Sequential(wrong, *module), dtype=DOUBLE).curvature()
        assert isinstance(known, str)
    whole = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), federation.classes))
    assert isinstance(simulate(federation, whole, dtype=DOUBLE).curvature(), Curvature)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_reduced_precision_has_no_bounds(precision):
    clients = simulate(regression(), nn.Linear(3, 1), "squared", precision=precision)
    assert precision in str(clients.curvature())
    assert isinstance(simulate(regression(), nn.Linear(3, 1), "squared").curvature(), Curvature)


def test_nor_have_products_that_torch_was_told_to_round():
    clients = simulate(regression(), nn.Linear(3, 1), "squared", engine="loop")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "'high' precision" in str(clients.curvature())
    finally:
        torch.set_float32_matmul_precision(before)
    half = simulate(regression(), nn.Linear(3, 1), "squared", engine="loop", dtype=torch.bfloat16)
    assert "bfloat16" in str(half.curvature())


def test_bf16_products_move_gradients_beyond_what_a_certificate_allows():
    """Why: the gradient of the rounded program is off by more than 1e-4 of its length."""
    module = nn.Linear(3, 1)
    exact, rounded = (
        simulate(regression(), module, "squared", precision=p) for p in ("full", "bf16")
    )
    x = exact.initial(Stream(0))
    one, other = (
        c.value_and_gradient(x, Stream(0))[1].weighted_sum(np.ones(5)) for c in (exact, rounded)
    )
    assert torch.linalg.vector_norm(one - other) > 1e-4 * torch.linalg.vector_norm(one)
