"""Per-client losses and accuracies, measured by the clients: what to ask for, what to believe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equifed.contract.evaluation import Evaluation
from equifed.flower.mailbox import finite
from equifed.flower.members import Members
from equifed.flower.wire import Reply, WireError

METRICS = ("loss", "accuracy")


def held_splits(members: Members, splits: Sequence[str]) -> tuple[str, ...]:
    """Return those of the splits that some client has."""
    held = {split for hello in members.hellos for split in hello.sizes}
    return tuple(split for split in splits if split in held)


def read_evaluation(split: str, replies: dict[int, Reply], n: int) -> Evaluation:
    """Return one split's numbers of all n clients; NaN for those that did not answer."""
    sizes = np.zeros(n, dtype=np.int64)
    found = {name: np.full(n, np.nan) for name in METRICS}
    for i, reply in replies.items():
        table = reply.numbers["splits"].get(split)
        if table is not None:
            sizes[i] = table["size"]
            for name, value in table["metrics"].items():
                found[name][i] = value
    seen = {k: v for k, v in found.items() if k == "loss" or not np.isnan(v).all()}
    return Evaluation(split, sizes, seen)


def check_metrics(members: Members, splits: Sequence[str], i: int, reply: Reply) -> None:
    """Refuse numbers of other splits, other sizes or other names than a client can have."""
    held = members.hellos[i].sizes
    tables = reply.numbers.get("splits")
    if not isinstance(tables, dict) or set(tables) != set(held) & set(splits):
        raise WireError("measured other splits than asked for")
    for split, table in tables.items():
        if not isinstance(table, dict) or table.get("size") != held[split]:
            raise WireError(f"measured another number of {split} samples than it said it has")
        metrics = table.get("metrics")
        if not isinstance(metrics, dict) or not set(metrics) <= set(METRICS):
            raise WireError("sent unknown metrics")
        if held[split]:
            for name, value in metrics.items():
                finite(f"{split} {name}", value)
