"""A ready ``ServerApp``: the configuration, the clients, the training loop and the run folder."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from equifed.algorithms.around import unwrap
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.streams import Stream
from equifed.flower.app_config import (
    FLOWER,
    AppConfig,
    FederationSettings,
    Kept,
    describe_run,
    read_model,
)
from equifed.flower.fit import SiteTrials, check_sites, describe_choice, prepare_fit
from equifed.flower.handshake import StartError
from equifed.flower.mailbox import say
from equifed.flower.members import Members, gather
from equifed.flower.memory import CARD, PAGE, digest
from equifed.flower.messenger import SecureSums
from equifed.flower.plan import read_plan, sign_plan, unpack_plan
from equifed.flower.preparing import Fit, show_statistics
from equifed.flower.rehearsal import choose_splits, lengthen, make_plan
from equifed.flower.server import FlowerClients
from equifed.flower.task import PACKAGES
from equifed.flower.wire import Reply, WireError, pack_tensor
from equifed.metrics.metric import as_metrics
from equifed.models.export import describe
from equifed.report import ReportError, as_methods, build, render_participant, write_card
from equifed.training.files import write_file
from equifed.training.folder import RunFolder
from equifed.training.history import History, MetricRecord, RoundRecord
from equifed.training.loop import train
from equifed.training.play_round import TrainingError
from equifed.training.tables import PREPARATION, package_versions
from equifed.training.trackers import Callback

GOOD_EVENTS = ("given out", "resume", "stop")
"""Events that are no warning."""


def make_server_app(config: AppConfig) -> ServerApp:
    """Return a ``ServerApp`` that trains what a configuration describes."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = FederationSettings.from_run_config(context.run_config)
        try:
            if settings.do == "statistics":
                show_statistics(grid, settings, say, make_plan(config, settings))
            elif settings.do == "evaluate":
                measure_model(grid, config, settings)
            else:
                run_federation(grid, config, settings)
        except Exception as error:
            say(f"ENDED: {explain_end(error)}")
            raise

    return app


def run_federation(grid: Grid, config: AppConfig, settings: FederationSettings) -> History:
    """Gather the clients, train, deliver the model, and return what happened."""
    kept = Kept(Path(settings.out)) if settings.resume else None
    if kept is not None:
        config, settings = kept.apply(config, settings)
    settings = replace(settings, rounds=settings.count_rounds(config))
    if settings.do == "fit":
        settings = prepare_fit(settings, config)
    clients = join(grid, config, settings, kept)
    if settings.do == "fit":
        check_sites(clients.members)
    folder = _open_folder(settings, config, clients.members)
    if settings.do == "fit":
        return _fit(clients, config, settings, folder)
    history = train(
        config.build_algorithm(clients.members.sizes.tolist()),
        clients,
        rounds=settings.rounds,
        seed=config.seed,
        x=read_model(Path(settings.start)) if settings.start and kept is None else None,
        evaluate=choose_splits(config, settings),
        every=config.evaluate.every,
        metrics=config.evaluate.metrics,
        stop=[config.stop],
        give_out=config.give_out,
        callbacks=[RoundLog(clients.members.events, folder)],
        progress=False,
        missing=settings.deadlines.to_policy(),
        folder=folder,
        resume=settings.resume,
    )
    if settings.deliver:
        _deliver(clients, config, history)
    say(json.dumps(history.summary()))
    return history


def _fit(
    clients: FlowerClients, config: AppConfig, settings: FederationSettings,
    folder: RunFolder | None,
) -> History:  # fmt: skip
    """Choose among candidates, and deliver the chosen one."""
    served, sites = SiteTrials(clients, config, settings, folder).choose()
    if settings.deliver:
        _deliver(sites, describe_choice(config, settings, served), served.history)
    for line in str(served).splitlines():
        say(line)
    say(json.dumps(served.to_dict()))
    return served.history


def join(
    grid: Grid, config: AppConfig, settings: FederationSettings, kept: Kept | None = None
) -> FlowerClients:
    """Gather the clients of a new run, or of one that goes on."""
    task, table = config.build_task(), config.table
    hidden = SecureSums() if settings.privacy == "secure" else None
    order = None if kept is None else kept.names
    signed = find_plan(config, settings, kept)
    run, told = read_plan(signed["text"]).run, {"plan": signed}
    before = kept or (Kept(Path(settings.start)) if settings.start else None)
    if before is not None and before.preparation is not None:
        told["preparation"] = before.preparation
    fit = None if table is None else Fit(table, task, hidden)
    about = settings.deadlines, run, settings.clients, order, told, fit
    mailbox, members = gather(grid, task, *about)
    if before is not None:
        before.check(members, resumed=kept is not None)
    algorithm = config.build_algorithm(members.sizes.tolist())
    for warning in (*(fit.warnings if fit else ()), *find_risks(algorithm, members)):
        say(f"WARNING: {warning}")
    return FlowerClients(mailbox, members, hidden)


def measure_model(
    grid: Grid, app: AppConfig, settings: FederationSettings
) -> dict[str, dict[str, Any]]:
    """Let sites measure the model of a finished run on their rows, and deliver it.

    Sites that were not in that run are compared with those that were, and their rows are prepared
    as the others' were; nothing is trained.
    """
    folder = Path(settings.start)
    kept = Kept(folder)
    config, model = kept.config(app), read_model(folder)
    clients = join(grid, config, replace(settings, privacy=kept.told["privacy"]))
    splits = choose_splits(config, replace(settings, privacy=kept.told["privacy"]))
    found: dict[str, dict[str, Any]] = {name: {} for name in clients.names}
    x, metrics = clients.flatten_shared(model), as_metrics(config.evaluate.metrics)
    for told in clients.evaluate(x, splits, metrics):
        for i in np.flatnonzero(told.sizes).tolist():
            name, values = clients.names[i], {k: float(v[i]) for k, v in told.metrics.items()}
            found[name][told.split] = values
            numbers = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            say(f"{name} measured on {told.sizes[i]} {told.split} rows: {numbers}")
    _deliver(clients, config, History.load(folder))
    return found


def _deliver(clients: FlowerClients, config: AppConfig, history: History) -> None:
    for name, what in deliver(clients, config, history).items():
        wrong = what.startswith("not")
        say(f"WARNING: {name}: {what}" if wrong else f"delivered to {name}, checksum {what}")


def find_plan(config: AppConfig, settings: FederationSettings, kept: Kept | None) -> dict[str, str]:
    """Return the plan as clients are told it: the operator's, or that of the run that goes on.

    Else it is one that nobody signed, which sites with operators in their policy refuse.
    """
    if settings.plan:
        return unpack_plan(settings.plan)
    if kept is None:
        return sign_plan(make_plan(config, settings))
    earlier: dict[str, str] = kept.told["plan"]
    plan = read_plan(earlier["text"])
    if settings.rounds <= plan.rounds:
        return earlier
    if earlier["signature"]:
        raise StartError(
            f"The plan of this run has {plan.rounds} rounds, but {settings.rounds} were requested; "
            "an operator must sign that: equifed flower resume --key"
        )
    return sign_plan(lengthen(plan, config, settings.rounds))


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


# -- what sites get at the end ------------------------------------------------------------------


def deliver(clients: FlowerClients, config: AppConfig, history: History) -> dict[str, str]:
    """Send every site the model and what belongs to it; return what came of it, by site.

    That is the checksum of what lies in the site's folder now, or why there is nothing. A site
    that was not in the history has no page there.
    """
    assert history.parameters is not None
    x = clients.flatten_shared(history.parameters)
    card, own = make_card(clients, config, history), make_pages(history)
    args: dict[str, Any] = {"sha256": digest(x.detach().cpu().numpy())}
    if clients.keeps_own():
        args["own_round"] = clients.round_of(x)
    requests = clients.write_requests(
        "deliver", Stream(0, ("deliver",)), args, {"x": pack_tensor(x)}
    )
    for i, request in requests.items():
        name = clients.names[i]
        request.args["files"] = {CARD: card} | ({PAGE: own[name]} if name in own else {})

    def check(i: int, reply: Reply) -> None:
        if not re.fullmatch("[0-9a-f]{64}", str(reply.numbers.get("checksum"))):
            raise WireError("sent no checksum of what it keeps")

    answers = clients.mailbox.ask(requests, check, partial=True)
    told = {i: str(reply.numbers["checksum"]) for i, reply in answers.replies.items()}
    told |= {i: f"not delivered: {failure.reason}" for i, failure in answers.failures.items()}
    return {clients.names[i]: told[i] for i in sorted(told)}


def make_card(clients: FlowerClients, config: AppConfig, history: History) -> str:
    """Return the model card, without the table of single clients: sites get their own page."""
    members = clients.members
    schema, prepared = members.hellos[0].schema, members.preparation
    assert history.parameters is not None
    made = members.engine.predictor(clients.flatten_shared(history.parameters))
    predictor = replace(
        made,
        own={},  # those of the sites are not here
        clients=tuple(history.names),
        classes=schema.class_names or made.classes,
        preparation=prepared,
    )
    known = "columns, categories and preparation" if schema.digest else "arrays without names"
    told = {
        "versions": package_versions(),
        "data": {"name": f"own data of every site: {known}", "source": {}}
        | {"sha256": schema.digest or "none"},
    }
    text = write_card(
        history,
        config.to_dict(),
        told,
        describe(predictor),
        None if prepared is None else prepared.describe(),
        () if prepared is None else prepared.left_out,
    )
    return re.sub(r"(?s)## Clients\n.*?(?=\n## |\Z)", "", text)


def make_pages(history: History) -> dict[str, str]:
    """Return one page for every client by name; none if nothing was evaluated."""
    try:
        report = build(as_methods(history))
        names = () if report.scale is None else history.names
        return {name: render_participant(report, i) for i, name in enumerate(names)}
    except ReportError:
        return {}


# -- what the server app says ------------------------------------------------------------------


def explain_end(error: Exception) -> str:
    """Return the reason of an end on one line: our own words, or what went wrong unexpectedly."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        cure = "make room there, then: equifed flower resume"
        return f"no space is left on the server's disk{where}; {cure}"
    text = " ".join(str(error).split())
    ours = isinstance(error, StartError | TrainingError | ValueError | RuntimeError)
    return text if ours and text else f"{type(error).__name__}: {text}"


class RoundLog(Callback):
    """Says in the log how the run goes, and writes down who is left out of it (``events``)."""

    def __init__(
        self, events: list[dict[str, Any]] | None = None, folder: RunFolder | None = None
    ) -> None:
        self.events, self.folder = [] if events is None else events, folder
        self.history: History | None = None

    @override
    def start(self, history: History, rounds: int) -> None:
        self.history = history
        say(f"{rounds} rounds with {', '.join(history.names)}")
        self._take_events(history.rounds[-1].round if history.rounds else 0)

    def _take_events(self, r: int) -> None:
        while self.events and self.history is not None:
            event = {"round": r, **self.events.pop(0)}
            self.history.events.append(event)
            if self.folder is not None:
                self.folder.event(event)
            self.event(event)

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        self._take_events(record.round)
        objective = "" if record.objective is None else f" objective {record.objective:.6g},"
        cost = f"{record.exchanges} exchanges, {record.seconds:.1f} s"
        say(f"round {record.round}:{objective} {cost}")

    @override
    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        self._take_events(round)

    @override
    def event(self, event: dict[str, Any]) -> None:
        kind = str(event["event"])
        told = "" if kind in GOOD_EVENTS else "WARNING: "
        who = f" of {event['client']}" if event.get("client") else ""
        why = f": {event['reason']}" if event.get("reason") else ""
        say(f"{told}round {event.get('round', 0)}: {kind}{who}{why}")
