"""Stored results, and the tables of benchmarks/README.md that are made from them.

    python -m benchmarks.results [--write]

Benchmarks that take ``--store`` write ``benchmarks/results/NAME.json``: the times of all
candidates, and on what they were measured. A table stands between two comments that name the file,
``<!-- results: NAME -->`` and ``<!-- end -->``; ``--write`` puts it there, else it is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"


def describe_machine() -> dict[str, Any]:
    """Return what times depend on."""
    told: dict[str, Any] = {name: _version(name) for name in ("equifed", "torch", "numpy")}
    told |= {"python": platform.python_version(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        told["gpu"] = torch.cuda.get_device_name()
    return told | {"processor": _processor()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a clone


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def store(
    name: str,
    base: str,
    rows: Mapping[str, Mapping[str, float]],
    folder: Path = FOLDER,
    more: Mapping[str, object] | None = None,
) -> None:
    """Write seconds by row and candidate; ``base`` is what ratios are to.

    ``more`` is what else they depend on.
    """
    told = {"on": describe_machine() | dict(more or {}), "base": base, "seconds": rows}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")


def make_table(told: Mapping[str, Any]) -> str:
    """Return milliseconds and, in brackets, ratios to the base as a Markdown table.

    >>> rows = {"CNN": {"plain": 0.2, "loop": 0.1}}
    >>> print(make_table({"on": {"torch": "2"}, "base": "plain", "seconds": rows}))
    | ms | plain | loop |
    |---|---:|---:|
    | CNN | 200.0 | 100.0 (0.50) |
    <BLANKLINE>
    Measured on: torch 2.
    """
    base, rows = told["base"], told["seconds"]
    columns = list(dict.fromkeys(key for times in rows.values() for key in times))
    lines = [f"| ms | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name, times in rows.items():
        cells = []
        for key in columns:
            ratio = f" ({times[key] / times[base]:.2f})" if key in times and key != base else ""
            cells.append(f"{1e3 * times[key]:.1f}{ratio}" if key in times else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    on = ", ".join(f"{key} {value}" for key, value in told["on"].items())
    return "\n".join([*lines, "", f"Measured on: {on}."])


def write_tables(page: str, folder: Path = FOLDER) -> str:
    """Return a page whose tables are those of the stored results; others stay as they are."""

    def table(found: re.Match[str]) -> str:
        path = folder / f"{found[1]}.json"
        if not path.exists():
            return found[0]
        told = json.loads(path.read_text())
        return f"<!-- results: {found[1]} -->\n\n{make_table(told)}\n\n<!-- end -->"

    return re.sub(r"<!-- results: (\S+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(write_tables(PAGE.read_text()))
        return
    for path in sorted(FOLDER.glob("*.json")):
        print(f"\n{path.stem}\n\n{make_table(json.loads(path.read_text()))}")


if __name__ == "__main__":
    main()
