"""The same FedAvg rounds in other simulators, each in an environment of its own, and in equifed.

    python -m benchmarks.peers [mlp logistic cnn lstm] [--peers fedjax,pfl,flwr,flgo] [--rounds 5]
                               [--threads 2] [--store]

An MLP 784-50-10 and logistic regression: 100 clients x 600 samples x 784 features, batch 50, 12
local steps. A CNN and an LSTM (those of ``benchmarks.models``): 10 clients x 60 images or sequences
of 80 tokens, batch 20, three local steps. Always one shuffled pass, step size 0.05, uniform
averaging, and the same initial model. All programs stay alive and do one round each in turn; the
first round of each (tracing, start of workers) is left out. The environments are made at the first
call under ``build/peers``. ``--processor`` is for machines with other loads: one thread, seconds of
the processor, and no peer that computes in several processes.

The mean loss must fall as far as with ``equifed, loop`` (``equifed`` if that failed), to 2 %, for
the two networks to 20 %; otherwise a row does other work, and the table says so. Exact agreement is
not expected: everyone draws its own shuffles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import engines, models
from benchmarks.results import FOLDER, store

from equifed.contract.streams import Stream
from equifed.models.architectures import build, initialise

PINNED = {
    "fedjax": ("fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2", "numpy==2.4.6"),
    "pfl": ("pfl[pytorch]==0.6.0", "torch==2.13.0", "numpy==2.4.6"),
    "flwr": ("flwr[simulation]==1.41.0", "torch==2.13.0"),
    "flgo": ("flgo==0.4.4", "torch==2.13.0", "torchvision==0.28.0", "numpy==2.4.6"),
}
ROWS = {  # row of the table: environment, script, further arguments
    "equifed": ("equifed", "with_equifed.py", "auto"),
    "equifed, loop": ("equifed", "with_equifed.py", "loop"),
    "fedjax, jit": ("fedjax", "with_fedjax.py", "jit"),
    "fedjax, pmap": ("fedjax", "with_fedjax.py", "pmap"),
    "pfl, one process": ("pfl", "with_pfl.py"),
    "pfl, processes": ("pfl", "with_pfl.py", "processes"),
    "flwr": ("flwr", "with_flwr.py"),
    "flgo": ("flgo", "with_flgo.py"),
}
MODELS = {"mlp": "MLP 784-50-10", "logistic": "Logistic regression", "cnn": "CNN", "lstm": "LSTM"}
DENSE = ("mlp", "logistic")
RUNNERS, HOME = Path(__file__).parent / "peer_runners", Path("build/peers").resolve()
PATIENCE = 120.0
TOLERANCE = {"mlp": 0.02, "logistic": 0.02, "cnn": 0.2, "lstm": 0.2}
"""Of the fall of the loss; 600 samples fall little in a few rounds, and shuffles matter more."""

SEVERAL = ("fedjax, pmap", "pfl, processes", "flwr")
"""Rows whose work is done by several processes or devices."""


# -- the environments and the work ----------------------------------------------------------------


def environment(peer: str) -> Path:
    """Return the interpreter of a peer's environment, made first if it is not there."""
    folder, python = HOME / peer, HOME / peer / "bin" / "python"
    made = folder / "pinned.txt"
    if not made.exists() or made.read_text().split() != list(PINNED[peer]):
        print(f"installing {' '.join(PINNED[peer])}", file=sys.stderr)
        venv.create(folder, with_pip=True, symlinks=True)
        command = [str(python), "-m", "pip", "install", "-q", *PINNED[peer]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"not installed: {last_words(done.stderr)}")
        made.write_text("\n".join(PINNED[peer]))
    return python


def write_work(folder: Path, model: str, clients: int | None) -> None:
    """Write the data and the initial model."""
    folder.mkdir(parents=True, exist_ok=True)
    if model in DENSE:
        data = engines.federation(clients or 100)
    else:
        data = models.federation(model, clients or 10)
    train, n = data.train, len(data.names)
    np.save(folder / "inputs.npy", train.inputs.reshape(n, -1, *train.inputs.shape[1:]))
    np.save(folder / "targets.npy", train.targets.reshape(n, -1).astype(np.int64))
    module = initialise(build(model, train.inputs.shape[1:], data.classes or 0), Stream(0))
    np.savez(folder / f"{model}.npz", *[p.detach().numpy() for p in module.parameters()])


def last_words(text: str) -> str:
    """Return the last line that names an error, or else the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|[\w.]*(Error|Exception)\b)", line)]
    return (errors or lines or ["no message"])[-1]


# -- the programs ---------------------------------------------------------------------------------


@dataclass
class Program:
    """One runner, alive between its rounds."""

    name: str
    clock: str = "seconds"
    process: subprocess.Popen[str] | None = None
    failure: str = ""
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def start(self, model: str, rounds: int, threads: int) -> None:
        """Start the runner."""
        peer, script, *more = ROWS[self.name]
        try:
            python = Path(sys.executable) if peer == "equifed" else environment(peer)
        except (RuntimeError, subprocess.SubprocessError) as error:
            self.failure = str(error)
            return
        settings = {"OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"}
        if threads == 1:  # JAX takes all cores unless it is told not to
            settings["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        settings["GLOO_SOCKET_IFNAME"] = "lo"  # processes of one machine need no network
        command: list[Any] = [python, RUNNERS / script, HOME / "work" / model, model, rounds, *more]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | settings,
                cwd=HOME,
            )

    @property
    def log(self) -> Path:
        """Where the runner's other output goes."""
        return HOME / (self.name.replace(", ", "-").replace(" ", "-") + ".log")

    def turn(self) -> None:
        """Let the runner do one round; a runner that fails is left out from then on."""
        if self.failure or self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("round\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
            line = self.process.stdout.readline() if ready else ""
            answer = json.loads(line or "{}")
            self.seconds.append(answer[self.clock])
            self.losses.append(answer["loss"])
        except (OSError, KeyError, ValueError):
            self.failure = f"failed: {last_words(self.log.read_text())}"

    def end(self) -> None:
        """Close the runner's input, and stop it if it does not end by itself."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


# -- the tables -----------------------------------------------------------------------------------


def compare(model: str, names: list[str], rounds: int, threads: int, clock: str) -> list[Program]:
    """Run all programs of one model turn by turn; the first round of each is a warm-up."""
    programs = [Program(name, clock) for name in names]
    try:
        for program in programs:
            program.start(model, rounds + 1, threads)
        for _ in range(rounds + 1):
            for program in programs:
                program.turn()
    finally:
        for program in programs:
            program.end()
    return programs


def table(model: str, programs: list[Program]) -> str:
    """Return seconds per round (best and median), the ratio of the best, and the final losses."""
    ours = [p for p in programs if p.name.startswith("equifed") and not p.failure]
    if not ours or ours[0].name != "equifed":
        raise SystemExit(f"equifed itself failed: {programs[0].failure}; see {programs[0].log}.")
    base = min(ours[0].seconds[1:])
    first, *_, last = ours[-1].losses  # after the warm-up, and after all rounds
    lines = [
        f"\n{MODELS[model]}",
        "",
        "| simulator | best s | median s | times equifed | final loss | same work |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for program in programs:
        if program.failure:
            lines.append(f"| {program.name} | | | | | {program.failure} |")
            continue
        times, loss = program.seconds[1:], program.losses[-1]
        off = abs((program.losses[0] - loss) / (first - last) - 1)
        same = "yes" if off <= TOLERANCE[model] else f"NO: {100 * off:.0f} % off"
        lines.append(
            f"| {program.name} | {min(times):.3f} | {float(np.median(times)):.3f} "
            f"| {min(times) / base:.1f} | {loss:.4f} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    arguments.add_argument("--peers", default=",".join(PINNED))
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--clients", type=int)
    arguments.add_argument("--processor", action="store_true", help="one thread's own seconds")
    arguments.add_argument("--store", type=Path, nargs="?", const=FOLDER, help="keep the times")
    given = arguments.parse_args()
    chosen = ["equifed", *given.peers.split(",")]
    if unknown := set(chosen) - set(PINNED) - {"equifed"}:
        raise SystemExit(f"--peers expected some of {','.join(PINNED)}, got {sorted(unknown)}.")
    if unknown := set(given.models) - set(MODELS):
        raise SystemExit(f"Models are some of {', '.join(MODELS)}, got {sorted(unknown)}.")
    names, rows = [name for name, row in ROWS.items() if row[0] in chosen], {}
    clock = "seconds"
    if given.processor:
        clock, given.threads = "processor", 1
        names = [name for name in names if name not in SEVERAL]
    for model in given.models or MODELS:
        write_work(HOME / "work" / model, model, given.clients)
        programs = compare(model, names, given.rounds, given.threads, clock)
        print(table(model, programs), flush=True)
        rows[MODELS[model]] = {p.name: min(p.seconds[1:]) for p in programs if not p.failure}
    if given.store is not None:
        pins = [PINNED[peer][0].split("==") for peer in chosen[1:]]
        versions = {name.partition("[")[0]: version for name, version in pins}
        versions |= {"threads": str(given.threads), "clock": clock}
        label = "-".join(["peers", *given.models])
        store(label, "equifed", rows, given.store, versions)


if __name__ == "__main__":
    main()
