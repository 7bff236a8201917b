"""Train every algorithm in chunks of several sizes and in two processes, and compare all bits.

    python -m scripts.trust.determinism [--repeats 20] [--rounds 3] [--threads 1] [--names WORDS]

All algorithms of the catalogue with the settings that the conformance tests give them, for logistic
regression and an MLP, with and without own biases (where the algorithm takes them), in double
precision on a CPU, with a fixed number of threads. Compared are the trained model and the weights
of all rounds; the table counts the runs that differ from the first in any bit, and the exit code is
1 if one does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tests.conformance.cases import CASES

from equifed.data.federation import Federation
from equifed.engines.distributed import DistributedClients
from equifed.engines.simulate import simulate
from equifed.runs.run import free_port
from equifed.training.loop import train

MODELS: dict[str, dict[str, Any]] = {
    "logistic": {"model": "logistic"},
    "mlp": {"model": "mlp"},
    "own bias": {"model": "logistic", "own": "bias"},
    "mlp, own bias": {"model": "mlp", "own": "bias"},
}
CHUNKS = (1, 3, 8, 20, None)
CLIENTS, FEATURES, CLASSES = 21, 6, 3


def federation() -> Federation:
    """Return ragged clients: neither blocks of eight nor batches are full."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(3, 60, CLIENTS)
    sizes[:4], sizes[9:12], sizes[17:19] = 25, 24, 32
    return Federation.from_clients(
        {
            f"c{i}": (draw.normal(size=(m, FEATURES)), draw.integers(0, CLASSES, m))
            for i, m in enumerate(sizes)
        },
        classes=CLASSES,
    )


def digest(clients: Any, name: str, rounds: int) -> str:
    """Train, and return a digest of the model and of all weights."""
    try:
        history = train(CASES[name], clients, rounds=rounds, seed=1)
    except ValueError as error:  # minibatches of profile losses, own parts of some algorithms
        return f"refused: {error}"
    assert history.parameters is not None
    content = hashlib.sha256()
    for value in history.parameters.values():
        content.update(value.numpy().tobytes())
    for weights in history.weights.values():
        content.update(np.ascontiguousarray(weights).tobytes())
    return content.hexdigest()


def digests(names: Iterable[str], model: str, rounds: int, chunk: int | None) -> dict[str, str]:
    """Return the digests of runs in this process, or in the group that it is of."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"dtype": torch.float64, "l2": 0.01, "chunk": chunk}
    kind = DistributedClients if "RANK" in os.environ else simulate
    clients = kind(federation(), **MODELS[model], **given)
    return {name: digest(clients, name, rounds) for name in names}


def two_processes(names: list[str], rounds: int, threads: int) -> dict[str, dict[str, str]]:
    """Return the digests of both models' runs in a group of two processes."""
    task = json.dumps([names, rounds, threads])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "scripts.trust.determinism", "--worker", task]
    running = [
        subprocess.Popen(
            command, env=os.environ | group | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=3600)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("A process of the group failed; its message is above.")
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    if first != second:
        raise RuntimeError("The two processes of one group ended with different models.")
    return first


def compare(names: list[str], rounds: int, repeats: int, threads: int) -> int:
    """Print the table and return the number of runs that differ."""
    torch.set_num_threads(threads)
    first = {model: digests(names, model, rounds, CHUNKS[0]) for model in MODELS}
    differing = 0
    print(f"{'':24} {'runs':>6} {'differ':>7}")
    for turn in range(repeats):
        found = {f"chunk {c or 'all'}": {m: digests(names, m, rounds, c) for m in MODELS}
                 for c in CHUNKS}  # fmt: skip
        found["2 processes"] = two_processes(names, rounds, threads)
        for way, models in found.items():
            bad = [f"{m}: {n}" for m in MODELS for n in names if models[m][n] != first[m][n]]
            differing += len(bad)
            runs = sum(not models[m][n].startswith("refused") for m in MODELS for n in names)
            print(f"repeat {turn + 1:2}, {way:12} {runs:6} {len(bad):7}", *bad, flush=True)
    return differing


def main() -> None:
    """Compare, or be one of the processes that are compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--names", nargs="*", default=list(CASES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        names, rounds, threads = json.loads(given.worker)
        torch.set_num_threads(threads)
        print(json.dumps({model: digests(names, model, rounds, None) for model in MODELS}))
        return
    differing = compare(given.names, given.rounds, given.repeats, given.threads)
    print(f"{differing} runs differ.")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
