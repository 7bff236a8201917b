"""The commands that look around: ``list``, ``schema``, ``data`` and ``privacy``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from equifed import cli
from equifed.cli import terminal
from equifed.cli.terminal import Count, File, Json, Text, argument, open_console, option, print_json

DATA = terminal.complete_names("data")
NAMED = 5  # ledgers that are printed in full; the others are like them, or --json has them

data_app = typer.Typer(help="List, describe and download data sets.", no_args_is_help=True)


@data_app.command(name="show")
def show_data(
    name: Annotated[str, argument("Data set, or a configuration file.", autocompletion=DATA)],
    settings: terminal.Set = None,
    json: Json = False,
) -> None:
    """Show who has how many samples of what; of a table, also gaps and scales."""
    from equifed.runs.build import load_data

    given = settings or []
    if wrong := [text for text in given if not text.startswith("data.")]:
        raise cli.configs.ConfigError(
            [f"--set {text}: only data.KEY is used here" for text in wrong]
        )
    toml = name.endswith(".toml")
    data = (
        cli.configs.RunConfig.read(name, given).data if toml else cli.configs.read_data(name, given)
    )
    tables, document = describe_data(data, load_data(data))
    terminal.tell(document, (f"{table}\n" for table in tables), json, False)


def describe_data(data: dict[str, Any], federation: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return what there is to know about a federation, as tables and as a document."""
    sizes, prepared = federation.table(), federation.preparation
    counts = {
        client: dict(zip(sizes.header[1:], map(int, row), strict=True))
        for client, *row in (*sizes.rows, sizes.totals)
    }
    total = counts.pop(sizes.totals[0])
    document = {"name": data["name"], "clients": counts, "all": total}
    tables: list[Any] = [sizes]
    if federation.classes is not None and federation.classes <= 12:
        held = federation.train.class_counts(federation.classes)
        names = federation.names, held, federation.class_names
        table, document["shares"] = cli.describing.tabulate_shares(federation.name, *names)
        tables.append(table)
    if prepared is not None and data["name"] == "table":
        features = [column.name for column in prepared.columns]
        features += [prepared.target.name] if federation.classes is None else []
        read = cli.columns_of.read_columns(data["path"])
        found = cli.describing.describe_columns(read, data["client"], features)
        tables += [*cli.describing.tabulate_columns(federation.name, found), prepared.describe()]
        document |= {"columns": found, "preparation": prepared.to_json()}
    return tables, document


@data_app.command(name="fetch")
def fetch_data(
    name: Annotated[str, argument("Data set; see: equifed list data.", autocompletion=DATA)],
) -> None:
    """Get the files of a data set from its publisher, checked by their SHA-256."""
    paths = cli.registry.fetch(name)
    if cli.registry.DATASETS[name].embedded:
        typer.echo(f"{name} is part of the package.")
    for path in paths:
        typer.echo(path)


# -- list -------------------------------------------------------------------------------------


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    """Return sections, or the names of the section that is given."""
    sections, given = cli.catalogue.SECTIONS, context.params.get("section")
    if given not in (None, *sections):
        return []
    known = sections if given is None else sections[given].entries()
    return [name for name in known if name.startswith(incomplete)]


def list_names(
    section: Annotated[
        Text, argument("Section to list; all by default.", autocompletion=_complete)
    ] = None,
    name: Annotated[
        Text, argument("Show the settings of this name.", autocompletion=_complete)
    ] = None,
    json: Json = False,
) -> None:
    """List algorithms, objectives, schedules, data sets, models, losses, engines; or settings."""
    from rich.table import Table

    sections = cli.catalogue.SECTIONS
    if section is not None and section not in sections:
        raise ValueError(cli.catalogue.unknown("section", section, sections))
    if section is not None and name is not None:
        entry, rows = sections[section][name], list_settings(section, name)
        about = {"section": section, "name": name, "summary": entry.summary, "paper": entry.paper}
        lines = [f"{name}: {entry.describe()}", *_write_settings(rows)]
        terminal.tell({**about, "settings": rows}, lines, json, False)
        return
    found = {name: sections[name].entries() for name in ([section] if section else sections)}
    if json:
        print_json({
            section: {name: {"summary": e.summary, "paper": e.paper} for name, e in held.items()}
            for section, held in found.items()
        })  # fmt: skip
        return
    for title, held in found.items():
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for entry_name, entry in held.items():
            table.add_row(entry_name, entry.describe())
        open_console(stdout=True).print(table)


def _write_settings(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines about some settings."""
    for row in rows:
        value = "" if row["default"] is None else f" = {cli.first_look.write_toml(row['default'])}"
        need = "required; " if row["required"] else ""
        yield f"  {row['setting']}{value}  ({need}{row['type']})"
        if row["meaning"]:
            yield textwrap.indent(textwrap.fill(row["meaning"], 90), " " * 6)


def schema(app: Annotated[bool, option("Of an app's equifed.toml.", "--app")] = False) -> None:
    """Print the JSON schema of configuration files, for editors that complete and check TOML."""
    print_json(cli.first_look.make_schema(app))


def list_settings(section: str, name: str) -> list[dict[str, Any]]:
    """Return the settings of a name as a configuration has them: key, type, default, meaning."""
    kind, settings = cli.catalogue.SECTIONS[section], cli.schemas.settings
    constructor = kind[name].load()
    wanted = settings(constructor, kind.given)
    shared = dict(cli.configs.CHOSEN.values()).get(section)
    filled = cli.schemas.open_step({"name": name}, wanted) if section == "algorithms" else {}
    rows = list(walk_settings(wanted, constructor, filled))
    if shared is None:
        return rows
    rest = {key: setting for key, setting in settings(shared).items() if key not in wanted}
    return [*rows, *walk_settings(rest, shared, {})]


def walk_settings(
    wanted: dict[str, Any], owner: Callable[..., Any], filled: dict[str, Any], path: str = ""
) -> Iterator[dict[str, Any]]:
    """Go through settings and those inside them; ``filled`` has defaults that come from outside."""
    meanings = read_meanings(owner)
    for key, setting in wanted.items():
        default, record = filled.get(key, setting.default), setting.record
        if record is not None and (setting.required or default is not None):
            inner = {**(setting.default or {}), **(default or {})}
            yield from walk_settings(cli.schemas.settings(record), record, inner, f"{path}{key}.")
            continue
        yield {
            "setting": path + key,
            "type": _write_type(setting),
            "required": setting.required and default is None,
            "default": default,
            "meaning": meanings.get(key, ""),
        }


def _write_type(setting: Any) -> str:
    """Return a type in words; None is what a setting without a value has."""
    if setting.section is not None:
        return f"see: equifed list {setting.section}"
    if setting.record is not None:
        return f"table of {getattr(setting.record, '__name__', 'settings')}"
    parts = [
        part for part in cli.schemas.alternatives(setting.annotation) if part is not type(None)
    ]
    text = " | ".join(map(inspect.formatannotation, parts))
    text = re.sub(r"\b(?:typing|pathlib|collections\.abc)\.", "", text)
    return re.sub(r"Literal\[(.*?)\]+", lambda found: found[1].replace(", ", " or "), text)


def read_meanings(documented: Callable[..., Any]) -> dict[str, str]:
    """Return the first sentence about every parameter of a docstring in NumPy's style."""
    _, _, text = (inspect.getdoc(documented) or "").partition("Parameters\n----------\n")
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", text):
        head, _, body = block.partition("\n")
        names, colon, _ = head.partition(" : ")
        if not colon:
            break  # the next part of the docstring
        plain = re.sub(r":\w+:(?=`)|`+", "", " ".join(body.split()))
        meaning = re.split(r"\.(?:\s|$)", plain, maxsplit=1)[0]
        found |= dict.fromkeys((name.strip() for name in names.split(",")), meaning)
    return found


# -- privacy: what was spent on what, and what a budget would buy ------------------------------


def privacy(
    path: Annotated[File, argument("Folder of a finished run, or a site's ledger file.")] = None,
    plan: Annotated[bool, option("Print the noise that a budget allows.", "--plan")] = False,
    epsilon: Annotated[float, option("Budget of a plan.")] = 3.0,
    delta: Annotated[float, option("Delta of the budget; well below 1 / rows.")] = 1e-5,
    rounds: Annotated[str, option("Rounds to plan for (a,b,...).")] = "6,12,25",
    rows: Annotated[str, option("Rows per site (a,b,...).")] = "46,300,10000",
    algorithm: Annotated[
        str, option("fair-newton, fedavg, scaffold, scaff-pd, drfa or private-fedavg.")
    ] = "fair-newton",
    average: Annotated[bool, option("Client weights are fixed (average).", "--average")] = False,
    length: Annotated[float, option("Longest row; longer ones are scaled down.")] = 8.0,
    loss: Annotated[float, option("Largest loss of a row; others are clipped.")] = 3.0,
    steps: Annotated[int, option("Local steps per round.", min=1)] = 10,
    batch_size: Annotated[Count, option("Rows per step; all by default.")] = None,
    clients: Annotated[int, option("Clients, for private-fedavg.", min=1)] = 1000,
    participation: Annotated[float, option("Share of them in a round.")] = 1.0,
    clip: Annotated[float, option("Longest update, for private-fedavg.")] = 1.0,
    json: Json = False,
) -> None:
    """Show what privacy a run or a site has spent, or plan a budget with --plan.

    The budget is what to publish, not what happened to be spent. A plan is for a linear model with
    a logistic loss; noise is the standard deviation on every number of an answer.
    """
    from equifed.privacy.fedavg import PrivateFedAvg

    if plan == (path is not None):
        raise ValueError("Give the folder of a run or a ledger file, or --plan; one of the two.")
    if path is not None:
        _show_ledgers(path, json)
        return
    found: list[tuple[int, int, Sequence[Any]]] = []
    whose = "rows"
    for r in _read_numbers(rounds, "rounds"):
        if algorithm == "private-fedavg":
            whose = "clients"
            private = PrivateFedAvg(epsilon, r, clip, participation=participation, delta=delta)
            found.append((clients, r, [private.price(clients, r)]))
            continue
        sites, bounds = (
            _read_numbers(rows, "rows"),
            cli.ledger.Bounds(epsilon, length, loss, r, delta),
        )
        answers = cli.private.plan_answers(
            bounds, algorithm, sites, steps=steps, batch_size=batch_size, fair=not average
        )
        found += [(m, r, entries) for m, entries in zip(sites, answers, strict=True)]
    if json:
        lines = [{"rows": m, "rounds": r, "answers": list(map(asdict, e))} for m, r, e in found]
        print_json({"epsilon": epsilon, "delta": delta, "plan": lines})
        return
    records = []
    for m, r, entries in found:
        told = {e.kind: "once" if e.steps == 1 else f"{e.steps} times" for e in entries}
        cells = {
            cli.ledger.MECHANISMS[e.kind].words: f"{e.sigma:.3g} ({told[e.kind]})" for e in entries
        }
        records.append({"rounds": r, whose: f"{m:,}", **cells})
    every = {key: "" for record in records for key in record}
    title = f"epsilon {epsilon:g} at delta {delta:g}: noise (deviation)"
    terminal.print_records(title, [every | record for record in records])


def _read_numbers(text: str, what: str) -> list[int]:
    """Return whole numbers that are separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"--{what} must be whole numbers from 1, as in 6,12,25; got {text!r}.")
    return found


def _show_ledgers(path: Path, json: bool) -> None:
    ledgers, list_entries = cli.private.read_ledgers(path), cli.ledger.list_entries
    if json:
        told = [
            one.to_dict() | {"spent": one.spent, "entries": list_entries(one)} for one in ledgers
        ]
        print_json({"ledgers": told})
        return
    names = {"sensitivity": "sensitivity", "sigma": "noise", "q": "of the rows", "alone": "alone"}
    for ledger in ledgers[:NAMED]:
        title = (
            f"{cli.arrays.show_text(ledger.name)}: publish epsilon {ledger.epsilon:g} at delta "
            f"{ledger.delta:g} for every {ledger.unit}; spent so far {ledger.spent:.3g}"
        )
        records = []
        for entry in list_entries(ledger):
            known, share = cli.ledger.MECHANISMS.get(entry["kind"]), entry["share"]
            what = entry["kind"] if known is None else known.words
            record = {"answer": what, "times": entry["steps"]}
            record |= {label: f"{entry[key]:.3g}" for key, label in names.items()}
            records.append(record | {"of the budget": "" if share is None else f"{share:.1%}"})
        terminal.print_records(title, records)
    if len(ledgers) > NAMED:
        most = max(ledger.spent for ledger in ledgers)
        typer.echo(f"{len(ledgers) - NAMED} more, with --json; the most spent is {most:.3g}.")
