"""Which chosen settings lie at the edge of what was tried: the best may lie beyond.

Read from the stored tables of tries, so that it can be told of results whose runs are gone. A
setting is judged by the value of the chosen try; where every trial chose for itself, by the median
trial. Values at a natural limit have nothing beyond them: a proximal term of 0 is FedAvg. So have
those that a definition names under ``limits``: a tail of one client in four is the worst case.
Settings that go together, a minibatch and the steps of a pass, are judged by the first; words and
lists have no order and are not judged.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.harness.experiment import EXPERIMENTS, ROOT

Limits = Mapping[str, Sequence[float | None]]

LIMITS: Limits = {
    "mu": (0.0, None), "q": (0.0, None), "tilt": (0.0, None), "phi": (0.0, None),
    "l2": (0.0, None), "tails": (None, 1.0), "level": (None, 1.0), "tail": (None, 1.0),
    "extrapolation": (0.0, 1.0), "batch": (1.0, 100_000.0), "batch_size": (1.0, 100_000.0),
    "steps": (1.0, None),
}  # fmt: skip
"""Smallest and largest value that a setting can have; a minibatch of 100,000 is all samples."""

Try = tuple[str, Mapping[str, str], int]
"""A method, its settings as they were written, and how often it was chosen."""


@dataclass(frozen=True)
class Edge:
    """A chosen value with nothing tried beyond it."""

    experiment: str
    method: str
    setting: str
    value: float
    tried: tuple[float, ...]

    def __str__(self) -> str:
        side = "smallest" if self.value == self.tried[0] else "largest"
        return (f"{self.experiment}: {self.method}, {self.setting} = {self.value:g} is the {side} "
                f"of {', '.join(f'{v:g}' for v in self.tried)}")  # fmt: skip


def read_tries(path: Path) -> list[Try]:
    """Return the tries of a table, or none if it is no table of tries."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    columns = lines[0] if lines else []
    paths = {k: name.rpartition(".")[2] for k, name in enumerate(columns) if "." in name}
    if not columns or columns[0] != "method" or columns[-1] not in ("", "trials that chose it"):
        return []
    out: list[Try] = []
    for line in lines[1:]:
        if "settings" in columns:
            given = dict(_settings(line[columns.index("settings")]))
        else:
            given = {name: line[k] for k, name in paths.items() if line[k]}
        draw = f", draw {line[columns.index('draw')]}" if "draw" in columns else ""
        times = int(line[-1]) if line[-1].isdigit() else int(line[-1] == "chosen")
        out.append((line[0] + draw, given, times))
    return out


def _settings(words: str) -> list[tuple[str, str]]:
    """Return the settings that a text names.

    >>> dict(_settings("lr = 0.1, tails = [0.5, 1.0], q = 2"))
    {'lr': '0.1', 'tails': '[0.5, 1.0]', 'q': '2'}
    """
    return re.findall(r"(\w+) = (\[[^\]]*\]|[^,]*)", words)


def find_edges(experiment: str, tries: Sequence[Try], limits: Limits = LIMITS) -> list[Edge]:
    """Return the chosen values of every method that lie at the edge of its tries."""
    out = []
    for method in dict.fromkeys(one[0] for one in tries):
        mine = [one for one in tries if one[0] == method]
        names = list(dict.fromkeys(name for _, given, _ in mine for name in given))
        for k, name in enumerate(names):
            if not any(_go_together(mine, name, other) for other in names[:k]):
                out += _edge(experiment, method, name, mine, limits)
    return out


def _go_together(tries: Sequence[Try], one: str, other: str) -> bool:
    pairs = {(given.get(one), given.get(other)) for _, given, _ in tries}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) > 1


def _edge(
    experiment: str, method: str, name: str, tries: Sequence[Try], limits: Limits
) -> list[Edge]:
    picked: list[float] = []
    try:
        tried = sorted({_number(given[name]) for _, given, _ in tries if name in given})
        for _, given, times in tries:
            picked += [_number(given[name])] * times if name in given else []
    except ValueError:  # words and lists
        return []
    if len(tried) < 2 or not picked:
        return []
    value = sorted(picked)[len(picked) // 2]
    low, high = limits.get(name, (None, None))
    beyond = (value == tried[0] and value != low) or (value == tried[-1] and value != high)
    return [Edge(experiment, method, name, value, tuple(tried))] if beyond else []


def _number(text: str) -> float:
    """Return a value as a number; "3/n" is 3 for each sample of a client's.

    >>> _number("3/n")
    3.0
    """
    return float(text.removesuffix("/n"))


def stored_edges(names: Iterable[str] = (), root: Path = ROOT) -> list[Edge]:
    """Return the edges in the stored results of some experiments, or of all."""
    out = []
    for name in names or EXPERIMENTS:
        results = root / name / "results"
        limits = {**LIMITS, **_own_limits(results / "results.json")}
        for path in sorted(results.glob("*.csv")):
            out += find_edges(name, read_tries(path), limits)
    return out


def _own_limits(record: Path) -> Limits:
    """Return the limits that the definition of the stored results names."""
    if not record.exists():
        return {}
    named: Limits = json.loads(record.read_text(encoding="utf-8"))["settings"].get("limits", {})
    return named
