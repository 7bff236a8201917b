"""What the sites get at the end: the model, its preparation and card, and their own page."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from equifed.contract.streams import Stream
from equifed.flower.app_config import AppConfig
from equifed.flower.matrices import pack_tensor
from equifed.flower.memory import CARD, PAGE, digest
from equifed.flower.server import FlowerClients
from equifed.flower.wire import Reply, WireError
from equifed.models.export import describe
from equifed.report import (
    ReportError,
    as_methods,
    build,
    render_participant,
    write_card,
)
from equifed.training.history import History
from equifed.training.tables import package_versions


def deliver(clients: FlowerClients, config: AppConfig, history: History) -> dict[str, str]:
    """Send every site the model and what belongs to it; return what came of it, by site.

    That is the checksum of what lies in the site's folder now, or why there is nothing. A site
    that was not in the history has no page there.
    """
    assert history.parameters is not None
    x = clients.flatten_shared(history.parameters)
    card, own = make_card(clients, config, history), make_pages(history)
    args: dict[str, Any] = {"sha256": digest(x.detach().cpu().numpy())}
    if clients.members.engine.remembers_own():
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
