"""Fine-tuning after training: plain local steps, chosen on held-out samples, kept in files."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

import equifed as ef
from equifed.algorithms import FedAvg
from equifed.cli.main import app
from equifed.contract.local import LocalSGD
from equifed.runs import personalise as module
from equifed.runs.load import PERSONAL_PARTS, PERSONALISED
from equifed.runs.personalise import describe, personalise
from equifed.training.files import RunFolderError, digest, seal, write_file
from equifed.training.tables import MODEL

pytestmark = pytest.mark.long


def turned(m: int = 120, seed: int = 0) -> ef.Federation:
    """Two classes that every other client sees the other way round: no bias helps."""
    draw, data = np.random.default_rng(seed), {}
    for i in range(4):
        labels = draw.integers(0, 2, m)
        sign = 1 if i % 2 else -1
        data[f"client {i}"] = (draw.normal(size=(m, 3)) + sign * (2 * labels - 1)[:, None], labels)
    return ef.Federation.from_clients(data, classes=2).split(validation=0.25, test=0.5)


def trained(
    data: ef.Federation, model: str | torch.nn.Module = "mlp", **options: str
) -> ef.History:
    clients = ef.simulate(data, model, **options)  # type: ignore[arg-type]
    return ef.train(FedAvg(LocalSGD(lr=0.1, steps=5)), clients, rounds=5)


def test_it_is_gradient_descent_where_a_batch_is_all_samples() -> None:
    data = turned(m=40)  # ten training samples each
    history = trained(data)
    found = personalise(history, data, own="all", lr=0.05, steps=7)
    assert set(found.fitted_on) == {"train"} and found.choices["train"].settings["steps"] == 7
    shared = history.predictor().module
    for i, name in enumerate(data.names):
        net = copy.deepcopy(shared)
        inputs, targets = (torch.as_tensor(part) for part in data.train.client(i))
        for _ in range(7):
            loss = torch.nn.functional.cross_entropy(net(inputs.float()), targets)
            steps = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for weight, step in zip(net.parameters(), steps, strict=True):
                    weight -= 0.05 * step
        ours = dict(found.predictor.for_client(name).module.named_parameters())
        for key, weight in net.named_parameters():
            torch.testing.assert_close(ours[key], weight, atol=1e-5, rtol=1e-4)
    with torch.no_grad():  # the shared model stays as it is
        assert all(
            torch.equal(a, b)
            for a, b in zip(shared.parameters(), found.predictor.module.parameters(), strict=True)
        )


def test_to_change_nothing_is_exact_in_the_precision_of_the_model() -> None:
    data = turned()
    clients = ef.simulate(data, "mlp", dtype=torch.float64)
    history = ef.train(FedAvg(LocalSGD(lr=0.1, steps=5)), clients, rounds=2)
    found = history.personalise(data, own="all", steps=0)
    assert found.choices["train"].settings["steps"] == 0 and "no change" in describe(found)
    for name, weight in found.predictor.module.named_parameters():
        for own in found.predictor.own[name]:
            assert torch.equal(own, weight.detach())


def test_it_helps_where_an_own_bias_cannot() -> None:
    data = turned()
    history = trained(data)
    bias, tuned = (history.personalise(data, own=own) for own in ("bias", "all"))
    assert bias.average is not None and tuned.average is not None
    assert tuned.average.lower > bias.average.upper + 0.1
    assert "fine-tuned" in describe(tuned) and tuned.names == tuple(tuned.predictor.own)


def test_validation_samples_choose_and_test_samples_do_not() -> None:
    data = turned()
    history = trained(data)
    assert data.test is not None and data.validation is not None
    history.provenance = {}
    splits = {}
    for name, split in (("test", data.test), ("validation", data.validation)):
        wrong = type(split)(split.inputs, 1 - split.targets, split.offsets)
        splits[name] = {"train": data.train, "validation": data.validation, "test": data.test,
                        name: wrong}  # fmt: skip
    found = {k: personalise(history, ef.Federation(data.name, data.names, classes=2, **parts),
                            own="all") for k, parts in splits.items()}  # fmt: skip
    ours = personalise(history, data, own="all")
    assert found["test"].choices == ours.choices
    # Held-out samples that contradict the training samples: nothing is changed.
    assert str(found["validation"].choices["train"]).startswith("no change")
    assert found["validation"].after == pytest.approx(found["validation"].before)


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = turned()
    history = trained(data)
    cases = [
        ({"lr": -1.0}, "lr must be a number above 0, got -1"),
        ({"steps": 1.5}, "steps must be a whole number, at least 0, got 1.5"),
        ({"steps": float("nan")}, "at least 0, got nan"),
        ({"penalty": 1.0}, "penalty apply to own biases, .*got own='all'"),
        ({"lr": 1e30, "steps": 5}, "lr 1e.30: 4 client.*client 0.*give a smaller lr"),
    ]
    for given, words in cases:
        with pytest.raises(ValueError, match=words):
            history.personalise(data, own="all", **given)
    with pytest.raises(ValueError, match=r"lr and steps to fine-tuning .*got own='bias'"):
        history.personalise(data, lr=0.1)
    with pytest.raises(ValueError, match="own parts already"):
        trained(data, own="bias").personalise(data, own="all")
    bare = ef.Federation(data.name, data.names, data.train, test=data.test, classes=2)
    plain = trained(bare)
    with pytest.raises(ValueError, match=r"validation = 0\.2.*give lr= and steps="):
        plain.personalise(bare, own="all", lr=0.1)
    unchanged = plain.personalise(bare, own="all", steps=0)
    assert unchanged.after == pytest.approx(unchanged.before)
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"Own models of 4 clients.*own='bias'"):
        history.personalise(data, own="all")


def test_a_run_folder_keeps_it_and_predict_uses_it(tmp_path: Path) -> None:
    config = {
        "rounds": 3,
        "data": {"name": "heart-disease", "validation": 0.3, "test": 0.3},
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 5}},
    }
    folder = tmp_path / "run"
    ef.run(config, folder)
    given = ["personalise", str(folder), "--own", "all", "--lr", "0.1", "--steps", "20"]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 0 and "fine-tuned" in told.output
    predictor = ef.load_predictor(folder, personalised=True)
    first, second = (predictor.for_client(name).module for name in predictor.clients[:2])
    assert not torch.equal(next(first.parameters()), next(second.parameters()))
    made, data = personalise(folder, own="all", lr=0.1, steps=20), ef.load("heart-disease")
    for i, name in enumerate(predictor.clients):
        rows = data.train.client(i)[0]
        ours, theirs = (p.for_client(name).answer(rows) for p in (made.predictor, predictor))
        np.testing.assert_array_equal(ours, theirs)
    parts = save({"beside:centre": torch.zeros(3)})  # as version 0.2 wrote own offsets
    held = {"parts": digest(parts), "model": digest((folder / MODEL).read_bytes())}
    (folder / PERSONAL_PARTS).write_bytes(parts)
    write_file(folder / PERSONALISED, seal(held))
    with pytest.raises(RunFolderError, match=r"own offsets of version 0\.2.*equifed personalise"):
        ef.load_predictor(folder, personalised=True)
