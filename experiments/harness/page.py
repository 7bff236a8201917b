"""The page that puts published and measured side by side, made from the stored results.

python -m experiments.harness.page experiments docs/reproductions.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.harness.experiment import EXPERIMENTS, Table

HEAD = """# Reproductions

What the papers publish and what this library measures, side by side. This page is made from the
stored results by `python -m experiments.harness.page experiments docs/reproductions.md`; every
number comes from `experiments/NAME/results`, which names the command and the versions. Run one
yourself with `python -m experiments run NAME`, or its short form with `--quick`. "Agree" is a
test in code (`experiments/harness`); where it says no, the experiment's README says why as far as
we know.
"""


def page(folder: Path) -> str:
    """Return the page about the results in ``folder/NAME/results``."""
    parts = [HEAD.rstrip()]
    for name, one in EXPERIMENTS.items():
        parts.append(f"## {name}")
        parts.append(f"{one.title} ({one.paper}). [Discussion](../experiments/{name}/README.md).")
        stored = folder / name / "results" / "results.json"
        if not stored.exists():
            parts.append("**Built, but the project has stored no results of it yet.**")
            continue
        parts += _measured(json.loads(stored.read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _measured(record: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    rows = [
        (c["claim"], c["source"], c["measured"], "yes" if c["agrees"] else "**no**", c["why"])
        for c in record["checks"]
    ]
    table = Table("", ("published", "where", "measured", "agree", "note"), rows)
    return [f"`{record['command']}` ({versions}).", table.markdown()]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])), encoding="utf-8")
