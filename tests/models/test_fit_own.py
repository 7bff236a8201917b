"""Own parts at fixed shared parameters: the best ones, for new clients and after training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.problems import classification, regression
from torch import nn

from equifed.algorithms import FedAvg, ScaffPD
from equifed.contract.local import LocalSGD
from equifed.data.split import DataError
from equifed.engines.simulate import simulate
from equifed.models.losses import DERIVATIVES
from equifed.models.newton import fit_linear
from equifed.models.own_part import read_last_layer
from equifed.objectives import Average
from equifed.training.loop import train

pytestmark = pytest.mark.long

LOSSES = {"cross_entropy": 3, "binary_logistic": 1, "squared": 2}


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_fit_is_the_best_one(loss: Any, head: bool, scale: float) -> None:
    """Against scipy's BFGS on plain losses; the gradient there is zero."""
    draw, k = torch.Generator().manual_seed(2), LOSSES[loss]
    outputs = scale * torch.randn(14, k, generator=draw, dtype=torch.float64)
    entered = torch.randn(14, 3, generator=draw, dtype=torch.float64)
    design = torch.cat([entered, torch.ones(14, 1)], dim=1) if head else torch.ones(14, 1).double()
    targets = torch.randint(0, max(k, 2), (14,), generator=draw)
    if loss == "squared":
        targets = torch.randn(14, k, generator=draw, dtype=torch.float64)
    v = fit_linear(design, outputs, targets, loss, 0.05)

    def value(flat: np.ndarray) -> float:
        w = torch.as_tensor(flat).reshape(v.shape)
        each = DERIVATIVES[loss].loss(outputs + design @ w, targets)
        return float(each.mean() + 0.025 * w.square().sum())

    best = minimize(value, np.zeros(v.numel()), method="BFGS", options={"gtol": 1e-8})
    ours = value(v.numpy().reshape(-1))
    assert ours <= best.fun + 1e-10
    moved = [value(v.numpy().reshape(-1) + 1e-4 * e) - ours for e in np.eye(v.numel())]
    back = [value(v.numpy().reshape(-1) - 1e-4 * e) - ours for e in np.eye(v.numel())]
    np.testing.assert_allclose(moved, back, atol=1e-9 * max(1.0, scale))


def test_one_class_is_held_by_the_penalty() -> None:
    v = fit_linear(torch.ones(5, 1).double(), torch.zeros(5, 3).double(), torch.zeros(5).long(),
                   "cross_entropy", 1e-3)  # fmt: skip
    assert v[0, 0] > 2 and torch.isfinite(v).all()
    assert float(v.sum()) == pytest.approx(0.0, abs=1e-9)  # the penalty has no part of the sum


DATA = classification((12, 5, 9, 30, 7), seed=2)


@pytest.fixture(scope="module")
def predictor() -> Any:
    clients = simulate(DATA, "logistic", l2=0.05, own="bias", dtype=torch.float64)
    return train(ScaffPD(Average()), clients, rounds=3).predictor()


def test_a_known_client_as_a_new_one_gets_its_own_part(predictor: Any) -> None:
    """Reduction: with a trained client's samples the fit is what training has found."""
    for i, name in enumerate(DATA.names):
        rows, labels = DATA.train.client(i)
        fresh = predictor.for_new_client(rows, [str(k) for k in labels])
        known = predictor.for_client(name)
        np.testing.assert_allclose(
            fresh.decision_function(rows), known.decision_function(rows), atol=1e-7
        )


def test_without_samples_a_new_client_takes_the_mean(predictor: Any) -> None:
    rows = DATA.train.inputs[:6]
    fresh = predictor.for_new_client(client="somewhere")
    with pytest.warns(UserWarning, match="mean"):
        mean = predictor.decision_function(rows)
    np.testing.assert_array_equal(fresh.decision_function(rows), mean)
    with pytest.raises(DataError, match="model of 'somewhere'"):
        fresh.predict(rows, client="client 0")


def test_what_a_new_client_cannot_have_is_refused_by_name(predictor: Any) -> None:
    rows, labels = DATA.train.client(0)
    names = [str(k) for k in labels]
    with pytest.raises(ValueError, match=r"'client 0' took part in training; use for_client"):
        predictor.for_new_client(rows, names, client="client 0")
    with pytest.raises(ValueError, match="rows and targets"):
        predictor.for_new_client(rows)
    with pytest.raises(DataError, match="12 rows and 3 targets"):
        predictor.for_new_client(rows, names[:3])
    with pytest.raises(DataError, match="no class '9'"):
        predictor.for_new_client(rows, ["9"] * len(rows))
    with pytest.raises(ValueError, match="own_l2 must be a number above 0, got 0"):
        predictor.for_new_client(rows, names, own_l2=0.0)
    shared = train(ScaffPD(Average()), simulate(DATA, "logistic", l2=0.1), rounds=1).predictor()
    with pytest.raises(ValueError, match="no own parts"):
        shared.for_new_client(rows, names)


def test_a_penalty_by_samples_is_that_of_the_rows(predictor: Any) -> None:
    rows, labels = DATA.train.client(0)
    names = [str(k) for k in labels]
    fits = [predictor.for_new_client(rows, names, own_l2=l2) for l2 in ("3/n", 3 / len(rows))]
    ours, theirs = (fit.decision_function(rows) for fit in fits)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("norm", r"last linear layer, not 1\.weight, 1\.bias"),
        (["0.*"], "not those of .* '0'"),
    ],
)
def test_own_parts_inside_a_network_are_not_fitted(own: str | list[str], message: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    found = train(
        FedAvg(LocalSGD(lr=0.1, steps=2)), simulate(DATA, net, own=own), rounds=1
    ).predictor()
    rows, labels = DATA.train.client(0)
    for own_l2 in (None, 0.1):  # the penalty, 0 in training, is not to blame
        with pytest.raises(ValueError, match=message):
            found.for_new_client(rows, [str(k) for k in labels], own_l2=own_l2)
    assert found.for_new_client().only == "new client"


def test_a_network_has_a_head_for_a_new_client() -> None:
    data = regression((12, 20, 9), outputs=2)
    clients = simulate(data, "mlp", l2=0.01, own="head")
    found = train(FedAvg(LocalSGD(lr=0.05, steps=3)), clients, rounds=2).predictor()
    rows, values = data.train.client(1)
    fresh = found.for_new_client(rows, values)
    errors = [((p.predict(rows) - values) ** 2).mean() for p in (fresh, found.for_new_client())]
    assert errors[0] < errors[1]


def test_outputs_beyond_the_last_layer_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    with pytest.raises(ValueError, match="not those of its last linear layer '0'"):
        read_last_layer(net, ["0.bias"], lambda m: m(torch.randn(4, 3)).detach())
