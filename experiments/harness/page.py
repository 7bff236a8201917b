"""The page about the stored results: ``python -m experiments page``."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from experiments.harness.experiment import EXPERIMENTS, ROOT, Cell, Settings, Table, definition
from experiments.harness.plan import Standing

PAGE = ROOT.parent / "docs" / "reproductions.md"
HEAD = """# Reproductions

What the papers publish and what this library measures, side by side. This page is made from the
stored results by `python -m experiments page`; every number comes from `experiments/NAME/results`,
which names the command and the versions (before version 0.2 `python -m experiments run` was
`equifed reproduce`). Run one yourself from a clone with `python -m experiments run NAME`, or its
short form with `--quick`.

"Agree" is a test in code (`experiments/NAME/run.py` and `experiments/harness`). **no**: the
experiment's README says why as far as we know. *order only, other data*: the claim holds here, but
on another data set than the paper's (or on other features), so that no number can be compared.

Results are *confirmatory* where a plan was committed before the first run (`python -m experiments
plans` checks it). All others are *exploratory*: tables were looked at and made again before they
were stored.

## Summary

Published claims by experiment, those with the most disagreements first.
"""
PAPERS = ROOT / "papers.toml"
FIGURES = """## Every table and figure of the five papers

SCAFF-PD (main text, and the earlier version with its appendix), DRFA, RC-FL and SCAFF-PD-IA. Where
several checks judge a row, *ours* is the first that disagrees, or else the first."""


def page() -> str:
    """Return the page about the stored results of all experiments."""
    figures = tomllib.loads(PAPERS.read_text(encoding="utf-8"))["row"]
    parts = [HEAD.rstrip(), summarise().markdown(), FIGURES, list_figures(figures).markdown()]
    for name, one in EXPERIMENTS.items():
        parts.append(f"## {name}")
        parts.append(f"{one.title} ({one.paper}). [Discussion](../experiments/{name}/README.md).")
        record = read_record(name)
        if record is None:
            parts.append("**Built, but the project has stored no results of it yet.**")
            continue
        parts += [f"**Not run yet**: {row}." for row in definition(name).get("not_run_yet", [])]
        parts += _measured(name, record)
        cells = (key for row in figures if row.get("experiment") == name
                 for key in row.get("cells", ()))  # fmt: skip
        for key in cells:
            parts += [f"Printed cells beside ours, `{key}.csv`:", read_cells(name, key).markdown()]
    return "\n\n".join(parts) + "\n"


def summarise() -> Table:
    """Return how many published claims agree, by experiment; aims of ours are one row."""
    rows: list[list[Cell]] = []
    aims = [0, 0, 0]
    for name, one in EXPERIMENTS.items():
        record = read_record(name) or {"checks": []}
        published = [c for c in record["checks"] if not is_ours(c)]
        for check in record["checks"]:
            if is_ours(check):
                aims[_place(name, check)] += 1
        if published:
            counts = [0, 0, 0]
            for check in published:
                counts[_place(name, check)] += 1
            title = f"[{name}](#{name})"
            rows.append([title, one.paper.replace("|", "/"), *counts, name_standing(record)])
    rows.sort(key=lambda row: -int(row[4] or 0))
    rows.append(["all", "aims of our own, no published number", *aims, ""])
    columns = ("experiment", "paper", "yes", "order only", "no", "standing")
    return Table("", columns, rows)


def list_figures(rows: Sequence[Settings]) -> Table:
    """Return a row for every table and figure of the papers, judged by the stored checks."""
    columns = ("paper", "table or figure", "published", "ours", "data", "verdict")
    return Table("", columns, [
        [row["paper"], row["where"], row["published"], *_judge_row(row)] for row in rows
    ])  # fmt: skip


def _judge_row(row: Settings) -> tuple[str, str, str]:
    """Return what is ours, on which data, and the verdict."""
    name = row.get("experiment", "")
    data = f"{row['data']} ([{name}](#{name}))" if name else row["data"]
    if "verdict" in row:
        return row["ours"], data, row["verdict"]
    checks = [
        check for check in (read_record(name) or {"checks": []})["checks"]
        if any(words in check["source"] for words in row["source"])
        and row.get("claim", "") in check["claim"]
    ]  # fmt: skip
    if not checks:
        raise ValueError(f"{PAPERS.name}: no stored check of {name} is about {row['where']}.")
    told = [judge(name, check) for check in checks]
    first = next((c for c in checks if not c["agrees"]), checks[0])
    counted = [f"{told.count(word)} {word}" for word in sorted(set(told))]
    return first["measured"], data, told[0] if len(told) == 1 else ", ".join(counted)


def read_cells(name: str, key: str) -> Table:
    """Return the printed numbers of a stored table and ours, without its other columns."""
    text = (ROOT / name / "results" / f"{key}.csv").read_text(encoding="utf-8")
    columns, *lines = csv.reader(text.splitlines())
    kept = [
        k for k, title in enumerate(columns)
        if title == "method" or re.search("published|, here|^here", title)
        or f"published {title}" in columns
    ]  # fmt: skip
    rows = [[line[k].removeprefix("'") or "-" for k in kept] for line in lines]
    return Table("", [columns[k] for k in kept], rows)


def is_ours(check: dict[str, Any]) -> bool:
    """Whether a check is an aim of this project, and no published claim."""
    return str(check["source"]).startswith(("our ", "ours"))


def judge(name: str, check: dict[str, Any]) -> str:
    """Return the verdict on a check: yes, no, or that the order alone can be compared."""
    if not check["agrees"]:
        return "**no**"
    for words, other in definition(name).get("other", {}).items():
        if words in check["source"]:
            return f"order only, other {other}"
    return "yes"


def _place(name: str, check: dict[str, Any]) -> int:
    verdict = judge(name, check)
    return 0 if verdict == "yes" else 2 if verdict == "**no**" else 1


def _measured(name: str, record: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    against = sorted(record["checks"], key=lambda check: -_place(name, check))  # us, first
    rows = [(c["claim"], c["source"], c["measured"], judge(name, c), c["why"]) for c in against]
    table = Table("", ("published", "where", "measured", "agree", "note"), rows)
    made = f"`{record['command']}` ({versions}); {name_standing(record)}."
    standing = record.get("standing") or {}
    if standing.get("confirmatory"):
        made += (f" [Plan](../experiments/{name}/plan.md) of commit {standing['commit'][:8]}, run "
                 f"with commit {standing['run'][:8]}.")  # fmt: skip
    return [made, table.markdown()]


def read_record(name: str) -> dict[str, Any] | None:
    """Return the stored record of an experiment, if there is one."""
    path = ROOT / name / "results" / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def name_standing(record: dict[str, Any]) -> str:
    """Say what stored results are; those of former versions were not planned."""
    told = record.get("standing")
    return "exploratory" if told is None else Standing(**told).word
