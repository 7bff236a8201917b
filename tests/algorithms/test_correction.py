"""A part of the correction of local steps, and the memory of stored variates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification

import equifed as ef
from equifed.contract import Stream
from equifed.objectives import Average, ChiSquare
from equifed.steps import ConstantSteps

LR, J = 0.1, 3


def scaff_pd(objective: Any = None, **changed: Any) -> ef.ScaffPD:
    """SCAFF-PD on minibatches with tau = J eta, as FedAvg moves."""
    work = ef.LocalSGD(lr=LR, steps=J, batch_size=4)
    primal = changed.pop("primal", J * LR)
    steps = ConstantSteps(primal=primal, dual=0.1, extrapolation=1.0, local=LR)
    given = {"gradient_batch_size": 4, "loss_batch_size": 4, **changed}
    return ef.ScaffPD(objective or Average(), given.pop("local", work), steps, **given)


def clients(engine: str = "stacked") -> Any:
    data = classification((12, 9, 15, 12), (5,), seed=1)
    return ef.simulate(data, "logistic", engine=engine, dtype=torch.float64)


def end_of(algorithm: Any, rounds: int = 5, engine: str = "stacked", **given: Any) -> np.ndarray:
    found = ef.train(algorithm, clients(engine), rounds=rounds, progress=False, **given).parameters
    assert found is not None
    return np.concatenate([np.asarray(value).ravel() for value in found.values()])


def test_no_correction_is_fedavg() -> None:
    work = replace(scaff_pd().local, correction=0.0)
    plain = end_of(ef.FedAvg(replace(work, correction=1.0), weighting="uniform"))
    for one in (scaff_pd(local=work), ef.Scaffold(work), ef.Scaffold(work, "fresh")):
        np.testing.assert_allclose(end_of(one), plain, rtol=0, atol=1e-12)


def test_one_step_is_the_same_with_any_part() -> None:
    """With J = 1 corrections cancel in the sum."""
    ends = [
        end_of(scaff_pd(ChiSquare(rho=0.5), local=replace(scaff_pd().local, steps=1, correction=a),
                        primal=LR))
        for a in (0.0, 0.3, 1.0)
    ]  # fmt: skip
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=0, atol=1e-12)


@pytest.mark.long
def test_the_whole_correction_ends_at_the_solution() -> None:
    """With c_i = g_i(x) the whole correction ends at the solution, a part beside it."""
    data = classification((12, 9, 15, 12), (5,), seed=1)
    far = []
    for part in (1.0, 0.3):
        here = ef.simulate(data, "logistic", l2=0.1, dtype=torch.float64)
        work = ef.LocalSGD(lr=LR, steps=J, correction=part)
        one = scaff_pd(local=work, gradient_batch_size=None, loss_batch_size=None)
        state = one.init(here, here.initial(Stream(0)))
        for t in range(200):
            state, info = one.round(state, here, Stream(0).at(t))
        assert info.proof is not None
        far.append(float(info.proof.gradient.norm()))
    assert far[0] < 0.01 * far[1]


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_engines_agree_with_the_plain_loop(part: float) -> None:
    work = replace(scaff_pd().local, correction=part)
    for one in (scaff_pd(ChiSquare(rho=0.5), local=work), ef.Scaffold(work)):
        np.testing.assert_allclose(end_of(one), end_of(one, engine="loop"), rtol=0, atol=1e-10)


@pytest.mark.parametrize("part", [0.3, 1.0])
def test_the_rest_of_the_correction_is_taken_back_where_clients_are_missing(part: float) -> None:
    """With a linear loss every gradient is g_i: x moves by sum w_i (g_i - a c_i) + a c, c_i = g_i.

    Weights w_i = lambda_i N/|S| do not sum to one, yet the corrections add no drift.
    """
    gradients = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0]], dtype=torch.float64)
    inputs = {f"c{i}": (g.numpy()[None], np.zeros(1)) for i, g in enumerate(gradients)}
    data = ef.Federation.from_clients(inputs)
    model = torch.nn.Linear(2, 1, bias=False)

    def linear(scores: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return scores.squeeze(-1)

    here = ef.simulate(data, model, loss=linear, dtype=torch.float64).subset(np.array([0, 2]))
    one = scaff_pd(local=ef.LocalSGD(lr=LR, steps=J, correction=part), gradient_batch_size=None)
    x = torch.zeros(2, dtype=torch.float64)
    state, _ = one.round(one.init(here, x), here, Stream(0))
    wanted = gradients[[0, 2]].mean(dim=0) * J * LR
    torch.testing.assert_close(state.x, -wanted)


# -- the memory -----------------------------------------------------------------------------------


def memory(z: float, steps: int) -> float:
    """b of the docstring: the part of a deviation that option II keeps, z = eta h."""
    return float(1 - np.mean([(1 - z) ** j for j in range(steps)]))


@pytest.mark.parametrize(("z", "steps"), [(0.5, 2), (1.9, 5), (2.3, 2), (3.1, 5), (2.1, 4)])
@pytest.mark.parametrize("part", [0.3, 1.0])
def test_deviations_are_multiplied_by_what_the_docstring_says(
    z: float, steps: int, part: float
) -> None:
    """Two clients h/2 (u - 1)^2 and h/2 (u + 1)^2: x stays at 0, variates deviate or settle."""
    lr, h = 0.1, z / 0.1
    points = {"a": (np.ones((1, 1)), np.ones(1)), "b": (np.ones((1, 1)), -np.ones(1))}
    model = torch.nn.Linear(1, 1, bias=False)

    def squared(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return h / 2 * (scores.squeeze(-1) - targets).square()

    data = ef.Federation.from_clients(points)
    here = ef.simulate(data, model, loss=squared, dtype=torch.float64)
    one = ef.Scaffold(ef.LocalSGD(lr=lr, steps=steps, correction=part), server_lr=1e-12)
    c = 0.0
    state = one.init(here, torch.zeros(1, dtype=torch.float64))
    b = memory(z, steps)
    for t in range(4):
        state, _ = one.round(state, here, Stream(0).at(t))
        c = (1 - b) * -h + part * b * c
        found = here.remembered(state.variates, here.index).weighted_sum(np.array([1.0, 0.0]))
        assert float(found) == pytest.approx(c, rel=1e-6)


# -- odd use --------------------------------------------------------------------------------------


def test_what_has_no_correction_refuses_a_part_of_it() -> None:
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"correction must lie in \[0, 1\], got"):
            ef.LocalSGD(lr=0.1, steps=1, correction=wrong)
    part = ef.LocalSGD(lr=0.1, steps=1, correction=0.5)
    for engine in ("stacked", "loop"):
        with pytest.raises(ValueError, match=r"local\.correction = 0\.5 .* leave it at 1"):
            end_of(ef.FedAvg(part), rounds=1, engine=engine)
    with pytest.raises(ValueError, match="FedDyn's multipliers are its whole correction"):
        end_of(ef.FedDyn(part), rounds=1)
