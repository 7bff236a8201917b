"""Chunks on several cores: the same bits as one after the other."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.threads import map_in_threads
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy, squared


@pytest.fixture
def two_threads():
    """Give torch two threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_threads_work_on_one_core_each(two_threads) -> None:
    """The first two items wait for each other, so they pass only if both run at once."""
    meeting = threading.Barrier(2, timeout=10)

    def work(item: int) -> tuple[int, int]:
        if item < 2:
            meeting.wait()
        return item, torch.get_num_threads()

    assert map_in_threads(work, range(5), together=True) == [(i, 1) for i in range(5)]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("items", "together"), [(5, False), (1, True)])
def test_one_after_the_other(two_threads, items: int, together: bool) -> None:
    main = threading.get_ident()
    assert map_in_threads(lambda _: threading.get_ident(), range(items), together) == [main] * items


def test_errors_come_through_and_threads_are_restored(two_threads) -> None:
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda item: 1 // item, [1, 2, 0, 3], together=True)
    assert torch.get_num_threads() == 2


def test_nobody_works_on_after_an_error(two_threads) -> None:
    ready, ended = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            ready.wait(10)
            raise ZeroDivisionError
        ready.set()
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(ZeroDivisionError):
        map_in_threads(work, range(50), together=True)
    seen = list(ended)
    assert 1 in seen and len(seen) < 49
    time.sleep(0.1)
    assert ended == seen


def test_same_bits_as_one_after_the_other(two_threads) -> None:
    """Threads change neither gradients nor local updates, to the last bit."""
    draw = np.random.default_rng(0)
    clients = {f"c{i}": (draw.standard_normal((9 + i, 6)), draw.integers(0, 3, 9 + i))
               for i in range(7)}  # fmt: skip
    federation = Federation.from_clients(clients)
    module = build("mlp", (6,), 3)
    results = []
    for independent in (True, False):
        engine = StackedClients(federation, module, cross_entropy, chunk=2)
        engine.independent = independent
        torch.set_num_threads(2 if independent else 1)
        x = engine.initial(Stream(0))
        _, gradients = engine.value_and_gradient(x, Stream(1))
        moved = engine.local_steps(x, LocalSGD(lr=0.1, steps=5, batch_size=4), Stream(2))
        weights = np.full(7, 1 / 7)
        results.append(torch.stack([gradients.weighted_sum(weights),
                                    moved.displacement.weighted_sum(weights)]))  # fmt: skip
    assert torch.equal(*results)


def test_least_squares_remembers_in_one_place_and_stays_on_one_thread() -> None:
    draw = np.random.default_rng(0)
    clients = {f"c{i}": (draw.standard_normal((9, 4)), draw.standard_normal(9)) for i in range(3)}
    federation = Federation.from_clients(clients)
    assert not StackedClients(federation, torch.nn.Linear(4, 1), squared).independent
