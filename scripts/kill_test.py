"""Kill runs with ``kill -9`` at random moments and check that they end as if nothing had happened.

    python scripts/kill_test.py --kills 30

Every run saves after each round, so that many kills fall into a save. A killed run is resumed (and
killed again) until it is complete; its model, metrics, weights and summary must then equal those
of an uninterrupted run byte for byte. Exit code 1 if one does not. Needs an operating system with
``fork``: the parent imports everything once and computes nothing, its children run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from equifed.cli.main import app
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.training import loop as training

FILES = ("model.safetensors", "metrics.csv", "weights.csv", "summary.json")
LOCAL = {"lr": 0.05, "epochs": 1, "batch_size": 16}
METHODS: list[dict[str, Any]] = [
    {
        "name": "scaff-pd",
        "objective": {"name": "chi-square", "rho": 0.1},
        "local": LOCAL,
        "steps": {"name": "constant", "primal": 0.2, "dual": 0.1},
        "gradient_batch_size": 32,
    },
    {"name": "scaffold", "local": LOCAL, "participation": 0.5},
    {"name": "fedavg", "local": LOCAL, "participation": 0.5},
]


def configuration(algorithm: dict[str, Any], rounds: int) -> RunConfig:
    """Return a short run with everything that draws random numbers."""
    return RunConfig.from_dict(
        {
            "rounds": rounds,
            "threads": 1,
            "data": "heart-disease",
            "model": {"name": "mlp", "hidden": [16], "dropout": 0.2},
            "algorithm": algorithm,
            "evaluate": {"every": 2},
        }
    )


def child(folder: Path, config: RunConfig | None) -> int:
    """Start a process that begins a run, or goes on with one; return its number."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        training.CHECKPOINT_SECONDS = 0.0
        if config is not None:
            runs.run(config, folder)
            code = 0
        else:
            app(["resume", "--quiet", str(folder)])
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        os._exit(code)


def finished(number: int) -> bool:
    """Wait for a process; tell whether it ended by itself, and fail if it failed."""
    _, status = os.waitpid(number, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status) != 0:
        sys.exit(f"a run failed with exit code {os.WEXITSTATUS(status)}")
    return True


def killed_until_complete(
    folder: Path, config: RunConfig, duration: float, rng: random.Random, most: int
) -> tuple[int, int]:
    """Run into a folder with kills at random moments; return how many, and how many hit a save."""
    kills = saves = 0
    started: RunConfig | None = config
    while True:
        number = child(folder, started)
        if kills < most:
            time.sleep(rng.uniform(0, 0.7 * duration))
            os.kill(number, signal.SIGKILL)
        if finished(number):
            return kills, saves
        kills += 1
        saves += any((folder / "checkpoint").glob("*.tmp"))
        # Killed before anything was written, there is nothing to resume: begin again.
        started = None if (folder / runs.CONFIG).exists() else config


def main() -> int:
    """Run the test and print the count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; random by default")
    options = parser.parse_args()
    rng, kills, saves, bad = random.Random(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        for i, algorithm in enumerate(itertools.cycle(METHODS)):
            if kills >= options.kills:
                break
            config = configuration(algorithm, options.rounds)
            whole, broken = Path(place) / f"whole-{i}", Path(place) / f"broken-{i}"
            began = time.monotonic()
            finished(child(whole, config))
            duration = time.monotonic() - began
            more = min(options.kills - kills, 5)
            k, s = killed_until_complete(broken, config, duration, rng, more)
            differing = [f for f in FILES if (whole / f).read_bytes() != (broken / f).read_bytes()]
            bad += bool(differing)
            kills, saves = kills + k, saves + s
            print(f"{algorithm['name']}: {k} kills, differing files: {differing or 'none'}")
    print(f"{kills} kills ({saves} during a save), {bad} runs that differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
