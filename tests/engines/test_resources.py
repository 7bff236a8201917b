"""Memory that is kept from round to round: never two owners, and the same bits."""

from __future__ import annotations

import gc

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import classification

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.threads import ALIGNED, SMALL, Workspace, empty_rows

WIDE = torch.zeros(SMALL // 4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), max_size=12))
def test_no_two_owners_share_memory(requests: list[tuple[int, int, bool]]) -> None:
    """Every matrix, or a view that outlives it, keeps its number while others come and go."""
    workspace, held = Workspace(8 * SMALL), {}
    for number, (rows, place, view) in enumerate(requests):
        held.pop(place, None)
        matrix = empty_rows(rows, WIDE[: len(WIDE) - 3], workspace).fill_(number)
        held[place] = (number, matrix[:1, ::7] if view else matrix)
        del matrix
        assert all(bool((kept == n).all()) for n, kept in held.values())


def test_memory_comes_back_and_the_bound_holds() -> None:
    workspace = Workspace(4 * SMALL)
    places = set()
    for _ in range(5):
        matrix = empty_rows(2, WIDE, workspace)
        places.add(matrix.data_ptr())
        assert matrix.data_ptr() % ALIGNED == 0
        assert matrix.shape == (2, len(WIDE)) and matrix.stride() == empty_rows(2, WIDE).stride()
        del matrix
    assert len(places) == 1
    many = [empty_rows(2, WIDE, workspace) for _ in range(4)]
    del many
    gc.collect()
    assert sum(block.nbytes for block in workspace._free.values()) <= 4 * SMALL
    last = empty_rows(3, WIDE, workspace).fill_(5.0)
    del workspace
    gc.collect()
    assert bool((last == 5).all())  # it outlives the one who lent it


def test_handles_of_earlier_rounds_keep_their_numbers_on_every_engine() -> None:
    data = classification(sizes=(4,) * 6, shape=(60_000,), dtype=np.float32)
    for kind in (StackedClients, LoopClients):
        clients = kind(data, "logistic")
        x, work = clients.initial(Stream(0)), LocalSGD(lr=0.1, steps=2, batch_size=2)
        moved = clients.local_steps(x, work, Stream(1)).displacement
        _, gradients = clients.value_and_gradient(x, Stream(2))
        before = [h.dense().clone() for h in (moved, gradients)]
        again = [clients.local_steps(x, work, Stream(r)).displacement for r in (1, 3)]
        assert torch.equal(again[0].dense(), before[0])
        for handle, numbers in zip((moved, gradients), before, strict=True):
            assert torch.equal(handle.dense(), numbers)
