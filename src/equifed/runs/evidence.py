"""The evidence pack: one zip with what an auditor asks about a run, and which file answers what.

Its README follows Annex IV (technical documentation) of the EU AI Act, Regulation (EU) 2024/1689.
The same run gives the same bytes.
"""

from __future__ import annotations

import io
import json
import math
import tempfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import show_text
from equifed.models.export import describe
from equifed.report import Method, build, csv_text, read_methods, write_card, write_report
from equifed.runs.load import need_config, read_predictor
from equifed.training import History, RunFolderError, is_complete, open_run_folder, tables
from equifed.training.files import as_plain, digest, refuse_folder, write_file
from equifed.training.tables import SUMS

__all__ = ["pack_evidence", "write_model_card"]

CARD = "MODEL_CARD.md"
README, CLIENT_TABLE, CERTIFICATE, VERSIONS = (
    "README.md", "clients.csv", "certificate.json", "versions.json"
)  # fmt: skip
FEDERATION = "flower.json"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the time of every file in the zip

# Points of Annex IV, what they ask, and the files that answer
QUESTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("1 (c), 2 (c)", "Which software, in which versions?", (VERSIONS, f"run/{tables.RUN}")),
    ("2 (a), 2 (b)", "How was it developed: methods, steps, design choices, and what is it "
     "optimised for?", (f"run/{tables.CONFIG}", CARD)),
    ("2 (b)", "Which trade-offs were made between those concerned?", ("report.html", CLIENT_TABLE)),
    ("2 (d)", "Which data: where from, how selected and prepared?",
     (f"run/{tables.RUN}", f"run/{tables.PREPARATION}", CARD)),
    ("2 (g)", "How was it validated and tested, by which metrics, and what did the tests log?",
     ("report.html", "run/metrics.csv", f"run/{tables.DETAILS}", "run/rounds.csv")),
    ("2 (g), 3", "How accurate is it for specific groups of persons, here the clients, and what "
     "are its limits?", (CLIENT_TABLE, CARD, f"run/{tables.DETAILS}", f"run/{tables.ALONE}")),
    ("2 (g), 2 (h)", "What went wrong on the way: who was left out, kept in bounds, or stood out?",
     (f"run/{tables.EVENTS}", "report.html")),
    ("2 (h)", "Which measures protected the participants?", (f"run/{FEDERATION}",)),
    ("2 (b), 4", "Is the optimisation finished, and is that proved?", (CERTIFICATE,)),
    ("4", "Are the metrics appropriate, and how sure are they?", ("report.html",)),
    ("6", "Is this what was run, unchanged since?", (f"run/{tables.CHECKSUMS}", SUMS)),
)  # fmt: skip
# What no run can answer
LEFT = (
    "1 (a), (b), (d) to (h): intended purpose, provider, how it reaches the market, instructions",
    "2 (d): why these participants were chosen, and how their labels came about",
    "2 (e), 3: human oversight",
    "2 (f): changes that are planned",
    "5: the risk management system (Article 9)",
    "7, 8: harmonised standards, the declaration of conformity",
    "9: the plan of monitoring after it is on the market (`equifed evaluate` measures new rows)",
)


def write_model_card(folder: str | Path, out: str | Path, *, trust: bool = False) -> Path:
    """Write the model card of a complete run into a folder, and return the file."""
    run = open_run_folder(folder, trust=trust)
    predictor = read_predictor(run)
    prepared, history = predictor.preparation, History.load(run.path, model=False)
    columns = (None, ()) if prepared is None else (prepared.describe(), prepared.left_out)
    given = need_config(run).to_dict(), run.json(tables.RUN), describe(predictor)
    text = write_card(history, *given, *columns)
    card = Path(out) / CARD
    card.parent.mkdir(parents=True, exist_ok=True)
    card.write_text(text, encoding="utf-8")
    return card


def pack_evidence(
    folder: str | Path, out: str | Path | None = None, *, with_model: bool = True,
    overwrite: bool = False, trust: bool = False, key: str | Path | None = None,
) -> Path:  # fmt: skip
    """Write the evidence pack of a complete run, signed if there is a key; return its path."""
    path = Path(folder)
    whole = path.absolute()
    target = Path(out) if out is not None else whole.with_name(f"{whole.name}-evidence.zip")
    there = target.exists() and not overwrite
    refuse_folder(
        (target.is_dir(), f"{target} is a folder; give the name of a zip file."),
        (there, f"{target} already exists; give --overwrite, or another --out."),
    )
    files = _collect(path, with_model, trust)
    if key is not None:
        from equifed.training.keys import PACK_PURPOSE, read_private, sign

        signature = sign(read_private(Path(key)), PACK_PURPOSE, files[SUMS])
        files[tables.SUMS_SIGNATURE] = f"{signature}\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as pack:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = 0o644 << 16
            pack.writestr(info, files[name], zipfile.ZIP_DEFLATED)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, packed.getvalue())
    return target


def _collect(path: Path, with_model: bool, trust: bool) -> dict[str, bytes]:
    """Return the files of the pack by name."""
    refuse_folder(
        (not (path / "rounds.csv").exists(), f"{path} holds no run: rounds.csv is missing."),
        (not is_complete(path), f"{path} has not ended; resume it with: equifed resume {path}"),
    )
    run, history = open_run_folder(path, trust=trust), History.load(path, model=False)
    names = {*tables.FILES, tables.SUMMARY, tables.CHECKSUMS, FEDERATION, tables.SIGNATURE}
    names -= set() if with_model else {tables.MODEL, tables.OWN}
    files = {f"run/{name}": run.read(name) for name in names if name in run}
    (method,) = read_methods([path])
    runs = tuple(replace(run, folder=None) for run in method.runs)  # not where it once was
    with tempfile.TemporaryDirectory() as scratch:
        page = write_report(build([Method(runs[0].method, runs)]), Path(scratch) / "report.html")
        files |= {p.name: p.read_bytes() for p in (page, page.with_suffix(".json"))}
        try:
            files[CARD] = write_model_card(path, scratch, trust=trust).read_bytes()
        except (ValueError, RunFolderError) as error:
            files[CARD] = f"# Model card\n\nThere is none: {error}\n".encode()
    proved = {"certificate": history.certificate(), "in_words": history.describe_certificate()}
    versions = history.provenance.get("versions", {})
    for name, document in ((CERTIFICATE, proved), (VERSIONS, versions)):
        files[name] = (json.dumps(as_plain(document), indent=1) + "\n").encode()
    files[CLIENT_TABLE] = tabulate_clients(history).encode()
    files[README] = _write_readme(history, files).encode()
    sums = [f"{digest(files[name])}  {name}" for name in sorted(files)]
    return {**files, SUMS: ("\n".join(sums) + "\n").encode()}


def tabulate_clients(history: History) -> str:
    """Return a table with one line per client: every last metric, weight, events about it."""
    columns: dict[str, list[object]] = {"client": list(history.names)}
    for split, metric in dict.fromkeys((r.split, r.metric) for r in history.metrics):
        record: Any = history.last(metric, split)
        columns[f"{split} {metric}"] = record.values.tolist()
        columns[f"{split} {metric} n"] = record.sizes.tolist()
    last = history.weights[max(history.weights)].tolist() if history.weights else None
    columns["weight"] = last or [math.nan] * len(history.names)
    for kind in ("quarantine", "guard", "watch"):
        told = {(e.get("client"), e.get("round")) for e in history.list_events(kind)}
        counts = Counter(client for client, _ in told)
        columns[f"rounds with {kind}"] = [counts[name] for name in history.names]
    return csv_text(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def _write_readme(history: History, files: dict[str, bytes]) -> str:
    """Return which file answers which question."""
    chosen = history.main_metric()
    served = "nothing was evaluated"
    if chosen is not None and (clients := history.per_client(*chosen)):
        values = np.array(list(clients.values()))
        served = f"{chosen[1]} {chosen[0]} from {values.min():.4g} to {values.max():.4g}"
    proved = history.describe_certificate() or "no certificate"
    lines = [
        "# Evidence of one run",
        "",
        f"{len(history.names)} clients, {len(history.rounds)} rounds of `{history.method}`, seed "
        f"{history.seed}; {served}; {show_text(proved)}.",
        "",
        "Made by `equifed evidence`. `run/` is the run folder as it was written; the others follow "
        f"from it. Check them with `sha256sum -c {SUMS}`, which shows damage; who vouches for "
        "them, `equifed verify PACK --signed-by KEYS`, if they are signed. It holds no samples.",
        "",
        "Points are those of Annex IV of the EU AI Act (Regulation (EU) 2024/1689). This list "
        "helps to find things; it is not a statement that the Act is complied with.",
        "",
        "| point | question | answered by |",
        "|---|---|---|",
    ]
    for point, question, names in QUESTIONS:
        there = [f"`{name}`" for name in names if name in files]
        if SUMS in names:
            there.append(f"`{SUMS}`")
        lines.append(f"| {point} | {question} | {', '.join(there) or 'not part of this run'} |")
    lines += ["", "Not answered here, since no run can; the provider writes it:", ""]
    return "\n".join([*lines, *(f"* {text}" for text in LEFT), ""])
