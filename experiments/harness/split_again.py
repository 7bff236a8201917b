"""A data set with published test samples, pooled and split anew: a seed draws who is tested."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from equifed import Federation, load
from equifed.data import standardise
from equifed.runs import RunConfig, build_run


def split_again(
    data: str,
    validation: float = 0.2,
    test: float = 0.3,
    seed: int = 0,
    scaled: int = 0,
    clients: str | None = None,
) -> Federation:
    """Return a data set whose clients' samples are pooled and split again.

    The first ``scaled`` columns are standardised again, with the new training samples. ``clients``
    is for data sets that ask who the clients are.
    """
    pooled = pool(data, clients)
    split = pooled.split(validation=validation, test=test, seed=seed)
    return standardise(split, range(scaled)) if scaled else split


@lru_cache(maxsize=2)  # tries of one data set come one after another
def pool(data: str, clients: str | None = None) -> Federation:
    """Return a data set with all samples of every client for training."""
    whole = load(data) if clients is None else load(data, clients=clients)
    parts = list(whole.splits().values())
    samples = {
        name: tuple(np.concatenate(columns) for columns in
                    zip(*(part.client(i) for part in parts), strict=True))
        for i, name in enumerate(whole.names)
    }  # fmt: skip
    return Federation.from_clients(
        samples, name=whole.name, classes=whole.classes, class_names=whole.class_names,
        source=whole.source,
    )  # fmt: skip


def load_table(data: Mapping[str, Any]) -> Federation:
    """Return the federation of a table ``[data]``, holdout and all."""
    table: dict[str, Any] = {"data": dict(data), "rounds": 1}  # a configuration is about a run
    table |= {"model": {"name": "logistic"}, "algorithm": {"name": "fedavg"}}
    return build_run(RunConfig.from_dict(table)).federation


def with_constant(of: dict[str, Any]) -> Federation:
    """Return the data of another table with flat inputs and one more column, of ones.

    Its weight is a bias that all clients share, so that an own bias is the distance to it.
    """
    data = load_table(of)
    return data.with_inputs({
        k: np.hstack([s.inputs.reshape(len(s.inputs), -1), np.ones((len(s.inputs), 1), np.float32)])
        for k, s in data.splits().items()
    })  # fmt: skip
