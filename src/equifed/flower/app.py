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
from equifed.flower.kept import FLOWER, Kept, describe_run
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
from equifed.training.missing import TrainingError
from equifed.training.versions import package_versions

GOOD_EVENTS = ("given out", "resume", "stop")
"""Events that are no warning."""

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
            run_federation(grid, chosen, settings)
        except Exception as error:
            say(f"ENDED: {explain_end(error)}")
            raise

    return app


def run_federation(grid: Grid, config: AppConfig, settings: FederationSettings) -> History:
    """Gather the clients, train, and return what happened."""
    kept = Kept.read(Path(settings.out)) if settings.resume else None
    if kept is not None:
        config, settings = kept.apply(config, settings)
    settings = replace(settings, rounds=settings.rounds or config.rounds)
    task, deadlines = config.build_task(), settings.deadlines
    run, order = (secrets.token_hex(8), None) if kept is None else (kept.run, kept.names)
    mailbox, members = gather(grid, task, deadlines, run, settings.clients, order)
    if kept is not None:
        kept.check(members)
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
        folder=_open_folder(settings, config, members),
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


def explain_end(error: Exception) -> str:
    """Return the reason of an end on one line: our own words, or what went wrong unexpectedly."""
    text = " ".join(str(error).split())
    ours = isinstance(error, StartError | TrainingError | ValueError | RuntimeError)
    return text if ours and text else f"{type(error).__name__}: {text}"


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
        kind, told = str(event["event"]), "" if event["event"] in GOOD_EVENTS else "WARNING: "
        who = f" of {event['client']}" if event.get("client") else ""
        why = f": {event['reason']}" if event.get("reason") else ""
        say(f"{told}round {event.get('round', 0)}: {kind}{who}{why}")


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
    return folder
