"""Hidden sums: what is computed, what it costs in accuracy, and what the server sees."""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import DenseVectors
from equifed.flower.secure.masks import (
    RangeError,
    expand_mask,
    from_fixed,
    make_pair_mask,
    make_public_key,
    rebuild_secret,
    share_secret,
    to_fixed,
    worst_error,
)
from equifed.flower.secure.session import (
    Epoch,
    Published,
    SecureError,
    majority,
    open_sum,
)
from equifed.flower.secure.sums import PairSums, PrivacyError, SecureSums
from equifed.flower.wire import Reply
from equifed.training.loop import train

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
    with contextlib.suppress(ValueError):  # most often what too few give is no secret at all
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
    boxes = {i: epoch.share(published) for i, epoch in epochs.items()}
    masked = {
        i: epochs[i].mask(to_fixed(vectors[k], n), slot, published)
        for k, i in enumerate(members)
        if k not in lost_before
    }
    arrived = sorted(masked)
    answers = {
        i: epochs[i].unmask(
            slot, published, arrived, {j: boxes[j][i][slot] for j in members if j != i}
        )
        for k, i in enumerate(members)
        if k not in lost_before | lost_after
    }
    return from_fixed(open_sum(masked, answers, "e", slot, published)), vectors


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_tolerable_loss_is_recovered(n: int) -> None:
    spare = n - majority(n)
    for before, after in itertools.product(range(spare + 1), repeat=2):
        if before + after <= spare:
            lost = set(range(before)), set(range(before, before + after))
            found, vectors = protocol(n, *lost)
            present = [k for k in range(n) if k not in lost[0]]
            np.testing.assert_allclose(
                found, vectors[present].sum(axis=0), rtol=0, atol=worst_error(n) + 1e-12
            )


def test_too_many_losses_leave_the_sum_closed() -> None:
    with pytest.raises(SecureError, match="2 clients answered the last step, 3 are needed"):
        protocol(5, set(), {0, 1, 2})


def test_a_client_refuses_what_would_open_its_vector() -> None:
    epochs = {i: Epoch("e", i, bytes([i + 1]) * 32, slots=1) for i in range(3)}
    published = {i: epoch.publish() for i, epoch in epochs.items()}
    boxes = {j: epochs[j].share(published)[0][0] for j in (1, 2)}
    with pytest.raises(SecureError, match="too few"):
        epochs[0].unmask(0, published, [0], boxes)
    with pytest.raises(SecureError, match="own vector"):
        epochs[0].unmask(0, published, [1, 2], boxes)
    with pytest.raises(SecureError, match="changed on its way"):
        epochs[0].unmask(0, published, [0, 1, 2], {**boxes, 1: boxes[2]})
    with pytest.raises(SecureError, match="own keys"):
        swapped = {**published, 0: Published(b"x" * 32, (b"y" * 32,))}
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
    [(None, {0, 1, 2, 3, 4}), (PairSums(), set()), (SecureSums(slots=2), set())],
    ids=["none", "sums", "secure"],
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


@pytest.mark.parametrize("hidden", [PairSums, SecureSums])
def test_a_sum_with_one_nonzero_weight_is_refused(hidden: Any, grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=hidden())
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    with pytest.raises(PrivacyError, match="one client's vector"):
        gradients.weighted_sum(np.array([0.0, 1.0, 0.0, 0.0, 0.0]))


def test_a_value_out_of_range_names_the_client(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task(), hidden=PairSums())
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    with pytest.raises(MissingClients, match="not below"):
        gradients.weighted_sum(WEIGHTS * 1e12)


@pytest.mark.parametrize(
    ("floor", "hidden", "refused"),
    [
        ("sums", None, True),
        ("sums", PairSums, False),
        ("secure", PairSums, True),
        ("secure", SecureSums, False),
    ],
)
def test_a_node_may_insist_on_privacy(
    floor: str, hidden: Any, refused: bool, tmp_path: Path
) -> None:
    grid = memory_grid(convex(), task(), tmp_path, privacy=floor)
    clients = flower_clients(grid, task(), hidden=hidden and hidden())
    algorithm = FedAvg(LocalSGD(lr=0.1, steps=2))
    x = clients.initial(Stream(0))
    if not refused:
        train(algorithm, clients, rounds=1)
        return
    with pytest.raises(MissingClients, match=re.escape(f"privacy '{floor}' or more only")):
        algorithm.round(algorithm.init(clients, x), clients, STREAM)


def test_a_client_masks_one_vector_once_per_slot(grid: MemoryGrid) -> None:
    """A server that asks again under the same masks with another weight gets nothing."""
    sums = PairSums()
    clients = flower_clients(grid, task(), hidden=sums)
    _, gradients = clients.value_and_gradient(clients.initial(Stream(0)), STREAM)
    first = gradients.weighted_sum(WEIGHTS)
    sums.number -= 1
    torch.testing.assert_close(gradients.weighted_sum(WEIGHTS), first, rtol=0, atol=0)
    sums.number -= 1
    with pytest.raises(MissingClients, match="already taken with other content"):
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
    # Clients 1 and 2 refuse; the other three are a majority and open the sum.
    gradients.weighted_sum(WEIGHTS)
    refusals = [Reply.from_records(m.content).text for m in grid.received]
    assert sum("changed on its way" in text for text in refusals) == 2
