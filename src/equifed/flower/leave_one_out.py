"""``equifed flower leave-one-out``: how well the model of the others serves each site.

For every site the preparation is fitted and the model trained without it, as if it did not exist;
then the site measures that model on its own rows. Beside it stands the model of all sites.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from equifed.data.describe import Table
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.greeting import greet
from equifed.flower.hello import StartError, describe_difference
from equifed.flower.mailbox import Mailbox
from equifed.flower.members import Members
from equifed.flower.server import FlowerClients
from equifed.metrics.metric import as_metrics
from equifed.training.files import write_file
from equifed.training.history import History

LEAVE_ONE_OUT = "leave-one-out.json"
Train = Callable[[str | None], tuple[FlowerClients, History]]
"""Trains without a site, or with all."""

Found = dict[str, Any]


def show_leave_one_out(
    grid: Grid,
    config: AppConfig,
    settings: FederationSettings,
    train: Train,
    say: Callable[[str], None],
) -> dict[str, Found]:
    """Train once with all sites and once without each; print and return what the sites measured."""
    if settings.clients < 3:
        raise StartError("Leaving one site out takes three sites or more: two must be left.")
    clients, whole = train(None)
    hellos = {hello.name: hello for hello in clients.members.hellos}
    found: dict[str, Found] = {}
    for name, hello in hellos.items():
        split = next(s for s in ("test", "validation", "train") if hello.sizes.get(s))
        say(f"without {name}")
        try:
            found[name] = _measure(grid, config, settings, train, name, split)
        except StartError as error:
            found[name] = {"split": split, "reason": str(error)}
            say(f"WARNING: {name}: {error}")
        found[name]["with it"] = _read_last(whole, name, split)
    for line in str(_tabulate(found)).splitlines():
        say(line)
    if settings.out:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        content = json.dumps(found, indent=1).encode() + b"\n"
        write_file(Path(settings.out) / LEAVE_ONE_OUT, content)
    return found


def _measure(
    grid: Grid,
    config: AppConfig,
    settings: FederationSettings,
    train: Train,
    name: str,
    split: str,
) -> Found:
    """Train without a site, and let it measure the model."""
    clients, history = train(name)
    members = clients.members
    assert history.parameters is not None
    if members.outside is None:
        raise StartError(f"{name} is gone")
    node = members.outside
    said, failures = greet(grid, settings.deadlines, members.run, [node], members.told)
    if node not in said:
        raise StartError(f"it cannot measure the model of the others: {failures[node].reason}")
    hello = said[node]
    differs = describe_difference(members.hellos[0], hello)
    if differs or hello.model != members.hellos[0].model:
        raise StartError(f"it cannot measure the model of the others. {differs}")
    mailbox = Mailbox(grid, settings.deadlines, 1)
    mailbox.nodes = {0: node}
    alone = FlowerClients(mailbox, Members(members.run, members.task, [hello], members.engine))
    asked = as_metrics(config.evaluate.metrics)
    (told,) = alone.evaluate(clients.flatten(history.parameters), [split], asked)
    metrics = {key: float(values[0]) for key, values in told.metrics.items()}
    return {"split": split, "rows": int(told.sizes[0]), "without it": metrics}


def _read_last(history: History, name: str, split: str) -> dict[str, float]:
    at = history.names.index(name)
    names = dict.fromkeys(record.metric for record in history.metrics if record.split == split)
    last = {metric: history.last(metric, split) for metric in names}
    values = {k: float(record.values[at]) for k, record in last.items() if record is not None}
    return {k: v for k, v in values.items() if math.isfinite(v)}


def _tabulate(found: dict[str, Found]) -> Table:
    known = [k for told in found.values() for k in told.get("without it", {})]
    metrics = list(dict.fromkeys(known))
    rows = []
    for name, told in found.items():
        cells = [name, told["split"], str(told.get("rows", "-"))]
        for metric in metrics:
            for which in ("without it", "with it"):
                value = told.get(which, {}).get(metric)
                cells.append("-" if value is None else f"{value:.4g}")
        rows.append(tuple(cells))
    titles = [f"{m} {which}" for m in metrics for which in ("without", "with")]
    header = ("site", "split", "rows", *titles)
    return Table("the model of the other sites, and that of all", header, rows)
