"""The command about privacy: what was spent on what, and what a budget would buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equifed.cli.terminal import Json, open_console, print_json

if TYPE_CHECKING:
    from equifed.privacy.ledger import Entry, Ledger

    Planned = tuple[int, int, Sequence[Entry]]

NAMED = 5
"""Ledgers that are printed in full; the others are like them, or --json has them."""


def privacy(
    path: Annotated[
        Path | None, typer.Argument(help="Folder of a finished run, or a site's ledger file.")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Plan: print the noise that a budget allows, before any run."),
    ] = False,
    epsilon: Annotated[float, typer.Option(help="Budget of a plan.")] = 3.0,
    delta: Annotated[float, typer.Option(help="Delta of the budget; well below 1 / rows.")] = 1e-5,
    rounds: Annotated[str, typer.Option(help="Rounds to plan for (a,b,...).")] = "6,12,25",
    rows: Annotated[str, typer.Option(help="Rows per site (a,b,...).")] = "46,300,10000",
    algorithm: Annotated[
        str, typer.Option(help="fair-newton, fedavg, scaffold, scaff-pd, drfa or private-fedavg.")
    ] = "fair-newton",
    average: Annotated[
        bool, typer.Option("--average", help="Fixed client weights (average objective).")
    ] = False,
    length: Annotated[float, typer.Option(help="Longest row; longer ones are scaled down.")] = 8.0,
    loss: Annotated[
        float, typer.Option(help="Bound on the loss of a row; larger losses are clipped.")
    ] = 3.0,
    steps: Annotated[int, typer.Option(min=1, help="Local steps per round.")] = 10,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step; all by default.")] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients, for private-fedavg.")] = 1000,
    participation: Annotated[float, typer.Option(help="Share of them in a round.")] = 1.0,
    clip: Annotated[float, typer.Option(help="Longest update, for private-fedavg.")] = 1.0,
    json: Json = False,
) -> None:
    """Show what privacy a run or a site has spent, or plan a budget with --plan.

    The budget is what to publish, not what happened to be spent. A plan is for a linear model with
    a logistic loss; noise is the standard deviation on every number of an answer.
    """
    if plan == (path is not None):
        raise ValueError("Give the folder of a run or a ledger file, or --plan; one of the two.")
    if path is not None:
        _show(path, json)
        return
    budget, private = (epsilon, delta), algorithm == "private-fedavg"
    if private:
        found = _plan_clients(budget, _numbers(rounds, "rounds"), clients, participation, clip)
    else:
        bounds, sites = (*budget, length, loss), _numbers(rows, "rows")
        given = {"steps": steps, "batch_size": batch_size, "fair": not average}
        found = _plan_sites(bounds, _numbers(rounds, "rounds"), algorithm, sites, given)
    if json:
        lines = [{"rows": m, "rounds": r, "answers": list(map(asdict, e))} for m, r, e in found]
        print_json({"epsilon": epsilon, "delta": delta, "plan": lines})
        return
    title = f"epsilon {epsilon:g} at delta {delta:g}: noise (deviation)"
    _print_plan(found, title, "clients" if private else "rows")


def _plan_clients(
    budget: tuple[float, float], rounds: Sequence[int], n: int, participation: float, clip: float
) -> list[Planned]:
    from equifed.privacy.fedavg import PrivateFedAvg

    epsilon, delta = budget
    made = [
        PrivateFedAvg(epsilon, r, clip, participation=participation, delta=delta) for r in rounds
    ]
    return [(n, one.rounds, [one.price(n, one.rounds)]) for one in made]


def _plan_sites(
    bounds: tuple[float, ...], rounds: Sequence[int], algorithm: str, sites: Sequence[int],
    given: Mapping[str, Any],
) -> list[Planned]:  # fmt: skip
    from equifed.privacy.budget import Bounds
    from equifed.privacy.plan import plan_answers

    epsilon, delta, length, loss = bounds
    found: list[Planned] = []
    for r in rounds:
        plan = plan_answers(Bounds(epsilon, length, loss, r, delta), algorithm, sites, **given)
        found += [(m, r, entries) for m, entries in zip(sites, plan, strict=True)]
    return found


def _numbers(text: str, what: str) -> list[int]:
    """Return whole numbers that are separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"--{what} must be whole numbers from 1, as in 6,12,25; got {text!r}.")
    return found


def _print_plan(found: Sequence[Planned], title: str, whose: str) -> None:
    from rich.table import Table

    from equifed.privacy.budget import MECHANISMS

    kinds = list(dict.fromkeys(entry.kind for _, _, entries in found for entry in entries))
    table = Table("rounds", whose, *(MECHANISMS[kind].words for kind in kinds), title=title)
    for m, r, entries in found:
        times = {e.kind: "once" if e.steps == 1 else f"{e.steps} times" for e in entries}
        cells = {e.kind: f"{e.sigma:.3g} ({times[e.kind]})" for e in entries}
        table.add_row(str(r), f"{m:,}", *(cells.get(kind, "") for kind in kinds))
    open_console(stdout=True).print(table)


def _show(path: Path, json: bool) -> None:
    from equifed.privacy.plan import list_entries, read_ledgers

    ledgers = read_ledgers(path)
    if json:
        found = [ledger.to_dict() | {"spent": ledger.spent} for ledger in ledgers]
        for told, ledger in zip(found, ledgers, strict=True):
            told["entries"] = list_entries(ledger)
        print_json({"ledgers": found})
        return
    console = open_console(stdout=True)
    for ledger in ledgers[:NAMED]:
        console.print(_tabulate(ledger, list_entries(ledger)))
    if len(ledgers) > NAMED:
        most = max(ledger.spent for ledger in ledgers)
        console.print(f"{len(ledgers) - NAMED} more, with --json; the most spent is {most:.3g}.")


def _tabulate(ledger: Ledger, entries: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from equifed.contract.arrays import show_text
    from equifed.privacy.budget import MECHANISMS

    title = (
        f"{show_text(ledger.name)}: publish epsilon {ledger.epsilon:g} at delta {ledger.delta:g} "
        f"for every {ledger.unit}; spent so far {ledger.spent:.3g}"
    )
    columns = ("answer", "times", "sensitivity", "noise", "of the rows", "of the budget", "alone")
    table = Table(*columns, title=Text(title))
    for e in entries:
        share = "" if e["share"] is None else f"{e['share']:.1%}"
        table.add_row(
            Text(MECHANISMS[e["kind"]].words if e["kind"] in MECHANISMS else show_text(e["kind"])),
            str(e["steps"]),
            f"{e['sensitivity']:.3g}", f"{e['sigma']:.3g}", f"{e['q']:.3g}", share,
            f"{e['alone']:.3g}",
        )  # fmt: skip
    return table
