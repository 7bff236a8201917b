"""What is kept of the runs of a network table: one line each, beside the tables made of them.

``runs/`` is where runs leave their files, and is no part of the repository. ``results/kept.jsonl``
is: a later call, on another machine too, begins with what it holds, so that a table can be made
again, or gets one more row, without what a lent machine computed before.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from experiments.harness.network_task import BEGUN

KEPT = Path("results", "kept.jsonl")


def restore(out: Path) -> None:
    """Put the files of kept runs back where they are missing."""
    if not (out / KEPT).exists():
        return
    first, *lines = (out / KEPT).read_text(encoding="utf-8").splitlines()
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for line in lines:
        record = json.loads(line)
        path = runs / f"{record.pop('file')}.json"
        if not path.exists():
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if not (runs / BEGUN).exists():
        begun = json.loads(first)["begun"]
        text = "".join(f"{method}\tkept\n" * count for method, count in begun.items())
        (runs / BEGUN).write_text(text, encoding="utf-8")


def keep(out: Path) -> None:
    """Write all runs of a folder into one file, in the order of their names."""
    begun = {method: count for method, (count, _) in sorted(count_runs(out).items())}
    records = [{"file": path.stem, **json.loads(path.read_text(encoding="utf-8"))}
               for path in sorted((out / "runs").glob("*.json"))]  # fmt: skip
    if records:
        (out / KEPT).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(one, ensure_ascii=False) for one in ({"begun": begun}, *records)]
        (out / KEPT).write_text("\n".join(lines) + "\n", encoding="utf-8")


def count_runs(out: Path) -> dict[str, tuple[int, int]]:
    """Return for each method how many runs were begun, and how many of them ended."""
    path = out / "runs" / BEGUN
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    begun = Counter(line.partition("\t")[0] for line in lines)
    ended = Counter(json.loads(file.read_text(encoding="utf-8"))["method"]
                    for file in (out / "runs").glob("*.json"))  # fmt: skip
    return {m: (begun[m], ended[m]) for m in {**begun, **ended}}
