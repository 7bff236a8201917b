"""What clients measured, as the server reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from equifed.contract.evaluation import ClientDetail, Evaluation
from equifed.flower.wire import ALWAYS, Reply, WireError


def check_detail(size: int, reply: Reply) -> None:
    """Refuse details that are none, or of other samples than the client said it has."""
    told = reply.numbers.get("detail")
    if told is None and size == 0:
        return
    try:
        found = ClientDetail.from_dict(told)
    except ValueError as error:
        raise WireError(f"sent {error}") from error
    if found.size != size:
        raise WireError("described another number of samples than it said it has")


def expect_nothing(name: str, value: object) -> None:
    """Refuse a metric of a split without samples that is anything but NaN.

    >>> expect_nothing("test loss", float("nan"))
    >>> expect_nothing("test loss", 0.5)
    Traceback (most recent call last):
    equifed.flower.wire.WireError: test loss is a value measured on no samples
    """
    if not (isinstance(value, float) and math.isnan(value)):
        raise WireError(f"{name} is a value measured on no samples")


def read_evaluation(
    split: str, replies: dict[int, Reply], n: int, names: Iterable[str]
) -> Evaluation:
    """Return one split's numbers of all n clients; NaN for those that did not answer."""
    sizes = np.zeros(n, dtype=np.int64)
    found = {name: np.full(n, np.nan) for name in names}
    for i, reply in replies.items():
        table = reply.numbers["splits"].get(split)
        if table is not None:
            sizes[i] = table["size"]
            for name, value in table["metrics"].items():
                found[name][i] = value
    optional = set(ALWAYS) - {"loss"}
    seen = {k: v for k, v in found.items() if k not in optional or not np.isnan(v).all()}
    return Evaluation(split, sizes, seen)
