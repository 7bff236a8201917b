"""The commands before a run: ``init`` writes a first configuration, ``--dry-run`` what it takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equifed.cli.terminal import Json, Overwrite, Quiet, explain_errors, print_json

if TYPE_CHECKING:
    from equifed.data.infer import Guess
    from equifed.runs.config import RunConfig

Table = Annotated[Path, typer.Argument(help="CSV or Parquet file, one row a sample.")]


def init(
    table: Table,
    client: Annotated[str | None, typer.Option(help="Column that says whose row it is.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(help="Column of numbers that are codes; may be repeated. Text always is."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Configuration file to write.")] = Path("run.toml"),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Look at a table and write a commented configuration for it, ready to run."""
    with explain_errors():
        from equifed.runs.first_config import write_first_config

        if out.exists() and not overwrite:
            raise ValueError(f"{out} is there already; give --overwrite, or another --out.")
        ask = not (quiet or json) and _is_terminal()
        guess = _guess(table, client, target, categorical or [], ask)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(write_first_config(guess, table, out), encoding="utf-8")
        _try(out)
        if json:
            print_json({"out": str(out), **asdict(guess)})
        elif not quiet:
            typer.echo("\n".join(_describe(guess, out)))


def _guess(
    table: Path, client: str | None, target: str | None, coded: list[str], ask: bool
) -> Guess:
    """Return what the columns are: as given, as answered, else as guessed."""
    from equifed.data.columns import read_columns
    from equifed.data.infer import (
        choose_categories,
        guess_client,
        guess_columns,
        guess_target,
        look_at,
    )

    columns = read_columns(table)
    looks = {name: look_at(values) for name, values in columns.items()}
    rows = len(next(iter(columns.values())))
    if client is None:
        found = guess_client({k: v for k, v in looks.items() if k != target}, rows)
        client = _choose("client", "Whose row is it", found, list(columns), ask)
    if target is None:
        found = guess_target(looks, client)
        target = _choose("target", "What is to be predicted", found, list(columns), ask)
    guess = guess_columns(columns, client, target)
    if ask and guess.codes and not coded:
        question = f"Few whole numbers: {', '.join(guess.codes)}. Which are codes, not amounts"
        answer = typer.prompt(f"{question}? Columns", default="none", err=True)
        coded = [] if answer == "none" else [c.strip() for c in answer.split(",") if c.strip()]
    return choose_categories(guess, columns, coded)


def _choose(what: str, question: str, found: Sequence[str], columns: list[str], ask: bool) -> str:
    if ask:
        typer.echo(f"Columns: {', '.join(columns)}", err=True)
        answer = typer.prompt(f"{question}? Column", default=found[0] if found else None, err=True)
        return str(answer)
    if not found:
        raise ValueError(
            f"No column looks like the {what}; name it with --{what} COLUMN, one of "
            f"{', '.join(columns)}."
        )
    return found[0]


def _try(out: Path) -> None:
    """Load the data as the configuration says, so that what is wrong is said now."""
    from equifed.runs.build import load_data
    from equifed.runs.config import RunConfig

    try:
        load_data(RunConfig.read(out).data)
    except ValueError as error:
        raise ValueError(
            f"wrote {out}, but its data cannot be loaded yet: {error} Correct the table, or the "
            "file."
        ) from None


def _describe(guess: Guess, out: Path) -> list[str]:
    """Return what was found, for a person to check."""
    lines = [
        f"client      {guess.client}",
        f"target      {guess.target} ({guess.task})",
        f"features    {', '.join(guess.features)}",
        *(f"left out    {name}: {reason}" for name, reason in guess.left_out.items()),
        *(f"look at     {remark}" for remark in guess.remarks),
    ]
    if guess.groups:
        lines.append(f"split       all rows of one {guess.groups[0]} stay together")
    return [*lines, f"wrote {out}; next: equifed run {out}"]


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def show_estimate(config: RunConfig, workers: int, json: bool) -> None:
    """Print what a run will take."""
    from equifed.runs.estimate import estimate

    found = estimate(config)
    if json:
        told: dict[str, Any] = {**asdict(found), "minutes": found.seconds / 60}
        print_json(told)
        return
    typer.echo("\n".join(found.describe()))
    if workers > 1:
        typer.echo(f"            in one process; {workers} workers share the time of the rounds")
