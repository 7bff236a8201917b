"""The commands of ``python -m experiments``: list, run, edges, tables, plans and page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from equifed.runs import apply_override, unknown
from experiments.harness.edges import stored_choices
from experiments.harness.experiment import EXPERIMENTS, Outcome
from experiments.harness.kept import find_differences
from experiments.harness.page import PAGE, name_standing, page, read_record
from experiments.harness.plan import find_broken
from experiments.harness.running import reproduce


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    given = _parser().parse_args(arguments)
    try:
        found = given.do(given)
    except (ValueError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True)
    listed = commands.add_parser("list", help="List the experiments.")
    listed.add_argument("--json", action="store_true", help="As JSON.")
    listed.set_defaults(do=_list)
    run = commands.add_parser("run", help="Run one; put the paper's numbers beside ours.")
    run.add_argument("name", metavar="NAME", help="Which experiment.")
    run.add_argument("--quick", action="store_true", help="The short form: minutes, not more.")
    run.add_argument("--jobs", type=int, default=1, help="Runs at a time.")
    run.add_argument("--out", type=Path, help="Folder; by default runs/NAME or runs/NAME-quick.")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                     help="Override a setting of the definition; may be repeated.")  # fmt: skip
    run.set_defaults(do=_run)
    edges = commands.add_parser("edges", help="Name chosen settings at the edge of their tries.")
    edges.add_argument("names", nargs="*", metavar="NAME", help="Which experiments; none: all.")
    edges.set_defaults(do=_edges)
    tables = commands.add_parser("tables", help="Compare stored tables with those of kept values.")
    tables.add_argument("names", nargs="*", metavar="NAME", help="Which experiments; none: all.")
    tables.set_defaults(do=_tables)
    plans = commands.add_parser("plans", help="Compare confirmatory results with their plans.")
    plans.set_defaults(do=_plans)
    written = commands.add_parser("page", help="Write the page about the stored results.")
    written.add_argument("out", nargs="?", type=Path, default=PAGE, help="docs/reproductions.md")
    written.set_defaults(do=_page)
    return parser


def _list(given: argparse.Namespace) -> None:
    if given.json:
        print(json.dumps({n: {"title": e.title, "paper": e.paper} for n, e in EXPERIMENTS.items()}))
        return
    width = max(map(len, EXPERIMENTS))
    for name, one in EXPERIMENTS.items():
        print(f"{name:{width}}  {one.title} ({one.paper})")


def _run(given: argparse.Namespace) -> None:
    folder = given.out or Path("runs") / (f"{given.name}-quick" if given.quick else given.name)
    changes: dict[str, Any] = {}
    for one in given.set:
        apply_override(changes, one)
    outcome = reproduce(given.name, folder, quick=given.quick, jobs=given.jobs,
                        console=Console(stderr=True), changes=changes)  # fmt: skip
    print("\n".join(outcome_lines(outcome, folder)))


def _edges(given: argparse.Namespace) -> bool:
    """Print the chosen settings with nothing tried beyond them; tell whether there are any."""
    for name in (name for name in given.names if name not in EXPERIMENTS):
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    judged = stored_choices(given.names)
    found = [one for one in judged if one.at_edge]
    print("\n".join(map(str, found)) or "No chosen setting lies at the edge of what was tried.")
    print(f"{len(judged)} chosen settings of {len({one.experiment for one in judged})} experiments "
          f"were judged, {len(found)} lie at an edge.")  # fmt: skip
    return bool(found)


def _tables(given: argparse.Namespace) -> bool:
    """Make tables again of what is kept of their runs; tell whether one is another."""
    made, lacking, wrong = [], [], 0
    for name in given.names or [name for name in EXPERIMENTS if read_record(name)]:
        if name not in EXPERIMENTS:
            raise ValueError(unknown("experiment", name, EXPERIMENTS))
        found = find_differences(name)
        (lacking if found is None else made).append(name)
        print("\n".join(f"{name}: {one}" for one in found or []), end="\n" if found else "")
        wrong += len(found or [])
    print(f"Made again of kept values: {', '.join(made) or 'none'}; {wrong} lines differ.")
    print(f"No values are kept of: {', '.join(lacking) or 'none'}.")
    return bool(wrong)


def _plans(given: argparse.Namespace) -> bool:
    """Print which results are confirmatory; tell whether one is so without reason."""
    stored = {name: record for name in EXPERIMENTS if (record := read_record(name))}
    for name, record in stored.items():
        print(f"{name}: {name_standing(record)}")
    broken = find_broken(stored)
    print("\n".join(broken) or "Confirmatory results have the plan that they were made by.")
    return bool(broken)


def _page(given: argparse.Namespace) -> None:
    given.out.write_text(page(), encoding="utf-8")


def outcome_lines(outcome: Outcome, folder: Path) -> list[str]:
    """Return published and measured, check by check, and where the rest is."""
    lines = []
    for one in outcome.checks:
        lines += [f"published: {one.claim} [{one.source}]", f" measured: {one.measured}"]
        lines.append("    agree: " + ("yes" if one.agrees else "NO" + (one.why and f", {one.why}")))
    lines += [f"failed: {problem}" for problem in outcome.problems]
    return [*lines, f"results: {folder / 'results'}, figures: {folder / 'figures'}"]
