"""Second derivatives over Flower: the sums of the loop, traffic, and matrices that are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from tests.flower.grid import MemoryGrid, convex, flower_clients, loop_clients, memory_grid, task

from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.arrays import multiply_rows
from equifed.contract.clients import MissingClients
from equifed.contract.curvature import Curvature, CurvatureSum
from equifed.contract.streams import Stream
from equifed.flower.messenger import SecureSums
from equifed.flower.questions import pack_blocks, unpack_blocks
from equifed.flower.wire import Reply
from equifed.flower.worker import Worker
from equifed.objectives import ChiSquare
from equifed.steps.metric import MetricKind
from equifed.training.history import History
from equifed.training.loop import train

pytestmark = pytest.mark.long

HIDDEN: dict[str, Any] = {"none": lambda: None, "secure": SecureSums}
WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])


@pytest.fixture
def grid(tmp_path: Path) -> MemoryGrid:
    return memory_grid(convex(), task(), tmp_path)


@pytest.mark.parametrize("privacy", HIDDEN)
@pytest.mark.parametrize("form", ["full", "blocks", "diagonal", "thin", "mean", "projected"])
def test_the_sum_is_that_of_the_loop_engine(form: str, privacy: str, grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=HIDDEN[privacy]())
    x = torch.linspace(-1, 1, clients.model.size, dtype=torch.float64)
    some = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
    thin = some if form in ("thin", "projected") else None
    given: tuple[Any, Any] = ("blocks" if form == "thin" else form, thin)
    sent = len(grid.received)
    found = clients.curvature_sum(x, WEIGHTS, *given)
    expected = loop_clients(convex(), task()).curvature_sum(x, WEIGHTS, *given)
    assert isinstance(found, CurvatureSum) and isinstance(expected, CurvatureSum)
    torch.testing.assert_close(found.blocks, expected.blocks, rtol=0, atol=1e-10)
    assert found.penalty == pytest.approx(expected.penalty)
    assert (found.exact, found.constant) == (expected.exact, expected.constant)
    assert torch.equal(found.places, expected.places)
    replies = [Reply.from_records(m.content) for m in grid.received[sent:]]
    arrays = [a for r in replies for a in r.arrays.values()]
    numbers = {"full": 18 * 19 // 2, "blocks": 3 * 6 * 7 // 2, "diagonal": 18, "thin": 3 * 6 * 2}
    numbers |= {"mean": 6 * 7 // 2, "projected": 3 * 3}
    assert {a.size for a in arrays} == {numbers[form]}  # of symmetric matrices one triangle
    assert {a.dtype.name for a in arrays} == {"float64" if privacy == "none" else "uint64"}
    up = int(clients.traffic.up.sum())
    assert up >= 4 * 8 * numbers[form]


def test_packing_keeps_symmetric_matrices() -> None:
    a = torch.randn(3, 5, 5, dtype=torch.float64)
    a = a + a.mT
    packed = pack_blocks(a, thin=False)
    assert packed.numel() == 3 * 15
    assert torch.equal(unpack_blocks(packed, a.shape, thin=False), a)


def hostile(change: Any) -> Any:
    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition != 2 or request.metadata.message_type != "train.curvature":
            return [reply]
        told = Reply.from_records(reply.content)
        arrays = {"curvature": change(told.arrays["curvature"])}
        return [Message(replace(told, arrays=arrays).to_records(), reply_to=request)]

    return tamper


BAD: dict[str, tuple[Any, str]] = {
    "not positive": (lambda v: -v, "negative eigenvalue"),
    "not finite": (lambda v: v * np.nan, "not finite"),
    "huge": (lambda v: v * 1e12, "that of the median client"),
    "another size": (lambda v: v[:-1], "expected float64 of shape"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("form", ["full", "diagonal"])
def test_a_hostile_matrix_is_refused_and_named(form: Any, case: str, grid: MemoryGrid) -> None:
    change, reason = BAD[case]
    grid.tamper = hostile(change)
    clients = flower_clients(grid, task())
    x = torch.zeros(clients.model.size, dtype=torch.float64)
    with pytest.raises(MissingClients, match=reason) as caught:
        clients.curvature_sum(x, WEIGHTS, form)
    assert list(caught.value.reasons) == [2]


def test_a_product_that_is_not_symmetric_is_refused(grid: MemoryGrid) -> None:
    grid.tamper = hostile(lambda v: v[::-1].copy())
    clients = flower_clients(grid, task())
    x = torch.zeros(clients.model.size, dtype=torch.float64)
    thin = torch.eye(6, dtype=torch.float64)[:, :3]
    with pytest.raises(MissingClients, match="its curvature") as caught:
        clients.curvature_sum(x, WEIGHTS, "blocks", thin)
    assert list(caught.value.reasons) == [2]


def test_models_without_second_derivatives_decline(tmp_path: Path) -> None:
    the_task = task("mlp", hidden=(4,))
    clients = flower_clients(memory_grid(convex(), the_task, tmp_path), the_task)
    assert clients.curvature_sum(clients.initial(Stream(0)), WEIGHTS) == "the model is not linear"


@pytest.mark.parametrize("metric", ["auto", "projected"])
def test_fair_newton_takes_its_metric_as_in_a_simulation(
    metric: MetricKind, grid: MemoryGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equifed.steps.metric.AXES", 3)
    algorithm = FairNewton(ChiSquare(0.5), metric=metric)
    expected = train(algorithm, loop_clients(convex(), task()), rounds=8, seed=3)
    found = train(algorithm, flower_clients(grid, task()), rounds=8, seed=3)
    notes = [e["reason"] for e in found.events if "second-order steps" in e["reason"]]
    assert len(notes) == 1 and ("projected" in notes[0]) == (metric == "projected")
    assert found.parameters is not None and expected.parameters is not None
    for key, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[key], value, rtol=0, atol=1e-8)
    for a, b in zip(found.rounds, expected.rounds, strict=True):
        assert a.objective == pytest.approx(b.objective, abs=1e-9)


def test_a_hostile_matrix_ends_no_run(grid: MemoryGrid) -> None:
    grid.tamper = hostile(lambda v: -v)
    history = train(FairNewton(ChiSquare(0.5)), flower_clients(grid, task()), rounds=3)
    reasons = [e for e in history.events if e["event"] == "quarantine"]
    assert {e["client"] for e in reasons} == {"client-2"} and len(history.rounds) == 3


def test_hidden_gradients_are_not_compared(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), Stream(0))
    assert "hidden from the server" in str(clients.inner_products(gradients, multiply_rows))


def test_a_sum_of_curvature_that_stays_closed_is_the_one_that_was_opened(tmp_path: Path) -> None:
    """With a member fewer it would show who that is; another form of it stands in for nothing."""
    clients = flower_clients(memory_grid(convex(5), task(), tmp_path), task(), hidden=SecureSums())
    x, fewer = torch.zeros(clients.model.size, dtype=torch.float64), clients.subset([0, 1, 2, 3])
    whole = clients.curvature_sum(x, np.full(5, 0.2), "diagonal")
    found = fewer.curvature_sum(x, np.full(4, 0.25), "diagonal")
    assert isinstance(whole, CurvatureSum) and isinstance(found, CurvatureSum)
    torch.testing.assert_close(found.blocks, whole.blocks, rtol=1e-12, atol=0)
    assert "cannot be opened" in str(fewer.curvature_sum(x, np.full(4, 0.25), "blocks"))


# -- bounds that every client tells of itself ----------------------------------------------------


def play(clients: Any) -> History:
    x = torch.zeros(clients.model.size, dtype=torch.float64)
    return train(ScaffPD(ChiSquare(0.1)), clients, rounds=6, x=x)


def assert_same(found: History, expected: History) -> None:
    for key, value in (expected.parameters or {}).items():
        torch.testing.assert_close((found.parameters or {})[key], value, rtol=0, atol=1e-9)
    for a, b in zip(found.rounds, expected.rounds, strict=True):
        assert a.numbers == pytest.approx(b.numbers, rel=1e-7)


@pytest.mark.parametrize("privacy", HIDDEN)
@pytest.mark.parametrize("classes", [2, 3])
def test_automatic_steps_are_those_of_a_simulation(
    privacy: str, classes: int, tmp_path: Path
) -> None:
    """Two classes have a tight bound from the data, three are measured."""
    data = convex(classes=classes)
    clients = flower_clients(memory_grid(data, task(), tmp_path), task(), hidden=HIDDEN[privacy]())
    here = loop_clients(data, task())
    told, known = clients.curvature(), here.curvature()
    assert isinstance(told, Curvature) and isinstance(known, Curvature)
    np.testing.assert_array_equal(told.smoothness, known.smoothness)
    np.testing.assert_array_equal(told.strong_convexity, known.strong_convexity)
    assert (told.tight, told.lowest) == (known.tight, known.lowest) == (classes == 2, 0.0)
    assert_same(play(clients), play(here))


def test_a_site_may_keep_its_bounds_and_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once, and the steps are the same where sums are hidden."""
    data, found = convex(classes=2), []
    monkeypatch.setattr(Worker, "bounds", lambda self: self.request.reply({}))
    for privacy in HIDDEN.values():
        grid = memory_grid(data, task(), tmp_path / str(privacy))
        clients = flower_clients(grid, task(), hidden=privacy())
        told = clients.curvature()
        assert isinstance(told, Curvature) and not told.tight
        assert np.isinf(told.smoothness).all() and (told.strong_convexity == 1e-3).all()
        found.append(play(clients))
        assert sum(m.metadata.message_type == "query.bounds" for m in grid.sent) == 4
    assert_same(*found)
    true = float(loop_clients(data, task()).curvature().smoothness.max())  # type: ignore[union-attr]
    assert 0.9 * true < found[0].rounds[0].numbers["smoothness"] < 1.001 * true


@pytest.mark.parametrize(
    "lie",
    [{"smoothness": 0.5}, {"smoothness": -1.0}, {"strong_convexity": -1.0}, {"smoothness": "x"}],
    ids=repr,
)
def test_bounds_that_no_loss_has_count_as_none(lie: dict[str, Any], grid: MemoryGrid) -> None:
    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition != 2 or request.metadata.message_type != "query.bounds":
            return [reply]
        told = Reply.from_records(reply.content)
        numbers = {**told.numbers, "strong_convexity": 1.0, **lie}
        return [Message(replace(told, numbers=numbers).to_records(), reply_to=request)]

    grid.tamper = tamper
    told = flower_clients(grid, task()).curvature()
    assert isinstance(told, Curvature) and np.isinf(told.smoothness).tolist() == [0, 0, 1, 0]
    assert told.strong_convexity[2] == 1e-3
