"""Which models take which path, and that the fast ones were really taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engines.ragged import engines, start
from tests.problems import classification, regression
from torch import nn
from torch.nn.utils import parametrize

from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors
from equifed.engines.stacked.dense_layers import DenseLayersRule, slope_of
from equifed.engines.stacked.gradient_rules import FunctionRule
from equifed.engines.stacked.least_squares import LeastSquares
from equifed.models import losses
from equifed.models.architectures import build

pytestmark = pytest.mark.long


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    return module


def twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


class Squared(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight**2


def parametrised() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Squared())
    return nn.Sequential(layer)


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


DENSE = {
    "linear": nn.Linear(3, 3),
    "zero linear": build("linear", (3,), 3),
    "mlp": build("mlp", (3,), 3, hidden=[4, 5], dropout=0.1),
    "nested": nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 3)),
    "dropout first": nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Linear(3, 3)),
}
OTHER = {
    "hook": hooked(),
    "layer used twice": twice(),
    "own forward": Doubled(3, 3),
    "weight computed": parametrised(),
    "layer norm": nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)),
}


@pytest.mark.parametrize("name", [*DENSE, *OTHER])
def test_each_model_takes_its_path_and_both_agree(name: str) -> None:
    module = (DENSE | OTHER)[name]
    _, clients = engines(classification(), module, losses.cross_entropy)
    assert isinstance(clients.rule.data, DenseLayersRule if name in DENSE else FunctionRule)
    _, slow = engines(classification(), module, losses.cross_entropy, fast=False)
    assert isinstance(slow.rule.data, FunctionRule)
    x, work = start(clients), LocalSGD(lr=0.1, epochs=2, batch_size=2)
    ours, theirs = (c.local_steps(x, work, Stream(1)).displacement.dense() for c in (clients, slow))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_linear_layers_on_sequences_are_left_to_autograd() -> None:
    sequences = classification(shape=(4, 3))
    module = nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(8, 3))
    _, clients = engines(sequences, module, losses.cross_entropy)
    assert isinstance(clients.rule.data, FunctionRule)


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [(losses.cross_entropy, 4), (losses.squared, 4), (losses.binary_logistic, 1)],
)
def test_slopes_are_derivatives(loss: losses.Loss, outputs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    o = 3 * torch.randn(6, outputs, generator=draw, dtype=torch.float64)
    t = torch.randint(2, (6,), generator=draw)
    w = torch.rand(6, generator=draw, dtype=torch.float64)
    eps = 1e-6
    columns = o.view(2, 3, outputs).transpose(1, 2)  # two clients with three samples each
    slope = slope_of(loss)(columns.clone(), t.view(2, 3), w.view(2, 3))
    slope = slope.transpose(1, 2).reshape(6, outputs)
    for k in range(outputs):
        e = eps * torch.eye(outputs, dtype=torch.float64)[k]
        difference = (loss(o + e, t) - loss(o - e, t)) / (2 * eps)
        torch.testing.assert_close(slope[:, k], w * difference, rtol=1e-6, atol=1e-8)


def test_least_squares_remember_matrices_and_forget_the_oldest() -> None:
    data = regression([6, 4, 5, 9, 7])
    _, clients = engines(data, nn.Linear(3, 1), losses.squared, chunk=1)
    quick = clients.least_squares
    assert quick is not None
    x, work = start(clients), LocalSGD(lr=0.1, steps=4)
    first = clients.local_steps(x, work, Stream(0)).displacement.dense()
    assert len(quick._known) == 5  # one chunk for each client
    again = clients.local_steps(x, work, Stream(1)).displacement.dense()
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    (a, b) = next(iter(quick._known.values()))
    assert a.shape == (1, 4, 4) and b.shape == (1, 1, 4)
    small = LeastSquares(quick._layer, 0.1, memory=3 * (a.nbytes + b.nbytes))
    clients.least_squares = small
    torch.testing.assert_close(
        clients.local_steps(x, work, Stream(2)).displacement.dense(), first, rtol=1e-14, atol=0
    )
    assert len(small._known) == 3


def test_steps_into_a_set_of_a_users_own_agree_where_features_outnumber_samples() -> None:
    data = regression([3, 5], features=20)
    both = engines(data, nn.Linear(20, 1), losses.squared)
    work = LocalSGD(lr=0.01, steps=30, onto=lambda x: x.clamp(0, 1))
    ours, theirs = (c.local_steps(start(both[0]), work, Stream(0)).displacement for c in both)
    torch.testing.assert_close(ours.dense(), theirs.dense(), rtol=1e-10, atol=1e-12)


def test_least_squares_are_used_where_they_pay() -> None:
    _, clients = engines(regression(), nn.Linear(3, 1), losses.squared)
    quick = clients.least_squares
    assert quick is not None
    assert quick.pays(LocalWork(lr=0.1, steps=2), 2, size=9)
    assert not quick.pays(LocalWork(lr=0.1, steps=1), 1, size=9)
    assert not quick.pays(LocalWork(lr=0.1, steps=50, batch_size=2), 50, size=9)
    ball = LocalWork(lr=0.1, steps=50, radius=1.0)
    assert quick.pays(ball, 50, size=9) and not quick.pays(ball, 50, size=1)  # few samples
    hinge = SmoothedHinge(0.1, 0.1)
    assert not quick.pays(LocalWork(lr=0.1, steps=50, hinge=hinge), 50, size=9)
    _, logistic = engines(classification(), nn.Linear(3, 3), losses.cross_entropy)
    assert logistic.least_squares is None
    _, deep = engines(regression(), build("mlp", (3,), 1), losses.squared)
    assert deep.least_squares is None


def test_results_of_equal_clients_do_not_depend_on_the_chunk_size_in_any_bit() -> None:
    federation = classification(sizes=(30,) * 12, shape=(20,))
    module, x = build("mlp", (20,), 3, hidden=[8], dropout=0.2), None
    results = []
    for chunk in (1, 5, 12):
        _, clients = engines(federation, module, losses.cross_entropy, chunk=chunk)
        x = start(clients) if x is None else x
        values, gradients = clients.value_and_gradient(x, Stream(0))
        moved = clients.local_steps(x, LocalSGD(lr=0.1, epochs=2, batch_size=8), Stream(1))
        results.append((values, gradients.dense(), moved.displacement.dense()))
    for other in results[1:]:
        np.testing.assert_array_equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])
        assert torch.equal(other[2], results[0][2])


@pytest.mark.parametrize(("memory", "kept"), [(5 * 64, True), (5 * 64 - 1, False)])
def test_the_memory_bound_counts_what_rows_take(memory: int, kept: bool) -> None:
    """Five clients with four numbers of eight bytes, each in a row of 64."""
    _, clients = engines(regression(), nn.Linear(3, 1), losses.squared, memory=memory)
    _, gradients = clients.value_and_gradient(start(clients), Stream(0))
    assert isinstance(gradients, DenseVectors) == kept
