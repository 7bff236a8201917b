"""Weighted sums of client vectors in one order, whatever holds them.

Floating-point numbers add up to other bits in another order. Here, in double precision on a CPU,
the order follows from the clients' places alone: each block of eight neighbours is one product, and
blocks are added pairwise in a binary tree. Whoever holds all clients under a node of the tree (a
chunk, a process, a piece that fits into memory) can compute the node alone; nodes, and the vectors
of divided blocks, are then put together to the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import BlockMatrix, ClientVectors, Index, Losses, Weights

BLOCK = 8
"""Clients of a block; 64 bytes in double precision, where blocks then begin."""

FEWEST, MOST, SAMPLES = 8, 64, 2048
"""Groups of clients whose Hessians are summed together, one for so many samples; processes hold
whole groups."""

Node = tuple[int, int]
"""Level and place of a node: (0, j) is block j, (l, j) the sum of (l - 1, 2 j) and its neighbour.
Level -1 are single clients."""

Rows = Callable[[int, int], Sequence[Tensor]]
"""Returns the vectors of the clients from one place up to another, as the rows of a matrix for each
kind of vector."""


def sum_rows(weights: Weights, matrix: Tensor) -> Tensor:
    """Return the weighted sum of all rows."""
    shares = torch.as_tensor(weights, dtype=matrix.dtype)
    if matrix.device.type == "cuda":  # from pinned memory the program need not wait for it
        shares = shares.pin_memory().to(matrix.device, non_blocking=True)
    one_order = has_one_order(matrix.dtype, matrix.device)
    return _sum_whole(shares, matrix) if one_order else shares @ matrix


def has_one_order(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether sums have one order: in double precision on a CPU, elsewhere speed counts."""
    return dtype == torch.float64 and device.type == "cpu"


def nodes_within(first: int, last: int, n: int, node: Node | None = None) -> Iterator[Node]:
    """Yield what one who holds the clients from ``first`` up to ``last`` of n can tell.

    The largest nodes under one, the root by default, and single clients of the blocks that are held
    in part.

    >>> list(nodes_within(0, 20, 20))
    [(2, 0)]
    >>> list(nodes_within(0, 10, 20))
    [(0, 0), (-1, 8), (-1, 9)]
    """
    node = node or _root(n)
    begin, end = _span(node, n)
    if first <= begin and end <= last:
        yield node
    elif begin < last and first < end:
        for child in _children(node, n):
            yield from nodes_within(first, last, n, child)


def node_values(nodes: Sequence[Node], weights: Weights, rows: Rows, most: int) -> Iterator[Tensor]:
    """Yield the sums of nodes, or single clients' vectors, a row per kind, ``most`` at a time."""
    n = len(weights)
    for node in nodes:
        begin, end = _span(node, n)
        if node[0] < 0:
            yield torch.stack([matrix[0] for matrix in rows(begin, end)])
        elif end - begin <= max(most, BLOCK):
            share = weights[begin:end]
            yield torch.stack([sum_rows(share, matrix) for matrix in rows(begin, end)])
        else:
            yield _add(node_values(_children(node, n), weights, rows, most))


def join_nodes(
    known: dict[Node, Tensor], weights: Weights, n: int, node: Node | None = None
) -> Tensor:
    """Return the sum over all n clients, or those under a node, from values that cover them."""
    node = node or _root(n)
    if node in known:
        return known[node]
    parts = [join_nodes(known, weights, n, child) for child in _children(node, n)]
    if node[0] == 0:
        begin, end = _span(node, n)
        return sum_rows(weights[begin:end], torch.stack(parts))
    return _add(parts)


def group_clients(sizes: Index, processes: int = 1) -> Index:
    """Return the group of each client: consecutive ones, with similar numbers of samples.

    They follow from the sizes alone unless there are more processes than :data:`FEWEST`.

    >>> group_clients(np.array([3, 1, 2]))
    array([0, 1, 2])
    """
    wanted = max(FEWEST, min(MOST, int(sizes.sum()) // SAMPLES))
    groups = max(1 << (wanted.bit_length() - 1), processes)  # two or four processes get as many
    if len(sizes) <= groups:
        return np.arange(len(sizes))
    before = np.cumsum(sizes) - sizes / 2
    found = np.minimum((before * groups / sizes.sum()).astype(np.int64), groups - 1)
    return np.unique(found, return_inverse=True)[1]


def leaf_nodes(first: int, last: int, leaves: int) -> list[Node]:
    """Return what one who holds the leaves from ``first`` up to ``last`` can tell."""
    return list(nodes_within(BLOCK * first, BLOCK * last, BLOCK * leaves)) if first < last else []


def sum_leaves(node: Node, leaf: Callable[[int], Tensor], leaves: int) -> Tensor:
    """Return the sum of the leaves under a node, each made when it is needed."""
    if node[0] == 0:
        return leaf(node[1])
    return _add([sum_leaves(child, leaf, leaves) for child in _children(node, BLOCK * leaves)])


def join_leaves(known: dict[Node, Tensor], leaves: int) -> Tensor:
    """Return the sum of all leaves from values of nodes that cover them."""
    return join_nodes(known, np.zeros(0), BLOCK * leaves)


def _sum_whole(weights: Tensor, matrix: Tensor) -> Tensor:
    n, d = matrix.shape
    width = -(-d // BLOCK) * BLOCK  # rows begin at whole blocks of memory
    level = matrix.new_empty(-(-n // BLOCK), width)[:, :d] if n else matrix.new_zeros(1, d)
    whole = n // BLOCK * BLOCK
    if whole:
        blocks = matrix[:whole].view(-1, BLOCK, d)
        _put_products(weights[:whole].view(-1, BLOCK), blocks, level[: whole // BLOCK])
    if whole < n:
        _put_products(weights[None, whole:], matrix[None, whole:], level[-1:])
    step = 1
    while step < len(level):  # in place: new memory would have to be made ready by the system
        right = level[step :: 2 * step]
        level[:: 2 * step][: len(right)].add_(right)
        step *= 2
    return level[0].clone()


def _put_products(weights: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Write the sum of each block (m, 8, d) into a row; the last few columns apart."""
    d, rows, places = blocks.shape[2], weights.unsqueeze(1), out.unsqueeze(1)
    even = d // BLOCK * BLOCK
    for columns in (slice(0, even), slice(even, d)):
        if columns.start < columns.stop:
            torch.bmm(rows, blocks[:, :, columns], out=places[:, :, columns])


def _add(parts: Iterator[Tensor] | list[Tensor]) -> Tensor:
    first, *other = parts
    return first + other[0] if other else first


def _root(n: int) -> Node:
    """Return the root of n clients' tree."""
    return max(0, -(-n // BLOCK) - 1).bit_length(), 0


def _span(node: Node, n: int) -> tuple[int, int]:
    """Return the clients under a node."""
    level, j = node
    width = 1 if level < 0 else BLOCK << level
    return j * width, min((j + 1) * width, n)


def _children(node: Node, n: int) -> list[Node]:
    level, j = node
    if level == 0:
        return [(-1, i) for i in range(*_span(node, n))]
    return [
        child for child in ((level - 1, 2 * j), (level - 1, 2 * j + 1)) if _span(child, n)[0] < n
    ]


class InProcessVectors(ClientVectors):
    """Client vectors that this process could lay side by side."""

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        n = len(weights)
        (total,) = self.nodes(list(nodes_within(0, n, n)), weights, 0)
        return total

    @abstractmethod
    def dense(self) -> Tensor:
        """Return all of them as the rows of one matrix."""

    @abstractmethod
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        """Return parts of the sum over all clients, of whom those here begin at ``first``."""

    def of_chunk(self, chunk: Any, places: slice | Index) -> Tensor:
        """Return the vectors of a chunk's clients as rows; a view where they are consecutive."""
        rows = self.dense()
        if isinstance(places, slice):
            return rows[places]
        return rows.index_select(0, torch.as_tensor(places, device=rows.device))


@dataclass(frozen=True, eq=False)
class DenseVectors(InProcessVectors):
    """Client vectors as the rows of one matrix.

    ``check`` raises for vectors that are not finite. A GPU may still be computing them, so it is
    asked at the first use of what they are made of, not before.
    """

    matrix: Tensor
    check: Callable[[], object] | None = None

    @property
    @override
    def at_hand(self) -> bool:
        return True

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        total = sum_rows(weights, self.matrix)
        self._checked()  # once the sum is under way
        return total

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        return to_numpy(sum_squares(self._checked(), scale))

    @override
    def dense(self) -> Tensor:
        return self._checked()

    def _checked(self) -> Tensor:
        if self.check is not None:
            self.check()
        return self.matrix

    @override
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        matrix = self._checked()
        held = len(matrix)

        def rows(begin: int, end: int) -> list[Tensor]:
            return [matrix[begin - first : end - first]]

        return [value[0] for value in node_values(nodes, weights, rows, held)]


def sum_squares(rows: Tensor, scale: BlockMatrix | None) -> Tensor:
    """Return the squared length of every row, in the metric ``scale``."""
    return (rows * (rows if scale is None else scale.multiply(rows))).sum(dim=1)


def to_numpy(values: Tensor) -> Losses:
    """Return per-client numbers as float64 on the server."""
    return values.detach().to("cpu", torch.float64).numpy()


def in_process(vectors: ClientVectors) -> InProcessVectors:
    """Return vectors that an engine in this process made; refuse those of others."""
    if not isinstance(vectors, InProcessVectors):
        raise TypeError(
            f"These clients cannot use {type(vectors).__name__}: vectors belong to the engine that "
            "made them."
        )
    return vectors


def dense_rows(vectors: ClientVectors) -> Tensor:
    """Return vectors of an engine in this process as the rows of a matrix."""
    return in_process(vectors).dense()


def put_rows(values: Tensor, places: slice | Index, rows: Tensor) -> None:
    """Write the rows of a matrix at a chunk's places."""
    if isinstance(places, slice):
        values[places] = rows
    else:
        values.index_copy_(0, torch.as_tensor(places, device=values.device), rows)
