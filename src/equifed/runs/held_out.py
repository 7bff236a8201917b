"""The rows that :func:`equifed.fit` chooses on: validation rows, or folds of training rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import DataError, Split

FOLDS, SHARE, ENOUGH = 5, 0.2, 10
"""Folds; share of the rows that is held out; with fewer of them at the median client, folds."""


def with_validation(data: Federation, seed: int, error: type[ValueError] = DataError) -> Federation:
    """Return data with validation rows; refuse those that were prepared without."""
    fitted = data.preparation is not None and data.preparation.is_fitted
    if data.validation is None and not fitted:
        data = data.split(validation=SHARE, seed=seed)
    if data.validation is None or not len(data.validation):
        raise error("There are no validation rows to choose on; give validation=0.15.")
    return data


def hold_out(data: Federation, seed: int, may_fold: bool = True) -> tuple[list[Federation], str]:
    """Return pairs of training and validation rows, and which rows those are.

    ``may_fold``: the validation rows, if there are any, are random ones of each client.
    """
    held, fitted = data.validation, data.preparation is not None and data.preparation.is_fitted
    sizes = np.round(SHARE * data.train.sizes) if held is None else held.sizes
    few = np.median(sizes) < ENOUGH
    if (held is None and fitted) or (few and (held is None or may_fold)):
        data = pool(data)
        most = min(FOLDS, int(data.train.sizes.max()))  # no fold is empty
        if most == 1:
            raise DataError(
                "Every client has a single row to train on, so none can be held out to choose on; "
                "leave such clients out, or join them."
            )
        rows = f"{len(data.train):,} training rows in {most} folds"
        return [_fold(data, k, seed) for k in range(most)], rows
    data = data if held is not None else data.split(validation=SHARE, seed=seed)
    assert data.validation is not None
    who = int((data.validation.sizes > 0).sum())
    return [data], f"{len(data.validation):,} validation rows of {who} clients"


def _fold(data: Federation, k: int, seed: int) -> Federation:
    """Return one fold: every fifth row of a client for validation; a single row stays."""
    train, held = [], []
    for name, start, size in zip(data.names, data.train.offsets, data.train.sizes, strict=False):
        order = start + Stream(seed).at("folds", name).generator().permutation(size)
        mine = (np.arange(size) % FOLDS == k) & (size > 1)
        train.append(np.sort(order[~mine]))
        held.append(np.sort(order[mine]))
    return replace(data, train=data.train.take(train), validation=data.train.take(held))


def pool(data: Federation) -> Federation:
    """Return the federation with validation rows among the training rows."""
    train, held = data.train, data.validation
    if held is None:
        return data
    parts = [train, held]
    both = Split(
        np.concatenate([p.inputs for p in parts]), np.concatenate([p.targets for p in parts]),
        np.array([0, len(train) + len(held)]),
        None if train.groups is None or held.groups is None
        else np.concatenate([train.groups, held.groups]),
    )  # fmt: skip
    rows = [
        np.concatenate([np.arange(*train.offsets[i : i + 2]),
                        len(train) + np.arange(*held.offsets[i : i + 2])])
        for i in range(len(data))
    ]  # fmt: skip
    return replace(data, train=both.take(rows), validation=None)
