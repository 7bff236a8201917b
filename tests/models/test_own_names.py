"""Own parameters: which they are by word, name and pattern, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification, regression
from torch import nn

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.models import build
from equifed.models.own_part import choose_own

NET = nn.Sequential(
    nn.Linear(3, 4),
    nn.LayerNorm(4),
    nn.Tanh(),
    nn.Linear(4, 4),
    nn.GroupNorm(2, 4),
    nn.Linear(4, 3),
)


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ("bias", ("5.bias",)),
        ("head", ("5.weight", "5.bias")),
        ("norm", ("1.weight", "1.bias", "4.weight", "4.bias")),
        ("3.bias", ("3.bias",)),
        (["5.*", "0.bias"], ("0.bias", "5.weight", "5.bias")),
        (["*.bias"], ("0.bias", "1.bias", "3.bias", "4.bias", "5.bias")),
    ],
)
def test_words_names_and_patterns(own: str | Sequence[str], names: tuple[str, ...]) -> None:
    assert choose_own(NET, own) == names


def test_a_tied_parameter_is_own_under_any_of_its_names() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    assert choose_own(tied, ["2.weight"]) == ("0.weight",)


def test_frozen_layers_are_no_last_layers() -> None:
    net = build("mlp", (3,), 3, hidden=[4])
    net[3].requires_grad_(False)
    with pytest.raises(ValueError, match=r"nothing would be shared.*1\.weight, 1\.bias"):
        choose_own(net, "head")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("biases", r"no parameter named 'biases'; it trains 0\.weight, 0\.bias, 1\.weight"),
        (["0.bias", "9.*"], r"no parameter '9\.\*'; it trains 0\.weight"),
        (["*"], "nothing would be shared"),
        ([], "own is one of 'bias', 'head', 'norm'"),
        (3, "own is one of 'bias', 'head', 'norm'"),
        ([1], "own is one of 'bias', 'head', 'norm'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(own: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_own(NET, own)  # type: ignore[arg-type]


def test_a_last_layer_without_bias_and_a_net_without_norms() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    with pytest.raises(ValueError, match=r"no parameter the bias of the last layer; it trains 0\."):
        choose_own(plain, "bias")
    with pytest.raises(ValueError, match="no parameter scales and shifts of the normalisation"):
        choose_own(plain, "norm")


@pytest.mark.long
def test_own_parameters_without_effect_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(1, 4, affine=False), nn.Linear(4, 3))
    simulate(classification(), net, own=["0.bias"])  # the group's mean does not take it out
    idle = nn.Sequential(Shift(3), nn.LayerNorm(3, elementwise_affine=False), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"own: the parameter 0\.shift has no effect"):
        simulate(classification(), idle, own=["0.shift"])
    hidden = [layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.ReLU())]
    wide = nn.Sequential(nn.Linear(3, 300), *hidden, nn.Linear(300, 3))
    simulate(classification(), wide, own="bias")  # however large outputs with random weights are


class Shift(nn.Module):
    """Adds the same number to all features, which a LayerNorm takes out again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.width = nn.Parameter(torch.zeros(1)), width

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.shift


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own_l2": 0.1}, "for example own='bias'"),
        ({"own_steps": "joint"}, "for example own='bias'"),
        ({"own": "bias", "own_steps": "both"}, "own_steps must be auto, profile, joint or alt"),
        ({"own": "bias", "own_l2": -1.0}, "own_l2 must be a number of at least 0, got -1.0"),
        ({"own": "bias", "own_l2": 0.0}, "own_l2 must be above 0.*lacks a class"),
        (
            {"own": "bias", "own_l2": "10/m"},
            'at least 0, got 10/m; "3/n" is 3 divided by',
        ),
        ({"own": "bias", "own_l2": "-1/n"}, "at least 0, got -1/n"),
        ({"own": "bias", "own_l2": "0.1"}, "at least 0, got 0.1; "),
        ({"own": "bias", "own_l2": [0.1]}, r"at least 0, got \[0.1\]; "),
        ({"own": ["bias"]}, "'bias' must be given alone: own='bias'"),
        ({"own": "bias", "own_l2": "10/n"}, "is for local steps; profile losses take a number"),
        ({"own": ["1.weight"], "own_steps": "profile"}, "for an own bias, not for 1.weight"),
    ],
)
def test_settings_that_say_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(classification(), "logistic", **options)  # type: ignore[arg-type]


def test_profile_losses_are_for_linear_models_and_known_losses() -> None:
    with pytest.raises(ValueError, match="for linear models; use own_steps='joint'"):
        simulate(classification(), "mlp", own="bias", own_steps="profile")
    with pytest.raises(ValueError, match="not for hinge; use own_steps='joint'"):
        simulate(classification(classes=2), "linear", "hinge", own="bias", own_steps="profile")
    assert simulate(regression(), "linear", own="bias").own.l2 == 0  # a mean needs no penalty


@pytest.mark.parametrize(
    ("model", "own", "said"),
    [
        ("logistic", "bias", "own part 1.bias by profile losses.*own_l2 = 0.001; 3 numbers per"),
        ("mlp", "bias", "own part 3.bias by joint local steps.*own_l2 = 1/n"),
        ("mlp", "head", "own part 3.weight, 3.bias by joint local steps.*own_l2 = 0.05"),
        ("logistic", ["1.weight"], "own part 1.weight by joint local steps"),
    ],
)
def test_it_says_which_of_the_two_it_does(model: str, own: str, said: str) -> None:
    clients = simulate(classification(), model, own=own, l2=0.05)
    told = clients.describe_own()
    assert told is not None
    assert re.search(said, told)


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_penalty_by_samples_is_each_clients_own(engine: str, batch_size: int | None) -> None:
    """Of 4/n: 4/12 and 4/5, and not more than 1 where there are two samples."""
    data, strengths = classification((12, 5, 2)), torch.tensor([[4 / 12], [4 / 5], [1.0]]).double()
    given: dict[str, Any] = {"own": "bias", "l2": 0.05, "dtype": torch.float64, "engine": engine}
    work = LocalSGD(lr=0.1, steps=1, batch_size=batch_size)
    losses, moved = {}, {}
    for own_l2 in ("4/n", 0.0):
        clients = simulate(data, "mlp", own_l2=own_l2, **given)
        x = clients.initial(Stream(0))
        v = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3)
        clients = clients.with_own(v)
        losses[own_l2] = clients.losses(x, Stream(1))
        told, _ = clients.value_and_gradient(x, Stream(1))
        np.testing.assert_allclose(told, losses[own_l2], rtol=1e-12)
        clients.local_steps(x, work, Stream(2))
        moved[own_l2] = clients.own_after()
    penalties = 0.5 * strengths[:, 0] * v.square().sum(dim=1)
    np.testing.assert_allclose(losses["4/n"] - losses[0.0], penalties, rtol=1e-6)
    torch.testing.assert_close(moved[0.0] - moved["4/n"], 0.1 * strengths * v, rtol=1e-6, atol=0)


def test_own_parameters_are_not_in_the_model_vector_and_not_sent() -> None:
    shared = simulate(classification(), "mlp", dtype=torch.float64)
    own = simulate(classification(), "mlp", dtype=torch.float64, own="head")
    assert own.model.size + own.model.own_size == shared.model.size
    x = own.initial(Stream(0))
    assert x.shape == (own.model.size,)
    own.value_and_gradient(x, Stream(0))
    assert (own.traffic.up == 8 * own.model.size + 8).all()
