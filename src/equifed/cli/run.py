"""The commands of one table or run: ``fit``, ``init``, ``run``, ``resume``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equifed.cli import terminal
from equifed.cli.fit_config import fit_config, show_served
from equifed.cli.terminal import Json, Overwrite, Quiet, open_console, print_json, repeat, resumable

if TYPE_CHECKING:
    from rich.console import Console

    from equifed.data.columns import Columns, Look
    from equifed.data.infer import Guess
    from equifed.privacy.clients import Privacy
    from equifed.runs.candidates import Choice
    from equifed.training.history import History

ColumnNames = list[str] | None
Engine = Annotated[
    str | None,
    typer.Option(
        help="Same as --set engine.name=NAME.", autocompletion=terminal.complete_names("engines")
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Follow the run elsewhere; see: equifed list trackers.",
        autocompletion=terminal.complete_names("trackers"),
    ),
]
TRIED_ROWS = 20_000
"""About so many rows show whether a table can be prepared; a run reads all of them."""


def init(
    table: Annotated[Path | None, typer.Argument(help="CSV or Parquet file of samples.")] = None,
    client: Annotated[str | None, typer.Option(help="Column that says whose row it is.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(help="Columns of numeric codes, treated as categories (a,b,...)."),
    ] = None,
    numeric: Annotated[
        list[str] | None,
        typer.Option(help="Columns of numbers; text in them is a missing value (a,b,...)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Configuration file to write.")] = Path("run.toml"),
    examples: Annotated[Path | None, typer.Option(help="Write examples to this folder.")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Look at a table and write a commented configuration for it, ready to run."""
    from equifed.runs.init import copy_examples, write_first_config

    if (table is None) == (examples is None):
        raise ValueError("Give a table (equifed init TABLE.csv), or --examples FOLDER.")
    if examples is not None:
        copied = copy_examples(examples, overwrite)
        if json:
            print_json({"examples": list(map(str, copied))})
        elif not quiet:
            typer.echo("\n".join(map(str, copied)))
        return
    if out.exists() and not overwrite:
        raise ValueError(f"{out} already exists; give --overwrite, or another --out.")
    assert table is not None
    console = open_console(quiet or json)
    columns, looks = look_at_table(table, console)
    named = split_names(categorical), split_names(numeric)
    guess = guess_table(columns, looks, client, target, *named)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(write_first_config(guess, table, out), encoding="utf-8")
    with console.status("trying candidates") as status:
        choice = _try(out, columns, guess, lambda what: status.update(f"solving: {what}"))
    out.write_text(write_first_config(guess, table, out, choice), encoding="utf-8")
    if json:
        print_json({"out": str(out), **asdict(guess), "choice": str(choice)})
    elif not quiet:
        lines = _describe(guess, next(iter(guess.groups), None))
        lines += [f"chosen      {choice}", f"wrote {out}; next: equifed run {out}"]
        typer.echo("\n".join(lines))


def split_names(given: list[str] | None) -> list[str]:
    """Return the names in options that are repeated or separated by commas."""
    return [name.strip() for text in given or [] for name in text.split(",") if name.strip()]


def look_at_table(table: Path, console: Console) -> tuple[Columns, dict[str, Look]]:
    """Return a table's columns and what they hold; a terminal shows how far that is."""
    from rich.progress import track

    from equifed.data.columns import look_at, read_columns

    with console.status(f"reading {table.name}"):
        columns = read_columns(table)
    shown = track(
        columns.items(), "looking at columns", len(columns), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    return columns, {name: look_at(values) for name, values in shown}


def guess_table(
    columns: Columns, looks: dict[str, Look], client: str | None, target: str | None,
    coded: list[str], numeric: list[str],
) -> Guess:  # fmt: skip
    """Return what the columns are: as given, else as guessed."""
    from equifed.data.infer import guess_client, guess_columns, guess_target

    others = {name: look for name, look in looks.items() if name != target}
    client = client or _first(guess_client(others, columns.rows), "client", columns)
    target = target or _first(guess_target(looks, client), "target", columns)
    return guess_columns(columns, client, target, coded, numeric, looks)


def _first(found: Sequence[str], what: str, columns: Iterable[str]) -> str:
    if not found:
        raise ValueError(
            f"No column looks like the {what}; name it with --{what} COLUMN, one of "
            f"{', '.join(columns)}."
        )
    return found[0]


def _try(out: Path, columns: Columns, guess: Guess, tell: Callable[[str], None]) -> Choice:
    """Return what ``fit`` would choose, and say now what is wrong with the table.

    Of a long table some rows of every client are tried.
    """
    import numpy as np

    from equifed.data.split import DataWarning
    from equifed.runs.candidates import choose
    from equifed.runs.config import RunConfig
    from equifed.runs.fit import read_data

    step = -(-columns.rows // TRIED_ROWS)
    firsts = {client: row for row, client in enumerate(columns[guess.client])}
    rows = np.union1d(np.arange(0, columns.rows, step), list(firsts.values()))
    together = guess.groups[0] if guess.groups and step == 1 else None
    try:
        RunConfig.read(out)
        with warnings.catch_warnings():
            if step > 1:  # they would be about these rows
                warnings.simplefilter("ignore", DataWarning)
            told: dict[str, Any] = {
                "features": guess.features, "task": guess.task, "numeric": guess.numeric,
                "categorical": guess.categorical, "keep_together": together,
            }  # fmt: skip
            some = columns if step == 1 else columns.take(rows)
            data = read_data(some, guess.client, guess.target, 0.25, 0, told)
        return choose(replace(data, test=None), 0, None, tell, together is None)
    except ValueError as error:
        raise ValueError(
            f"wrote {out}, but its data cannot be loaded yet: {error} Correct the table, or the "
            "file."
        ) from None


def _describe(guess: Guess, together: str | None) -> list[str]:
    """Return what was found, for a person to check."""
    lines = [
        f"client      {guess.client}",
        f"target      {guess.target} ({guess.task})",
        f"features    {', '.join(guess.features)}",
        *(f"left out    {name}: {reason}" for name, reason in guess.left_out.items()),
        *(f"look at     {remark}" for remark in guess.remarks),
    ]
    if together:
        lines.append(f"split       all rows of one {together} stay together")
    return lines


def run(
    config: terminal.Config,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; runs/CONFIG-SEED.")] = None,
    settings: terminal.Set = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    engine: Engine = None,
    device: Annotated[str | None, typer.Option(help="Same as --set engine.device=D.")] = None,
    workers: terminal.Workers = 1,
    track: Track = None,
    report: Annotated[bool, typer.Option("--report", help="Also write the report.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print clients, memory, traffic and time; train nothing."),
    ] = False,
    with_alone: Annotated[
        bool | None,
        typer.Option(
            "--with-alone/--no-alone",
            help="Also train a model per client, to compare; default: for small linear models.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train what a configuration file describes."""
    if with_alone and workers > 1:
        raise typer.BadParameter("own models are fitted in one process; leave out --workers.")
    if workers > 1 and not dry_run:
        _run_in_processes(workers, "--engine", "distributed")
    alone = None if with_alone is None else str(with_alone).lower()
    shortcuts = {"seed": seed, "engine.name": engine, "engine.device": device, "with_alone": alone}
    overrides = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    from equifed.runs import run as runs
    from equifed.runs.config import RunConfig
    from equifed.training.trackers import ProgressBar

    parsed = RunConfig.read(config, [*(settings or []), *overrides])
    for address, file in parsed.loaded_code:
        typer.echo(f"loads {address} from {file}", err=True)
    if dry_run:
        from equifed.runs.init import describe_estimate, estimate

        found = estimate(parsed)
        print_json(found) if json else typer.echo(describe_estimate(found))
        return
    folder = out or Path("runs") / f"{config.stem}-{parsed.seed}"
    trusted = " --trust" if parsed.loaded_code else ""
    with resumable(f"equifed resume {folder}{trusted}", folder):
        with ProgressBar(open_console(quiet), config.stem) as bar:
            history = runs.run(
                parsed, folder, overwrite=overwrite, callbacks=[bar], track=track or []
            )
        if report and runs.is_first():
            from equifed.report import build, read_methods, write_report

            page = folder / "report.html"
            write_report(build(read_methods([folder])), page, per_client=True)
        _show_end(history, folder, quiet, json)


def resume(
    folder: terminal.Folder,
    workers: terminal.Workers = 1,
    accept_config: Annotated[
        bool, typer.Option("--accept-config", help="Resume although config.toml was changed.")
    ] = False,
    trust: terminal.Trust = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Resume an interrupted run. The result is identical to an uninterrupted one."""
    if workers > 1:
        _run_in_processes(workers, *(["--trust"] if trust else []))
    with resumable(f"equifed resume {folder}{' --trust' if trust else ''}", folder):
        from equifed.runs import run as runs
        from equifed.training.folder import is_complete
        from equifed.training.trackers import ProgressBar

        complete = is_complete(folder)
        with ProgressBar(open_console(quiet), folder.name) as bar:
            history = runs.resume(folder, callbacks=[bar], accept_config=accept_config, trust=trust)
        if complete and not quiet:
            typer.echo(f"{folder} is complete; there is nothing to resume.", err=True)
        _show_end(history, folder, quiet, json)


def _run_in_processes(workers: int, *more: str) -> None:
    """Run this very command in several processes instead, and leave with their status."""
    from equifed.runs.run import run_workers

    if "RANK" not in os.environ:  # else it is one of them
        raise typer.Exit(run_workers(workers, [*sys.argv[1:], *more]))


def _show_end(history: History, folder: Path, quiet: bool, json: bool) -> None:
    """Show the clients, what happened to them, and where the run is."""
    from equifed.training.show import describe_events, print_line, tabulate_clients

    if json:
        measured = {(record.split, record.metric) for record in history.metrics}
        clients: dict[str, dict[str, dict[str, float]]] = {}
        for split, metric in sorted(measured):
            clients.setdefault(split, {})[metric] = history.per_client(metric, split)
        print_json({"folder": str(folder), "summary": history.summary(), "clients": clients})
        return
    out = open_console(quiet, stdout=True)
    if history.main_metric() is not None:
        out.print(tabulate_clients({folder.name: history}))
    for line in describe_events(history):
        print_line(out, line, "yellow")
    print_line(out, f"run folder: {folder}")


def fit(
    table: Annotated[
        Path,
        typer.Argument(help="CSV or Parquet file of samples, or a configuration (.toml)."),
    ],
    client: Annotated[str | None, typer.Option(help="Column that says whose row it is.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/fit-TABLE-SEED.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A network for a table, such as mlp; by default linear models."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of every training of a network; 100.")
    ] = None,
    settings: terminal.Set = None,
    keep_together: Annotated[
        str | None, typer.Option(help="Column whose rows of one value stay in one split.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Column with dates: later rows are held out.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Column with train, validation or test, or a run's split.csv."),
    ] = None,
    report_by: Annotated[
        str | None, typer.Option(help="Column whose values form groups to report metrics for, too.")
    ] = None,
    categorical: Annotated[
        ColumnNames,
        typer.Option(help="Columns of numeric codes, treated as categories (a,b,...)."),
    ] = None,
    numeric: Annotated[
        ColumnNames,
        typer.Option(help="Columns of numbers; text in them is a missing value (a,b,...)."),
    ] = None,
    test: Annotated[
        float, typer.Option(help="Share of every client's rows to hold out for the test.")
    ] = 0.25,
    seed: Annotated[
        int, typer.Option(help="Seed of the random split into training, validation and test rows.")
    ] = 0,
    keep_own: Annotated[
        bool,
        typer.Option(
            "--keep-own", help="Clients whose own model has at most half the loss keep it."
        ),
    ] = False,
    curves: Annotated[
        bool, typer.Option("--curves", help="Try columns with bends at their quartiles, too.")
    ] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy of every row; needs both bounds.")
    ] = None,
    rows_bound: Annotated[
        float | None,
        typer.Option(help="Bound on the length of a prepared row; longer rows are scaled down."),
    ] = None,
    loss_bound: Annotated[
        float | None, typer.Option(help="Bound on the loss of a row; larger losses are clipped.")
    ] = None,
    private_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of each candidate under privacy.")
    ] = 6,
    public_preparation: Annotated[
        bool, typer.Option("--public-preparation", help="Scales and categories are public.")
    ] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose the model that serves all clients of a table best, and prove and measure it.

    Of a configuration the data, the model, rounds, seed and local work are taken.
    """
    from equifed.runs.fit import fit as choose

    columns = [client, target, keep_together, time, split, report_by, categorical, numeric]
    if table.suffix == ".toml":
        private = [epsilon, rows_bound, loss_bound, public_preparation or None]
        if any(columns) or model or rounds or seed or test != 0.25 or private != [None] * 4:
            raise ValueError(
                "With a configuration only --set, --out, --keep-own, --curves and --overwrite go; "
                "data, model, rounds and seed stand in it (--set rounds=20)."
            )
        kept = {"keep_own": keep_own, "curves": curves, "overwrite": overwrite}
        return fit_config(table, settings, out, quiet, json, kept)
    if settings:
        raise ValueError("--set changes a configuration; a table has the options of fit.")
    privacy = _make_privacy(epsilon, rows_bound, loss_bound, private_rounds, public_preparation)
    console = open_console(quiet or json)
    named = split_names(categorical), split_names(numeric)
    guess = guess_table(*look_at_table(table, console), client, target, *named)
    folder = out or Path("runs") / f"fit-{table.stem}-{seed}"
    apart = {keep_together, time, split} - {None}
    together = keep_together or (None if apart else next(iter(guess.groups), None))
    options: dict[str, Any] = {"keep_together": together, "time": time}
    options |= {"split": split, "report_by": report_by}
    guess = replace(guess, features=tuple(n for n in guess.features if n not in apart))
    with resumable(repeat()), console.status("reading the table") as status:
        served = choose(
            table, client=guess.client, target=guess.target, test=test, seed=seed, out=folder,
            tell=lambda what: status.update(f"solving: {what}"), keep_own=keep_own,
            overwrite=overwrite, privacy=privacy, model=model, rounds=rounds, curves=curves,
            features=guess.features, task=guess.task, categorical=guess.categorical,
            numeric=guess.numeric, **{k: v for k, v in options.items() if v is not None},
        )  # fmt: skip
    if not (json or quiet):
        typer.echo("\n".join([*_describe(guess, together), ""]))
    show_served(served, folder, quiet, json, asdict(guess))


def _make_privacy(
    epsilon: float | None, rows: float | None, loss: float | None, rounds: int, public: bool
) -> Privacy | None:
    """Return what the options ask for; None: no privacy."""
    from equifed.privacy.clients import Privacy

    if epsilon is None and rows is None and loss is None and not public:
        return None
    if epsilon is None or rows is None or loss is None:
        raise ValueError("Privacy needs --epsilon, --rows-bound and --loss-bound, all three.")
    preparation: Any = "public" if public else "refused"
    return Privacy(epsilon, rows, loss, rounds, preparation=preparation)
