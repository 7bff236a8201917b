"""Errors, silence, stale, non-finite, wrongly shaped and duplicate replies; policies; memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Error, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripts.trust.replies import judge_many, run_many
from tests.flower.grid import (
    QUICK,
    MemoryGrid,
    convex,
    flower_clients,
    loop_clients,
    memory_grid,
    task,
)

from equifed.algorithms.guard import Guarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.flower.app import RoundLog
from equifed.flower.client import make_client_app
from equifed.flower.mailbox import Deadlines
from equifed.flower.members import Hello
from equifed.flower.messenger import SecureSums
from equifed.flower.wire import PACK_LIMIT, Reply, Request, WireError
from equifed.objectives import ChiSquare
from equifed.steps.schedules import ConstantSteps
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import TrainingError

pytestmark = pytest.mark.long

SCAFF_PD = ScaffPD(
    ChiSquare(0.5, scale=1.0), LocalSGD(lr=0.1, steps=3, batch_size=5), ConstantSteps(0.4, 0.5)
)
STREAM = Stream(0).at("round", 1, "gradient")
CONTINUE = replace(QUICK, on_missing="continue", quorum=0.5)


@pytest.fixture
def grid(tmp_path: Path) -> MemoryGrid:
    return memory_grid(convex(), task(), tmp_path / "memory")


def close(found: History, expected: History, atol: float = 1e-10) -> None:
    assert found.parameters is not None and expected.parameters is not None
    for key, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[key], value, rtol=0, atol=atol)


def changed(message: Message, change: Callable[[Reply], Reply], request: Message) -> Message:
    return Message(change(Reply.from_records(message.content)).to_records(), reply_to=request)


def only(client: int, kind: str, act: Callable[[Message, Message], list[Message]]) -> Any:
    """Tamper with the replies of one client to one kind of message."""

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition == client and request.metadata.message_type == kind:
            return act(request, reply)
        return [reply]

    return tamper


def with_numbers(**numbers: Any) -> Callable[[Message, Message], list[Message]]:
    return lambda request, reply: [
        changed(reply, lambda r: replace(r, numbers={**r.numbers, **numbers}), request)
    ]


def with_gradient(make: Callable[[Any], Any]) -> Callable[[Message, Message], list[Message]]:
    return lambda request, reply: [
        changed(
            reply, lambda r: replace(r, arrays={"gradient": make(r.arrays["gradient"])}), request
        )
    ]


UNUSABLE = {
    "error": (lambda q, r: [Message(Error(2, "secret-42"), reply_to=q)], "Flower reports error 2"),
    "silence": (lambda q, r: [], "no answer within"),
    "nan loss": (with_numbers(loss=float("nan")), "loss is nan"),
    "infinite loss": (with_numbers(loss=float("inf")), "loss is inf"),
    "text for a loss": (with_numbers(loss="1"), "loss is not a number"),
    "nan in a vector": (with_gradient(lambda g: g * np.nan), "squared gradient norm is nan"),
    "overflowing vector": (with_gradient(lambda g: g * 0 + 1e200), "squared gradient norm is inf"),
    "wrong length": (with_gradient(lambda g: g[:-1]), "expected float64 of shape (18,)"),
    "wrong dtype": (with_gradient(lambda g: g.astype(np.float32)), "expected float64"),
    "wrong rank": (with_gradient(lambda g: g[None]), "expected float64 of shape (18,)"),
    "always another request's": (
        lambda q, r: [changed(r, lambda a: replace(a, tag="round/0/gradient#0"), q)],
        "answered another request",
    ),
    "another run's": (
        lambda q, r: [changed(r, lambda a: replace(a, run="other"), q)],
        "answered another request",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_answer_names_the_client_and_the_reason(case: str, grid: MemoryGrid) -> None:
    act, reason = UNUSABLE[case]
    clients = flower_clients(grid, task(), replace(QUICK, timeout=0.05))
    grid.tamper = only(2, "train.gradient", act)
    x = clients.initial(Stream(0))
    with pytest.raises(MissingClients) as caught:
        clients.value_and_gradient(x, STREAM)
    assert list(caught.value.reasons) == [2]
    assert reason in caught.value.reasons[2]
    assert "secret" not in str(caught.value)


def test_a_stale_answer_is_not_trusted(grid: MemoryGrid) -> None:
    clients, answers = flower_clients(grid, task()), iter([True, False])

    def once(request: Message, reply: Message) -> list[Message]:
        if not next(answers):
            return [reply]
        old = replace(Reply.from_records(reply.content), tag="round/0/gradient#0")
        return [Message(replace(old, numbers={"loss": 1e9}).to_records(), reply_to=request)]

    grid.tamper = only(1, "train.gradient", once)
    x = clients.initial(Stream(0))
    with pytest.raises(MissingClients) as caught:
        clients.value_and_gradient(x, STREAM)
    assert caught.value.reasons == {1: "answered another request"}
    losses, _ = clients.value_and_gradient(x, STREAM)
    expected, _ = loop_clients(convex(), task()).value_and_gradient(x, STREAM)
    np.testing.assert_array_equal(losses, expected)


def test_duplicate_and_foreign_replies_are_dropped(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task())

    def twice(request: Message, reply: Message) -> list[Message]:
        second = changed(reply, lambda r: replace(r, numbers={"loss": 1e9}), request)
        foreign = changed(reply, lambda r: r, request)
        foreign.metadata.__dict__["_reply_to_message_id"] = "nobody asked"
        return [reply, second, foreign]

    grid.tamper = only(1, "train.gradient", twice)
    x = clients.initial(Stream(0))
    losses, _ = clients.value_and_gradient(x, STREAM)
    expected, _ = loop_clients(convex(), task()).value_and_gradient(x, STREAM)
    np.testing.assert_array_equal(losses, expected)
    assert clients.mailbox.dropped == 2


def test_the_text_of_an_exception_stays_on_the_client(tmp_path: Path) -> None:
    federation, calls = convex(), iter(range(100))

    def load(context: Context) -> Any:
        if context.node_config["partition-id"] == 1 and next(calls) > 0:
            raise ValueError("patient 17 is called secret-42")
        return federation.subset([int(context.node_config["partition-id"])])

    grid = memory_grid(federation, task(), tmp_path)
    for node in grid.apps:
        grid.apps[node] = make_client_app(load, task(), memory=tmp_path)
    clients = flower_clients(grid, task())
    grid.contexts = {n: replace_run(c) for n, c in grid.contexts.items()}
    with pytest.raises(MissingClients, match="data: ValueError while loading") as caught:
        clients.losses(clients.initial(Stream(0)), STREAM)
    assert list(caught.value.reasons) == [1]
    heard = [str(m.content.config_records["equifed"]) for m in grid.received]
    assert not any("secret" in text for text in heard)


def replace_run(context: Context) -> Context:
    """Return the context of another Flower run, for which nothing is cached."""
    return Context(2, context.node_id, context.node_config, context.state, context.run_config)


# -- policies ---------------------------------------------------------------------------------


def test_continue_equals_training_without_the_missing_client(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), replace(CONTINUE, grace=0.0))
    grid.tamper = lambda partition, request, reply: [] if partition == 1 else [reply]
    found = train(SCAFF_PD, clients, rounds=3, missing=CONTINUE.to_policy())
    others = loop_clients(convex(), task()).subset([0, 2, 3])
    close(found, train(SCAFF_PD, others, rounds=3))
    lost = [(e["round"], e["client"]) for e in found.events if e["event"] == "quarantine"]
    assert lost == [(1, "client-1"), (2, "client-1"), (3, "client-1")]


def test_a_client_that_is_not_connected_costs_no_time_under_continue(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), replace(CONTINUE, timeout=1e6, grace=1e6))
    grid.offline.add(clients.mailbox.nodes[2])
    sent = len(grid.sent)
    with pytest.raises(MissingClients, match="not connected"):
        clients.losses(clients.initial(Stream(0)), STREAM)
    assert len(grid.sent) == sent  # nobody works for a round that will be repeated
    grid.offline.clear()
    assert len(clients.losses(clients.initial(Stream(0)), STREAM)) == 4


def test_fewer_than_the_quorum_stop_the_run(grid: MemoryGrid) -> None:
    deadlines = replace(CONTINUE, quorum=0.75)
    clients = flower_clients(grid, task(), deadlines)
    grid.tamper = lambda partition, request, reply: [] if partition in (0, 1) else [reply]
    with pytest.raises(TrainingError, match="fewer than the quorum of 75%"):
        train(SCAFF_PD, clients, rounds=2, missing=deadlines.to_policy())


def test_fail_stops_at_once(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), replace(QUICK, timeout=0.05))
    grid.tamper = only(0, "train.local", lambda q, r: [])
    with pytest.raises(TrainingError, match="The policy for missing clients is 'fail'"):
        train(SCAFF_PD, clients, rounds=2, missing=QUICK.to_policy())


@pytest.mark.parametrize("how", ["error", "silence", "disconnect"])
def test_wait_asks_again_until_the_client_is_back(how: str, grid: MemoryGrid) -> None:
    deadlines = replace(QUICK, on_missing="wait", timeout=0.03, wait=5.0)
    clients = flower_clients(grid, task(), deadlines)
    troubles, node = iter([True, True, False]), clients.mailbox.nodes[3]

    def trouble(request: Message, reply: Message) -> list[Message]:
        if not next(troubles, False):
            grid.offline.discard(node)
            return [reply]
        if how == "disconnect":
            grid.offline.add(node)
            grid.get_node_ids = lambda: grid.offline.clear() or {*grid.apps}  # type: ignore
        return [Message(Error(5), reply_to=request)] if how == "error" else []

    grid.tamper = only(3, "train.local", trouble)
    found = train(SCAFF_PD, clients, rounds=3, missing=deadlines.to_policy())
    close(found, train(SCAFF_PD, loop_clients(convex(), task()), rounds=3))
    assert [e["event"] for e in found.events] == ["given out"]


def test_wait_ends_and_says_who_is_waited_for(
    grid: MemoryGrid, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = replace(QUICK, on_missing="wait", timeout=0.1, wait=1.0)
    clients = flower_clients(grid, task(), deadlines)
    grid.tamper = only(3, "evaluate.losses", lambda q, r: [])
    with pytest.raises(MissingClients, match="no answer"):
        clients.losses(clients.initial(Stream(0)), STREAM)
    (line,) = capsys.readouterr().out.splitlines()  # once, then every 30 s
    assert line == "equifed: waiting for 1 of 4 sites: client-3 (no answer within 0 s)"
    monkeypatch.setattr("equifed.flower.mailbox.WAIT_LINE", 0.005)
    with pytest.raises(MissingClients, match="no answer"):
        clients.losses(clients.initial(Stream(0)), STREAM)
    assert "waiting for 1 of 4 sites: client-3 (0 s)" in capsys.readouterr().out


def test_a_client_that_comes_back_as_another_node_is_found(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task())
    before = clients.mailbox.nodes[1]
    grid.apps[77] = grid.apps.pop(before)
    grid.contexts[77] = Context(1, 77, grid.contexts.pop(before).node_config, {}, {})  # type: ignore
    found = train(SCAFF_PD, clients, rounds=2)
    close(found, train(SCAFF_PD, loop_clients(convex(), task()), rounds=2))
    assert clients.mailbox.nodes[1] == 77


def test_absent_clients_have_no_numbers_in_an_evaluation(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), CONTINUE)
    grid.tamper = only(1, "evaluate.metrics", lambda q, r: [])
    train_split, _ = clients.evaluate(clients.initial(Stream(0)))
    assert np.isnan(train_split.metrics["loss"]).tolist() == [False, True, False, False]
    assert train_split.sizes[1] == 0


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [lambda: None, SecureSums], ids=["none", "secure"])
def test_a_client_that_lost_its_memory_is_asked_again(
    hidden: Any, grid: MemoryGrid, tmp_path: Path
) -> None:
    clients = flower_clients(grid, task(), hidden=hidden())

    kinds = {"train.gradient", "query.sum", "train.local"}

    def forget(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition == 3 and request.metadata.message_type in kinds:  # once after each phase
            kinds.remove(request.metadata.message_type)
            for path in (tmp_path / "memory").rglob("*.vector"):
                path.unlink()
        return [reply]

    grid.tamper = forget
    found = train(SCAFF_PD, clients, rounds=3)
    close(found, train(SCAFF_PD, loop_clients(convex(), task()), rounds=3))
    assert kinds <= {"query.sum"}  # which privacy "none" does not use


def test_a_damaged_memory_is_not_used(grid: MemoryGrid, tmp_path: Path) -> None:
    clients = flower_clients(grid, task())

    def damage(partition: int, request: Message, reply: Message) -> list[Message]:
        if request.metadata.message_type == "train.gradient":
            for path in (tmp_path / "memory").rglob("*.vector"):
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(bytes(content))
        return [reply]

    grid.tamper = damage
    found = train(SCAFF_PD, clients, rounds=2)
    close(found, train(SCAFF_PD, loop_clients(convex(), task()), rounds=2))


def test_old_vectors_are_deleted(grid: MemoryGrid, tmp_path: Path) -> None:
    train(Scaffold(LocalSGD(lr=0.1, steps=2)), flower_clients(grid, task()), rounds=12)
    kept = list((tmp_path / "memory").rglob("*.vector"))
    assert 0 < len(kept) <= 4 * 2 * 5  # four clients, two vectors a round, the last rounds only


@pytest.mark.long
@pytest.mark.parametrize("hidden", [lambda: None, SecureSums], ids=["none", "secure"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(
    hidden: Any, grid: MemoryGrid, tmp_path: Path
) -> None:
    # Three of four: a sum of two is not opened where sums are hidden.
    algorithm = Scaffold(LocalSGD(lr=0.1, steps=3, batch_size=5), participation=0.75)
    expected = train(algorithm, loop_clients(convex(), task()), rounds=6)
    folder = RunFolder(tmp_path / "run", convex().names)
    folder.create()
    train(algorithm, flower_clients(grid, task(), hidden=hidden()), rounds=3, folder=folder)
    (folder.path / "summary.json").unlink()
    again = flower_clients(grid, task(), hidden=hidden())  # a new server, the old clients
    found = train(algorithm, again, rounds=6, folder=folder, resume=True)
    close(found, expected)


@pytest.mark.long
def test_a_memory_that_cannot_be_remade_is_reported(grid: MemoryGrid, tmp_path: Path) -> None:
    algorithm = Scaffold(LocalSGD(lr=0.1, steps=3, batch_size=5))
    folder = RunFolder(tmp_path / "run", convex().names)
    folder.create()
    train(algorithm, flower_clients(grid, task(), hidden=SecureSums()), rounds=3, folder=folder)
    shutil.rmtree(tmp_path / "memory")
    again = flower_clients(grid, task(), hidden=SecureSums())
    with pytest.raises(TrainingError, match="stale: this client does not hold round/3/local"):
        train(algorithm, again, rounds=6, folder=folder, resume=True)


# -- ledger -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("hidden", "exchanges"),
    [(lambda: None, [3, 2, 2]), (SecureSums, [9, 5, 5])],  # bounds of the curvature are asked once
    ids=["none", "secure"],
)
def test_exchanges_and_bytes_of_a_scaff_pd_round(
    hidden: Any, exchanges: list[int], grid: MemoryGrid
) -> None:
    clients = flower_clients(grid, task(), hidden=hidden())
    start = len(grid.sent), len(grid.received)
    history = train(SCAFF_PD, clients, rounds=3)
    assert [record.exchanges for record in history.rounds] == exchanges
    sent = sum(_payload(m) for m in grid.sent[start[0] :])
    received = sum(_payload(m) for m in grid.received[start[1] :])
    assert (clients.traffic.down.sum(), clients.traffic.up.sum()) == (sent, received)
    vectors = 2 * 3 * 4 * clients.model.size * 8  # two vectors up a round from each of 4 clients
    each = 2 * (2 * 66 + 16) + 2 * (2 * 32 + 4)  # boxes as text, and two digests
    shares = 2 * 16 * 4 * 4 * each if hidden is SecureSums else 0
    assert vectors < received < vectors + shares + 20_000


def _payload(message: Message) -> int:
    total = 0
    for record in message.content.values():
        for key, value in record.items():
            total += len(key) + len(value if isinstance(value, str | bytes) else value.data)
    return total


# -- fuzz -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def test_an_accuracy_of_seven_is_no_answer(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), QUICK)

    def boast(request: Message, reply: Message) -> list[Message]:
        record = reply.content.config_records["equifed"]
        header = json.loads(str(record["header"]))
        for table in header["numbers"]["splits"].values():
            table["metrics"]["accuracy"] = 7.0
        record["header"] = json.dumps(header)
        return [reply]

    grid.tamper = only(1, "evaluate.metrics", boast)
    with pytest.raises(
        MissingClients, match=r"accuracy is 7\.0, and a fraction lies in"
    ) as missing:
        clients.evaluate(clients.initial(Stream(0)))
    assert list(missing.value.reasons) == [1]


def without_test_samples(client: int, metrics: dict[str, Any]) -> Any:
    """Let one client say hello without test samples, and then send metrics of them."""

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        told = Reply.from_records(reply.content)
        if partition == client and told.op == "hello":
            told.numbers["sizes"]["test"] = 0
        elif partition == client and told.op == "metrics":
            told.numbers["splits"]["test"] = {"size": 0, "metrics": metrics}
        return [Message(told.to_records(), reply_to=request)]

    return tamper


@pytest.mark.parametrize(
    "value", ["text", 0.5, 10**400, None, True, [1.0], float("inf")], ids=lambda v: str(v)[:5]
)
def test_metrics_of_no_samples_are_no_answer(value: Any, grid: MemoryGrid) -> None:
    grid.tamper = without_test_samples(2, {"loss": value})
    clients = flower_clients(grid, task())
    with pytest.raises(MissingClients, match="test loss is a value measured on no") as missing:
        clients.evaluate(clients.initial(Stream(0)))
    assert list(missing.value.reasons) == [2]
    grid.tamper = without_test_samples(2, {"loss": float("nan"), "accuracy": float("nan")})
    _, test = clients.evaluate(clients.initial(Stream(0)))  # what an honest client sends
    assert np.isnan(test.metrics["loss"]).tolist() == [False, False, True, False]


def test_text_as_metrics_of_no_samples_ends_no_run(
    grid: MemoryGrid, capsys: pytest.CaptureFixture[str]
) -> None:
    grid.tamper = without_test_samples(2, {"loss": "text"})
    clients = flower_clients(grid, task(), CONTINUE)
    log = RoundLog(clients.members.events)
    history = train(SCAFF_PD, clients, rounds=2, evaluate=["test"], callbacks=[log])
    assert len(history.rounds) == 2
    told = [(e["round"], e["client"], e["reason"]) for e in history.events if e["event"] == "note"]
    reason = "its evaluation was not used: test loss is a value measured on no samples"
    assert told == [(r, "client-2", reason) for r in range(3)]
    assert f"WARNING: round 2: note of client-2: {reason}" in capsys.readouterr().out


FUZZED = {
    "evaluate.losses": "loss",
    "train.gradient": "loss",
    "train.local": "steps",
    "evaluate.metrics": "splits",
}


@pytest.mark.long
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(sorted(FUZZED)),
    key=st.sampled_from(["inner", "numbers", "error", "text", "tag", "op", "protocol", "arrays"]),
    value=JSON,
)
def test_any_reply_is_a_usable_answer_or_a_missing_client(
    kind: str, key: str, value: Any, grid: MemoryGrid
) -> None:
    if not hasattr(grid, "clients"):
        grid.clients = flower_clients(grid, task(), replace(QUICK, timeout=0.02))  # type: ignore
    clients = grid.clients  # type: ignore[attr-defined]

    def fuzz(request: Message, reply: Message) -> list[Message]:
        record = reply.content.config_records["equifed"]
        header = json.loads(str(record["header"]))
        if key == "inner":
            header["numbers"][FUZZED[kind]] = value
        else:
            header[key] = value
        record["header"] = json.dumps(header)
        if key == "arrays" and "data" in record:
            del record["data"]
        return [reply]

    grid.tamper = only(1, kind, fuzz)
    x, two = clients.initial(Stream(0)), clients.subset([0, 1])
    try:
        if kind == "evaluate.losses":
            assert np.isfinite(two.losses(x, STREAM)).all()
        elif kind == "train.gradient":
            losses, gradients = two.value_and_gradient(x, STREAM)
            assert np.isfinite(losses).all() and np.isfinite(gradients.squared_norms()).all()
        elif kind == "train.local":
            moved = two.local_steps(x, LocalSGD(lr=0.1, steps=1), STREAM)
            assert torch.isfinite(moved.displacement.weighted_sum(np.array([0.5, 0.5]))).all()
        else:
            for evaluation in clients.evaluate(x):
                assert all(np.isfinite(values).all() for values in evaluation.metrics.values())
    except MissingClients as missing:
        assert list(missing.reasons) == [1]


def test_malformed_replies_are_refused_by_name_and_end_no_run(tmp_path: Path) -> None:
    judged = judge_many(300, 1, tmp_path / "judged")
    assert judged["kinds of request"] >= 10 and judged["refused, by name"] > 200
    ran = run_many(30, 1, tmp_path / "runs")
    assert ran["malformed replies"] >= 30 and ran["runs finished"] > 0
    assert not [k for k, n in (judged + ran).items() if k.isupper() and n], (judged, ran)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"loss": -0.5}, "loss is -0.5, and cannot be below"),
        ({"loss": 1e39}, r"loss is 1e\+39, which no float32 can hold"),
    ],
)
def test_a_loss_that_the_model_cannot_have_is_no_answer(
    numbers: dict[str, float], message: str, tmp_path: Path
) -> None:
    single = task(dtype="float32")
    grid = memory_grid(convex(), single, tmp_path)
    clients = flower_clients(grid, single)
    grid.tamper = only(1, "evaluate.losses", with_numbers(**numbers))
    with pytest.raises(MissingClients, match=message) as missing:
        clients.losses(clients.initial(Stream(0)), STREAM)
    assert list(missing.value.reasons) == [1]


@pytest.mark.long
@pytest.mark.parametrize("broken", [1, 3, 5])
def test_clients_that_send_nan_are_quarantined_and_the_model_stays_finite(
    broken: int, tmp_path: Path
) -> None:
    grid = memory_grid(convex(10), task(), tmp_path)
    clients = flower_clients(grid, task(), CONTINUE)
    bad = set(range(0, 2 * broken, 2))
    change = with_gradient(lambda g: g * np.nan)
    grid.tamper = lambda partition, request, reply: (
        change(request, reply)
        if partition in bad and request.metadata.message_type == "train.gradient"
        else [reply]
    )
    found = train(SCAFF_PD, clients, rounds=2, missing=CONTINUE.to_policy())
    lost = {(e["round"], e["client"]) for e in found.events if e["event"] == "quarantine"}
    assert lost == {(r, f"client-{i}") for r in (1, 2) for i in bad}
    assert found.parameters is not None
    assert all(torch.isfinite(value).all() for value in found.parameters.values())


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(
    numbers=st.fixed_dictionaries(
        {
            "name": JSON,
            "partition": JSON,
            "versions": JSON | st.dictionaries(st.text(max_size=3), JSON, max_size=2),
            "sizes": JSON | st.just({"train": 3}),
            "schema": JSON
            | st.fixed_dictionaries(
                {
                    "input_shape": JSON,
                    "input_dtype": JSON,
                    "target_shape": JSON,
                    "target_dtype": JSON,
                    "classes": JSON,
                }
            ),
            "model": JSON,
            "key": JSON,
        }
    )
)
def test_any_hello_is_read_or_refused(numbers: dict[str, Any]) -> None:
    try:
        hello = Hello.from_reply(Reply("hello", "run", "tag", numbers))
    except WireError:
        return
    assert hello.sizes["train"] > 0 and hello.name


def test_wire_round_trip_is_exact_and_sizes_are_checked() -> None:
    arrays = {"x": np.array([1 / 3, -0.0, 5e-324]), "m": np.array([2**64 - 1], dtype=np.uint64)}
    request = Request("local", "run", "round/1#0", 3, {"slope": 0.1 + 0.2}, arrays)
    back = Request.from_records(request.to_records())
    assert back.args == request.args and back.client == 3
    for name, array in arrays.items():
        assert back.arrays[name].tobytes() == array.tobytes()
    content = request.to_records()
    record = content.config_records["equifed"]
    record["index"] = str(record["index"]).replace("[3]", "[4]")
    with pytest.raises(WireError, match="does not have the size that it states"):
        Request.from_records(content)


@given(st.integers(0, 3 * PACK_LIMIT // 8))
@settings(deadline=None, max_examples=20)
def test_small_arrays_travel_with_the_header_and_large_ones_do_not(size: int) -> None:
    arrays = {"x": np.arange(size, dtype=np.float64), "y": np.zeros(2, dtype=np.float32)}
    content = Request("losses", "run", "tag", 0, {}, arrays).to_records()
    assert ("arrays" in content) == (8 * size + 8 > PACK_LIMIT)
    back = Request.from_records(content)
    assert all(back.arrays[k].tobytes() == v.tobytes() for k, v in arrays.items())
    if "arrays" in content:
        content.array_records["arrays"]["x"].shape = (size + 1,)
        with pytest.raises(WireError, match="does not have the size that it states"):
            Request.from_records(content)


def test_deadlines_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="on_missing must be"):
        Deadlines("hope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be"):
        Deadlines(timeout=float("nan"))
    with pytest.raises(ValueError, match="quorum must be"):
        Deadlines(quorum=1.5)


# -- guards ----------------------------------------------------------------------------------------


def named(history: History, kind: str) -> set[str]:
    return {event["client"] for event in history.events if event["event"] == kind}


def test_a_guard_names_the_liar_and_bounds_its_weight(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task())
    grid.tamper = only(2, "train.gradient", with_numbers(loss=1e6))
    history = train(Guarded(SCAFF_PD), clients, rounds=4, evaluate=("train",))
    assert named(history, "guard") == {"client-2"}
    assert max(w.max() for w in history.weights.values()) <= 0.5 + 1e-9  # two of four shares
    assert not named(history, "quarantine")


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_vector_that_would_make_everybody_overflow_costs_its_sender_alone(
    tmp_path: Path, dtype: str, guarded: bool
) -> None:
    grid = memory_grid(convex(), task(dtype=dtype), tmp_path / "memory")
    clients = flower_clients(grid, task(dtype=dtype))
    grid.tamper = only(2, "train.gradient", with_gradient(lambda g: (g + 1) * g.dtype.type(1e30)))
    history = train(Guarded(SCAFF_PD) if guarded else SCAFF_PD, clients, rounds=4)
    assert named(history, "quarantine") | named(history, "guard") == {"client-2"}
    assert max(float(v.abs().max()) for v in (history.parameters or {}).values()) < 100


def test_hidden_sums_say_that_lengths_are_not_guarded(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    events = train(Guarded(SCAFF_PD), clients, rounds=2).events
    notes = [event["reason"] for event in events if event["event"] == "note"]
    assert "sums are hidden: the lengths of updates are not guarded" in notes
