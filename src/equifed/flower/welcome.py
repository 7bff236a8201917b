"""``equifed flower welcome``: a site that comes after the end measures and gets the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from equifed.contract.evaluation import SPLITS
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.deliver import deliver
from equifed.flower.greeting import greet
from equifed.flower.hello import Hello, StartError, check_models, check_versions
from equifed.flower.joining import check_as_tables
from equifed.flower.kept import Kept
from equifed.flower.mailbox import Failure, Mailbox
from equifed.flower.members import Members
from equifed.flower.server import FlowerClients
from equifed.metrics.metric import as_metrics
from equifed.training.history import History

Found = dict[str, dict[str, float]]


def welcome(grid: Grid, settings: FederationSettings, say: Callable[[str], None]) -> Found:
    """Let a site measure the model of a finished run on its rows, and deliver it; return that.

    Its data are compared with those of the run, and prepared as they were; nothing is trained.
    """
    folder = Path(settings.start)
    kept, history = Kept.read(folder), History.load(folder)
    if history.parameters is None:
        raise StartError(f"The run in {folder} is not complete; a site joins it by: admit.")
    if settings.site in kept.names:
        raise StartError(f"{settings.site} took part in the run in {folder}; it joins nothing.")
    config = AppConfig.from_dict(kept.told["config"])
    clients = _meet(grid, config, settings, kept)
    kept.check_data(clients.members)
    x = clients.flatten_shared(history.parameters)
    found: Found = {}
    for told in clients.evaluate(x, SPLITS, as_metrics(config.evaluate.metrics)):
        if told.sizes[0]:
            found[told.split] = {key: float(v[0]) for key, v in told.metrics.items()}
            numbers = ", ".join(f"{key} {value:.4g}" for key, value in found[told.split].items())
            say(f"{settings.site} measured on {told.sizes[0]} {told.split} rows: {numbers}")
    for name, what in deliver(clients, config, history, pages=False).items():
        if what.startswith("not"):
            raise StartError(f"{name}: {what}")
        say(f"delivered to {name}, checksum {what}")
    return found


def _meet(grid: Grid, config: AppConfig, settings: FederationSettings, kept: Kept) -> FlowerClients:
    """Wait for the site by its name, and return it as the only client."""
    run, told = secrets.token_hex(8), dict[str, Any]()
    told["plan"] = {
        "privacy": kept.told["privacy"],
        "requests": ["metrics", "deliver"],
        "work": None,
    }
    if kept.preparation is not None:
        told["preparation"] = kept.preparation
    node, hello = _find(grid, settings, run, told)
    check_as_tables(grid, settings.deadlines, [node], told["plan"], config.table)
    check_versions([hello])
    task = config.build_task()
    engine = task.build_engine(hello.schema.make_placeholder())
    check_models([hello], task.fingerprint(engine))
    mailbox = Mailbox(grid, replace(settings.deadlines, on_missing="fail"), 1)
    mailbox.nodes = {0: node}
    members = Members(run, task, [hello], engine, told, preparation=kept.fitted)
    return FlowerClients(mailbox, members)


def _find(
    grid: Grid, settings: FederationSettings, run: str, told: dict[str, Any]
) -> tuple[int, Hello]:
    """Greet nodes until one has the name; refuse what it says of itself as it says it."""
    until, asked = time.monotonic() + settings.deadlines.wait, set[int]()
    seen: dict[int, Hello | Failure] = {}
    while True:
        new = sorted(set(grid.get_node_ids()) - asked)
        asked |= set(new)
        if new:
            hellos, failures = greet(grid, settings.deadlines, run, new, told)
            seen |= {**hellos, **failures}
        found = [(node, one) for node, one in seen.items() if one.name == settings.site]
        if len(found) > 1:
            raise StartError(f"Two nodes call themselves {settings.site!r}.")
        for node, one in found:
            if isinstance(one, Failure):
                raise StartError(f"{settings.site}: {one.reason}")
            return node, one
        if time.monotonic() >= until:
            names = ", ".join(sorted(str(one.name or "?") for one in seen.values())) or "nobody"
            raise StartError(f"{settings.site} is not connected; there are {names}.")
        time.sleep(min(max(settings.deadlines.poll, 0.01) * 5, 2.0))
