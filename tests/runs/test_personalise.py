"""Own parts after training: chosen on held-out samples, never on test samples, kept in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.hospitals import draw_hospitals
from typer.testing import CliRunner

import equifed as ef
from equifed.algorithms import FedAvg
from equifed.cli.main import app
from equifed.contract.local import LocalSGD
from equifed.runs.personalise import personalise
from equifed.training.files import RunFolderError

pytestmark = pytest.mark.long


def skewed(clients: int = 6, seed: int = 0, shift: float = 3.0, m: int = 150) -> ef.Federation:
    """Clients that differ in how frequent their classes are, and in nothing else."""
    draw = np.random.default_rng(seed)
    centres, data = draw.normal(size=(3, 4)), {}
    for i in range(clients):
        shares = np.exp(shift * draw.normal(size=3))
        labels = draw.choice(3, size=m, p=shares / shares.sum())
        data[f"client {i}"] = (centres[labels] + 1.5 * draw.normal(size=(m, 4)), labels)
    return ef.Federation.from_clients(data, classes=3).split(validation=0.3, test=0.4)


def trained(data: ef.Federation, model: str = "logistic", **options: Any) -> Any:
    clients = ef.simulate(data, model, l2=0.01, **options)
    return ef.train(FedAvg(LocalSGD(lr=0.3, steps=10)), clients, rounds=15)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_own_biases_help_under_label_skew(model: str) -> None:
    data = skewed()
    history = trained(data, model)
    found = history.personalise(data)
    assert set(found.fitted_on) == {"validation"}
    assert found.average is not None and found.average.lower > 0.02
    for i, name in enumerate(data.names):  # what is told is what the predictor does
        assert data.test is not None
        rows, labels = data.test.client(i)
        right = found.predictor.predict(rows, name) == labels.astype(str)
        assert right.mean() == pytest.approx(found.after[i])
        limits = found.differences[i]
        assert limits is not None and limits.lower <= found.after[i] - found.before[i]


def test_the_interval_of_the_mean_is_that_of_independent_clients() -> None:
    """Against the standard error of the mean over clients, from the samples' own differences."""
    data = skewed(clients=8, m=400)
    history = trained(data)
    found, before = history.personalise(data), history.predictor()
    squares = []
    for i, name in enumerate(data.names):
        assert data.test is not None
        rows, labels = data.test.client(i)
        right = [p.predict(rows, name) == labels.astype(str) for p in (found.predictor, before)]
        gain = right[0].astype(float) - right[1]
        squares.append(gain.var(ddof=1) / len(gain))
    error = np.sqrt(np.sum(squares)) / len(squares)
    assert found.average is not None
    width = found.average.upper - found.average.lower
    assert width == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert found.average.estimate == pytest.approx(np.mean(found.after - found.before))
    assert found.average.lower < found.average.estimate < found.average.upper


def test_nothing_is_changed_where_nothing_helps() -> None:
    """Labels without skew: the choice may be to change nothing, and nobody loses much."""
    found = trained(data := skewed(shift=0.0, m=400)).personalise(data)
    assert found.average is not None and abs(found.average.estimate) < 0.02


def test_small_clients_are_fitted_to_their_training_samples() -> None:
    data = skewed(m=50)  # 15 validation samples each
    found = trained(data).personalise(data)
    assert set(found.fitted_on) == {"train"} and set(found.choices) == {"train"}


def test_a_client_without_validation_samples_does_not_stop_the_choice() -> None:
    """What suits the others' training samples is chosen on their validation samples."""
    rng, parts = np.random.default_rng(0), {}
    for i, m in enumerate((60, 60, 60, 60, 2)):
        x = rng.normal(size=(m, 2))
        parts[f"c{i}"] = x, (x[:, 0] + 3 * (i % 2) - 1.5 + rng.logistic(size=m) > 0).astype(int)
    data = ef.Federation.from_clients(parts, classes=2).split(validation=0.25)
    assert data.validation is not None and data.validation.sizes.tolist() == [15] * 4 + [0]
    history = trained(data)
    found, without = history.personalise(data), data.subset(data.names[:4])
    assert found.choices["train"].changes  # own biases help
    same = ef.train(FedAvg(LocalSGD(lr=0.3, steps=10)), ef.simulate(without, "logistic"), rounds=1)
    same.trained = replace(history.predictor(), clients=without.names)
    assert personalise(same, without).choices["train"] == found.choices["train"]


def test_test_samples_have_no_part_in_the_fit() -> None:
    data = skewed()
    history = trained(data)
    ours = personalise(history, data).predictor.own
    assert data.test is not None
    wrong = (data.test.targets + 1) % 3
    other = ef.Federation(data.name, data.names, data.train, data.validation,
                          type(data.test)(data.test.inputs, wrong, data.test.offsets),
                          classes=3)  # fmt: skip
    history.provenance = {}
    theirs = personalise(history, other).predictor.own
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_goes_on_from_own_parts_of_training() -> None:
    data = skewed()
    history = trained(data, own="bias")
    found = history.personalise(data)
    assert found.average is not None and abs(found.average.estimate) < 0.05
    head = trained(data, "mlp").personalise(data, own="head")
    assert sorted(head.names) == ["3.bias", "3.weight"]


def test_what_cannot_be_is_refused_by_name() -> None:
    data = skewed()
    history = trained(data)
    with pytest.raises(ValueError, match="nothing would be shared"):
        history.personalise(data, own="head")
    with pytest.raises(ValueError, match="record how its data are loaded; pass data="):
        history.personalise()
    bare = ef.Federation(data.name, data.names, data.train, test=data.test, classes=3)
    plain = trained(bare)
    with pytest.raises(ValueError, match=r"validation = 0\.2.*temperature= and penalty="):
        plain.personalise(bare)
    assert plain.personalise(bare, temperature=1.0, penalty=1.0).fitted_on[0] == "train"
    with pytest.raises(ValueError, match="penalty must be a number above 0, got -1"):
        plain.personalise(bare, temperature=1.0, penalty=-1.0)
    with pytest.raises(ValueError, match="These data differ"):
        history.personalise(skewed(seed=1))


def test_a_run_folder_keeps_it_and_predict_uses_it_when_asked(tmp_path: Path) -> None:
    config = {
        "rounds": 5,
        "data": {"name": "heart-disease", "validation": 0.3, "test": 0.3},
        "model": {"name": "logistic", "l2": 0.01},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
    }
    folder = tmp_path / "run"
    ef.run(config, folder)
    with pytest.raises(RunFolderError, match="equifed personalise"):
        ef.load_predictor(folder, personalised=True)
    told = CliRunner().invoke(app, ["personalise", str(folder)])
    assert told.exit_code == 0 and "Cleveland" in told.output
    before, after = ef.load_predictor(folder), ef.load_predictor(folder, personalised=True)
    found = ef.History.load(folder).personalise()
    name = next(iter(found.predictor.own))
    assert not before.own and torch.equal(after.own[name], found.predictor.own[name])
    rows = ef.load("heart-disease").train.inputs[:5]
    assert not np.array_equal(before.decision_function(rows),
                              after.decision_function(rows, "Switzerland"))  # fmt: skip
    content = (folder / "personalised.safetensors").read_bytes()
    (folder / "personalised.safetensors").write_bytes(content[:-1] + b"x")
    with pytest.raises(RunFolderError, match="does not match its checksum"):
        ef.load_predictor(folder, personalised=True)


@pytest.mark.filterwarnings("ignore::equifed.data.split.DataWarning")
def test_a_client_that_comes_later_fits_its_own_part(tmp_path: Path) -> None:
    whole = draw_hospitals(0, {"North": 90, "South": 70, "West": 60})
    for name, rows in (("train", whole[whole.hospital != "West"]),
                       ("new", whole[whole.hospital == "West"])):  # fmt: skip
        rows.to_csv(tmp_path / f"{name}.csv", index=False, date_format="%Y-%m-%d")
    config = {
        "rounds": 5,
        "data": {"name": "table", "path": str(tmp_path / "train.csv"), "client": "hospital",
                 "target": "outcome", "holdout": {"test": 0.3}},
        "model": {"name": "logistic", "l2": 0.01, "own": "bias", "dtype": "float64"},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
    }  # fmt: skip
    folder, new = tmp_path / "run", str(tmp_path / "new.csv")
    ef.run(config, folder)

    def call(*more: str) -> Any:
        return CliRunner().invoke(app, ["personalise", str(folder), *more])

    out = tmp_path / "west"
    told = call(new, "--client", "West", "--out", str(out))
    assert told.exit_code == 0 and "own part fitted" in told.output, told.output
    given = ef.load_predictor(out, trust=True)
    weights = load_file(out / "model.safetensors")
    rows = whole[whole.hospital == "West"]
    x = torch.as_tensor(given.preparation.apply(rows))
    chance = torch.softmax(x.double() @ weights["1.weight"].T + weights["1.bias"], dim=1)
    classes = torch.as_tensor(given.preparation.encode_target(list(rows.outcome)))
    slope = (chance - torch.nn.functional.one_hot(classes, 2)).mean(0)
    torch.testing.assert_close(slope, -1e-3 * weights["1.bias"], rtol=0, atol=1e-9)  # OWN_L2
    assert given.only == "West" and list(given.predict(rows)) == [
        given.classes[k] for k in chance.argmax(1)
    ]
    trained = str(tmp_path / "train.csv")
    for arguments, message in (
        ([new], "Name the new client and a folder"),
        ([new, "--client", "North", "--out", "x"], "took part in training"),
        ([trained, "--client", "West", "--out", "x"], "of 'West', with its own part; got a row of"),
        ([new, "--client", "West", "--own", "head"], "for the run's clients"),
        (["--client", "West"], "for a new client's ROWS"),
    ):
        said = call(*arguments)
        assert said.exit_code == 2 and message in " ".join(said.output.split()), said.output
    with pytest.raises(ValueError, match="is the model of 'West', with its own part"):
        given.for_new_client(new, client="East")
