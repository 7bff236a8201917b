"""A ready ``ServerApp``: the configuration, the clients, the training loop and the run folder."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from equifed.algorithms.around import unwrap
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import LocalSGD
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.ask_statistics import show_statistics
from equifed.flower.deliver import deliver
from equifed.flower.joining import (
    Admission,
    check_as_tables,
    find_open_part,
    hide_others,
    plan_next_part,
    read_model,
)
from equifed.flower.kept import FLOWER, Kept, describe_run
from equifed.flower.leave_one_out import show_leave_one_out
from equifed.flower.members import Members, gather
from equifed.flower.messenger import HiddenSums
from equifed.flower.preparing import Fit
from equifed.flower.round_log import RoundLog, explain_end, say
from equifed.flower.secure.sums import PairSums, SecureSums
from equifed.flower.server import FlowerClients
from equifed.flower.task import PACKAGES
from equifed.flower.welcome import welcome
from equifed.training.files import write_file
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.tables import PREPARATION, package_versions

HIDDEN: dict[str, Callable[[], HiddenSums | None]] = {
    "none": lambda: None,
    "sums": PairSums,
    "secure": SecureSums,
}


def make_server_app(config: AppConfig | Callable[[Context], AppConfig]) -> ServerApp:
    """Return a ``ServerApp`` that trains what a configuration describes."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = FederationSettings.from_run_config(context.run_config)
        chosen = config if isinstance(config, AppConfig) else config(context)
        try:
            if settings.do == "statistics":
                show_statistics(grid, settings, say)
            elif settings.do == "leave-one-out":
                run_leave_one_out(grid, chosen, settings)
            elif settings.do == "welcome":
                welcome(grid, settings, say)
            else:
                run_federation(grid, chosen, settings)
        except Exception as error:
            say(f"ENDED: {explain_end(error)}")
            raise

    return app


def run_federation(grid: Grid, config: AppConfig, settings: FederationSettings) -> History:
    """Gather the clients, train, and return what happened."""
    config, settings, clients = _begin(grid, config, settings)
    history, admission = _train_part(clients, config, settings)
    while admission.joined:
        everyone = len(clients.names) + len(admission.joined)
        config, settings = plan_next_part(config, settings, everyone, history.rounds[-1].round)
        say(f"{settings.rounds} rounds are left; they go on from this model in {settings.out}")
        with hide_others(grid, admission):
            clients = join(grid, config, settings)
        history, admission = _train_part(clients, config, settings)
    if settings.deliver:
        for name, what in deliver(clients, config, history).items():
            wrong = what.startswith("not")
            say(f"WARNING: {name}: {what}" if wrong else f"delivered to {name}, checksum {what}")
    say(json.dumps(history.summary()))
    return history


def _begin(
    grid: Grid, config: AppConfig, settings: FederationSettings
) -> tuple[AppConfig, FederationSettings, FlowerClients]:
    """Gather the clients of a new run, of one that goes on, or of its next part."""
    if not settings.resume:
        settings = replace(settings, rounds=settings.rounds or config.rounds)
        return config, settings, join(grid, config, settings)
    part, kept = find_open_part(Path(settings.out)), Kept.read(Path(settings.out))
    if part is not None and part.folder != Path(settings.out):
        say(f"the run in {settings.out} went on in {part.folder}; that is resumed")
        settings, kept = replace(settings, out=str(part.folder)), part.kept
    config, settings = kept.apply(config, settings)
    if part is None or not part.joining:
        return config, settings, join(grid, config, settings, kept)
    say(f"{part.folder} ended for {' and '.join(part.joining)} to join; the next part begins now")
    config, settings = plan_next_part(config, settings, len(part.names), part.done)
    say(f"{settings.rounds} rounds are left; they go on from this model in {settings.out}")
    clients = join(grid, config, settings)
    part.check(clients.members)
    return config, settings, clients


def _train_part(
    clients: FlowerClients, config: AppConfig, settings: FederationSettings
) -> tuple[History, Admission]:
    """Train until the last round, or until a site joins that the operator admitted."""
    folder = _open_folder(settings, config, clients.members)
    place = None if folder is None else folder.path
    admission = Admission(clients, place, settings.rounds, config.table)
    return train_clients(clients, config, settings, folder, admission), admission


def join(
    grid: Grid,
    config: AppConfig,
    settings: FederationSettings,
    kept: Kept | None = None,
    without: str | None = None,
) -> FlowerClients:
    """Gather the clients of a new run, or of one that goes on; perhaps without one of them."""
    task, hidden, table = config.build_task(), HIDDEN[settings.privacy](), config.table
    run, order = (secrets.token_hex(8), None) if kept is None else (kept.run, kept.names)
    told = {"plan": make_plan(config, settings)}
    before = kept or (Kept.read(Path(settings.start)) if settings.start else None)
    if before is not None and before.preparation is not None:
        told["preparation"] = before.preparation
    fit = None if table is None else Fit(table, task, hidden)
    about = settings.deadlines, run, settings.clients, order, told, fit, without
    mailbox, members = gather(grid, task, *about)
    if kept is not None:
        kept.check(members)
    elif before is not None:
        before.check_data(members)
        nodes = list(mailbox.nodes.values())
        check_as_tables(grid, settings.deadlines, nodes, told["plan"], table)
    algorithm = config.build_algorithm(members.sizes.tolist())
    for warning in (*(fit.warnings if fit else ()), *find_risks(algorithm, members)):
        say(f"WARNING: {warning}")
    return FlowerClients(mailbox, members, hidden)


def train_clients(
    clients: FlowerClients,
    config: AppConfig,
    settings: FederationSettings,
    folder: RunFolder | None = None,
    admission: Admission | None = None,
) -> History:
    """Train what the configuration describes."""
    start = read_model(Path(settings.start)) if settings.start and not settings.resume else None
    return train(
        config.build_algorithm(clients.members.sizes.tolist()),
        clients,
        rounds=settings.rounds or config.rounds,
        seed=config.seed,
        x=start,
        evaluate=config.evaluate.splits,
        every=config.evaluate.every,
        metrics=config.evaluate.metrics,
        stop=[config.stop, *([] if admission is None else [admission])],
        give_out=config.give_out,
        callbacks=[RoundLog(clients.members.events, folder)],
        progress=False,
        missing=settings.deadlines.to_policy(),
        folder=folder,
        resume=settings.resume,
    )


def run_leave_one_out(
    grid: Grid, config: AppConfig, settings: FederationSettings
) -> dict[str, Any]:
    """Train with all sites and without each, and return what the sites measured."""
    plain = replace(settings, out="", resume=False, deliver=False)

    def train_without(name: str | None) -> tuple[FlowerClients, History]:
        clients = join(grid, config, plain, without=name)
        return clients, train_clients(clients, config, plain)

    return show_leave_one_out(grid, config, settings, train_without, say)


def make_plan(config: AppConfig, settings: FederationSettings) -> dict[str, Any]:
    """Return what clients are told before they tell anything: a site may refuse it.

    That is the privacy, the local work, and the requests that are known beforehand.
    """
    requests = ["metrics"] if config.evaluate.splits else []
    requests += [] if config.table is None else ["prepare"]
    requests += {
        "none": [],
        "sums": ["sum"],
        "secure": ["sum", "keys", "shares", "boxes", "unmask"],
    }[settings.privacy]
    work = None
    with contextlib.suppress(ValueError):  # it needs the clients' sizes
        local = getattr(unwrap(config.build_algorithm([1] * settings.clients)), "local", None)
        work = local.to_dict() if isinstance(local, LocalSGD) else None
    requests += [] if work is None else ["local"]
    return {"privacy": settings.privacy, "requests": requests, "work": work}


def find_risks(algorithm: AnyAlgorithm, members: Members) -> list[str]:
    """Return what people should know before they trust this federation.

    An objective without a cap hands the model to whoever claims a large enough loss.
    """
    out = [f"{hello.name}: {note}" for hello in members.hellos for note in hello.notes]
    objective, n = getattr(unwrap(algorithm), "objective", None), len(members.names)
    if n > 1 and objective is not None:
        claimed = np.ones(n)
        claimed[0] = 1e6
        if np.max(objective.weights(claimed)) > 0.99:
            out.append(
                f"the objective {type(objective).__name__} has no cap on the weights: one client "
                "that reports a large loss, by mistake or not, decides alone. CVaR has a cap."
            )
    own = package_versions(PACKAGES)
    for package in ("torch", "numpy"):
        others = {h.name: h.versions.get(package, "?")[:20] for h in members.hellos}
        odd = [f"{name} {v}" for name, v in others.items() if v != own[package]]
        if odd:
            out.append(
                f"{package} differs from the server's {own[package]}: {', '.join(odd)}; results "
                "may differ in the last digits from a simulation."
            )
    return out


def _open_folder(
    settings: FederationSettings, config: AppConfig, members: Members
) -> RunFolder | None:
    if not settings.out:
        return None
    folder = RunFolder(settings.out, members.names)
    if not settings.resume:
        folder.create()
    content = json.dumps(describe_run(settings, config, members), indent=2).encode() + b"\n"
    write_file(folder.path / FLOWER, content)
    if members.preparation is not None:
        told = json.dumps(members.preparation.to_json(), indent=1).encode() + b"\n"
        write_file(folder.path / PREPARATION, told)
    return folder
