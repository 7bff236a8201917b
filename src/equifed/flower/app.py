"""A ready ``ServerApp``, and data of an embedded set for trying out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.data.federation import Federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.members import Members, StartError, gather
from equifed.flower.secure.sums import HiddenSums, PairSums, SecureSums
from equifed.flower.server import FlowerClients
from equifed.flower.task import versions
from equifed.training.folder import RunFolder
from equifed.training.history import History, RoundRecord
from equifed.training.loop import Callback, train
from equifed.training.tables import write_file

HIDDEN: dict[str, Callable[[], HiddenSums | None]] = {
    "none": lambda: None,
    "sums": PairSums,
    "secure": SecureSums,
}
FLOWER = "flower.json"
"""What a run folder of a federation holds besides: the run's identity, and who took part."""


def server_app(config: AppConfig | Callable[[Context], AppConfig]) -> ServerApp:
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
    run, order = _identity(settings)
    post, roster = gather(grid, config.task(), settings.patience(), run, settings.clients, order)
    clients = FlowerClients(post, roster, HIDDEN[settings.privacy]())
    algorithm = config.build_algorithm(roster.sizes.tolist())
    for warning in warnings_about(algorithm, roster):
        say(f"WARNING: {warning}")
    history = train(
        algorithm,
        clients,
        rounds=settings.rounds or config.rounds,
        seed=config.seed,
        evaluate=config.evaluate.splits,
        every=config.evaluate.every,
        stop=config.stop.rules(),
        callbacks=[RoundLog()],
        missing=settings.patience().missing(),
        folder=_folder(settings, roster),
        resume=settings.resume,
    )
    say(json.dumps(history.summary()))
    return history


def embedded(config: AppConfig, context: Context) -> Federation:
    """Return the client of the configuration's data set that the node's partition names."""
    return config.client_data(int(context.node_config["partition-id"]))


def warnings_about(algorithm: AnyAlgorithm, roster: Members) -> list[str]:
    """Return what people should know before they trust this federation.

    An objective without a cap hands the model to whoever claims a large enough loss.
    """
    out = []
    objective, n = getattr(algorithm, "objective", None), len(roster.names)
    if n > 1 and objective is not None:
        claimed = np.ones(n)
        claimed[0] = 1e6
        if np.max(objective.weights(claimed)) > 0.99:
            out.append(
                f"the objective {type(objective).__name__} has no cap on the weights: one client "
                "that reports a large loss, by mistake or not, decides alone. CVaR has a cap."
            )
    own = versions()
    for package in ("torch", "numpy"):
        others = {h.name: h.versions.get(package, "?")[:20] for h in roster.hellos}
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

    def start(self, history: History, rounds: int) -> None:
        """Say who takes part."""
        say(f"{rounds} rounds with {', '.join(history.names)}")

    def round(self, record: RoundRecord, info: Info) -> None:
        """Say what a round cost."""
        objective = "" if record.objective is None else f" objective {record.objective:.6g},"
        cost = f"{record.exchanges} exchanges, {record.seconds:.1f} s"
        say(f"round {record.round}:{objective} {cost}")

    def event(self, event: dict[str, Any]) -> None:
        """Say that something happened to a client or the run."""
        say(f"WARNING: {json.dumps(event)}")


def _identity(settings: FederationSettings) -> tuple[str, list[str] | None]:
    """Return the run's identity and, for a run that goes on, its clients in order."""
    if not settings.resume:
        return secrets.token_hex(8), None
    path = Path(settings.out)
    try:
        run = json.loads((path / FLOWER).read_text(encoding="utf-8"))["run"]
        order = json.loads((path / "clients.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        raise StartError(f"{path} holds no run of a federation to go on with.") from None
    return str(run), [str(name) for name in order]


def _folder(settings: FederationSettings, roster: Members) -> RunFolder | None:
    if not settings.out:
        return None
    folder = RunFolder(settings.out, roster.names)
    if not settings.resume:
        folder.create()
    told = {
        "run": roster.run,
        "privacy": settings.privacy,
        "clients": [
            {"name": h.name, "sizes": h.sizes, "versions": h.versions} for h in roster.hellos
        ],
    }
    write_file(folder.path / FLOWER, json.dumps(told, indent=2).encode() + b"\n")
    return folder
