"""Make configurations at random, sane and absurd, and see whether each is run or refused.

    python -m scripts.trust.configurations --cases 10000

Every name of the catalogue is drawn, with settings drawn by their types: usual values, limits,
absurd sizes, wrong types, odd texts, lists that are long or deep. A configuration is checked; those
on small data that pass are trained for two rounds. What may come of it: a run with a finite model,
or an error in words (exit code 1 or 2 of the command line). An exception that the command line
would call unexpected, a run of more than ``--seconds``, or a model that is not finite without an
error is printed, and the exit code is 1; so it is where a name was drawn fewer than 20 times in
10,000, or fewer than a fifth of all were trained.

What asks for more than two rounds, or for more than 10,000 local steps, epochs, clients or hidden
units, gets what it asks for, however long that takes: it is checked and not trained here. More than
ten million are refused.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import signal
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from equifed.cli.terminal import _explain
from equifed.runs import run as runs
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RECORDS, Holdout, ModelSettings, RunConfig
from equifed.runs.schema import Setting, alternatives, settings
from equifed.training.events import check_finite

SMALL = ("heart-disease", "penguins", "synthetic-regression")
"""Data that are embedded and small: what names them is trained, too."""
OPTION, NAMED, RARE = 0.2, 0.6, 0.05
"""How often a setting that has a default is set, one that names something, and one that is a path:
hardly any file is there."""

SUITED = {"synthetic-regression": ("linear", "mlp")}
"""Models that suit small data, where they are not the ones for classes."""
MUCH, ABSURD = 10_000, 10_000_000
"""Local steps, epochs or clients beyond which a run takes as long as it was asked to, and beyond
which it is to be refused."""
ARRAYS = (tuple, list, Sequence)
TRAINED, LEAST = 0.2, 20 / 10_000
"""Shares of all cases that are to be trained, and in which each name is to be drawn."""

NUMBERS = [0.5, 0.1, 1.0, 0.01, 0.9, 0.25, 2.0]
ODD_NUMBERS = [
    0.0, -0.0, -1.0, 1e-30, 1e-308, 5e-324, 1e30, -1e30, 1e150, 1e308, -1e308,
    float("inf"), float("-inf"), float("nan"), 1.0 + 1e-12, 1 - 1e-12,
]  # fmt: skip
WHOLE = [1, 2, 3, 5, 8]
ODD_WHOLE = [0, -1, 100, 10**6, 10**9, -(10**40), 10**40, 10**400, 2**31, 2**63, -(2**63)]


def _nested(depth: int) -> Any:
    out: Any = 1
    for _ in range(depth):
        out = [out]
    return out


WRONG: list[Any] = [
    "", "x", "size", "auto", "none", True, False, [], [1, "a"], {}, {"name": "x"}, 3, 0.5, 2.0,
    " ", "\x00", "\x1b[31m", "na\u00efve \u540d\u524d \u202e", "../../etc/passwd", "a" * 10_000,
    ":", "os:system", "no.such.module:name", "[bold]", "{0}", "%s", [0.1] * 10_000, _nested(50),
    _nested(900), {"name": {"name": {"name": 1}}}, {"": 1}, {"name": ""}, {"name": True}, [None],
    datetime.date(2020, 1, 1), datetime.time(1, 2), float("nan"), float("inf"), 10**400, -1, None,
    "nan", [[]],
]  # fmt: skip

Draw = np.random.Generator


class _TooLong(BaseException):
    """A run took longer than it may."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Generator:
    """Draws tables by the signatures of what they name, and counts the names."""

    def __init__(self, draw: Draw, names: Counter[tuple[str, str]]) -> None:
        self.draw, self.names = draw, names
        self.oddness = float(draw.choice([0.0, 0.0, 0.0, 0.05, 0.3]))

    def pick(self, choices: Any) -> Any:
        """Return one of some values."""
        return choices[int(self.draw.integers(len(choices)))]

    def chosen(self, section: str, name: str | None = None, depth: int = 0) -> Any:
        """Return a table that names an entry of a section."""
        name = name or self.pick(list(SECTIONS[section].entries()))
        self.names[section, name] += 1
        given = SECTIONS[section].given
        wanted = settings(SECTIONS[section][name].load(), given)
        return {"name": name, **self.table(wanted, depth)}

    def table(self, wanted: dict[str, Setting], depth: int = 0) -> dict[str, Any]:
        """Return a table for settings, most of them left out."""
        out = {}
        for name, setting in wanted.items():
            named = setting.section is not None or name.startswith("metric")
            often = NAMED if named else RARE if Path in setting.parts else OPTION
            if setting.required or self.draw.random() < often:
                out[name] = self.value(setting, depth)
        if {"steps", "epochs"} <= set(wanted) and self.draw.random() > self.oddness:
            chosen, other = self.pick(
                [("steps", "epochs"), ("steps", "epochs"), ("epochs", "steps")]
            )
            out[chosen] = self.pick(ODD_WHOLE if self.draw.random() < self.oddness else WHOLE)
            out.pop(other, None)
        return out

    def value(self, setting: Setting, depth: int) -> Any:
        """Return a value for a setting, by its type or absurd."""
        if self.draw.random() < self.oddness / 3:
            return self.pick(WRONG)
        if setting.section is not None:
            if depth < 3:
                return self.chosen(setting.section, depth=depth + 1)
            return {"algorithms": "fedavg", "objectives": "average"}.get(setting.section, "auto")
        if setting.record is not None:
            return self.table(settings(setting.record), depth + 1)
        kinds = alternatives(setting.annotation)
        lists = [k for k in kinds if typing.get_origin(k) in ARRAYS]
        if lists and self.draw.random() < 0.8:
            return self.leaf(lists[0], setting)
        return self.leaf(self.pick(kinds), setting)

    def leaf(self, kind: Any, setting: Setting) -> Any:
        """Return a plain value."""
        odd = self.draw.random() < self.oddness
        if typing.get_origin(kind) is typing.Literal:
            return self.pick(typing.get_args(kind))
        if typing.get_origin(kind) in ARRAYS or kind is tuple:
            inner = (*typing.get_args(kind), float)[0]
            return [self.leaf(inner, setting) for _ in range(int(self.draw.integers(0, 5)))]
        if kind is bool:
            return bool(self.draw.integers(2))
        if kind is int:
            return self.pick(ODD_WHOLE if odd else WHOLE)
        if kind is float:
            return self.pick(ODD_NUMBERS if odd else NUMBERS)
        if kind is type(None):
            return "none"
        if setting is not None and setting.name.startswith("metric") and not odd:
            name = self.pick(list(SECTIONS["metrics"].entries()))
            self.names["metrics", name] += 1
            return name
        usual = setting is not None and isinstance(setting.default, str)
        if usual and not odd and self.draw.random() < 0.7:
            return setting.default
        return self.pick(["x", "auto", "none", "size"])

    def configuration(self) -> dict[str, Any]:
        """Return a whole configuration."""
        name = self.pick(SMALL) if self.draw.random() < 0.85 else None
        suited = SUITED.get(name or "", ("logistic", "mlp"))
        model = self.pick(suited) if self.draw.random() < 0.8 else None
        out: dict[str, Any] = {
            "rounds": 2 if self.draw.random() > self.oddness / 3 else self.pick(ODD_WHOLE + WRONG),
            "threads": 1,
            "data": self.chosen("data", name) | self._holdout(),
            "model": {**self.chosen("models", model), **self._shared_model(name)},
            "algorithm": self.chosen("algorithms"),
        }
        if self.draw.random() < 0.5:
            here = out["data"]["name"] in SMALL  # a group of processes is not started here
            engines = [n for n in SECTIONS["engines"].entries() if not here or n != "distributed"]
            out["engine"] = self.chosen("engines", self.pick(engines))
            for slow in ("device", "compiled"):  # compiling takes its announced minute
                out["engine"].pop(slow, None)
        for key, record in RECORDS.items():
            if self.draw.random() < 0.15:
                out[key] = self.table(settings(record))
        if self.draw.random() < self.oddness:
            keys = ["seed", "sed", "give_out", "threads", *out, *RECORDS, "", "\u00e9\n"]
            out[self.pick(keys)] = self.pick(WRONG + ODD_WHOLE)
        return out

    def _holdout(self) -> dict[str, Any]:
        some = self.draw.random() < 0.05
        return {"holdout": self.table(settings(Holdout))} if some else {}

    def _shared_model(self, data: str | None) -> dict[str, Any]:
        out: dict[str, Any] = {}
        losses = ["auto", *SECTIONS["losses"].entries()]
        if data in SUITED and self.draw.random() < 0.7:
            losses = ["auto", "squared"]
        if self.draw.random() < 0.5:
            out["l2"] = self.leaf(float, None)  # type: ignore[arg-type]
        if self.draw.random() < 0.3:
            out["loss"] = self.pick(losses)
            self.names["losses", out["loss"]] += 1
        if self.draw.random() < 0.5:
            out["dtype"] = "float64"
        if self.draw.random() < 0.15:
            out["own"] = self.pick(["bias", "norm", "head", "*", "0.*", ["*.bias"], [], ""])
        for name in ("penalise", "init", "own_l2", "own_steps", "class_weights"):
            if self.draw.random() < 0.05:
                out[name] = self.value(settings(ModelSettings)[name], 0)
        return out


def try_one(table: dict[str, Any], seconds: int) -> tuple[str, str]:
    """Check and, if it is small, train a configuration; return what came of it and the words."""
    try:
        with _limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = RunConfig.from_dict(table, base=Path("."))
            if config.data["name"] not in SMALL:
                return "accepted", ""
            if config.rounds > 2 or asks_for_much(table):
                return "accepted", ""
            history = runs.run(config)
            wrong = check_finite(history.parameters or {})
            return ("trained", "") if wrong is None else ("not finite", wrong)
    except _TooLong:
        return "too long", ""
    except Exception as error:  # this is what the script looks for
        words = _explain(error)[0]
        unexpected = "This should not happen" in words or not str(error).strip()
        return ("unexpected" if unexpected else "refused"), words


def asks_for_much(table: Any) -> bool:
    """Tell whether a configuration asks for more work, clients or units than are tried here."""
    if not isinstance(table, dict):
        return False
    counts = [table.get(name) for name in ("steps", "epochs", "clients", "own_steps")]
    widths = table.get("hidden")
    counts += widths if isinstance(widths, list) else [widths]
    much = any(isinstance(count, int) and MUCH < count <= ABSURD for count in counts)
    return much or any(asks_for_much(value) for value in table.values())


def try_many(seconds: int, cases: range) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Try configurations, print what should not be, and return names and outcomes."""
    names, counts = Counter[tuple[str, str]](), Counter[str]()
    for case in cases:
        table = Generator(np.random.default_rng(case), names).configuration()
        outcome, words = try_one(table, seconds)
        counts[outcome] += 1
        if outcome in ("unexpected", "not finite", "too long"):
            told = f"{words.splitlines()[:1]} {str(table)[:2000]}"
            print(f"{outcome}, seed {case}: {told}", file=sys.stderr, flush=True)
    return names, counts


def main() -> int:
    """Try as many configurations as asked, and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=int, default=60, help="longest time for one")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    names, counts = Counter[tuple[str, str]](), Counter[str]()
    last = options.first + options.cases
    parts = [range(a, min(a + 100, last)) for a in range(options.first, last, 100)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for some_names, some_counts in pool.imap_unordered(
            partial(try_many, options.seconds), parts
        ):
            names += some_names
            counts += some_counts
    least = show_coverage(names)
    print(", ".join(f"{outcome} {counts[outcome]:,}" for outcome in sorted(counts)))
    wrong = counts["unexpected"] + counts["not finite"] + counts["too long"]
    few = counts["trained"] < TRAINED * options.cases or least < int(LEAST * options.cases)
    return 1 if wrong or few else 0


def show_coverage(names: Counter[tuple[str, str]]) -> int:
    """Print how often the names of each section were drawn, and return the least of all."""
    print("| section | names | least often |")
    print("|---|---:|---|")
    least = []
    for section in sorted(set(SECTIONS) - {"trackers"}):  # which no configuration names
        found = {name: names[section, name] for name in SECTIONS[section].entries()}
        rare = min(found, key=lambda name: found[name])
        least.append(found[rare])
        print(f"| {section} | {len(found)} | {rare}: {found[rare]:,} |")
    return min(least)


if __name__ == "__main__":
    sys.exit(main())
