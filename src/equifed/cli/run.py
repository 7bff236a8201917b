"""The commands of one table or run: ``fit``, ``init``, ``run``, ``resume``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from equifed import cli
from equifed.cli import terminal
from equifed.cli.terminal import Count, File, Number, Text, Texts, argument, option

Client = Annotated[Text, option("Column that says whose row it is.")]
Target = Annotated[Text, option("Column to predict.")]
Coded = Annotated[Texts, option("Columns of numeric codes, treated as categories (a,b,...).")]
Numeric = Annotated[Texts, option("Columns of numbers; text in them is a missing value (a,b,...).")]
ENGINES = terminal.complete_names("engines")
TRIED_ROWS = 20_000  # about so many show whether a table can be prepared; a run reads all


def init(
    table: Annotated[File, argument("CSV or Parquet file of samples.")] = None,
    client: Client = None,
    target: Target = None,
    categorical: Coded = None,
    numeric: Numeric = None,
    out: Annotated[Path, option("Configuration file to write.")] = Path("run.toml"),
    examples: Annotated[File, option("Write examples to this folder.")] = None,
    overwrite: terminal.Overwrite = False,
    quiet: terminal.Quiet = False,
    json: terminal.Json = False,
) -> None:
    """Look at a table and write a commented configuration for it, ready to run."""
    if examples is not None and table is None:
        copied = list(map(str, cli.first_look.copy_examples(examples, overwrite)))
        terminal.tell({"examples": copied}, copied, json, quiet)
        return
    if table is None or examples is not None:
        raise ValueError("Give a table (equifed init TABLE.csv), or --examples FOLDER.")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} already exists; give --overwrite, or another --out.")
    console = terminal.open_console(quiet or json)
    columns, guess = guess_table(table, console, client, target, categorical, numeric)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(cli.first_look.write_first_config(guess, table, out), encoding="utf-8")
    with console.status("trying candidates") as status:
        choice = _try(out, columns, guess, lambda what: status.update(f"solving: {what}"))
    out.write_text(cli.first_look.write_first_config(guess, table, out, choice), encoding="utf-8")
    lines = _describe(guess, next(iter(guess.groups), None))
    lines += [f"chosen      {choice}", f"wrote {out}; next: equifed run {out}"]
    terminal.tell({"out": str(out), **asdict(guess), "choice": str(choice)}, lines, json, quiet)


def guess_table(
    table: Path, console: Any, client: str | None, target: str | None, coded: Texts,
    numeric: Texts,
) -> tuple[Any, Any]:  # fmt: skip
    """Return a table's columns and what they are: as given, else as guessed."""
    columns, looks = look_at_table(table, console)
    others = {name: look for name, look in looks.items() if name != target}
    client = client or _first(cli.infer.guess_client(others, columns.rows), "client", columns)
    target = target or _first(cli.infer.guess_target(looks, client), "target", columns)
    codes, numbers = _split_names(coded), _split_names(numeric)
    return columns, cli.infer.guess_columns(columns, client, target, codes, numbers, looks)


def _split_names(given: Texts) -> list[str]:
    return [name.strip() for text in given or [] for name in text.split(",") if name.strip()]


def look_at_table(table: Path, console: Any) -> tuple[Any, dict[str, Any]]:
    """Return a table's columns and what they hold; a terminal shows how far that is."""
    from rich.progress import track

    with console.status(f"reading {table.name}"):
        columns = cli.columns_of.read_columns(table)
    rows = track(
        columns.items(), "looking at columns", len(columns), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    return columns, {name: cli.columns_of.look_at(values) for name, values in rows}


def _first(found: Sequence[str], what: str, columns: Iterable[str]) -> str:
    if not found:
        raise ValueError(
            f"No column looks like the {what}; name it with --{what} COLUMN, one of "
            f"{', '.join(columns)}."
        )
    return found[0]


def _try(out: Path, columns: Any, guess: Any, tell: Callable[[str], None]) -> Any:
    """Return what ``fit`` would choose, and say now what is wrong with the table.

    Of a long table some rows of every client are tried.
    """
    from equifed.data import DataWarning

    step = -(-columns.rows // TRIED_ROWS)
    together = guess.groups[0] if guess.groups and step == 1 else None
    try:
        cli.configs.RunConfig.read(out)
        with warnings.catch_warnings():
            if step > 1:
                warnings.simplefilter("ignore", DataWarning)  # they would be about these rows
                firsts = {client: row for row, client in enumerate(columns[guess.client])}
                columns = columns.take(
                    cli.np.union1d(cli.np.arange(0, columns.rows, step), [*firsts.values()])
                )
            told: dict[str, Any] = {
                "features": guess.features, "task": guess.task, "numeric": guess.numeric,
                "categorical": guess.categorical, "keep_together": together,
            }  # fmt: skip
            data = cli.fitting.read_data(columns, guess.client, guess.target, 0.25, 0, told)
        return cli.candidates.choose(replace(data, test=None), 0, None, tell, together is None)
    except ValueError as error:
        raise ValueError(
            f"wrote {out}, but its data cannot be loaded yet: {error} Correct the table, or the "
            "file."
        ) from None


def _describe(guess: Any, together: str | None) -> list[str]:
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


def fit(
    table: Annotated[Path, argument("CSV or Parquet file of samples, or a configuration (.toml).")],
    client: Client = None,
    target: Target = None,
    out: Annotated[File, option("Folder; runs/fit-TABLE-SEED.")] = None,
    model: Annotated[Text, option("Network for a table, as mlp; default: linear models.")] = None,
    rounds: Annotated[Count, option("Of every training of a network; 100.", min=1)] = None,
    settings: terminal.Set = None,
    keep_together: Annotated[Text, option("Column whose rows of one value share a split.")] = None,
    time: Annotated[Text, option("Column with dates: later rows are held out.")] = None,
    split: Annotated[Text, option("Column of train, validation, test; or a split.csv.")] = None,
    report_by: Annotated[Text, option("Column whose values form groups to report on, too.")] = None,
    categorical: Coded = None,
    numeric: Numeric = None,
    test: Annotated[float, option("Share of every client's rows to hold out for the test.")] = 0.25,
    seed: Annotated[int, option("Seed of the split into training, validation and test rows.")] = 0,
    keep_own: Annotated[bool, option("Keep own models that halve the loss.", "--keep-own")] = False,
    curves: Annotated[bool, option("Try columns that bend at quartiles, too.", "--curves")] = False,
    epsilon: Annotated[Number, option("Differential privacy of rows; needs both bounds.")] = None,
    rows_bound: Annotated[Number, option("Longest prepared row; others are scaled down.")] = None,
    loss_bound: Annotated[Number, option("Largest loss of a row; others are clipped.")] = None,
    private_rounds: Annotated[int, option("Rounds of each candidate under privacy.", min=1)] = 6,
    public_preparation: Annotated[
        bool, option("Scales and categories are public.", "--public-preparation")
    ] = False,
    overwrite: terminal.Overwrite = False,
    quiet: terminal.Quiet = False,
    json: terminal.Json = False,
) -> None:
    """Choose the model that serves all clients of a table best, and prove and measure it.

    Of a configuration the data, the model, rounds, seed and local work are taken.
    """
    console, told, lines = terminal.open_console(quiet or json), dict[str, Any](), list[str]()
    columns = {"keep_together": keep_together, "time": time, "split": split, "report_by": report_by}
    bounds = epsilon, rows_bound, loss_bound, public_preparation or None
    choose: Callable[..., Any]
    if table.suffix == ".toml":
        named = [client, target, *columns.values(), categorical, numeric, model, rounds, seed]
        if any(named) or test != 0.25 or bounds != (None,) * 4:
            raise ValueError(
                "With a configuration only --set, --out, --keep-own, --curves and --overwrite go; "
                "data, model, rounds and seed stand in it (--set rounds=20)."
            )
        config = read_config(table, settings)
        seed, choose = config.seed, partial(cli.fitting.fit_config, config)
    else:
        if settings:
            raise ValueError("--set changes a configuration; a table has the options of fit.")
        _, guess = guess_table(table, console, client, target, categorical, numeric)
        apart = {keep_together, time, split} - {None}
        together = keep_together or (None if apart else next(iter(guess.groups), None))
        guess = replace(guess, features=tuple(n for n in guess.features if n not in apart))
        told, lines = asdict(guess), [*_describe(guess, together), ""]
        given: Any = {**columns, "keep_together": together}
        choose = partial(
            cli.fitting.fit, table, client=guess.client, target=guess.target, task=guess.task,
            features=guess.features, categorical=guess.categorical, numeric=guess.numeric,
            model=model, rounds=rounds, test=test, seed=seed,
            privacy=_make_privacy(*bounds, private_rounds),
            **{key: value for key, value in given.items() if value is not None},
        )  # fmt: skip
    folder = out or Path("runs") / f"fit-{table.stem}-{seed}"
    with terminal.resumable(terminal.repeat()), console.status("reading the data") as status:
        served = choose(
            out=folder, tell=lambda what: status.update(f"solving: {what}"), keep_own=keep_own,
            curves=curves, overwrite=overwrite,
        )  # fmt: skip
    lines += [repr(served), "", f"folder: {folder}; page: {folder / cli.fitting.REPORT}"]
    lines += [f"next: equifed predict {folder} new.csv --out predictions.csv"]
    terminal.tell({"folder": str(folder), **told, **served.to_dict()}, lines, json, quiet)


def _make_privacy(
    epsilon: Number, rows: Number, loss: Number, public: bool | None, rounds: int
) -> Any:
    if epsilon is None and rows is None and loss is None and not public:
        return None
    if epsilon is None or rows is None or loss is None:
        raise ValueError("Privacy needs --epsilon, --rows-bound and --loss-bound, all three.")
    preparation: Any = "public" if public else "refused"
    return cli.private.Privacy(epsilon, rows, loss, rounds, preparation=preparation)


def read_config(path: Path, overrides: Iterable[str] | None) -> Any:
    """Read a configuration, and say which code it loads."""
    config = cli.configs.RunConfig.read(path, overrides or [])
    for address, code in config.loaded_code:
        typer.echo(f"loads {address} from {code}", err=True)
    return config


def run(
    config: terminal.Config,
    out: Annotated[File, option("Folder for the run; runs/CONFIG-SEED.")] = None,
    settings: terminal.Set = None,
    seed: Annotated[Count, option("Same as --set seed=N.")] = None,
    engine: Annotated[
        Text,
        option("Same as --set engine.name=NAME.", autocompletion=ENGINES),
    ] = None,
    device: Annotated[Text, option("Same as --set engine.device=D.")] = None,
    workers: terminal.Workers = 1,
    track: Annotated[
        Texts,
        option(
            "Follow the run elsewhere; see: equifed list trackers.",
            autocompletion=terminal.complete_names("trackers"),
        ),
    ] = None,
    report: Annotated[bool, option("Also write the report.", "--report")] = False,
    dry_run: Annotated[bool, option("Print what it takes; train nothing.", "--dry-run")] = False,
    with_alone: Annotated[
        bool | None,
        option(
            "Also train a model per client, to compare; default: for small linear models.",
            "--with-alone/--no-alone",
            show_default=False,
        ),
    ] = None,
    overwrite: terminal.Overwrite = False,
    quiet: terminal.Quiet = False,
    json: terminal.Json = False,
) -> None:
    """Train what a configuration file describes."""
    if with_alone and workers > 1:
        raise typer.BadParameter("own models are fitted in one process; leave out --workers.")
    if workers > 1 and not dry_run:
        _run_in_processes(workers, "--engine", "distributed")
    alone = None if with_alone is None else str(with_alone).lower()
    shortcuts = {"seed": seed, "engine.name": engine, "engine.device": device, "with_alone": alone}
    overrides = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    parsed = read_config(config, [*(settings or []), *overrides])
    if dry_run:
        found = cli.first_look.estimate(parsed)
        terminal.tell(found, [cli.first_look.describe_estimate(found)], json, False)
        return
    folder = out or Path("runs") / f"{config.stem}-{parsed.seed}"
    trusted = " --trust" if parsed.loaded_code else ""
    with terminal.resumable(f"equifed resume {folder}{trusted}", folder):
        with cli.training.trackers.ProgressBar(terminal.open_console(quiet), config.stem) as bar:
            history = cli.runs.run(
                parsed, folder, overwrite=overwrite, callbacks=[bar], track=track or []
            )
        if report and cli.runs.is_first():
            made = cli.reports.build(cli.reports.read_methods([folder]))
            cli.reports.write_report(made, folder / "report.html", per_client=True)
        _show_end(history, folder, quiet, json)


def resume(
    folder: terminal.Folder,
    workers: terminal.Workers = 1,
    accept_config: Annotated[
        bool, option("Take a changed config.toml.", "--accept-config")
    ] = False,
    trust: terminal.Trust = False,
    quiet: terminal.Quiet = False,
    json: terminal.Json = False,
) -> None:
    """Resume an interrupted run. The result is identical to an uninterrupted one."""
    if workers > 1:
        _run_in_processes(workers, *(["--trust"] if trust else []))
    with terminal.resumable(f"equifed resume {folder}{' --trust' if trust else ''}", folder):
        complete = cli.training.is_complete(folder)
        with cli.training.trackers.ProgressBar(terminal.open_console(quiet), folder.name) as bar:
            history = cli.runs.resume(
                folder, callbacks=[bar], accept_config=accept_config, trust=trust
            )
        if complete and not quiet:
            typer.echo(f"{folder} is complete; there is nothing to resume.", err=True)
        _show_end(history, folder, quiet, json)


def _run_in_processes(workers: int, *more: str) -> None:
    """Run this very command in several processes instead, and leave with their status."""
    if "RANK" not in os.environ:  # else it is one of them
        raise typer.Exit(cli.runs.run_workers(workers, [*sys.argv[1:], *more]))


def _show_end(history: Any, folder: Path, quiet: bool, json: bool) -> None:
    """Show the clients, what happened to them, and where the run is."""
    if json:
        found: dict[str, dict[str, dict[str, float]]] = {}
        for split, metric in sorted({(record.split, record.metric) for record in history.metrics}):
            found.setdefault(split, {})[metric] = history.per_client(metric, split)
        terminal.print_json({"folder": str(folder), "summary": history.summary(), "clients": found})
        return
    out = terminal.open_console(quiet, stdout=True)
    if history.main_metric() is not None:
        out.print(cli.shown.tabulate_clients({folder.name: history}))
    for line in cli.shown.describe_events(history):
        cli.shown.print_line(out, line, "yellow")
    cli.shown.print_line(out, f"run folder: {folder}")
