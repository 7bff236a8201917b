"""Before a run: examples, a first configuration for a table, and what a run will take."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from equifed.contract.arrays import Vector
from equifed.contract.evaluation import Evaluation
from equifed.data.infer import Guess
from equifed.runs.build import Run, build_run
from equifed.runs.config import RunConfig
from equifed.training.stopping import StopWhen

ROUNDS, TEST = 200, 0.25
PACKAGE = Path(__file__).parents[1]


def find_examples() -> Path:
    """Return the folder of the examples: inside an installed package, or of its clone."""
    for folder in (PACKAGE / "examples", PACKAGE.parents[1] / "examples"):
        if (folder / "three-clients.toml").exists():
            return folder
    raise FileNotFoundError(
        "The examples are not part of this installation; they are in the repository, "
        "https://github.com/equifed/equifed, in the folder examples."
    )


def copy_examples(out: Path, overwrite: bool) -> list[Path]:
    """Copy all examples into a folder, and return the new files."""
    source = find_examples()
    files = {out / path.name: path for path in sorted(source.iterdir()) if path.is_file()}
    there = [path for path in files if path.exists()]
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is where the examples come from; choose another folder.")
    if there and not overwrite:
        raise ValueError(f"{there[0]} already exists; give --overwrite, or another folder.")
    out.mkdir(parents=True, exist_ok=True)
    for path, original in files.items():
        shutil.copyfile(original, path)
    return list(files)


def write_first_config(guess: Guess, table: Path, out: Path) -> str:
    """Return the text of a configuration file at ``out`` for a table, as it was guessed to be."""
    parts = [
        _write_head(table, out),
        _write_data(guess, table, out),
        _write_preparation(guess),
        _write_training(guess),
    ]
    return "\n".join(parts)


def _write_head(table: Path, out: Path) -> str:
    return f"""\
# Made for {table.name}. Train, look at the report, then change what you know better:
#
#     equifed run {out.name} --dry-run      what it will take
#     equifed run {out.name}
#
# Settings that are left out have their defaults; the run folder's config.toml shows them all.

seed = 0           # of every draw: who is held out, the model's start
rounds = {ROUNDS}
"""


def _write_data(guess: Guess, table: Path, out: Path) -> str:
    lines = [
        "[data]",
        'name = "table"',
        f"path = {_value(_relative(table, out))}",
        f"client = {_value(guess.client)}     # whose row it is",
        f"target = {_value(guess.target)}     # what is predicted",
        f"task = {_value(guess.task)}",
        _write_features(guess.features),
    ]
    if guess.left_out:
        lines += ["# Left out, because each of them seems to be no feature:"]
        lines += [_remark(f"{name}: {reason}") for name, reason in guess.left_out.items()]
    if guess.groups:
        group = guess.groups[0]
        lines += [f"group = {_value(group)}    # all rows of one {group} stay in one split"]
    for date in guess.dates[:1]:
        lines += [
            f"# time = {_value(date)}    # hold out every client's latest rows, not random ones"
            + ("; in place of group" if guess.groups else "")
        ]
    lines += [
        "",
        "# Rows of every client that are held out, to measure the model on:",
        "[data.holdout]",
        f"test = {TEST}",
        "validation = 0.0",
        "",
    ]
    return "\n".join(lines)


def _write_preparation(guess: Guess) -> str:
    coded = guess.categorical if guess.categorical == "auto" else list(guess.categorical)
    lines = [
        "# How columns become features; fitted on training rows, kept in the run folder.",
        *map(_remark, guess.remarks),
        "[data.prepare]",
        'scale = "standard"        # mean 0 and deviation 1; or "none"',
        'missing = "indicator"     # gaps: the mean and a 0/1 column; or "mean", "drop", "error"',
        f"categorical = {_value(coded)}      # auto: columns with text; or a list of columns",
        'unknown = "other"         # categories that no training row has; or "error"',
        "min_count = 5             # rarer categories go to other",
        "per_client = false        # true: scale every client by its own numbers",
        "",
    ]
    return "\n".join(lines)


def _write_training(guess: Guess) -> str:
    model = "logistic" if guess.task == "classification" else "linear"
    return f"""\
[model]
name = "{model}"           # equifed list models
l2 = 0.001

[algorithm]
name = "fair-newton"      # second-order steps, for linear models; equifed list algorithms

# What is minimised: the worst client's loss minus a penalty that keeps the weights of the clients
# near equal ones. rho = 0 is the worst case, a large rho the average.
[algorithm.objective]
name = "chi-square"       # equifed list objectives
rho = 0.1

[evaluate]
every = 1                 # rounds between two evaluations

# Training ends when it is proved to be this near to the smallest objective there is (0.1 %).
[stop]
at_relative_gap = 0.001
"""


def _write_features(features: Sequence[str]) -> str:
    """Return the list of features, on lines of their own where one is not enough."""
    line = f"features = {_value(list(features))}"
    if len(line) <= 100:
        return line
    return "\n".join(["features = [", *(f"    {_value(name)}," for name in features), "]"])


def _relative(table: Path, out: Path) -> str:
    """Return the table's path as seen from the configuration, absolute if there is no such."""
    try:
        return Path(os.path.relpath(table.absolute(), out.absolute().parent)).as_posix()
    except ValueError:  # another drive
        return table.absolute().as_posix()


def _remark(text: str) -> str:
    """Return a comment, whatever is in the text."""
    return "#   " + " ".join(text.split())


def _value(value: Any) -> str:
    import tomli_w

    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


# -- what it will take ------------------------------------------------------------------------

TRIED = 3
"""Rounds that are run, and thrown away, to measure."""


@dataclass(frozen=True)
class Estimate:
    """What a run will take; times and bytes per round are measured in its first ones.

    ``rounds`` is the most: stop rules may end it earlier. ``memory`` is the largest that the
    process has needed so far, in bytes; None where the system does not tell. ``tried`` is how many
    rounds were measured.
    """

    clients: int
    samples: dict[str, int]
    parameters: int
    rounds: int
    exchanges: int
    bytes_up: int
    bytes_down: int
    memory: int | None
    device_memory: int | None
    seconds_to_build: float
    seconds: float
    tried: int

    def describe(self) -> list[str]:
        """Return the lines that a person reads."""
        held = ", ".join(f"{label} {count:,}" for label, count in self.samples.items())
        memory = "not known here" if self.memory is None else _write_bytes(self.memory)
        if self.device_memory:
            memory += f", and {_write_bytes(self.device_memory)} on the device"
        return [
            f"clients     {self.clients}; samples: {held}",
            f"model       {self.parameters:,} parameters",
            f"rounds      {self.rounds} at most, {self.exchanges:,} exchanges with the clients",
            f"traffic     {_write_bytes(self.bytes_up)} up, {_write_bytes(self.bytes_down)} down, "
            "all clients and rounds together, in a real federation",
            f"memory      {memory} of this process, its largest so far",
            f"time        {_write_seconds(self.seconds)}, measured in {self.tried} round(s) here; "
            f"loading took {_write_seconds(self.seconds_to_build)}",
        ]


def estimate(config: RunConfig) -> Estimate:
    """Build a run, try its first rounds, and return what all of it will take. Nothing is written.

    Traffic is that of the first round and, for all others, that of the last one tried; an algorithm
    that changes what it asks later is not foreseen. Evaluations are counted as often as the
    configuration has them.
    """
    start = time.perf_counter()
    built = build_run(config)
    loaded = time.perf_counter() - start
    tried = min(TRIED, config.rounds)
    short = replace(
        built.config, rounds=tried, evaluate=replace(config.evaluate, every=1), stop=StopWhen()
    )
    watch = _Watch(built)
    history = replace(built, config=short, evaluate=watch).train()
    first, *others = history.rounds
    usual = others[-1] if others else first  # the first may have measured step sizes
    left = config.rounds - 1
    seconds = first.seconds + left * min(r.seconds for r in others or [first])
    seconds += min(watch.seconds) * (1 + config.rounds // config.evaluate.every)
    parameters = history.parameters or {}
    return Estimate(
        clients=len(built.federation),
        samples={label: len(split) for label, split in built.federation.splits().items()},
        parameters=sum(p.numel() for p in parameters.values()),
        rounds=config.rounds,
        exchanges=first.exchanges + left * usual.exchanges,
        bytes_up=first.bytes_up + left * usual.bytes_up,
        bytes_down=first.bytes_down + left * usual.bytes_down,
        memory=_read_memory(),
        device_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        seconds_to_build=loaded,
        seconds=seconds,
        tried=tried,
    )


class _Watch:
    """Evaluates as the run would, and looks at the clock."""

    def __init__(self, built: Run) -> None:
        self.built, self.seconds = built, [0.0]

    def __call__(self, x: Vector) -> list[Evaluation]:
        start, given = time.perf_counter(), self.built.evaluate
        found = given(x) if callable(given) else self.built.clients.evaluate(x, given)
        self.seconds = [*(s for s in self.seconds if s), time.perf_counter() - start]
        return found


def _read_memory() -> int | None:
    """Return the largest memory that this process has had, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(largest) * (1 if sys.platform == "darwin" else 1024)


def _write_bytes(count: float) -> str:
    """Return bytes in a unit that people read.

    >>> _write_bytes(1536), _write_bytes(12)
    ('1.5 kB', '12 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def _write_seconds(seconds: float) -> str:
    """Return a time in a unit that people read.

    >>> _write_seconds(42.3), _write_seconds(600)
    ('42 s', '10 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
