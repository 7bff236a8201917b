"""Bounds on curvature hold for the Hessians that autograd finds, or are not given."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import classification, regression
from torch import nn
from torch.nn.utils import parametrizations

from equifed.algorithms import FairNewton
from equifed.contract.curvature import Curvature
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.models import build
from equifed.models.features import features
from equifed.objectives import CVaR
from equifed.training.loop import train

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


def hooked(kind: str, width: int = 3) -> nn.Module:
    layer = nn.Linear(width, 1)
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


class Backbone(nn.Module):
    """Computes what it likes, without anything to train."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).requires_grad_(False)

    def forward(self, x):
        return torch.cat([self.layer(x).sin(), x * x], dim=1)


def headed(*fixed: nn.Module, width: int = 4) -> nn.Module:
    """Return fixed parts with a linear layer at their end, under a name."""
    parts = [part.requires_grad_(False) for part in fixed]
    return nn.Sequential(OrderedDict(fixed=nn.Sequential(*parts), head=nn.Linear(width, 1)))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Linear(1, 1))
    module[2].requires_grad_(False)
    module[0].requires_grad_(False)
    module[2].bias = module[3].bias
    return module


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
    "own flatten": lambda: nn.Sequential(Stack(), nn.Linear(3, 1)),
    "head": lambda: headed(nn.Linear(3, 4), nn.Tanh()),
    "head on anything": lambda: headed(Backbone(), width=7),
    "head on what has hooks": lambda: headed(nn.Linear(3, 2), hooked("forward", 2), width=1),
    "head on convolutions": lambda: headed(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten()
    ),
}
UNKNOWN = {
    "subclass": lambda: Quadrupled(3, 1),
    "subclass of sequence": lambda: Stretched(nn.Linear(3, 1)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 1)),
    "spectral": lambda: parametrizations.orthogonal(nn.Linear(3, 1)),
    "forward hook": lambda: hooked("forward"),
    "hook before": lambda: hooked("before"),
    "backward hook": lambda: hooked("backward"),
    "own forward": replaced,
    "two layers": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
    "activation": lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh()),
    "tied to its head": tied,
    "head behind dropout": lambda: headed(nn.Linear(3, 4), nn.Dropout()),
    "head that has a hook": lambda: nn.Sequential(
        nn.Linear(3, 3).requires_grad_(False), hooked("forward")
    ),
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


def test_softmax_of_two_classes_attains_its_bound_at_zero():
    """As logistic loss does, so that nobody need measure it; with three classes nobody does."""
    two, three = (
        simulate(classification(classes=k), "logistic", l2=0.1, dtype=DOUBLE) for k in (2, 3)
    )
    known = two.curvature()
    assert isinstance(known, Curvature) and known.tight and not three.curvature().tight
    for i, hessian in enumerate(hessians(two, torch.zeros(two.model.size, dtype=DOUBLE))):
        np.testing.assert_allclose(known.smoothness[i], np.linalg.eigvalsh(hessian)[-1])


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


def test_a_layer_that_is_used_twice_is_not_linear():
    """The outputs are quadratic in its weights; a list of a module's children has it once."""
    layer = nn.Linear(3, 3)
    for twice in (nn.Sequential(layer, layer), nn.Sequential(layer, nn.Identity(), layer)):
        clients = simulate(classification(shape=(3,)), twice, dtype=DOUBLE, l2=0.1)
        assert "not linear" in str(clients.curvature())
        assert "not linear" in str(clients.curvature_sum(clients.initial(Stream(0)), np.ones(5)))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("loss", ["squared", "logistic", "cross_entropy"])
def test_a_head_on_fixed_parts_is_solved_as_a_linear_model_on_their_features(loss, engine):
    """Curvature, metric and certificate; the backbone is in double precision on both sides."""
    classes = {"squared": None, "logistic": 2, "cross_entropy": 3}[loss]
    data = regression() if classes is None else classification(classes=classes)
    head = nn.Linear(7, {"cross_entropy": 3}.get(loss, 1))
    whole = nn.Sequential(Backbone(), head).double()
    there = simulate(data, whole, loss, dtype=DOUBLE, l2=0.1, engine=engine)
    fixed = simulate(features(whole[0], data), head, loss, dtype=DOUBLE, l2=0.1, engine=engine)
    a, b = there.curvature(), fixed.curvature()
    assert isinstance(a, Curvature) and isinstance(b, Curvature)
    np.testing.assert_allclose(a.smoothness, b.smoothness)
    np.testing.assert_allclose(a.strong_convexity, b.strong_convexity)
    x = there.initial(Stream(0))
    for form in ("full", "blocks", "diagonal"):
        one, two = (c.curvature_sum(x, np.full(5, 0.2), form) for c in (there, fixed))
        torch.testing.assert_close(one.blocks, two.blocks)
    runs = [train(FairNewton(CVaR(0.5)), c, rounds=30) for c in (there, fixed)]
    assert all(run.certificate()["gap"] < 1e-9 for run in runs)
    np.testing.assert_allclose(*(run.rounds[-1].objective for run in runs))


def test_a_model_of_which_a_layer_is_trained_is_told_about_features():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1)

        def forward(self, x):
            return self.fc(self.body(x).relu())

    known = simulate(regression(), Own(), "squared").curvature()
    assert "'fc', the only one that is trained" in str(known) and "equifed.features" in str(known)


def test_hooks_that_come_later_take_the_bounds_away():
    clients = simulate(regression(), nn.Linear(3, 1), "squared")
    assert isinstance(clients.curvature(), Curvature)
    handle = clients.model.module.register_forward_hook(lambda module, given, out: 6 * out)
    assert "not linear" in str(clients.curvature())
    handle.remove()
    assert isinstance(clients.curvature(), Curvature)


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
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in str(clients.curvature())
    assert isinstance(clients.curvature(), Curvature)
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
