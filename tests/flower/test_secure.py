"""Hidden sums: what is computed, what it costs in accuracy, and what the server sees."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flower.grid import (
    QUICK,
    MemoryGrid,
    convex,
    flower_clients,
    loop_clients,
    memory_grid,
    task,
)

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.absence import Memory, Recall
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors
from equifed.flower import messenger as messenger_module
from equifed.flower.messenger import SecureSums
from equifed.flower.secure.ledger import Ledger, PrivacyError, Sum
from equifed.flower.secure.session import (
    Epoch,
    Published,
    RangeError,
    SecureError,
    WrongSecret,
    expand_mask,
    from_fixed,
    majority,
    make_pair_mask,
    make_public_key,
    open_sum,
    rebuild_secret,
    share_secret,
    to_fixed,
    worst_error,
)
from equifed.flower.wire import Reply
from equifed.training.keys import KeyProblem, read_key_file
from equifed.training.loop import train
from equifed.training.play_round import Witness

pytestmark = pytest.mark.long

STREAM = Stream(0).at("round", 1, "gradient")


# -- fixed point and masks --------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-1e5, 1e5), min_size=3, max_size=3), min_size=1, max_size=8))
def test_the_error_of_a_fixed_point_sum_is_below_its_bound(rows: list[list[float]]) -> None:
    vectors = np.array(rows)
    words = sum((to_fixed(v, len(rows)) for v in vectors), np.zeros(3, dtype=np.uint64))
    exact = [float(sum(map(Fraction, column))) for column in vectors.T]
    assert np.abs(from_fixed(words) - exact).max() <= worst_error(len(rows)) + 1e-10


@pytest.mark.parametrize("value", [2.0**23 / 3, -(2.0**30), np.inf, np.nan])
def test_what_does_not_fit_is_refused_and_never_clipped(value: float) -> None:
    to_fixed(np.array([2.0**23 / 3 * 0.999]), terms=3)
    with pytest.raises(RangeError, match="not below"):
        to_fixed(np.array([0.0, value]), terms=3)


def test_pair_masks_cancel_in_the_sum_of_all_and_of_nothing_less() -> None:
    secrets = {i: bytes([i + 1]) * 32 for i in (0, 2, 5, 9)}
    publics = {i: make_public_key(secret) for i, secret in secrets.items()}
    masks = {i: make_pair_mask(s, i, publics, "sum", 1000) for i, s in secrets.items()}
    for size in range(1, 5):
        for group in itertools.combinations(masks, size):
            total = sum((masks[i] for i in group), np.zeros(1000, dtype=np.uint64))
            assert (total == 0).all() == (size == 4)
            if size < 4:  # uniform words: the top bit is a coin
                assert 0.4 < (total >> np.uint64(63)).mean() < 0.6


@settings(deadline=None, max_examples=30)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.data())
def test_any_threshold_of_shares_rebuild_and_fewer_do_not(
    secret: bytes, randomness: bytes, data: st.DataObject
) -> None:
    holders = data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=9, unique=True))
    t = data.draw(st.integers(2, len(holders)))
    shares = share_secret(secret, randomness, holders, t)
    chosen = data.draw(st.permutations(holders))
    assert rebuild_secret({i: shares[i] for i in chosen[:t]}) == secret
    with contextlib.suppress(ValueError):  # most often what too few give is not a secret at all
        assert rebuild_secret({i: shares[i] for i in chosen[: t - 1]}) != secret


# -- the protocol, without Flower -------------------------------------------------------------


def protocol(
    n: int, lost_before: set[int], lost_after: set[int], slot: int = 1
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Run all four steps with clients lost before and after sending; return sum and vectors."""
    rng, members = np.random.default_rng(n), [3 * i for i in range(n)]
    vectors = rng.normal(size=(n, 20))
    epochs = {i: Epoch("e", i, bytes([i + 1]) * 32, slots=2) for i in members}
    published = {i: epoch.publish() for i, epoch in epochs.items()}
    boxes = {i: epoch.share(published)[0] for i, epoch in epochs.items()}
    masked = {
        i: epochs[i].mask(to_fixed(vectors[k], n), slot, published)
        for k, i in enumerate(members)
        if k not in lost_before
    }
    answers = {
        i: epochs[i].unmask(slot, published, {j: boxes[j][i][slot] for j in members if j != i})
        for k, i in enumerate(members)
        if k not in lost_before | lost_after
    }
    return from_fixed(open_sum(masked, answers, slot, published)), vectors


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_tolerable_loss_after_sending_is_recovered(n: int) -> None:
    for after in range(n - majority(n) + 1):
        found, vectors = protocol(n, set(), set(range(after)))
        atol = worst_error(n) + 1e-12
        np.testing.assert_allclose(found, vectors.sum(axis=0), rtol=0, atol=atol)


def test_a_sum_without_somebody_s_vector_stays_closed() -> None:
    with pytest.raises(SecureError, match="a vector is missing"):
        protocol(5, {2}, set())


def test_too_many_losses_leave_the_sum_closed() -> None:
    with pytest.raises(SecureError, match="2 clients answered the last step, 3 are needed"):
        protocol(5, set(), {0, 1, 2})


def test_a_client_refuses_what_would_open_its_vector() -> None:
    epochs = {i: Epoch("e", i, bytes([i + 1]) * 32, slots=1) for i in range(3)}
    published = {i: epoch.publish() for i, epoch in epochs.items()}
    boxes = {j: epochs[j].share(published)[0][0][0] for j in (1, 2)}
    with pytest.raises(SecureError, match="changed on its way"):
        epochs[0].unmask(0, published, {**boxes, 1: boxes[2]})
    assert set(epochs[0].unmask(0, published, {2: boxes[2]})) == {0, 2}
    with pytest.raises(SecureError, match="own keys"):
        swapped = {**published, 0: Published(b"x" * 32, (b"y" * 32,), (b"z" * 32,))}
        epochs[0].share(swapped)


# -- on the grid ------------------------------------------------------------------------------


@pytest.fixture
def grid(tmp_path: Path) -> MemoryGrid:
    return memory_grid(convex(5, d=60), task(), tmp_path / "memory")


def server_view(grid: MemoryGrid) -> list[np.ndarray[Any, Any]]:
    """Return every array that the server received, and every long text as bytes."""
    found = []
    for message in grid.received:
        reply = Reply.from_records(message.content)
        found += list(reply.arrays.values())
    return found


WEIGHTS = np.array([0.4, 0.25, 0.2, 0.1, 0.05])


def exposed(vectors: torch.Tensor, seen: list[np.ndarray[Any, Any]]) -> set[int]:
    """Return whose vector, or multiple of it, is among the arrays, as floats or in fixed point."""
    out = set()
    for array in seen:
        if array.dtype == np.uint64:
            # Whatever the scale: compare directions of the numbers that the words stand for.
            array = from_fixed(array)
        for i, vector in enumerate(vectors.numpy()):
            scale = np.linalg.norm(array) * np.linalg.norm(vector)
            if len(array) == len(vector) and abs(array @ vector) > 0.5 * scale:
                out.add(i)
    return out


@pytest.mark.parametrize(
    ("hidden", "visible"),
    [(None, {0, 1, 2, 3, 4}), (SecureSums(slots=2), set())],
    ids=["none", "secure"],
)
def test_no_vector_is_in_what_the_server_receives(
    hidden: Any, visible: set[int], grid: MemoryGrid
) -> None:
    federation, the_task = convex(5, d=60), task()
    clients = flower_clients(grid, the_task, hidden=hidden)
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    total = gradients.weighted_sum(WEIGHTS)
    _, dense = loop_clients(federation, the_task).value_and_gradient(x, STREAM)
    assert isinstance(dense, DenseVectors)
    torch.testing.assert_close(total, dense.weighted_sum(WEIGHTS), rtol=0, atol=worst_error(5))
    assert exposed(dense.matrix, server_view(grid)) == visible


def test_the_server_cannot_open_a_single_vector_with_all_it_got(grid: MemoryGrid) -> None:
    """With every own mask rebuilt from shares, only the sum of all is free of pair masks."""
    federation, the_task, sums = convex(5, d=60), task(), SecureSums(slots=2)
    clients = flower_clients(grid, the_task, hidden=sums)
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    total = gradients.weighted_sum(WEIGHTS)
    masked, shares = {}, dict[int, dict[int, bytes]]()
    for message in grid.received:
        reply = Reply.from_records(message.content)
        client = {v: k for k, v in clients.mailbox.nodes.items()}[message.metadata.src_node_id]
        if reply.op == "sum":
            masked[client] = reply.arrays["masked"]
        if reply.op == "unmask":
            shares[client] = {int(j): bytes.fromhex(s) for j, s in reply.numbers["shares"].items()}
    rebuilt = {j: rebuild_secret({i: shares[i][j] for i in shares}) for j in range(5)}
    opened = {j: masked[j] - expand_mask(rebuilt[j], len(masked[j])) for j in range(5)}
    _, dense = loop_clients(federation, the_task).value_and_gradient(x, STREAM)
    assert isinstance(dense, DenseVectors)
    for size in range(1, 5):
        for group in itertools.combinations(range(5), size):
            part = from_fixed(sum((opened[j] for j in group), np.zeros_like(masked[0])))
            weighted = WEIGHTS[list(group)] @ dense.matrix.numpy()[list(group)]
            assert np.abs(part - weighted).max() > 1.0
    everyone = from_fixed(sum(opened.values(), np.zeros_like(masked[0])))
    np.testing.assert_allclose(everyone, total.numpy(), rtol=0, atol=1e-12)


@pytest.mark.long
def test_a_client_that_vanishes_before_unmasking_is_still_in_the_sum(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), replace(QUICK, timeout=0.05), SecureSums())
    grid.tamper = lambda partition, request, reply: (
        [] if partition in (1, 4) and request.metadata.message_type == "query.unmask" else [reply]
    )
    algorithm = FedAvg(LocalSGD(lr=0.1, steps=2))
    found = train(algorithm, clients, rounds=2)
    expected = train(algorithm, loop_clients(convex(5, d=60), task()), rounds=2)
    assert found.parameters is not None and expected.parameters is not None
    assert [e["event"] for e in found.events] == ["given out"]
    for key, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[key], value, rtol=0, atol=1e-11)


@pytest.mark.long
def test_too_few_answers_to_the_last_step_name_those_missing(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), replace(QUICK, timeout=0.05), SecureSums())
    grid.tamper = lambda partition, request, reply: (
        [] if partition < 3 and request.metadata.message_type == "query.unmask" else [reply]
    )
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    with pytest.raises(MissingClients) as caught:
        gradients.weighted_sum(WEIGHTS)
    assert list(caught.value.reasons) == [0, 1, 2]


def test_a_sum_with_one_nonzero_weight_is_refused(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    with pytest.raises(PrivacyError, match="one client's vector"):
        gradients.weighted_sum(np.array([0.0, 1.0, 0.0, 0.0, 0.0]))


def test_a_value_out_of_range_names_the_client(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    with pytest.raises(MissingClients, match="not below"):
        gradients.weighted_sum(WEIGHTS * 1e12)


def test_a_node_may_insist_on_privacy(tmp_path: Path) -> None:
    grid = memory_grid(convex(), task(), tmp_path, privacy="secure")
    algorithm = FedAvg(LocalSGD(lr=0.1, steps=2))
    train(algorithm, flower_clients(grid, task(), hidden=SecureSums()), rounds=1)
    clients = flower_clients(grid, task())
    x = clients.initial(Stream(0))
    with pytest.raises(MissingClients, match="takes part with privacy 'secure' only"):
        algorithm.round(algorithm.init(clients, x), clients, STREAM)


def test_a_client_masks_one_vector_once_per_slot(grid: MemoryGrid) -> None:
    """A server that asks again under the same masks with another weight gets nothing."""
    sums = SecureSums()
    clients = flower_clients(grid, task(), hidden=sums)
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    first = gradients.weighted_sum(WEIGHTS)
    assert sums._epoch is not None
    sums._epoch.slot -= 1
    torch.testing.assert_close(gradients.weighted_sum(WEIGHTS), first, rtol=0, atol=0)
    sums._epoch.slot -= 1
    with pytest.raises(MissingClients, match="already taken with different content"):
        gradients.weighted_sum(WEIGHTS[::-1].copy())


@pytest.mark.long
def test_a_message_that_was_tampered_with_does_not_open(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())

    def swap(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition == 0 and request.metadata.message_type == "query.shares":
            told = Reply.from_records(reply.content)
            boxes = told.numbers["boxes"]
            boxes["1"], boxes["2"] = boxes["2"], boxes["1"]
            return [Message(told.to_records(), reply_to=request)]
        return [reply]

    grid.tamper = swap
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    # Clients 1 and 2 say so; the other three are a majority and open the sum.
    total = gradients.weighted_sum(WEIGHTS)
    dense = loop_clients(convex(5, d=60), task()).value_and_gradient(
        torch.zeros(183).double(), STREAM
    )[1]
    torch.testing.assert_close(total, dense.weighted_sum(WEIGHTS), rtol=0, atol=worst_error(5))
    told = sorted(note for _, note in clients.take_notes())
    assert [note.split(",")[0] for note in told] == [
        f"client-0 sent client-{i} a share that does not open" for i in (1, 2)
    ]


# -- what is opened, and what is not ----------------------------------------------------------


def row_sum(*row: float, kind: str = "gradient", model: str = "m", round: int = 1) -> Sum:
    return Sum(kind, model, round, np.array(row))


def shown(rows: np.ndarray[Any, Any]) -> float:
    """Return the largest share of one client in a combination of rows, by brute force."""
    best = 0.0
    for i in range(rows.shape[1]):  # maximise (c W)_i^2 / |c W|^2: a generalised eigenvalue
        gram = rows @ rows.T
        best = max(best, float(rows[:, i] @ np.linalg.pinv(gram, rcond=1e-12) @ rows[:, i]))
    return best


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(3, 7))
def test_the_ledger_refuses_what_combinations_would_show(seed: int, sums: int, n: int) -> None:
    rng, ledger = np.random.default_rng(seed), Ledger()
    rows = rng.choice([1.0, 2.0, 3.0], size=(sums, n))
    if seed % 2:
        rows[-1] = rows[0] + 2.0 * (np.arange(n) == seed % n)  # the difference is one client's
    opened: list[np.ndarray[Any, Any]] = []
    for row in rows:
        if ledger.refuse(row_sum(*row)) is None:
            ledger.add(row_sum(*row), torch.zeros(2))
            opened.append(row)
    assert shown(np.stack(opened)) <= 0.99 + 1e-9
    if seed % 2 and sums > 1:
        assert len(opened) < sums
    for size in (1, 2):  # nothing that the server can form has one or two members
        for group in itertools.combinations(range(n), size):
            rest = np.delete(np.stack(opened), group, axis=1)
            if len(opened) > 1:
                assert np.linalg.matrix_rank(rest) == np.linalg.matrix_rank(np.stack(opened))


def test_members_of_one_model_or_round_are_the_same_or_three_apart() -> None:
    ledger = Ledger()
    ledger.add(row_sum(1, 1, 1, 1, 1, 1), torch.ones(2))
    fewer = (1, 1, 1, 1, 1, 0)
    for other in ({}, {"kind": "displacement"}, {"model": "n"}, {"round": 2}):
        reason = ledger.refuse(row_sum(*fewer, **other))  # type: ignore[arg-type]
        assert reason is not None and "1 member more or fewer" in reason
    assert ledger.refuse(row_sum(*fewer, model="n", round=2)) is None
    assert ledger.refuse(row_sum(1, 1, 1, 0, 0, 0, kind="displacement")) is None
    assert ledger.refuse(row_sum(2, 2, 2, 2, 2, 2)) is None  # nothing new


def test_what_stands_in_is_the_nearest_combination_of_opened_sums() -> None:
    rng, ledger = np.random.default_rng(0), Ledger()
    vectors, rows = rng.normal(size=(6, 4)), rng.uniform(1, 2, size=(2, 6))
    for row in rows:
        ledger.add(row_sum(*row), torch.as_tensor(row @ vectors))
    inside = 2 * rows[0] - 0.5 * rows[1]
    found = ledger.stand_in(row_sum(*inside))
    assert found is not None
    np.testing.assert_allclose(found.numpy(), inside @ vectors, atol=1e-10)
    wanted = rng.uniform(1, 2, size=6)
    nearest = rows.T @ np.linalg.solve(rows @ rows.T, rows @ wanted)
    found = ledger.stand_in(row_sum(*wanted))
    assert found is not None
    np.testing.assert_allclose(found.numpy(), nearest @ vectors, atol=1e-10)
    assert ledger.stand_in(row_sum(*wanted, model="other")) is None


def test_a_sum_without_one_member_is_not_opened_again_at_the_same_model(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    total = gradients.weighted_sum(WEIGHTS)
    before = len(grid.sent)
    fewer = clients.subset([0, 1, 2, 3])
    _, again = fewer.value_and_gradient(x, STREAM)
    asked = len(grid.sent)
    found = again.weighted_sum(WEIGHTS[:4])
    assert len(grid.sent) == asked > before  # nobody was asked for a sum
    row = np.append(WEIGHTS[:4], 0.0)
    torch.testing.assert_close(found, total * float(row @ WEIGHTS) / float(WEIGHTS @ WEIGHTS))
    assert "finished from the sums" in clients.take_notes()[0][1]
    _, later = fewer.value_and_gradient(x + 1, Stream(0).at("round", 2, "gradient"))
    later.weighted_sum(WEIGHTS[:4])


def test_clients_refuse_a_second_epoch_with_other_members_at_one_model(grid: MemoryGrid) -> None:
    """A server that forgot, or pretends to have forgotten, what it opened."""
    clients = flower_clients(grid, task(), hidden=SecureSums())
    x = clients.initial(Stream(0))
    clients.value_and_gradient(x, STREAM)[1].weighted_sum(WEIGHTS)
    for round in (1, 7):  # the same round, and the same model in another one
        forgetful = flower_clients(grid, task(), hidden=SecureSums()).subset([0, 1, 2, 3])
        _, gradients = forgetful.value_and_gradient(x, Stream(0).at("round", round, "gradient"))
        with pytest.raises(MissingClients, match="helped to open a sum at this model with other"):
            gradients.weighted_sum(WEIGHTS[:4])
    same = flower_clients(grid, task(), hidden=SecureSums())
    same.value_and_gradient(x, STREAM)[1].weighted_sum(WEIGHTS)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (
            {"0": 1.0, "1": 2.0**-60, "2": 2.0**-60, "3": 0.0, "4": 0.0},
            "client 0 has 1 of the",
        ),
        ({"0": 0.5, "1": 0.5, "2": 0.0, "3": 0.0, "4": 0.0}, "a sum of 2 members hides too little"),
        ({"0": 1.0}, "not those of all its parties"),
    ],
)
def test_a_client_knows_whose_weights_are_in_a_sum(
    lie: dict[str, float], message: str, grid: MemoryGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    monkeypatch.setattr(messenger_module, "to_keys", lambda weights: lie)
    with pytest.raises(MissingClients, match=message):
        gradients.weighted_sum(np.full(5, 0.2))


def test_what_clients_remember_is_not_summed_alone(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=SecureSums())
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    memory = clients.remember(None, clients.index, gradients)
    held = clients.remembered(memory, np.arange(4))
    with pytest.raises(PrivacyError, match="not summed under hidden sums"):
        held.weighted_sum(WEIGHTS[:4])
    fewer = clients.subset([0, 1, 2, 3])
    _, new = fewer.value_and_gradient(x + 1, Stream(0).at("round", 2, "gradient"))
    loop = loop_clients(convex(5, d=60), task()).subset(np.arange(4))
    old = loop.value_and_gradient(x, STREAM)[1].weighted_sum(WEIGHTS[:4])
    expected = loop.value_and_gradient(x + 1, STREAM)[1].weighted_sum(WEIGHTS[:4]) - old
    found = new.weighted_difference(held, WEIGHTS[:4])
    torch.testing.assert_close(found, expected, rtol=0, atol=worst_error(4))


def test_absent_clients_are_not_remembered_where_sums_are_hidden(grid: MemoryGrid) -> None:
    """The sum of what those present sent before would show those who are not."""
    clients = Witness(flower_clients(grid, task(), hidden=SecureSums()))
    algorithm, view = FedAvg(LocalSGD(lr=0.1, steps=2)), Recall(clients.subset(range(4)), Memory())
    algorithm.round(algorithm.init(clients, clients.initial(Stream(0))), view, Stream(0))
    assert view.memory().sent is None


# -- who is to blame, and whose keys they are -------------------------------------------------


def tampering(partition: int, kind: str, change: Any) -> Any:
    """Let one client change the numbers of its replies of one kind."""

    def tamper(at: int, request: Message, reply: Message) -> list[Message]:
        if at != partition or request.metadata.message_type != kind:
            return [reply]
        told = Reply.from_records(reply.content)
        return [Message(replace(told, numbers=change(told.numbers)).to_records(), reply_to=request)]

    return tamper


def flip(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


WRONG: dict[str, tuple[str, Any, str]] = {
    "boxes that nobody can open": (
        "query.shares",
        lambda n: {**n, "boxes": {j: [flip(b) for b in v] for j, v in n["boxes"].items()}},
        "sent shares of its keys that 4 of 4 cannot open",
    ),
    "holders written otherwise": (
        "query.shares",
        lambda n: {**n, "boxes": {f"0{j}": v for j, v in n["boxes"].items()}},
        "sent data that are neither keys nor shares",
    ),
    "digests of other shares": (
        "query.shares",
        lambda n: {**n, "digests": {j: [flip(d) for d in v] for j, v in n["digests"].items()}},
        "sent shares of its keys that 4 of 4 cannot open",
    ),
    "complaints about everybody": (
        "query.boxes",
        lambda n: {"bad": [j for j in range(5) if j != 3]},
        "says that the shares of 4 of 4 others do not open",
    ),
    "a digest of another mask": (
        "query.keys",
        lambda n: {**n, "own": [flip(d) for d in n["own"]]},
        "its shares do not belong to the keys that it published",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_who_sent_something_wrong_is_named_and_nobody_else(case: str, grid: MemoryGrid) -> None:
    kind, change, reason = WRONG[case]
    grid.tamper = tampering(3, kind, change)
    clients = flower_clients(grid, task(), hidden=SecureSums(slots=2))
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    with pytest.raises(MissingClients) as caught:
        gradients.weighted_sum(WEIGHTS)
    if case == "a digest of another mask":  # it does not even recognise its own keys
        assert list(caught.value.reasons) == [3]
    else:
        assert caught.value.reasons == {3: reason}


def test_noise_in_a_sum_is_told(grid: MemoryGrid) -> None:
    def tamper(at: int, request: Message, reply: Message) -> list[Message]:
        told = Reply.from_records(reply.content)
        if at != 3 or "masked" not in told.arrays:
            return [reply]
        wrong = told.arrays["masked"] ^ np.uint64(0x5555555555555555)
        return [Message(replace(told, arrays={"masked": wrong}).to_records(), reply_to=request)]

    clients = flower_clients(grid, task(), hidden=SecureSums())
    x = clients.initial(Stream(0))
    clients.value_and_gradient(x, STREAM)[1].weighted_sum(WEIGHTS)
    assert clients.take_notes() == []
    grid.tamper = tamper
    clients.value_and_gradient(x + 1, STREAM)[1].weighted_sum(WEIGHTS)
    ((_, note),) = clients.take_notes()
    assert "masked vector was wrong or damaged; the masks hide whose" in note


def test_a_wrong_share_costs_its_sender_alone(grid: MemoryGrid) -> None:
    grid.tamper = tampering(
        3, "query.unmask", lambda n: {"shares": {j: flip(s) for j, s in n["shares"].items()}}
    )
    clients = flower_clients(grid, task(), hidden=SecureSums(slots=2))
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, STREAM)
    total = gradients.weighted_sum(WEIGHTS)  # four others are enough
    dense = loop_clients(convex(5, d=60), task()).value_and_gradient(x, STREAM)[1]
    torch.testing.assert_close(total, dense.weighted_sum(WEIGHTS), rtol=0, atol=worst_error(5))


def test_shares_of_another_secret_are_the_fault_of_whose_they_are() -> None:
    """All shares are as committed to, but they do not belong to the published keys."""
    epochs = {i: Epoch("e", i, bytes([i + 1]) * 32, slots=1) for i in range(4)}
    liar = Epoch("e", 2, b"other" * 6 + b"xx", slots=1)
    published = {i: epoch.publish() for i, epoch in epochs.items()}
    masked = {i: epochs[i].mask(to_fixed(np.ones(3), 4), 0, published) for i in epochs}
    answers = {}
    for i in epochs:
        boxes = {j: epochs[j].share(published)[0][i][0] for j in epochs if j != i}
        answers[i] = epochs[i].unmask(0, published, boxes)
        answers[i][2] = liar._share_own(0, range(4))[i]
    with pytest.raises(WrongSecret) as caught:
        open_sum(masked, answers, 0, published)
    assert caught.value.client == 2


@pytest.fixture
def keyed(tmp_path: Path) -> MemoryGrid:
    """Return a grid whose nodes have keys, and know each other's."""
    lines, grid = [], memory_grid(convex(4), task(), tmp_path / "memory")
    for node, context in grid.contexts.items():
        key = ec.generate_private_key(ec.SECP384R1())
        path = tmp_path / f"{node}.key"
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        lines.append(f"{public} client-{context.node_config['partition-id']}\n")
        context.node_config |= {"node-key": str(path), "peers": str(tmp_path / "peers")}
    (tmp_path / "peers").write_text("# all sites\n" + "".join(lines))
    return grid


def test_sites_that_know_each_other_refuse_keys_that_the_server_made(keyed: MemoryGrid) -> None:
    weights = np.full(4, 0.25)
    clients = flower_clients(keyed, task(), hidden=SecureSums(), run="honest")
    x = clients.initial(Stream(0))
    clients.value_and_gradient(x, STREAM)[1].weighted_sum(weights)

    mine = Epoch("server", 2, b"s" * 32, 16).publish().to_dict()
    keyed.tamper = tampering(2, "query.keys", lambda n: {**n, **mine})  # in place of client 2's
    clients = flower_clients(keyed, task(), hidden=SecureSums(), run="between")
    with pytest.raises(MissingClients) as caught:
        clients.value_and_gradient(x, STREAM)[1].weighted_sum(weights)
    others = [reason for i, reason in caught.value.reasons.items() if i != 2]
    assert len(others) == 3
    assert all("'client-2' are not signed by the key that this site" in text for text in others)


def test_a_file_of_keys_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    for text in ("ssh-ed25519 AAAA", "ecdsa-sha2-nistp256 AAAA north", "x"):
        path.write_text(text)
        with pytest.raises(KeyProblem, match=f"{path}, line 1: .* is not a public key with a name"):
            read_key_file(path)
