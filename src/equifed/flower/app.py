"""A ready ``ServerApp``: the configuration, the clients, the training loop and the run folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from equifed.algorithms.wrapper import unwrap
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.members import Members, StartError, gather
from equifed.flower.messenger import HiddenSums
from equifed.flower.secure.sums import PairSums, SecureSums
from equifed.flower.server import FlowerClients
from equifed.flower.task import PACKAGES
from equifed.training.callback import Callback
from equifed.training.files import write_file
from equifed.training.folder import RunFolder
from equifed.training.history import History, RoundRecord
from equifed.training.loop import train
from equifed.training.versions import package_versions

HIDDEN: dict[str, Callable[[], HiddenSums | None]] = {
    "none": lambda: None,
    "sums": PairSums,
    "secure": SecureSums,
}
FLOWER = "flower.json"
"""What a run folder of a federation holds besides: the run's identity, and who took part."""


def make_server_app(config: AppConfig | Callable[[Context], AppConfig]) -> ServerApp:
    """Return a ``ServerApp`` that trains what a configuration describes."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = FederationSettings.from_run_config(context.run_config)
        chosen = config if isinstance(config, AppConfig) else config(context)
        run_federation(grid, chosen, settings)

    return app


def run_federation(grid: Grid, config: AppConfig, settings: FederationSettings) -> History:
    """Gather the clients, train, and return what happened."""
    settings, run, order = _read_run(settings)
    settings = replace(settings, rounds=settings.rounds or config.rounds)
    task, deadlines = config.build_task(), settings.deadlines
    mailbox, members = gather(grid, task, deadlines, run, settings.clients, order)
    clients = FlowerClients(mailbox, members, HIDDEN[settings.privacy]())
    algorithm = config.build_algorithm(members.sizes.tolist())
    for warning in find_risks(algorithm, members):
        say(f"WARNING: {warning}")
    history = train(
        algorithm,
        clients,
        rounds=settings.rounds,
        seed=config.seed,
        evaluate=config.evaluate.splits,
        every=config.evaluate.every,
        metrics=config.evaluate.metrics,
        stop=config.stop.rules(),
        give_out=config.give_out,
        callbacks=[RoundLog()],
        progress=False,
        missing=deadlines.to_policy(),
        folder=_open_folder(settings, members),
        resume=settings.resume,
    )
    say(json.dumps(history.summary()))
    return history


def find_risks(algorithm: AnyAlgorithm, members: Members) -> list[str]:
    """Return what people should know before they trust this federation.

    An objective without a cap hands the model to whoever claims a large enough loss.
    """
    out = []
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


def say(text: str) -> None:
    """Print a line; Flower carries it to whoever follows the run."""
    print(f"equifed: {text}", flush=True)


class RoundLog(Callback):
    """Says in the log how the run goes."""

    @override
    def start(self, history: History, rounds: int) -> None:
        say(f"{rounds} rounds with {', '.join(history.names)}")

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        objective = "" if record.objective is None else f" objective {record.objective:.6g},"
        cost = f"{record.exchanges} exchanges, {record.seconds:.1f} s"
        say(f"round {record.round}:{objective} {cost}")

    @override
    def event(self, event: dict[str, Any]) -> None:
        say(f"WARNING: {json.dumps(event)}")


def _read_run(settings: FederationSettings) -> tuple[FederationSettings, str, list[str] | None]:
    """Return the settings, the run's identity and, for a run that goes on, its clients in order.

    How many clients a run has and what the server sees of them were agreed at its start; it has as
    many rounds as it was to have then, unless the settings say otherwise.
    """
    if not settings.resume:
        return settings, secrets.token_hex(8), None
    path = Path(settings.out)
    try:
        told = json.loads((path / FLOWER).read_text(encoding="utf-8"))
        run, privacy = str(told["run"]), told["privacy"]
        order = [str(client["name"]) for client in told["clients"]]
        rounds = settings.rounds or int(told["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        raise StartError(f"{path} holds no run of a federation to go on with.") from None
    return replace(settings, clients=len(order), privacy=privacy, rounds=rounds), run, order


def _open_folder(settings: FederationSettings, members: Members) -> RunFolder | None:
    if not settings.out:
        return None
    folder = RunFolder(settings.out, members.names)
    if not settings.resume:
        folder.create()
    told = {
        "run": members.run,
        "privacy": settings.privacy,
        "rounds": settings.rounds,
        "clients": [
            {"name": h.name, "sizes": h.sizes, "versions": h.versions} for h in members.hellos
        ],
    }
    write_file(folder.path / FLOWER, json.dumps(told, indent=2).encode() + b"\n")
    return folder
