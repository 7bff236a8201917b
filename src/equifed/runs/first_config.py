"""A first configuration for a table: every line says what it is, and it runs as it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equifed.data.infer import Guess

ROUNDS, TEST = 200, 0.25


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
        'scale = "standard"        # or "robust" (median and quartiles), "none"',
        'missing = "indicator"     # gaps: the mean and a 0/1 column; or "mean", "median", "drop"',
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
