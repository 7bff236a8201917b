"""What is asked of the clients' samples when training has ended."""

from __future__ import annotations

from collections.abc import Sequence

from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients
from equifed.contract.evaluation import Details
from equifed.metrics.metric import METRICS, Metric
from equifed.training.history import History


def describe_end(
    clients: Clients, history: History, asked: Sequence[Metric], x: Vector
) -> Details | None:
    """Return what single samples say about a model, in all metrics of the split to show."""
    shown = history.main_metric()
    if shown is None:
        return None
    known = {**METRICS, **{metric.name: metric for metric in asked}}
    names = dict.fromkeys(r.metric for r in history.metrics if r.split == shown[1])
    return clients.describe(x, shown[1], [known[name] for name in names if name in known])
