"""Said first, then run: a table is confirmatory if its plan was committed before its first run.

``experiments/NAME/plan.md`` says the question, data, splits, methods, grids, budgets, the one
comparison that decides, its margin and what would count as a no. Whoever runs the experiment gets
the plan's checksum and commit into the results. They are called confirmatory only where plan,
definition and code, harness and library too, were committed, nothing was set by hand, the form is
the full one, and every run in the folder was started under the same plan. All others are
exploratory, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.harness.experiment import ROOT

PLAN, CODE = "plan.md", ("definition.toml", "run.py")
STARTED = "started.json"
"""In ``runs``: under which plan the first of them was started."""


KEPT = Path("results", "kept.jsonl")
"""Runs of former calls, which a network table begins with."""


@dataclass(frozen=True)
class Standing:
    """What a table may be called, and why; checksums and commits are None without a plan."""

    confirmatory: bool
    reason: str
    plan: str | None = None  # checksum
    code: str | None = None  # that of definition and run.py
    commit: str | None = None  # the last one that changed the plan
    run: str | None = None  # the one that was checked out when the runs were started

    @property
    def word(self) -> str:
        """The word for it."""
        return "confirmatory" if self.confirmatory else "exploratory"


def stand(name: str, out: Path, full: bool, root: Path = ROOT) -> Standing:
    """Return the standing of results in ``out``, and write down the plan of a first run.

    ``full``: the full form, with the settings of the definition.
    """
    folder = root / name
    told = asdict(_judge(folder, full))
    kept = out / "runs" / STARTED
    if not kept.exists():
        started = (out / "runs").is_dir() and any((out / "runs").iterdir())
        started = started or (out / KEPT).exists()
        if started and told["confirmatory"]:
            told |= {"confirmatory": False, "reason": "runs of the folder have no plan"}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        return Standing(**told)
    first = Standing(**json.loads(kept.read_text(encoding="utf-8")))
    for part in ("plan", "code"):
        if getattr(first, part) != told[part]:
            return Standing(False, f"the {part} was changed after the first run")
    return first if told["confirmatory"] else Standing(**told)


def _judge(folder: Path, full: bool) -> Standing:
    """Return what a run that is started now may be called."""
    path = folder / PLAN
    if not path.exists():
        return Standing(False, f"there is no {PLAN}")
    sums = _checksum(path), _checksum(*(folder / name for name in CODE))
    if not full:
        return Standing(False, "a short form, or settings that the plan does not have", *sums)
    commit = _git(folder, "log", "-1", "--format=%H", "--", PLAN)
    run = _git(folder, "rev-parse", "HEAD")
    if not commit or not run:
        return Standing(False, f"{PLAN} is not committed", *sums)
    beside = [
        path for path in (folder.parent / "harness", folder.parents[1] / "src") if path.exists()
    ]
    if _git(folder, "status", "--porcelain", "--", PLAN, *CODE, *map(str, beside)) != "":
        return Standing(False, "plan, definition or code has changes without a commit", *sums)
    return Standing(True, "the plan was committed before the first run", *sums, commit, run)


def _checksum(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _committed(folder: Path, commit: str, *names: str) -> str | None:
    """Return the checksum of files of a folder as they are in a commit; None if one is not."""
    told = [_ask(folder, "show", f"{commit}:./{name}") for name in names]
    known = [one for one in told if one is not None]
    return hashlib.sha256(b"".join(known)).hexdigest() if len(known) == len(told) else None


def find_broken(records: Mapping[str, Mapping[str, Any]], root: Path = ROOT) -> list[str]:
    """Return what is wrong with stored results that call themselves confirmatory."""
    wrong = []
    for name, record in records.items():
        standing = Standing(**record.get("standing", {"confirmatory": False, "reason": ""}))
        if not standing.confirmatory:
            continue
        path = root / name / PLAN
        if not path.exists() or _checksum(path) != standing.plan:
            wrong.append(f"{name}: {PLAN} is another than the one that the results were made by")
        ancestor = (str(standing.commit), str(standing.run))
        if _git(root, "merge-base", "--is-ancestor", *ancestor) is None:
            wrong.append(f"{name}: the plan's commit is no ancestor of the one that was run")
        for files, known in (((PLAN,), standing.plan), (CODE, standing.code)):
            if _committed(root / name, ancestor[1], *files) != known:
                wrong.append(
                    f"{name}: {' and '.join(files)} was another in the commit {ancestor[1]}"
                )
    return wrong


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says, None where it fails or is not there."""
    told = _ask(folder, *arguments)
    return None if told is None else told.decode().strip()


def _ask(folder: Path, *arguments: str) -> bytes | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
