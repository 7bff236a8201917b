"""Stored variates: SCAFFOLD's option II inside SCAFF-PD, in part, and what their memory does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification

import equifed as ef
from equifed.contract import Info, Stream
from equifed.objectives import Average, ChiSquare
from equifed.runs import RunConfig
from equifed.runs.run import resume, run
from equifed.steps import ConstantSteps
from equifed.training.history import RoundRecord
from equifed.training.loop import Callback

LR, J = 0.1, 3


def scaff_pd(objective: Any = None, **changed: Any) -> ef.ScaffPD:
    """SCAFF-PD on minibatches with tau = J eta, as FedAvg moves."""
    work = ef.LocalSGD(lr=LR, steps=J, batch_size=4)
    steps = ConstantSteps(primal=J * LR, dual=0.1, extrapolation=1.0, local=LR)
    given = {"gradient_batch_size": 4, "loss_batch_size": 4, "metric": "none", **changed}
    return ef.ScaffPD(objective or Average(), given.pop("local", work), steps, **given)


def clients(engine: str = "stacked") -> Any:
    data = classification((12, 9, 15, 12), (5,), seed=1)
    return ef.simulate(data, "logistic", engine=engine, dtype=torch.float64)


def end_of(algorithm: Any, rounds: int = 5, engine: str = "stacked", **given: Any) -> np.ndarray:
    found = ef.train(algorithm, clients(engine), rounds=rounds, progress=False, **given).parameters
    assert found is not None
    return np.concatenate([np.asarray(value).ravel() for value in found.values()])


def test_whole_variates_with_the_average_are_scaffold() -> None:
    """Option II of SCAFFOLD is SCAFF-PD with weights 1/N, tau = J eta and stored variates."""
    work = scaff_pd().local
    ours = end_of(ef.StoredVariates(scaff_pd(), correction=1.0))
    theirs = end_of(ef.Scaffold(work, weighting="uniform"))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    plain = end_of(ef.FedAvg(work, weighting="uniform"))
    assert np.abs(ours - plain).max() > 1e-6  # the variates do something


def test_no_correction_is_fedavg_and_a_part_of_it_is_scaffolds() -> None:
    work = scaff_pd().local
    none = end_of(ef.StoredVariates(scaff_pd(), correction=0.0))
    np.testing.assert_allclose(none, end_of(ef.FedAvg(work, weighting="uniform")), atol=1e-12)
    part = end_of(ef.StoredVariates(scaff_pd(), correction=0.4))
    theirs = end_of(ef.Scaffold(replace(work, correction=0.4), weighting="uniform"))
    np.testing.assert_allclose(part, theirs, rtol=0, atol=1e-12)


def test_one_full_step_is_scaff_pd() -> None:
    """With J = 1 and all samples corrections cancel in the sum, and all parts of one agree."""
    work = ef.LocalSGD(lr=LR, steps=1)
    one = scaff_pd(ChiSquare(rho=0.5), local=work, gradient_batch_size=None, loss_batch_size=None)
    plain = end_of(one)
    for part in (0.0, 0.3, 1.0):
        np.testing.assert_allclose(end_of(ef.StoredVariates(one, part)), plain, atol=1e-12)


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_engines_agree_with_the_plain_loop(part: float) -> None:
    ours = ef.StoredVariates(scaff_pd(ChiSquare(rho=0.5)), part)
    np.testing.assert_allclose(end_of(ours), end_of(ours, engine="loop"), rtol=0, atol=1e-10)
    fresh = scaff_pd(local=replace(scaff_pd().local, correction=part))
    np.testing.assert_allclose(end_of(fresh), end_of(fresh, engine="loop"), rtol=0, atol=1e-10)


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


def test_absent_clients_keep_theirs() -> None:
    everyone, stream = clients(), Stream(0)
    one = ef.StoredVariates(scaff_pd())
    state, _ = one.round(one.init(everyone, everyone.initial(stream)), everyone, stream.at(1))
    after, _ = one.round(state, everyone.subset(np.array([0, 3])), stream.at(2))
    for i, stays in ((0, False), (1, True), (2, True), (3, False)):
        before, now = (
            everyone.remembered(s.variates, np.array([i])).weighted_sum(np.ones(1))
            for s in (state, after)
        )
        assert bool(torch.equal(before, now)) is stays


def test_a_run_that_was_killed_resumes_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"name": "constant", "primal": 0.3, "dual": 0.1, "extrapolation": 1.0, "local": 0.1}
    core = {"name": "scaff-pd", "objective": {"name": "cvar", "tail": 0.5}, "metric": "none"}
    core |= {"local": {"lr": 0.1, "steps": 3, "batch_size": 4}, "gradient_batch_size": 4}
    table = {"rounds": 6, "data": {"name": "heart-disease"}, "model": {"name": "logistic"}}
    table["algorithm"] = {"name": "stored-variates", "algorithm": core | {"steps": steps}}
    whole = run(RunConfig.from_dict(table), tmp_path / "whole")

    class Breaks(Callback):
        def round(self, record: RoundRecord, info: Info) -> None:
            if record.round == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(RunConfig.from_dict(table), tmp_path / "half", callbacks=[Breaks()])
    again = resume(tmp_path / "half")
    for key, value in (whole.parameters or {}).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray((again.parameters or {})[key]))


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
    schedule = ConstantSteps(primal=1e-12, dual=0.1, extrapolation=1.0, local=lr)
    core = ef.ScaffPD(Average(), ef.LocalSGD(lr=lr, steps=steps), schedule, metric="none")
    one, c = ef.StoredVariates(core, part), 0.0
    state = one.init(here, torch.zeros(1, dtype=torch.float64))
    b = memory(z, steps)
    for t in range(4):
        state, _ = one.round(state, here, Stream(0).at(t))
        c = (1 - b) * -h + part * b * c
        found = here.remembered(state.variates, here.index).weighted_sum(np.array([1.0, 0.0]))
        assert float(found) == pytest.approx(c, rel=1e-6)


# -- odd use --------------------------------------------------------------------------------------


def test_what_has_no_stored_variates_is_refused() -> None:
    with pytest.raises(ValueError, match="variates of SCAFF-PD, got FedAvg"):
        ef.StoredVariates(ef.FedAvg())
    with pytest.raises(ValueError, match="wrappers go around StoredVariates"):
        ef.StoredVariates(ef.ServerOptimised(scaff_pd()))
    with pytest.raises(ValueError, match='give ScaffPD metric="none"'):
        ef.StoredVariates(ef.ScaffPD(Average()))
    with pytest.raises(ValueError, match=r"correction must lie in \[0, 1\], got 1.5"):
        ef.StoredVariates(scaff_pd(), correction=1.5)
    twice = scaff_pd(local=ef.LocalSGD(lr=LR, steps=J, correction=0.5))
    with pytest.raises(ValueError, match=r"got 0\.5 there as well"):
        ef.StoredVariates(twice)
    with pytest.raises(ValueError, match="correction must lie in"):
        ef.LocalSGD(lr=0.1, steps=1, correction=float("nan"))
    with pytest.raises(ValueError, match="leave it at 1"):
        end_of(ef.FedAvg(ef.LocalSGD(lr=0.1, steps=1, correction=0.5)), rounds=1)


def test_variates_are_no_proof_of_a_gradient() -> None:
    """SCAFF-PD with all samples tells its gradient; stored variates are not that."""
    here, stream = clients(), Stream(0)
    core = scaff_pd(gradient_batch_size=None, loss_batch_size=None)
    for one, told in ((core, True), (ef.StoredVariates(core), False)):
        _, info = one.round(one.init(here, here.initial(stream)), here, stream)
        assert (info.gradient is not None) is told
