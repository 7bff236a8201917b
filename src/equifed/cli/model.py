"""The commands about a trained model: ``predict``, ``personalise``, ``export``, ``evidence``..."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Any

import typer

import equifed as ef
from equifed import cli
from equifed.cli import terminal
from equifed.cli.terminal import Count, File, Json, Number, SignedBy, Text, Trust, argument, option

Run = Annotated[Path, argument("Folder of a run, or of what equifed export wrote.")]
RunOnly = Annotated[Path, argument("Folder of a run.")]
Rows = Annotated[Path, argument("CSV or Parquet file with a header line.")]
Client = Annotated[Text, option("Client of all rows, if the table has no client column.")]
Personalised = Annotated[bool, option("Use own parts of equifed personalise.", "--personalised")]


def predict(
    run: Run,
    rows: Rows,
    out: Annotated[File, option("CSV file; standard output by default.")] = None,
    client: Client = None,
    keep: Annotated[bool, option("Keep the table's columns.", "--keep")] = False,
    personalised: Personalised = False,
    trust: Trust = False,
    signed_by: SignedBy = None,
) -> None:
    """Predict for new rows: one line each, in order, the prediction and its probabilities.

    The target's column need not be there. Columns are matched by name; others are ignored.
    """
    predictor = ef.load_predictor(run, personalised=personalised, trust=trust)
    table = cli.columns_of.read_columns(rows)
    for sentence in cli.loading.find_strangers(predictor, table, client):
        typer.echo(f"equifed: warning: {sentence}", err=True)
    columns = _predict_columns(predictor, table, client)
    if keep:
        twice = [name for name in columns if name in table]
        if twice:
            raise ValueError(f"The table has a column {twice[0]!r} already; leave out --keep.")
        columns = {**table, **columns}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_write_cells([*columns]))
    writer.writerows(zip(*map(_write_cells, columns.values()), strict=True))
    if out is None:
        typer.echo(text.getvalue(), nl=False)
        return
    out.write_text(text.getvalue(), encoding="utf-8")
    typer.echo(f"{len(next(iter(columns.values())))} predictions: {out}", err=True)


def _write_cells(values: list[Any]) -> list[Any]:
    """Return cells of which no spreadsheet computes a text that is not a number."""
    texts = {v for v in values if isinstance(v, str)}
    changed = {t: cli.arrays.to_cell(t) for t in texts if cli.columns_of.to_numbers([t]) is None}
    return [changed.get(v, v) if isinstance(v, str) else v for v in values] if changed else values


def _predict_columns(
    predictor: Any, table: dict[str, list[Any]], client: str | None
) -> dict[str, list[Any]]:
    """Return the columns of predictions; numbers in full."""
    if predictor.classes is None:
        found = predictor.predict(table, client)
        if found.ndim > 1:  # values of several targets
            return {f"prediction_{k + 1}": found[:, k].tolist() for k in range(found.shape[1])}
        return {"prediction": found.tolist()}
    scores = predictor.decision_function(table, client)
    columns = {"prediction": predictor.name_likeliest(scores).tolist()}
    if predictor.link is not None:
        pairs = zip(predictor.classes, predictor.to_chances(scores).T, strict=False)
        columns |= {f"probability_{name}": chances.tolist() for name, chances in pairs}
    return columns


def personalise(
    run: RunOnly,
    rows: Annotated[File, argument("Labelled rows of a new client.")] = None,
    own: Annotated[Text, option("Parameters to fit: bias (default), head or all.")] = None,
    temperature: Annotated[Number, option("Temperature that divides the outputs.")] = None,
    penalty: Annotated[Number, option("Penalty on the distance from the shared part.")] = None,
    lr: Annotated[Number, option("With --own all: step size.")] = None,
    steps: Annotated[Count, option("With --own all: number of steps.")] = None,
    client: Annotated[Text, option("With ROWS: the new client's name.")] = None,
    out: Annotated[File, option("With ROWS: folder for its model.")] = None,
    personalised: Personalised = False,
    trust: Trust = False,
    signed_by: SignedBy = None,
    json: Json = False,
) -> None:
    """Fit an own part to every client after training, and show before and after on test samples.

    What is not given is chosen on validation samples. The run's model stays as it is; equifed
    predict --personalised uses what is found. With ROWS of a client that took no part in training,
    fit its own part where the run's clients have one, and write its model for equifed predict.
    """
    from equifed.runs.personalise import describe

    of_run, of_new = (own, temperature, penalty, lr, steps), (client, out, personalised or None)
    if any(given is not None for given in (of_new if rows is None else of_run)):
        raise ValueError(
            "--own, --temperature, --penalty, --lr and --steps are for the run's clients; "
            "--client, --out and --personalised are for a new client's ROWS."
        )
    if rows is not None:
        if client is None or out is None:
            raise ValueError("Name the new client and a folder for its model: --client, --out.")
        predictor = ef.load_predictor(run, personalised=personalised, trust=trust)
        cli.exports.export(predictor.for_new_client(rows, client=client), out, program=True)
        if json:
            terminal.print_json({"run": str(run), "client": client, "out": str(out)})
        else:
            typer.echo(f"own part fitted: equifed predict {out} NEW.csv --trust", err=True)
        return
    found = ef.personalise(
        run, own=own or "bias", temperature=temperature, penalty=penalty, lr=lr, steps=steps,
        trust=trust,
    )  # fmt: skip
    path = found.save(run)
    if json:
        terminal.print_json({"run": str(run), **found.to_dict()})
        return
    title = f"{found.metric or 'no test split, nothing measured'}: before and after, 95 % limits"
    terminal.print_records(title, found.rows())
    if (average := found.average) is not None:
        told = f"{average.lower:+.3g} to {average.upper:+.3g}"
        typer.echo(f"average over clients {average.estimate:+.3g} (95 %: {told})")
    typer.echo(f"{describe(found)}: {path}", err=True)


def evaluate(
    run: RunOnly, rows: Rows, client: Client = None, trust: Trust = False,
    signed_by: SignedBy = None, json: Json = False,
) -> None:  # fmt: skip
    """Measure the model on new labelled rows, client by client, beside its numbers at training."""
    found = cli.loading.evaluate(run, rows, client, trust=trust)
    if json:
        measured = {d.metric: {"split": d.split, "clients": d.rows} for d in found}
        terminal.print_json({"run": str(run), "rows": str(rows), "metrics": measured})
        return
    for drift in found:
        then = f"at training ({drift.split})" if drift.split else "not measured at training"
        terminal.print_records(f"{drift.metric} now, and {then}", drift.rows)


def export(
    run: RunOnly,
    out: Annotated[File, option("Folder for the files; RUN/export.")] = None,
    torch: Annotated[bool, option("Also model.pt2 (torch.export).", "--torch")] = False,
    onnx: Annotated[bool, option("Also model.onnx (extra onnx).", "--onnx")] = False,
    card: Annotated[bool, option("Also MODEL_CARD.md.", "--card")] = False,
    client: Annotated[Text, option("Client, for models with own parts.")] = None,
    personalised: Personalised = False,
    trust: Trust = False,
    signed_by: SignedBy = None,
) -> None:
    """Write the model as files: weights, description, preparation; programs and card if asked."""
    folder = run / "export" if out is None else out
    predictor = ef.load_predictor(run, personalised=personalised, trust=trust)
    predictor = predictor if client is None else predictor.for_client(client)
    files = cli.exports.export(predictor, folder, program=torch, onnx=onnx)
    if card:
        files.append(cli.evidence_of.write_model_card(run, folder, trust=trust))
    for path in files:
        typer.echo(path)


def evidence(
    run: RunOnly,
    out: Annotated[File, option("Zip file to write; RUN-evidence.zip.")] = None,
    without_model: Annotated[bool, option("Leave it out.", "--without-model")] = False,
    key: Annotated[File, option("Private key to sign the pack with.")] = None,
    overwrite: terminal.Overwrite = False,
    trust: Trust = False,
    signed_by: SignedBy = None,
    quiet: terminal.Quiet = False,
) -> None:
    """Bundle a run for auditors: one zip with an index."""
    path = cli.evidence_of.pack_evidence(
        run, out, with_model=not without_model, overwrite=overwrite, trust=trust, key=key
    )
    if not quiet:
        typer.echo(f"evidence: {path}")


def sign(run: Run, key: Annotated[Path, option("Private key, of equifed flower keys.")]) -> None:
    """Sign a complete run, or an export, with your key: you vouch for every file of it.

    Others give your public key to --signed-by of the commands that read the folder. What is written
    into it later is not signed.
    """
    typer.echo(f"signature: {cli.keys.sign_folder(run, key)}")


def verify(
    path: Annotated[Path, argument("A run's folder, an export or an evidence pack.")],
    signed_by: Annotated[Path, option("File of public keys, one on a line.")],
) -> None:
    """Say who signed a folder or an evidence pack; exit with 2 if none of the keys did."""
    if path.is_dir():
        name = cli.keys.check_signature(
            cli.training.StoredRun(path), cli.keys.read_key_file(signed_by)
        )
    else:
        name = cli.keys.check_pack(path, signed_by)
    typer.echo(f"{path}: signed by {name}")
