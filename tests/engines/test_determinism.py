"""The same bits for any chunk size, any memory and any number of processes (float64, CPU)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.trust import determinism

from equifed.contract.local import LocalWork
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import (
    group_clients,
    join_leaves,
    join_nodes,
    leaf_nodes,
    node_values,
    nodes_within,
    sum_leaves,
    sum_rows,
)
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.stacked.samples import common_widths

pytestmark = pytest.mark.long


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 90), d=st.integers(1, 70), most=st.integers(1, 40), data=st.data())
def test_a_sum_has_the_same_bits_whoever_holds_the_rows(n, d, most, data) -> None:
    draw = np.random.default_rng(n + 100 * d)
    matrix, weights = torch.as_tensor(draw.normal(size=(n, d))), draw.random(n)
    whole = sum_rows(weights, matrix)
    torch.testing.assert_close(whole, torch.as_tensor(weights) @ matrix)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    known = {}
    for a, b in zip([0, *cuts], [*cuts, n], strict=True):
        held, nodes = matrix[a:b].clone(), list(nodes_within(a, b, n)) if a < b else []
        values = node_values(nodes, weights, lambda i, j, a=a, m=held: [m[i - a : j - a]], most)
        known |= {node: value[0] for node, value in zip(nodes, values, strict=True)}
    assert torch.equal(join_nodes(known, weights, n), whole)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30), bearable=st.integers(0, 10_000)
)
def test_widths_hold_all_samples_and_rise_with_them(sizes: list[int], bearable: int) -> None:
    used = np.array(sizes)
    widths = common_widths(used, 8, bearable)
    assert (widths >= used).all() and (widths % 8 == 0).all()
    order = np.argsort(used)
    assert (np.diff(widths[order]) >= 0).all()
    assert int((widths - -(-used // 8) * 8).sum()) <= bearable * len(set(widths.tolist()))


@pytest.mark.parametrize("model", determinism.MODELS)
@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("memory", [1 << 30, 1 << 13, 1])
def test_chunks_and_memory_change_no_bit(model: str, batch: int | None, memory: int) -> None:
    federation, stream = determinism.federation(), Stream(0)
    if model == "own bias":
        batch = None  # profile losses are of all samples
    work = LocalWork(lr=0.1, steps=3, batch_size=batch, average=True)
    weights = np.random.default_rng(1).random(determinism.CLIENTS)
    torch.manual_seed(0)
    found = set()
    for chunk, bound in ((1, 1 << 30), (3, memory), (8, memory), (None, memory)):
        given = {**determinism.MODELS[model], "chunk": chunk, "memory": bound}
        clients = StackedClients(federation, l2=0.1, dtype=torch.float64, **given)
        x = clients.initial(Stream(3))
        gradients = clients.value_and_gradient(x, stream, batch)[1]
        target = gradients.weighted_sum(weights)
        moved = clients.local_steps(x, work, stream, control=gradients, target=target)
        assert moved.average is not None
        sums = [v.weighted_sum(weights) for v in (gradients, moved.displacement, moved.average)]
        numbers = torch.cat([*sums, clients.own_after().flatten()]).numpy()
        found.add(numbers.tobytes() + clients.losses(x, stream).tobytes())
    assert len(found) == 1


def test_chunks_and_processes_change_no_bit_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["scaff-pd/auto", "scaffold/sampled"]
    assert determinism.compare(names, rounds=2, repeats=1, threads=1) == 0
    assert "2 processes" in capsys.readouterr().out


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 900), min_size=1, max_size=90), cut=st.integers(0, 40))
def test_groups_hold_all_clients_in_order_and_any_process_can_sum_its_own(sizes, cut) -> None:
    groups = group_clients(np.array(sizes))
    leaves = int(groups[-1]) + 1
    assert groups[0] == 0 and set(np.diff(groups)) <= {0, 1} and leaves <= len(sizes)
    values = torch.as_tensor(np.random.default_rng(leaves).normal(size=leaves))
    cut = min(cut, leaves)
    known = {
        node: sum_leaves(node, lambda j: values[j], leaves)
        for a, b in ((0, cut), (cut, leaves))
        for node in leaf_nodes(a, b, leaves)
    }
    (root,) = leaf_nodes(0, leaves, leaves)
    assert torch.equal(join_leaves(known, leaves), sum_leaves(root, lambda j: values[j], leaves))
    torch.testing.assert_close(join_leaves(known, leaves), values.sum())


def test_single_precision_is_padded_to_the_largest_of_each_chunk_alone() -> None:
    clients = StackedClients(determinism.federation(), "logistic", dtype=torch.float32, chunk=3)
    assert [c.width for c in clients.chunks(None)] == [max(c.sizes) for c in clients.chunks(None)]
