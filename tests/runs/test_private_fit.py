"""``ef.fit`` under privacy: what is paid for, that nothing else reads rows, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification, regression

import equifed as ef
from equifed.data.split import Split
from equifed.privacy.clients import read_ledgers
from equifed.privacy.ledger import Entry, mu_of
from equifed.privacy.noise import StreamNoise
from equifed.privacy.site import PrivateSite, Unanswered
from equifed.runs import outcome, private_fit
from equifed.training.events import PRIVACY

Told = dict[tuple[Any, ...], torch.Tensor]
TASKS = {
    "two classes": lambda sizes, seed: classification(sizes, (3,), 2, seed),
    "three classes": lambda sizes, seed: classification(sizes, (3,), 3, seed),
    "values": lambda sizes, seed: regression(sizes, 3, seed=seed),
}


def draw(task: str = "three classes", held: tuple[int, ...] = (5, 0, 6), seed: int = 0) -> Any:
    """Draw clients, the second without validation rows; test rows are always the same."""
    make = TASKS[task]
    rows, m = make((12, 9, 15), seed + 1).train, sum(held)
    offsets = np.concatenate([[0], np.cumsum(held)])
    validation = Split(rows.inputs[:m], rows.targets[:m], offsets)
    test = make((8, 8, 8), 7).train
    return dataclasses.replace(make((12, 9, 15), seed), validation=validation, test=test)


def ask(data: Any, seed: int = 0, **bounds: Any) -> Any:
    given = {"epsilon": 2.0, "rows": 1.5, "loss": 2.0, "rounds": 3} | bounds
    return ef.fit(data, seed=seed, privacy=ef.Privacy(**given))


def ledgers(served: Any) -> list[dict[str, Any]]:
    (event,) = (event for event in served.history.events if event["event"] == PRIVACY)
    found: list[dict[str, Any]] = event["ledgers"]
    return found


# -- what is paid ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rhos", [(), (0.3,), (1.0, 0.3, 0.1)])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bounds", [{}, {"unit": "person", "most_rows": 2, "epsilon": 0.01}])
def test_all_candidates_and_the_choice_cost_the_budget_exactly(
    task: str, rhos: tuple[float, ...], bounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owns = rhos[:1]
    for name, tried in (("RHOS", rhos), ("OWN_L2", owns), ("L2", (1e-3, 1e-2))):
        monkeypatch.setattr(private_fit, name, tried)
        monkeypatch.setattr(private_fit, f"FEW_{name.removesuffix('_L2')}", tried[: len(rhos)])
    monkeypatch.setattr(private_fit, "FEW_L2", (1e-3,))
    served = ask(draw(task), **bounds)
    assert any("own bias" in name for name in served.chosen.best) == bool(owns)
    count = (1 + len(rhos) + len(owns)) * (2 if task == "values" else 1)
    assert served.chosen.tried == count
    budget = mu_of(bounds.get("epsilon", 2.0), 1e-5) ** 2
    for ledger, held in zip(ledgers(served), (5, 0, 6), strict=True):
        entries = [Entry(**entry) for entry in ledger["entries"]]
        assert sum(entry.square for entry in entries) == pytest.approx(budget, rel=1e-9)
        steps = sorted((entry.kind, entry.steps) for entry in entries)
        if task == "values":  # all candidates follow from what is told once
            assert steps == [("moments", 1)] * (2 if held else 1)
        else:
            asked = [("gradients", 3 * count), ("losses", 3 * count), ("moments", 1)]
            assert steps == sorted(asked + [("losses", count)] * bool(held))


@pytest.mark.parametrize("task", TASKS)
def test_a_part_of_the_budget_is_kept_for_the_choice(task: str) -> None:
    kind = "moments" if task == "values" else "losses"
    for ledger in (ledgers(ask(draw(task)))[k] for k in (0, 2)):
        last = Entry(**ledger["entries"][-1])
        share = last.square / mu_of(2.0, 1e-5) ** 2
        assert (last.kind, share) == (kind, pytest.approx(private_fit.CHOOSING, rel=1e-9))


# -- what is told ---------------------------------------------------------------------------------


def listen(monkeypatch: pytest.MonkeyPatch, known: Told | None = None) -> tuple[Told, Told]:
    """Return what is told before noise, with its sensitivity; answers are those that are known."""
    told, moved = Told(), Told()

    def add(self: StreamNoise, value: Any, sensitivity: float, sigma: float, *where: Any) -> Any:
        key = (self.stream.address, *where)
        assert key not in told  # no noise is used twice
        told[key], moved[key] = value.clone(), torch.tensor(sensitivity)
        return (told if known is None else known)[key]

    monkeypatch.setattr(StreamNoise, "add", add)
    return told, moved


def replace_row(split: Split, row: int, other: Split) -> Split:
    inputs, targets = split.inputs.copy(), split.targets.copy()
    inputs[row], targets[row] = other.inputs[row] * 10, other.targets[row]
    return dataclasses.replace(split, inputs=inputs, targets=targets)


def same(one: Any, two: Any) -> None:
    """Everything that is published is the same."""
    assert repr(one) == repr(two)
    assert one.to_dict() == two.to_dict()
    for name, run in one.runs.items():
        other = two.runs[name]
        assert all(torch.equal(v, other.parameters[k]) for k, v in run.parameters.items())
        assert run.provenance == other.provenance
        dated = ({**event, "time": ""} for event in run.events)
        assert list(dated) == [{**event, "time": ""} for event in other.events]


@pytest.fixture
def few_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try own biases for classes, too, and few of them for values."""
    for name in ("FEW_OWN", "OWN_L2"):
        monkeypatch.setattr(private_fit, name, (0.1,))


@pytest.mark.usefixtures("few_own")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("where", ["train", "validation"])
def test_another_row_moves_every_answer_by_its_sensitivity_at_most(
    task: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked the same questions, as with the same answers they are; one client's answers differ."""
    data, other = draw(task), draw(task, seed=5)
    told, moved = listen(monkeypatch)
    first = ask(data)
    for row in (0, len(getattr(data, where)) - 1):
        changed = replace_row(getattr(data, where), row, getattr(other, where))
        again, _ = listen(monkeypatch, told)
        same(first, ask(dataclasses.replace(data, **{where: changed})))
        assert again.keys() == told.keys()
        lengths = {key: float((again[key] - told[key]).norm()) for key in told}
        assert all(lengths[key] <= float(moved[key]) * (1 + 1e-9) for key in told)
        assert len({key[0] for key, length in lengths.items() if length}) == 1


@pytest.mark.usefixtures("few_own")
@pytest.mark.parametrize("task", TASKS)
def test_what_no_mechanism_told_is_not_in_the_result(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other rows for training and validation, the same answers: the same result."""
    told, _ = listen(monkeypatch)
    first = ask(draw(task))
    listen(monkeypatch, told)
    same(first, ask(draw(task, seed=11)))


def test_a_seed_repeats() -> None:
    one, again, other = (ask(draw(), seed=seed) for seed in (0, 0, 1))
    assert "better off alone" not in one.gain  # own models are not solved
    same(one, again)
    assert repr(one.table) != repr(other.table)


def test_with_a_huge_budget_it_chooses_by_the_losses_on_validation_rows() -> None:
    data = draw("values")
    served = ask(data, epsilon=1e12, rows=10.0, loss=400.0, rounds=30)
    x = served.history.parameters
    rows, targets = data.validation.inputs, data.validation.targets
    (bias,) = (v.numpy() for k, v in x.items() if k.endswith("bias"))
    (weight,) = (v.numpy() for k, v in x.items() if k.endswith("weight"))
    losses = ((rows @ weight.T + bias)[:, 0] - targets) ** 2
    wanted = np.mean([losses[:5].mean(), losses[5:].mean()])
    assert served.chosen.scores[served.chosen.name].mean == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("task", ["two classes", "values"])
def test_a_private_own_bias_is_chosen_and_measured_where_it_serves(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets move with the client; test rows are measured with the biases that are told."""
    monkeypatch.setattr(private_fit, "FEW_OWN", (1e-3,))
    data = draw(task, held=(5, 4, 6))
    for split in (data.train, data.validation, data.test):
        who = np.repeat(np.arange(3), np.diff(split.offsets))
        split.targets[:] = who if task == "values" else who == 1
    served = ask(data, epsilon=1e12, rows=10.0, loss=400.0, rounds=60)
    assert served.chosen.name == "own bias, average"
    record = served.history.last("loss", "test")
    found = served.predictor()
    for k, name in enumerate(data.names):
        x, y = data.test.client(k)
        told = found.module_for(name)(torch.as_tensor(x)).detach().numpy()[:, 0].astype(float)
        far = (told - y) ** 2 if task == "values" else np.logaddexp(0, (1 - 2 * y) * told)
        assert record.values[k] == pytest.approx(far.mean(), rel=1e-5)


def test_test_rows_are_read_after_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            order.append(name)
            return before(*given, **named)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((private_fit.Choice, "take"), (outcome, "measure_again")):
        note(owner, name)
    served = ask(draw())
    assert order[0] == "take" and set(order[1:]) == {"measure_again"}
    assert all(run.last("accuracy", "test") is not None for run in served.runs.values())


# -- what is said, and refused --------------------------------------------------------------------


def test_it_says_what_was_paid_for(tmp_path: Any) -> None:
    privacy = ef.Privacy(epsilon=2.0, rows=1.5, loss=2.0, rounds=3)
    served = ef.fit(draw(), privacy=privacy, out=tmp_path / "run")
    for part in ("epsilon 2 ", "1e-05", "2 candidates", "20%", "simulation's own", "deviation"):
        assert part in repr(served)
    assert "with noise" in served.choice and "own parts" not in served.gain
    assert "validation loss, noised" in str(served.table)
    assert not math.isnan(served.rows[0]["validation"]["loss"])
    for ledger in read_ledgers(tmp_path / "run"):
        assert ledger.spent == pytest.approx(2.0, rel=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Epsilon 2 at delta 1e-05" in page
    whole = "".join(p.read_text() for p in (tmp_path / "run").rglob("*.json"))
    assert draw().checksum() not in whole


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "own models": (lambda data: data, {"keep_own": True}, "keep_own=False"),
    "no test rows": (
        lambda data: dataclasses.replace(data, test=None), {"test": 0.0}, "test=0.25"
    ),
    "no validation rows": (lambda data: draw(held=(0, 0, 0)), {}, "no validation rows"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_price_is_refused_with_the_reason(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, given, reason = REFUSED[what]
    monkeypatch.setattr(PrivateSite, "enter", None)  # before anything is asked
    privacy = ef.Privacy(epsilon=2.0, rows=1.5, loss=2.0, rounds=3)
    with pytest.raises(Unanswered, match=reason):
        ef.fit(change(draw()), privacy=privacy, **given)


def test_settings_that_say_something_else_are_refused() -> None:
    wrong: Any = 3.0
    with pytest.raises(TypeError, match=r"ef.Privacy\(...\), got float"):
        ef.fit(draw(), privacy=wrong)


def test_tables_are_refused_unless_what_prepares_them_is_public(tmp_path: Any) -> None:
    rows = [f"{'ab'[i % 2]},{20 + i % 9},{'yes' if i % 3 else 'no'}" for i in range(60)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["site,age,ill", *rows]))
    privacy = ef.Privacy(epsilon=2.0, rows=3.0, loss=2.0, rounds=3)
    with pytest.raises(Unanswered, match="preparation='public'"):
        ef.fit(table, client="site", target="ill", privacy=privacy)
    public = dataclasses.replace(privacy, preparation="public")
    assert ef.fit(table, client="site", target="ill", privacy=public).chosen.tried == 2
