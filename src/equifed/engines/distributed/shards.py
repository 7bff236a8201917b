"""Which process holds which clients, and what becomes of a federation that is cut up."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from equifed.contract.arrays import Index
from equifed.contract.evaluation import SPLITS
from equifed.data import Federation, Split
from equifed.engines.sums import group_clients


def assign_clients(sizes: Index, processes: int) -> Index:
    """Return the process that holds each client: consecutive groups, similar numbers of samples.

    >>> assign_clients(np.array([10, 10, 10, 10, 40]), 2)
    array([0, 0, 0, 0, 1])
    """
    groups = group_clients(sizes, processes)
    totals = np.bincount(groups, weights=sizes)
    before = np.cumsum(totals) - totals / 2
    wanted = (before * processes / totals.sum()).astype(np.int64)
    held: Index = np.minimum(wanted, processes - 1)[groups]
    if len(np.unique(held)) < processes:
        raise ValueError(
            f"{processes} processes are more than these {len(sizes)} clients can keep busy; start "
            "fewer."
        )
    return held


def cut_shard(federation: Federation, held: np.ndarray[Any, np.dtype[np.bool_]]) -> Federation:
    """Return the federation with the samples of the held clients only; the others stay, empty."""
    part = copy.copy(federation)
    for name in SPLITS:
        split = getattr(federation, name)
        if split is not None:
            sizes = np.diff(split.offsets)
            rows = np.repeat(held, sizes)
            offsets = np.concatenate([[0], np.cumsum(np.where(held, sizes, 0))])
            groups = None if split.groups is None else split.groups[rows]
            kept = Split(split.inputs[rows], split.targets[rows], offsets, groups)
            # The checks of a federation were made on the whole; a shard's empty clients are meant.
            object.__setattr__(part, name, kept)
    return part
