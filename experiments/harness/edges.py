"""Which chosen settings lie at the edge of what was tried, read from stored tables of choices.

Beyond an edge there may be a better value. Three forms of tables are known, by their columns:

* ``method, settings, ...`` with ``chosen``, or how many trials chose it, in the last column;
* a column of counts, ``0.01: 59, 0.1: 9``: how often each value was chosen;
* ``method, seed, SETTING, ...``: what each seed chose.

A file that is named as a table of choices and has none of these forms is an error. What was tried
is in the table, or in the definition that the results were made by. A setting is judged by the
value of the chosen try; where every trial chose for itself, by the median trial. Values at a
natural limit have nothing beyond them: a proximal term of 0 is FedAvg. So have those that a
definition names under ``limits``: a tail of one client in four is the worst case. Settings that go
together, a minibatch and the steps of a pass, are judged by the first; words and lists have no
order and are not judged.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.experiment import EXPERIMENTS, ROOT

Limits = Mapping[str, Sequence[float | None]]

LIMITS: Limits = {
    "mu": (0.0, None), "q": (0.0, None), "tilt": (0.0, None), "phi": (0.0, None),
    "l2": (0.0, None), "tails": (None, 1.0), "level": (None, 1.0), "tail": (None, 1.0),
    "extrapolation": (0.0, 1.0), "batch": (1.0, 100_000.0), "batch_size": (1.0, 100_000.0),
    "steps": (1.0, None),
}  # fmt: skip
"""Smallest and largest value that a setting can have; a minibatch of 100,000 is all samples."""

NAMED = re.compile(r"choice|chosen|grid|tries")
"""Files with such a name are tables of choices."""

COUNTS = re.compile(r"(?:(?:^|, )[^:]+: \d+)+")
"""A cell of counts: what was chosen, and how often."""

Try = tuple[str, Mapping[str, str], int]
"""A method, its settings as they were written, and how often it was chosen."""


@dataclass(frozen=True)
class Judged:
    """A chosen value among those that were tried."""

    experiment: str
    method: str
    setting: str
    value: float
    tried: tuple[float, ...]
    limits: Sequence[float | None] = (None, None)

    @property
    def at_edge(self) -> bool:
        """Whether nothing was tried beyond it, and it is no natural limit."""
        low, high = self.limits
        smallest = self.value == self.tried[0] and self.value != low
        return smallest or (self.value == self.tried[-1] and self.value != high)

    def __str__(self) -> str:
        side = "smallest" if self.value == self.tried[0] else "largest"
        return (f"{self.experiment}: {self.method}, {self.setting} = {self.value:g} is the {side} "
                f"of {', '.join(f'{v:g}' for v in self.tried)}")  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------


def read_tries(path: Path, settings: Mapping[str, Any] | None = None) -> list[Try]:
    """Return the tries of a table, or none if it is no table of choices.

    ``settings`` are those of the definition; they say what was tried where the table does not.
    """
    with path.open(encoding="utf-8", newline="") as file:
        columns, *lines = list(csv.reader(file)) or [[]]
    settings = settings or {}
    if columns[:1] == ["method"] and columns[-1] in ("", "trials that chose it"):
        return list(_read_each_try(columns, lines))
    if columns[:2] == ["method", "seed"] and NAMED.search(path.stem):
        return list(_read_each_seed(columns, lines, settings))
    counted = [k for k in range(len(columns))
               if lines and all(COUNTS.fullmatch(line[k]) for line in lines)]  # fmt: skip
    if counted and NAMED.search(path.stem):
        return list(_read_counts(columns, lines, counted, settings))
    if NAMED.search(path.stem):
        where = "/".join(path.parts[-3:])
        raise ValueError(f"{where} is named as a table of choices, but its columns "
                         f"({', '.join(columns)}) are none that experiments/harness/edges.py "
                         "reads; give it one of the forms there, or another name.")  # fmt: skip
    return []


def _read_each_try(columns: list[str], lines: list[list[str]]) -> Iterator[Try]:
    paths = {k: name.rpartition(".")[2] for k, name in enumerate(columns) if "." in name}
    for line in lines:
        if "settings" in columns:
            given = dict(_settings(line[columns.index("settings")]))
        else:
            given = {name: line[k] for k, name in paths.items() if line[k]}
        draw = f", draw {line[columns.index('draw')]}" if "draw" in columns else ""
        times = int(line[-1]) if line[-1].isdigit() else int(line[-1] == "chosen")
        yield line[0] + draw, given, times


def _read_each_seed(
    columns: list[str], lines: list[list[str]], settings: Mapping[str, Any]
) -> Iterator[Try]:
    """Yield what every seed chose, and each value that was tried, chosen by none."""
    for k, name in enumerate(columns[2:], start=2):
        seen = {_number(line[k]) for line in lines}
        tried = _find_tried(settings, seen, name) or seen
        if name == "round" and "training" in settings:  # those after which it was evaluated
            rounds, every = settings["training"]["rounds"], settings["training"]["every"]
            tried = tried | set(map(float, range(every, rounds + 1, every)))
        for method in dict.fromkeys(line[0] for line in lines):
            picked = [_number(line[k]) for line in lines if line[0] == method]
            for value in sorted(tried):
                yield method, {name: f"{value:g}"}, picked.count(value)


def _read_counts(
    columns: list[str], lines: list[list[str]], counted: list[int], settings: Mapping[str, Any]
) -> Iterator[Try]:
    for line in lines:
        for k in counted:
            pairs = re.findall(r"(?:^|, )([^:]+): (\d+)", line[k])
            times = {value: int(count) for value, count in pairs}
            title = f"{line[0]}, {columns[k]}"
            try:
                seen = {_number(value): count for value, count in times.items()}
            except ValueError:  # words
                yield from ((title, {"chosen": value}, count) for value, count in times.items())
                continue
            name, tried = _named_tried(settings, seen)
            for value in sorted(tried):
                yield title, {name: f"{value:g}"}, seen.get(value, 0)


def _find_tried(settings: Mapping[str, Any], seen: Iterable[float], name: str) -> set[float]:
    found = settings.get(name)
    return {float(v) for v in found} | set(seen) if isinstance(found, list) else set()


def _named_tried(settings: Mapping[str, Any], seen: Iterable[float]) -> tuple[str, set[float]]:
    """Return the setting of a definition whose list of values contains those that were chosen."""
    for name, values in settings.items():
        numbers = isinstance(values, list) and all(isinstance(v, (int, float)) for v in values)
        if numbers and set(seen) <= {float(v) for v in values}:
            return name, {float(v) for v in values}
    return "chosen", set(seen)


def _settings(words: str) -> list[tuple[str, str]]:
    """Return the settings that a text names.

    >>> dict(_settings("lr = 0.1, tails = [0.5, 1.0], q = 2"))
    {'lr': '0.1', 'tails': '[0.5, 1.0]', 'q': '2'}
    """
    return re.findall(r"(\w+) = (\[[^\]]*\]|[^,]*)", words)


# -- judging ---------------------------------------------------------------------------------------


def judge(experiment: str, tries: Sequence[Try], limits: Limits = LIMITS) -> list[Judged]:
    """Return the chosen value of every numeric setting of every method."""
    out = []
    for method in dict.fromkeys(one[0] for one in tries):
        mine = [one for one in tries if one[0] == method]
        names = list(dict.fromkeys(name for _, given, _ in mine for name in given))
        for k, name in enumerate(names):
            if not any(_go_together(mine, name, other) for other in names[:k]):
                out += _judge_one(experiment, method, name, mine, limits)
    return out


def find_edges(experiment: str, tries: Sequence[Try], limits: Limits = LIMITS) -> list[Judged]:
    """Return the chosen values of every method that lie at the edge of its tries."""
    return [one for one in judge(experiment, tries, limits) if one.at_edge]


def _go_together(tries: Sequence[Try], one: str, other: str) -> bool:
    pairs = {(given.get(one), given.get(other)) for _, given, _ in tries}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) > 1


def _judge_one(
    experiment: str, method: str, name: str, tries: Sequence[Try], limits: Limits
) -> list[Judged]:
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
    return [Judged(experiment, method, name, value, tuple(tried), limits.get(name, (None, None)))]


def _number(text: str) -> float:
    """Return a value as a number; "3/n" is 3 for each sample of a client's.

    >>> _number("3/n")
    3.0
    """
    return float(text.removesuffix("/n"))


def stored_choices(names: Iterable[str] = (), root: Path = ROOT) -> list[Judged]:
    """Return the judged choices in the stored results of some experiments, or of all."""
    out = []
    for name in names or EXPERIMENTS:
        results = root / name / "results"
        settings = _read_settings(results / "results.json")
        limits = {**LIMITS, **settings.get("limits", {})}
        for path in sorted(results.glob("*.csv")):
            out += judge(name, read_tries(path, settings), limits)
    return out


def _read_settings(record: Path) -> dict[str, Any]:
    """Return the definition of the stored results."""
    if not record.exists():
        return {}
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["settings"]
    return found
