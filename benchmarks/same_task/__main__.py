"""The same task in equifed, Flower, fluke, and scikit-learn with fairlearn: lines, seconds, result.

    python -m benchmarks.same_task [equifed flower fluke fairlearn]

460 made-up patients of six unequal hospitals (``examples/hospitals.csv``), a fifth of each
hospital's rows kept for the test; a linear classifier of the outcome; accuracy in each hospital.
Each program is short but whole, and starts from the same two files. Lines are those that are not
empty, comment or docstring, with ``shared.py`` where a program needs it; seconds are of the
processor, from the start of Python to the result, after a run that warms up. Environments are
made under ``build/peers``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np
import pandas as pd
from benchmarks import peers

HERE = Path(__file__).parent
WORK = peers.HOME / "same-task"
TOOLS = {
    "equifed": (),
    "flower": ("flwr[simulation]==1.41.0", "torch==2.13.0", "pandas==3.1.1"),
    "fluke": ("fluke-fl==0.8.1", "torch==2.13.0", "torchvision==0.28.0", "pandas==3.1.1"),
    "fairlearn": ("fairlearn==0.15.0", "scikit-learn==1.9.1", "pandas==3.1.1"),
}


def write_tables() -> tuple[Path, Path]:
    """Write training and test rows, a fifth of every hospital's for the test."""
    table = pd.read_csv(HERE.parents[1] / "examples" / "hospitals.csv")
    draw = np.random.default_rng(0)
    held = np.zeros(len(table), dtype=bool)
    for _, rows in table.groupby("hospital").indices.items():
        held[draw.permutation(rows)[: max(1, len(rows) // 5)]] = True
    WORK.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", table[~held]), ("test", table[held])):
        part.to_csv(WORK / f"{name}.csv", index=False)
    return WORK / "train.csv", WORK / "test.csv"


def count_lines(path: Path) -> int:
    """Return the lines of a program that hold code."""
    lines: set[int] = set()
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    before = tokenize.NEWLINE
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokens:
        statement = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.STRING and statement:  # a docstring
            before = token.type
            continue
        if token.type not in skipped and token.type != tokenize.NEWLINE:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return len(lines)


def run(tool: str, tables: tuple[Path, Path]) -> tuple[int, float, dict[str, float]]:
    """Return a program's lines, its processor seconds, and the accuracy of every hospital."""
    python = Path(sys.executable) if tool == "equifed" else peers.environment(f"task-{tool}")
    script = HERE / f"with_{tool}.py"
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [str(python), str(script), *map(str, tables)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=settings, cwd=WORK
        )
        if done.returncode:
            raise RuntimeError(f"{tool}: {peers.last_words(done.stderr)}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    lines = count_lines(script)
    if "from shared import" in script.read_text():
        lines += count_lines(HERE / "shared.py")
    return lines, seconds, json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run the programs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=list(TOOLS), help="which of them")
    tables = write_tables()
    for tool, pins in TOOLS.items():
        peers.PINNED[f"task-{tool}"] = pins
    for tool in parser.parse_args().tools:
        try:
            lines, seconds, found = run(tool, tables)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"| {tool} | {error} |", flush=True)
            continue
        average, worst = np.mean(list(found.values())), min(found, key=found.__getitem__)
        told = f"{100 * average:.1f} | {100 * found[worst]:.1f} ({worst})"
        print(f"| {tool} | {lines} | {seconds:.0f} | {told} |", flush=True)


if __name__ == "__main__":
    main()
