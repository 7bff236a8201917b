"""The commands that look around: ``list``, ``schema`` and ``data``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equifed.cli.terminal import DataName, Json, Set, complete_names, open_console, print_json

if TYPE_CHECKING:
    from equifed.data.federation import Federation
    from equifed.runs.catalogue import Entry
    from equifed.runs.schema import Setting

data_app = typer.Typer(help="List, describe and download data sets.", no_args_is_help=True)


@data_app.command(name="show")
def show_data(
    name: Annotated[
        str,
        typer.Argument(
            help="Data set (see: equifed list data), or a configuration file, for its data.",
            autocompletion=complete_names("data"),
        ),
    ],
    settings: Set = None,
    json: Json = False,
) -> None:
    """Show who has how many samples of what; of a table, also gaps and scales."""
    from equifed.runs.build import load_data
    from equifed.runs.config import ConfigError, RunConfig, read_data

    wrong = [text for text in settings or [] if not text.startswith("data.")]
    if wrong:
        raise ConfigError([f"--set {text}: only data.KEY is used here" for text in wrong])
    if name.endswith(".toml"):
        data = RunConfig.read(name, settings or []).data
    else:
        data = read_data(name, settings or [])
    tables, document = describe_data(data, load_data(data))
    if json:
        print_json(document)
        return
    out = open_console(stdout=True)
    for table in tables:
        out.print(f"{table}\n", highlight=False, markup=False, soft_wrap=True)


def describe_data(data: dict[str, Any], federation: Federation) -> tuple[list[Any], dict[str, Any]]:
    """Return what there is to know about a federation, as tables and as a document."""
    from equifed.data.columns import read_columns
    from equifed.data.describe import describe_columns, tabulate_columns, tabulate_shares

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
        table, document["shares"] = tabulate_shares(federation.name, *names)
        tables.append(table)
    if prepared is not None and data["name"] == "table":
        features = [column.name for column in prepared.columns]
        features += [prepared.target.name] if federation.classes is None else []
        found = describe_columns(read_columns(data["path"]), data["client"], features)
        tables += [*tabulate_columns(federation.name, found), prepared.describe()]
        document |= {"columns": found, "preparation": prepared.to_json()}
    return tables, document


@data_app.command(name="fetch")
def fetch_data(name: DataName) -> None:
    """Get the files of a data set from its publisher, checked by their SHA-256."""
    from equifed.datasets.registry import DATASETS, fetch

    paths = fetch(name)
    if DATASETS[name].embedded:
        typer.echo(f"{name} is part of the package.")
    for path in paths:
        typer.echo(path)


# -- list -------------------------------------------------------------------------------------


def _complete_section(incomplete: str) -> list[str]:
    from equifed.runs.catalogue import SECTIONS

    return [name for name in SECTIONS if name.startswith(incomplete)]


def _complete_entry(context: typer.Context, incomplete: str) -> list[str]:
    from equifed.runs.catalogue import SECTIONS

    section = SECTIONS.get(context.params.get("section", ""))
    return [name for name in section.entries() if name.startswith(incomplete)] if section else []


def list_names(
    section: Annotated[
        str | None,
        typer.Argument(help="Section to list; all by default.", autocompletion=_complete_section),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="Show the settings of this name.", autocompletion=_complete_entry),
    ] = None,
    json: Json = False,
) -> None:
    """List algorithms, objectives, schedules, data sets, models, losses, engines; or settings."""
    from equifed.runs.catalogue import SECTIONS, unknown

    if section is not None and section not in SECTIONS:
        raise ValueError(unknown("section", section, SECTIONS))
    if section is not None and name is not None:
        _show_entry(section, name, json)
    else:
        _show_sections([section] if section else list(SECTIONS), json)


def schema(
    app: Annotated[bool, typer.Option("--app", help="Of a Flower app's equifed.toml.")] = False,
) -> None:
    """Print the JSON schema of configuration files, for editors that complete and check TOML."""
    from equifed.runs.init import make_schema

    print_json(make_schema(app))


def _show_sections(names: list[str], json: bool) -> None:
    from rich.table import Table

    from equifed.runs.catalogue import SECTIONS

    found = {section: SECTIONS[section].entries() for section in names}
    if json:
        print_json({
            section: {name: {"summary": e.summary, "paper": e.paper} for name, e in held.items()}
            for section, held in found.items()
        })  # fmt: skip
        return
    for section, held in found.items():
        table = Table(title=section, title_justify="left", box=None, show_header=False)
        for name, entry in held.items():
            table.add_row(name, _describe(entry))
        open_console(stdout=True).print(table)


def _describe(entry: Entry) -> str:
    return f"{entry.summary} ({entry.paper})" if entry.paper else entry.summary


def _show_entry(section: str, name: str, json: bool) -> None:
    from equifed.runs.catalogue import SECTIONS
    from equifed.runs.init import write_toml

    entry, rows = SECTIONS[section][name], list_settings(section, name)
    if json:
        about = {"section": section, "name": name, "summary": entry.summary, "paper": entry.paper}
        print_json({**about, "settings": rows})
        return
    typer.echo(f"{name}: {_describe(entry)}")
    for row in rows:
        value = "" if row["default"] is None else f" = {write_toml(row['default'])}"
        need = "required; " if row["required"] else ""
        typer.echo(f"  {row['setting']}{value}  ({need}{row['type']})")
        if row["meaning"]:
            typer.echo(textwrap.indent(textwrap.fill(row["meaning"], 90), " " * 6))


def list_settings(section: str, name: str) -> list[dict[str, Any]]:
    """Return the settings of a name as a configuration has them: key, type, default, meaning."""
    from equifed.runs.catalogue import SECTIONS
    from equifed.runs.config import CHOSEN
    from equifed.runs.schema import open_step, settings

    constructor = SECTIONS[section][name].load()
    wanted = settings(constructor, SECTIONS[section].given)
    shared = dict(CHOSEN.values()).get(section)
    filled = open_step({"name": name}, wanted) if section == "algorithms" else {}
    rows = list(walk_settings(wanted, constructor, filled))
    if shared is None:
        return rows
    rest = {key: setting for key, setting in settings(shared).items() if key not in wanted}
    return [*rows, *walk_settings(rest, shared, {})]


def walk_settings(
    wanted: dict[str, Setting], owner: Callable[..., Any], filled: dict[str, Any], path: str = ""
) -> Iterator[dict[str, Any]]:
    """Go through settings and those inside them; ``filled`` has defaults that come from outside."""
    from equifed.runs.schema import settings

    meanings = read_meanings(owner)
    for key, setting in wanted.items():
        default, record = filled.get(key, setting.default), setting.record
        if record is not None and (setting.required or default is not None):
            inner = {**(setting.default or {}), **(default or {})}
            yield from walk_settings(settings(record), record, inner, f"{path}{key}.")
            continue
        yield {
            "setting": path + key,
            "type": _write_type(setting),
            "required": setting.required and default is None,
            "default": default,
            "meaning": meanings.get(key, ""),
        }


def _write_type(setting: Setting) -> str:
    """Return a type in words; None is what a setting without a value has."""
    if setting.section is not None:
        return f"see: equifed list {setting.section}"
    if setting.record is not None:
        return f"table of {getattr(setting.record, '__name__', 'settings')}"
    from equifed.runs.schema import alternatives

    parts = [part for part in alternatives(setting.annotation) if part is not type(None)]
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
