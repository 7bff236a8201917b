"""What an experiment keeps of its parts and runs, and whether its tables are made of that.

``results/values.jsonl.gz`` has a line for every part (what was given, what was answered) and for
every run, tries too (what every client had, by split, metric and round). ``python -m experiments
tables`` makes the tables again of these lines alone, or of ``kept.jsonl`` where a network table
keeps its runs, and compares them with the stored ones. Numbers have nine digits in the file where
all of them would take too much room.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from equifed import History
from equifed.contract import Evaluation
from equifed.report import slug
from experiments.harness.experiment import EXPERIMENTS, REMAKING, ROOT, Context, Outcome
from experiments.harness.plan import KEPT

VALUES = Path("results", "values.jsonl.gz")
LARGEST = 1_000_000
"""Bytes that an experiment may keep."""

NAMES = "names.json"
"""Beside the run folders: which run each is of."""

REMADE = "values.json"
"""In a folder whose tables are made of kept values: what its runs left. Nothing is run there."""

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
Line = dict[str, Any]


# -- keeping ---------------------------------------------------------------------------------------


def keep(out: Path) -> list[str]:
    """Write what parts and runs of a folder left; return what is wrong, if it is too large."""
    for digits, series in ((17, "all"), (9, "all"), (9, "held out"), (9, "")):
        lines = [*_read_parts(out), *_read_runs(out, series)]
        short = (_rounded(one, digits) for one in lines)
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in short)
        packed = gzip.compress(text.encode(), mtime=0)
        if len(packed) <= LARGEST:
            break
    (out / VALUES).unlink(missing_ok=True)
    if not lines:
        return []
    if len(packed) > LARGEST:
        return [f"values of {len(packed):,} bytes are not kept; at most {LARGEST:,} are"]
    (out / VALUES).parent.mkdir(parents=True, exist_ok=True)
    (out / VALUES).write_bytes(packed)
    return []


def read_names(out: Path) -> dict[str, str]:
    """Return which run every folder of runs is of."""
    file = out / NAMES
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _read_parts(out: Path) -> Iterator[Line]:
    for path in sorted((out / "runs").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "answer" in record:
            yield {"part": path.stem, **record}


def _read_runs(out: Path, series: str) -> Iterator[Line]:
    """Yield what clients had in every run, round by round on all splits, held out ones or none."""
    for part in (out, *sorted(file.parent for file in out.glob(f"*/{NAMES}"))):
        for folder, name in sorted(read_names(part).items()):
            for run in sorted((part / "runs" / folder).glob("seed-*")):
                if (run / "summary.json").exists():
                    history = History.load(run, model=False)
                    where = "" if part == out else part.name
                    seed = int(run.name.removeprefix("seed-"))
                    yield {"run": name, "where": where, "seed": seed, **_told(history, series)}


def _told(history: History, series: str) -> Line:
    last = {(r.split, r.metric): r.round for r in history.metrics}
    records = [
        r
        for r in history.metrics
        if series == "all" or (series and r.split != "train") or r.round == last[r.split, r.metric]
    ]
    told = {"clients": list(history.names), "records": [_record(r) for r in records]}
    others = {"alone": history.alone, "without_own": history.without_own}
    return told | {key: _record(r) for key, r in others.items() if r is not None}


def _record(record: Any) -> Line:
    return {"round": record.round, "split": record.split, "metric": record.metric,
            "values": record.values.tolist(), "n": record.sizes.tolist()}  # fmt: skip


def _rounded(value: Any, digits: int) -> Any:
    """Return a value with numbers of so many digits.

    >>> _rounded({"a": [1 / 3, 2, "b"]}, 9)
    {'a': [0.333333333, 2, 'b']}
    """
    if isinstance(value, dict):
        return {k: _rounded(v, digits) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


# -- making tables again ---------------------------------------------------------------------------


def find_differences(name: str, root: Path = ROOT) -> list[str] | None:
    """Return what is not in the tables that kept values make; None where none are kept."""
    stored = root / name
    settings = json.loads((stored / "results" / "results.json").read_text("utf-8"))["settings"]
    with TemporaryDirectory() as folder:
        out = Path(folder)
        if (stored / KEPT).exists():
            (out / KEPT).parent.mkdir()
            (out / KEPT).write_bytes((stored / KEPT).read_bytes())
            settings["finish"] = False
        elif (stored / VALUES).exists():
            _lay_out(out, gzip.decompress((stored / VALUES).read_bytes()).decode())
        else:
            return None
        before = REMAKING.set(True)
        try:
            outcome = EXPERIMENTS[name].module.run(Context(settings, out, Console(quiet=True)))
        finally:
            REMAKING.reset(before)
    return list(_compare(outcome, stored / "results"))


def _lay_out(out: Path, text: str) -> None:
    """Write kept parts as a call leaves them, and beside them what is kept of runs."""
    runs: dict[str, dict[str, Line]] = {"": {}}
    (out / "runs").mkdir(parents=True)
    for line in map(json.loads, text.splitlines()):
        if "part" in line:
            (out / "runs" / f"{line.pop('part')}.json").write_text(json.dumps(line), "utf-8")
        else:
            key = f"{slug(line['run'])}/{line['seed']}"
            runs.setdefault(line["where"], {})[key] = line
    for where, found in runs.items():
        (out / where).mkdir(exist_ok=True)
        (out / where / REMADE).write_text(json.dumps(found), "utf-8")


def read_histories(
    out: Path, variants: Mapping[int, Iterable[str]]
) -> dict[str, dict[int, History]]:
    """Return kept runs of every seed's variants; those that failed are not among them."""
    kept = json.loads((out / REMADE).read_text("utf-8"))
    found: dict[str, dict[int, History]] = {n: {} for names in variants.values() for n in names}
    for seed, names in variants.items():
        for name in names:
            line = kept.get(f"{slug(name)}/{seed}")
            if line is not None:
                found[name][seed] = _history(line)
    return found


def _history(line: Line) -> History:
    history = History(tuple(line["clients"]))
    for told in line["records"]:
        _add(history, told)
    for key in ("alone", "without_own"):
        if key in line:
            setattr(history, key, _add(History(history.names), line[key]))
    return history


def _add(history: History, told: Line) -> Any:
    """Return a record after it was added."""
    values = {told["metric"]: np.array(told["values"], dtype=np.float64)}
    one = Evaluation(told["split"], np.array(told["n"]), values)
    return history.add_evaluation(told["round"], [one])[0]


def _compare(outcome: Outcome, results: Path) -> Iterator[str]:
    for key, table in outcome.tables.items():
        path = results / f"{key}.csv"
        if not path.exists():
            yield f"{path.name}: there is no such table"
            continue
        old = list(csv.reader(path.read_text("utf-8").splitlines()))
        new = list(csv.reader(table.csv().splitlines()))
        if len(old) != len(new):
            yield f"{path.name}: {len(old)} lines are stored, {len(new)} are made"
        for k, (a, b) in enumerate(zip(old, new, strict=False)):
            if not _same(a, b):
                yield f"{path.name}, line {k + 1}: {','.join(a)} is stored, {','.join(b)} is made"


def _same(old: Sequence[str], new: Sequence[str]) -> bool:
    """Tell whether cells are equal; numbers may differ by one in the last digit that is shown.

    >>> _same(["3 of 5", "1.23"], ["3 of 5", "1.24"]), _same(["3 of 5"], ["4 of 5"])
    (True, False)
    """
    return len(old) == len(new) and all(map(_same_cell, old, new))


def _same_cell(old: str, new: str) -> bool:
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    return all(_near(a, b) for a, b in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True))


def _near(old: str, new: str) -> bool:
    mantissa = old.partition("e")[0]
    unit = 10.0 ** -len(mantissa.partition(".")[2]) if "." in mantissa else 0.0
    scale = float(f"1e{old.partition('e')[2]}") if "e" in old else 1.0
    return abs(float(old) - float(new)) <= 1.01 * unit * scale + 1e-5 * abs(float(old))
