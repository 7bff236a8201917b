"""Fine-tuning after training: plain local steps, chosen on held-out samples, kept in files."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import equifed as ef
from equifed.algorithms import FedAvg
from equifed.cli.main import app
from equifed.cli.predicting import _read_kinds
from equifed.contract.local import LocalSGD
from equifed.models.class_shares import share_shifts
from equifed.models.client_offsets import fit_offsets, leading_components
from equifed.models.export import export, load_exported
from equifed.runs import fine_tune as module
from equifed.runs.personalise import describe, personalise

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
    assert set(found.fitted_on) == {"train"} and found.choices["train"].to_dict()["steps"] == 7
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
    assert found.choices["train"].to_dict()["steps"] == 0 and "no change" in describe(found)
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
        ({"penalty": 1.0}, "own='all' has lr and steps"),
        ({"lr": 1e30, "steps": 5}, "lr 1e.30: 4 client.*client 0.*give a smaller lr"),
    ]
    for given, words in cases:
        with pytest.raises(ValueError, match=words):
            history.personalise(data, own="all", **given)
    with pytest.raises(ValueError, match=r"fine-tuning, own='all', got own='bias'"):
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


def skewed(model: str, **options: str) -> tuple[ef.Federation, ef.History]:
    """Classes that overlap, of which clients have other shares."""
    draw, data = np.random.default_rng(0), {}
    for i, share in enumerate((0.05, 0.5, 0.5, 0.5, 0.95)):
        labels = (draw.random(400) < share).astype(np.int64)
        data[f"client {i}"] = (draw.normal(size=(400, 3)) + labels[:, None] - 0.5, labels)
    federation = ef.Federation.from_clients(data, classes=2).split(validation=0.25, test=0.5)
    return federation, trained(federation, model, **options)


@pytest.mark.parametrize("options", [{"model": "mlp"}, {"model": "mlp", "loss": "logistic"}])
def test_own_shares_move_the_last_bias_and_nothing_else(options: dict[str, str]) -> None:
    data, history = skewed(**options)
    found = history.personalise(data, own="all", steps=0, class_kinds="classes")
    assert str(found.choices["train"]) == "own shares of classes"
    counts = [np.bincount(data.train.client(i)[1], minlength=2) for i in range(5)]
    shifts = share_shifts(np.stack(counts))
    if "loss" in options:  # one logit
        shifts = shifts[:, 1:] - shifts[:, :1]
    (last,) = found.predictor.own
    assert describe(found).startswith(f"own part {last} fitted after training")
    moved = found.predictor.own[last] - found.predictor.module.get_parameter(last).detach()
    np.testing.assert_allclose(moved, shifts, atol=1e-6)
    assert found.average is not None and found.average.lower > 0.02


def test_validation_samples_choose_own_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data, history = skewed("mlp")
    monkeypatch.setattr(module, "RATES", (1e-3,))  # steps alone do not come far
    shown = history.personalise(data, own="all", class_kinds=[0, 1])
    assert shown.choices["train"].to_dict()["shares"] is True
    monkeypatch.setattr(module, "STEPS", (0,))  # no steps are tried: the bias alone is own
    assert history.personalise(data, own="all", class_kinds=[0, 1]).names == ("3.bias",)
    monkeypatch.undo()
    monkeypatch.setattr(module, "RATES", (1e-3,))
    useless = history.personalise(data, own="all", class_kinds=[0, 0])  # one kind moves nothing
    plain = history.personalise(data, own="all")
    assert useless.choices == plain.choices and "shares" not in plain.choices["train"].to_dict()
    chosen = {k: v for k, v in shown.choices["train"].to_dict().items() if k != "shares"}
    given = history.personalise(data, own="all", class_kinds=[0, 1], **chosen)
    assert given.choices == shown.choices and given.after == pytest.approx(shown.after)


def test_own_shares_of_no_classes_are_refused() -> None:
    data, history = skewed("mlp")
    with pytest.raises(ValueError, match=r"class_kinds is .*2 numbers, got \[0, 1, 2\]"):
        history.personalise(data, own="all", class_kinds=[0, 1, 2])
    with pytest.raises(ValueError, match="class_kinds, offsets and trust are of fine-tuning"):
        history.personalise(data, class_kinds="classes")
    outside = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    with pytest.raises(ValueError, match="outputs are not those of its last linear layer '0'"):
        trained(data, outside).personalise(data, own="all", steps=0, class_kinds="classes")
    values = ef.Federation.from_clients(
        {name: (data.train.client(i)[0], data.train.client(i)[0][:, 0])
         for i, name in enumerate(data.names)}
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"class_kinds is for models of classes.*squared"):
        trained(values, "linear").personalise(values, own="all", steps=0, class_kinds="classes")


def with_pens(model: str = "mlp", **options: str) -> tuple[ef.Federation, ef.History]:
    """Two classes that differ in what clients differ in, too: how much ink there is."""
    draw, data = np.random.default_rng(0), {}
    for i, pen in enumerate(1.5 * draw.normal(size=8)):
        labels = draw.integers(0, 2, 240)
        ink = 1.5 * labels + pen + 0.5 * draw.normal(size=240)
        data[f"client {i}"] = (np.stack([ink, draw.normal(size=240)], axis=1), labels)
    federation = ef.Federation.from_clients(data, classes=2).split(validation=0.25, test=0.5)
    return federation, trained(federation, model, **options)


@pytest.mark.parametrize("loss", ["cross_entropy", "logistic"])
def test_own_offsets_move_outputs_as_measured_and_nothing_else(loss: str) -> None:
    data, history = with_pens(loss=loss)
    found = history.personalise(data, own="all", steps=0, offsets=5, trust=0.75)
    assert str(found.choices["train"]) == (
        "own offsets in 2 components of the inputs, trusted by 0.75"
    )
    assert found.names == ("linear.weight", "linear.bias") and describe(found).startswith(
        "own part"
    )
    components = leading_components(data.train.inputs, 2)
    owners = np.repeat(np.arange(8), data.train.sizes)
    measured = fit_offsets(components.of(data.train.inputs), data.train.targets, owners, 8, 2)
    weight, bias = measured.shifts()
    assert data.test is not None
    for i, name in enumerate(data.names):
        rows = data.test.client(i)[0]
        moved = 0.75 * (components.of(rows) @ weight[i].T + bias[i])
        before, after = (p.decision_function(rows, name)
                         for p in (history.predictor(), found.predictor))  # fmt: skip
        np.testing.assert_allclose(after - before, moved[:, 1] - moved[:, 0], atol=1e-4)
    assert found.average is not None and found.average.lower > 0.02


@pytest.mark.parametrize("loss", ["cross_entropy", "logistic"])
def test_own_shares_and_offsets_add_up(loss: str) -> None:
    data, history = skewed("mlp", loss=loss)
    given = {"own": "all", "steps": 0}
    both, offsets, shares = (
        history.personalise(data, **given, **more).predictor
        for more in ({"class_kinds": "classes", "offsets": 3, "trust": 0.75},
                     {"offsets": 3, "trust": 0.75}, {"class_kinds": "classes"})
    )  # fmt: skip
    ((last, own),) = shares.own.items()
    moved = own - history.predictor().module.get_parameter(last).detach()
    assert moved.abs().max() > 1
    told = both.own["linear.bias"] - offsets.own["linear.bias"]
    torch.testing.assert_close(told, moved, atol=1e-5, rtol=0)


def test_validation_samples_choose_how_far_offsets_are_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, history = with_pens()
    found = history.personalise(data, own="all", steps=0, offsets=2)
    trust = found.choices["train"].to_dict()["trust"]
    assert trust >= 0.5
    given = history.personalise(data, own="all", steps=0, offsets=2, trust=trust)
    assert given.choices == found.choices and given.after == pytest.approx(found.after)
    monkeypatch.setattr(module, "RATES", (1e-2,))
    tuned = history.personalise(data, own="all", offsets=2, class_kinds="classes")
    how = tuned.choices["train"].to_dict()
    chosen = {k: v for k, v in how.items() if k != "shares"}
    kinds = "classes" if "shares" in how else None
    again = history.personalise(data, own="all", class_kinds=kinds, **chosen)
    assert again.choices == tuned.choices and again.after == pytest.approx(tuned.after)
    assert data.validation is not None  # where labels are drawn anew, nothing is trusted
    labels = np.random.default_rng(1).permutation(data.validation.targets)
    held = type(data.validation)(data.validation.inputs, labels, data.validation.offsets)
    history.provenance = {}
    strange = ef.Federation(data.name, data.names, data.train, held, data.test, classes=2)
    useless = history.personalise(strange, own="all", steps=0, offsets=2)
    assert str(useless.choices["train"]) == "no change"


def test_local_steps_and_offsets_add_up() -> None:
    data, history = with_pens()
    given = {"own": "all", "lr": 0.05, "steps": 5}
    both, steps = (history.personalise(data, **given, **more).predictor
                   for more in ({"offsets": 2, "trust": 0.5}, {}))  # fmt: skip
    only = history.personalise(data, own="all", steps=0, offsets=2, trust=0.5).predictor
    assert {name.partition(".")[0] for name in both.own} == {"network", "linear"}
    assert data.test is not None
    for i, name in enumerate(data.names):
        rows = data.test.client(i)[0]
        told = [p.for_client(name).answer(rows) for p in (both, steps, only)]
        shared = history.predictor().answer(rows)
        np.testing.assert_allclose(told[0], told[1] + told[2] - shared, atol=1e-4)
        assert np.abs(told[1] - shared).max() > 1e-3 < np.abs(told[2] - shared).max()


def test_offsets_that_cannot_be_are_refused_by_name() -> None:
    data, history = with_pens()
    cases = [
        ({"trust": 0.5}, "trust is of own offsets; give offsets="),
        ({"offsets": 0}, "offsets is a number of components, at least 1, got 0"),
        ({"offsets": 1.5}, "at least 1, got 1.5"),
        ({"offsets": True}, "at least 1, got True"),
        ({"offsets": 2, "trust": 1.5}, r"trust must lie in \[0, 1\], got 1.5"),
        ({"offsets": 2, "trust": float("nan")}, "got nan"),
    ]
    for given, words in cases:
        with pytest.raises(ValueError, match=words):
            history.personalise(data, own="all", steps=0, **given)
    bare = ef.Federation(data.name, data.names, data.train, test=data.test, classes=2)
    with pytest.raises(ValueError, match=r"How far own offsets are trusted.*or give trust="):
        trained(bare).personalise(bare, own="all", steps=0, offsets=2)
    values = ef.Federation.from_clients(
        {name: (data.train.client(i)[0], data.train.client(i)[0][:, 0])
         for i, name in enumerate(data.names)}
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"offsets is for models of classes.*squared"):
        trained(values, "linear").personalise(values, own="all", steps=0, offsets=2, trust=1)
    same = {name: (np.ones((20, 3)), np.arange(20) % 2) for name in "ab"}
    flat = ef.Federation.from_clients(same, classes=2)
    with pytest.raises(ValueError, match="all training inputs are the same"):
        trained(flat).personalise(flat, own="all", steps=0, offsets=2, trust=1)
    few = ef.Federation.from_clients({n: (x[:6], y[:6]) for n, (x, y) in
                                      {n: data.train.client(i) for i, n in enumerate(data.names)}
                                      .items()}, classes=2)  # fmt: skip
    narrow = trained(few).personalise(few, own="all", steps=0, offsets=9, trust=1)
    assert narrow.choices["train"].to_dict()["offsets"] == 2  # of two columns; 48 samples allow 4
    words = {name: (np.random.default_rng(i).integers(0, 9, (20, 4)), np.arange(20) % 2)
             for i, name in enumerate("ab")}  # fmt: skip
    text = ef.Federation.from_clients(words, classes=2, tokens=True)
    reader = torch.nn.Sequential(
        torch.nn.Embedding(9, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    with pytest.raises(ValueError, match="these are tokens"):
        trained(text, reader).personalise(text, own="all", steps=0, offsets=2, trust=1)


@pytest.mark.parametrize(("text", "kinds"), [("classes", "classes"), ("0-2,3", [0, 0, 0, 1])])
def test_kinds_of_classes_are_ranges_on_the_command_line(text: str, kinds: object) -> None:
    assert _read_kinds(text) == kinds


@pytest.mark.parametrize("text", ["1-3", "0-2,4", "0-2,2-5", "3-1", "a", "", "0-2;3"])
def test_ranges_that_leave_classes_out_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"follow each other from 0 on, as 0-9,10-61; got"):
        _read_kinds(text)


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
    more = [*given[:4], "--steps", "0", "--class-kinds", "0,1"]
    told = CliRunner().invoke(app, more)
    assert told.exit_code == 0 and "own shares of classes" in told.output
    offsets = [*more, "--offsets", "3"]
    assert "trusted by" in CliRunner().invoke(app, [*offsets, "--trust", "0.5"]).output
    data = ef.load("heart-disease", validation=0.3, test=0.3)
    kept = ef.load_predictor(folder, personalised=True)
    made = personalise(folder, own="all", steps=0, class_kinds=[0, 1], offsets=3, trust=0.5)
    assert data.test is not None and set(kept.own) == {"linear.weight", "linear.bias"}
    for i, name in enumerate(data.names):
        rows = data.test.client(i)[0]
        ours, theirs = (p.for_client(name).answer(rows) for p in (made.predictor, kept))
        np.testing.assert_array_equal(ours, theirs)
    rows, labels = data.test.client(0)
    with pytest.raises(ValueError, match="a new client gets the shared model"):
        kept.for_new_client(rows, [data.class_names[k] for k in labels], client="new")
    shared = ef.load_predictor(folder).answer(rows)
    np.testing.assert_array_equal(kept.for_new_client(client="new").answer(rows), shared)
    written = export(kept.for_client(data.names[0]), tmp_path / "exported", program=True)
    again = load_exported(written[0].parent)
    np.testing.assert_allclose(again.answer(data.test.client(0)[0]),
                               kept.for_client(data.names[0]).answer(data.test.client(0)[0]),
                               atol=1e-6)  # fmt: skip
    told = CliRunner().invoke(app, [*more[:-1], "0-1,1"])
    assert told.exit_code != 0 and "follow each other" in told.output
