"""Own parts in training: kept between rounds, saved, given out; what they reduce to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification

from equifed.algorithms import FedAvg, Scaffold, ScaffPD
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.objectives import ChiSquare
from equifed.runs.config import RunConfig
from equifed.runs.run import run
from equifed.training.final_model import Kept
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import MissingPolicy, Played, play_round
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long

WORK = LocalSGD(lr=0.1, steps=3, batch_size=3)
DATA = classification((12, 5, 9, 1, 7), seed=2).split(validation=0.2, test=0.2, seed=0)
OWN: dict[str, dict[str, Any]] = {
    "profile": {"model": "logistic", "own": "bias"},
    "joint": {"model": "mlp", "own": "bias"},
    "alternating": {"model": "mlp", "own": "head", "own_steps": "alternating"},
}


def clients(kind: str, engine: str = "stacked", **options: Any) -> Any:
    given = {"l2": 0.05, "dtype": torch.float64, **OWN[kind], **options}
    return simulate(DATA, given.pop("model"), engine=engine, **given)


class Kill(Callback):
    """Ends the program in a round."""

    def round(self, record: Any, info: object) -> None:
        if record.round == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize(
    "algorithm",
    [Scaffold(LocalSGD(lr=0.1, steps=2), participation=0.5), ScaffPD(ChiSquare(0.1))],
    ids=["scaffold", "scaff-pd"],
)
def test_a_resumed_run_has_the_same_bits(
    kind: str, algorithm: AnyAlgorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    given: dict[str, Any] = {"rounds": 6, "seed": 3, "evaluate": ("test",)}
    whole = train(algorithm, clients(kind), **given)
    folder = RunFolder(tmp_path, DATA.names)
    folder.create()
    with pytest.raises(KeyboardInterrupt):
        train(algorithm, clients(kind), **given, folder=folder, callbacks=[Kill()])
    again = RunFolder(tmp_path, DATA.names)
    resumed = train(algorithm, clients(kind), **given, folder=again, resume=True)
    read = History.load(tmp_path)
    for history in (resumed, read):
        for ours, theirs in ((history.own, whole.own), (history.parameters, whole.parameters)):
            assert ours is not None and theirs is not None and ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for a, b in zip(resumed.metrics, whole.metrics, strict=True):
        np.testing.assert_array_equal(a.values, b.values)


def play(algorithm: Any, here: Any, state: Any, own: torch.Tensor, r: int) -> Played:
    kept, policy = Kept(own=own), MissingPolicy()
    return play_round(algorithm, state, here, Stream(1), r, policy, kept, print)


@pytest.mark.parametrize("kind", ["joint", "alternating"])
def test_those_who_take_no_part_keep_theirs(kind: str) -> None:
    here, algorithm = clients(kind), FedAvg(WORK, participation=0.4)
    x = here.initial(Stream(0))
    state, own = algorithm.init(here, x), here.own_parts(x)
    for r in range(3):
        played = play(algorithm, here, state, own, r)
        index, after = played.info.index, played.kept.own
        absent = np.setdiff1d(np.arange(5), index)
        assert len(absent) == 3
        assert torch.equal(after[absent], own[absent])
        assert all((after[index] != own[index]).any(dim=1))
        state, own = played.state, after


def test_a_round_is_a_function_of_the_state() -> None:
    here, algorithm = clients("joint"), FedAvg(WORK)
    x = here.initial(Stream(0))
    state, own = algorithm.init(here, x), here.own_parts(x)
    first = play(algorithm, here, state, own, 1)
    play(algorithm, here, first.state, first.kept.own, 2)
    again = play(algorithm, here, state, own, 1)
    assert torch.equal(first.kept.own, again.kept.own)
    assert torch.equal(first.state.x, again.state.x)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_with_one_client_joint_steps_are_ordinary_training(engine: str) -> None:
    """Everything is its own then: FedAvg moves shared and own parameters alike, bit for bit."""
    data = classification((30,))
    given: dict[str, Any] = {"engine": engine, "l2": 0.05, "dtype": torch.float64}
    histories = [
        train(FedAvg(WORK), simulate(data, "mlp", **given, **own), rounds=4, seed=1)
        for own in ({}, {"own": "head"})
    ]
    shared, own = (history.parameters for history in histories)
    assert shared is not None and own is not None
    assert all(torch.equal(shared[name], own[name]) for name in shared)


def test_corrections_are_of_the_shared_part_only() -> None:
    """With a control that cancels every gradient only own parts move."""
    here = clients("joint")
    x = here.initial(Stream(0))
    _, control = here.value_and_gradient(x, Stream(1))
    zero = torch.zeros_like(x)
    moved = here.local_steps(x, LocalSGD(lr=0.1, steps=1), Stream(1), control=control, target=zero)
    assert moved.displacement.squared_norms() == pytest.approx(np.zeros(5), abs=1e-25)
    assert ((here.own_after() - here.own_rows.start).abs().amax(dim=1) > 1e-4).all()


@pytest.mark.parametrize("kind", OWN)
def test_evaluation_uses_each_clients_own_part(kind: str) -> None:
    history = train(FedAvg(LocalSGD(lr=0.1, steps=3)), clients(kind), rounds=3, evaluate=("test",))
    assert history.own is not None and history.parameters is not None
    here, told = clients(kind), history.last("loss", "test")
    assert told is not None
    for i in range(len(DATA.names)):
        inputs, targets = (torch.as_tensor(part) for part in DATA.test.client(i))
        if len(targets) == 0:
            assert np.isnan(told.values[i])
            continue
        own = {name: values[i] for name, values in history.own.items()}
        parts = history.parameters | own
        outputs = torch.func.functional_call(here._template.double(), parts, (inputs,))
        expected = torch.nn.functional.cross_entropy(outputs, targets)
        assert told.values[i] == pytest.approx(float(expected), abs=1e-12)
    mean = {name: values.mean(0) for name, values in history.own.items()}
    for name, value in mean.items():  # what whoever has no own part is given
        torch.testing.assert_close(history.parameters[name], value)


def test_the_best_model_on_validation_data_has_the_own_parts_of_its_round() -> None:
    algorithm = FedAvg(LocalSGD(lr=20.0, steps=5))  # too bold: the last model is not the best
    given: dict[str, Any] = {"rounds": 8, "seed": 0, "evaluate": ("validation",)}
    history = train(algorithm, clients("joint"), **given, give_out="validation")
    chosen = history.given_out
    assert chosen is not None and history.own is not None
    assert chosen.round < 8, "the test needs a run whose last model is not the best"
    if chosen.round:
        given["rounds"] = chosen.round
        short = train(algorithm, clients("joint"), **given)
        assert short.own is not None
        assert all(torch.equal(history.own[name], short.own[name]) for name in short.own)


def test_a_start_brings_its_own_parts() -> None:
    here = clients("joint")
    module = here._template
    with torch.no_grad():
        module[3].bias.fill_(0.25)
    x = here.flatten(module.state_dict())
    assert x.shape == (here.model.size,)
    assert torch.equal(here.own_parts(x), torch.full((5, 3), 0.25, dtype=torch.float64))


def test_without_own_parts_nothing_is_told_or_written(tmp_path: Path) -> None:
    history = train(FedAvg(WORK), simulate(DATA, "mlp"), rounds=1)
    history.save(tmp_path)
    assert history.own is None and not (tmp_path / "own.safetensors").exists()
    assert not [event for event in history.events if "own" in event["reason"]]


def test_a_configuration_names_them(tmp_path: Path) -> None:
    table = {
        "rounds": 2,
        "data": "fashion-three",
        "model": {"name": "logistic", "l2": 0.01, "own": "bias", "own_l2": 0.01},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2, "batch_size": "none"}},
    }
    config = RunConfig.from_dict(table)
    assert RunConfig.from_dict(config.to_dict()) == config
    history = run(config, tmp_path)
    assert history.own is not None
    (name,) = history.own
    read = History.load(tmp_path).own
    assert read is not None and torch.equal(read[name], history.own[name])
    said = [event["reason"] for event in history.events if event["event"] == "note"]
    assert any("profile losses" in text and "own_l2 = 0.01" in text for text in said)
    warned = [event["reason"] for event in history.events if event["event"] == "warning"]
    assert any("one class only" in text and "T-shirt" in text for text in warned)
    several = {**table, "model": {"name": "mlp", "own": ["*.bias"], "own_steps": "alternating"}}
    assert RunConfig.from_dict(several).model["own"] == ["*.bias"]
    table["algorithm"] = {"name": "fedavg", "local": {"lr": 0.1, "steps": 2, "batch_size": 8}}
    said = [event["reason"] for event in run(RunConfig.from_dict(table)).events]
    assert any("joint local steps" in text for text in said)  # minibatches have no profile loss
