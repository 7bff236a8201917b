"""``equifed fit``: from a table to a model that serves all clients, and a page about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equifed.cli.run import guess_table, look_at_table, split_names
from equifed.cli.terminal import Json, Overwrite, Quiet, open_console, print_json, resumable

if TYPE_CHECKING:
    from equifed.privacy.settings import Privacy

Columns = list[str] | None


def fit(
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file of samples.")],
    client: Annotated[str | None, typer.Option(help="Column that says whose row it is.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/fit-TABLE-SEED.")] = None,
    keep_together: Annotated[
        str | None, typer.Option(help="Column whose rows of one value stay in one split.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Column with dates: later rows are held out.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Column with train, validation or test.")
    ] = None,
    report_by: Annotated[
        str | None, typer.Option(help="Column by whose values metrics are reported, too.")
    ] = None,
    categorical: Annotated[
        Columns, typer.Option(help="Columns of numbers that are codes (a,b,...). Text always is.")
    ] = None,
    numeric: Annotated[
        Columns, typer.Option(help="Columns in which any text is a gap (a,b,...).")
    ] = None,
    test: Annotated[float, typer.Option(help="Share of every client's rows for the test.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of what is held out.")] = 0,
    keep_own: Annotated[
        bool, typer.Option("--keep-own", help="Clients with half the loss alone keep their model.")
    ] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy of every row; needs both bounds.")
    ] = None,
    rows_bound: Annotated[
        float | None, typer.Option(help="Longest prepared row; longer ones are scaled down.")
    ] = None,
    loss_bound: Annotated[
        float | None, typer.Option(help="Largest loss of a row; others are clipped.")
    ] = None,
    private_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of each candidate under privacy.")
    ] = 6,
    public_preparation: Annotated[
        bool, typer.Option("--public-preparation", help="Scales and categories are no secret.")
    ] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose the model that serves all clients of a table best, and prove and measure it."""
    from equifed.runs.fit import REPORT
    from equifed.runs.fit import fit as choose

    privacy = _make_privacy(epsilon, rows_bound, loss_bound, private_rounds, public_preparation)
    console = open_console(quiet or json)
    named = split_names(categorical), split_names(numeric)
    guess = guess_table(*look_at_table(table, console), client, target, *named)
    folder = out or Path("runs") / f"fit-{table.stem}-{seed}"
    apart = {keep_together, time, split} - {None}
    together = keep_together or (None if apart else next(iter(guess.groups), None))
    options = {"keep_together": together, "time": time, "split": split, "report_by": report_by}
    features = [name for name in guess.features if name not in apart]
    again = (
        f"equifed fit {table} --client '{guess.client}' --target '{guess.target}' --out {folder}"
    )
    with resumable(again), console.status("reading the table") as status:
        served = choose(
            table, client=guess.client, target=guess.target, test=test, seed=seed, out=folder,
            tell=lambda what: status.update(f"solving: {what}"), keep_own=keep_own,
            overwrite=overwrite, privacy=privacy,
            features=features, task=guess.task, categorical=guess.categorical,
            numeric=guess.numeric, **{k: v for k, v in options.items() if v is not None},
        )  # fmt: skip
    if json:
        print_json({"folder": str(folder), **served.to_dict()})
    elif not quiet:
        typer.echo(f"{served!r}\n\nfolder: {folder}; page: {folder / REPORT}")
        typer.echo(f"next: equifed predict {folder} new.csv --out predictions.csv")


def _make_privacy(
    epsilon: float | None, rows: float | None, loss: float | None, rounds: int, public: bool
) -> Privacy | None:
    """Return what the options ask for; None: no privacy."""
    from equifed.privacy.settings import Privacy

    if epsilon is None and rows is None and loss is None and not public:
        return None
    if epsilon is None or rows is None or loss is None:
        raise ValueError("Privacy needs --epsilon, --rows-bound and --loss-bound, all three.")
    preparation: Any = "public" if public else "refused"
    return Privacy(epsilon, rows, loss, rounds, preparation=preparation)
