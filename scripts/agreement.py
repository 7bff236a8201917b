"""Do this version and version 0.2 compute the same? Every algorithm of the catalogue, both run.

    git worktree add ../before c8e8bd3
    python scripts/agreement.py --before ../before

Every algorithm plays 12 rounds on a convex problem (softmax regression with an L2 penalty) and on a
network (one hidden layer), in float64, with its defaults and with minibatches. Models, weights,
losses and objectives are compared: equal to the bit, or the largest relative difference. Algorithms
run bare; SCAFF-PD is that of 0.2 without a metric, FairNewton 0.2's SCAFF-PD as it was by default,
and both are trained once more as usual. Exits 1 if anything but ``BY_DESIGN`` differs.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import equifed as ef
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import ChiSquare
from equifed.runs.catalogue import ALGORITHMS

ROUNDS, ROUNDING, BEFORE = 12, 1e-9, "fair-newton" not in ALGORITHMS
JUDGED = ("safeguarded", "accelerated")  # wrappers of algorithms with step sizes
REFUSES = "it refuses networks, where 0.2 ran SCAFF-PD"
BY_DESIGN = {
    "convex/scaff-pd, trained": "0.2 added Anderson's acceleration to automatic steps",
    "network/fair-newton": REFUSES,
    "network/fair-newton, trained": REFUSES,
}
"""What is meant to differ, and why."""


def federation() -> ef.Federation:
    """Return five clients of unequal sizes whose classes overlap differently."""
    draw, clients = np.random.default_rng(7), {}
    for i, m in enumerate((40, 25, 60, 12, 33)):
        inputs = draw.standard_normal((m, 6)) + 0.4 * i
        scores = inputs @ draw.standard_normal((6, 3)) + draw.gumbel(size=(m, 3))
        clients[f"client {i}"] = (inputs, scores.argmax(axis=1))
    return ef.Federation.from_clients(clients)


def problems() -> dict[str, Any]:
    """Return the clients of the convex problem and of the network."""
    nn, given = torch.nn, {"engine": "stacked", "dtype": torch.float64}
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    models = {"convex": nn.Linear(6, 3), "network": network}
    return {name: ef.simulate(federation(), one, l2=1e-2, **given) for name, one in models.items()}


def algorithms() -> dict[str, Any]:
    """Return the algorithms by this version's names; wrappers are around FedAvg, or SCAFF-PD."""
    fair, out = ChiSquare(0.1), {}
    plain: dict[str, Any] = {"metric": "none"} if BEFORE else {}
    for name, entry in ALGORITHMS.items():
        make: Any = entry.load()
        takes = inspect.signature(make).parameters
        required = {k for k, one in takes.items() if one.default is inspect.Parameter.empty}
        inner = ef.ScaffPD(fair, **plain) if name in JUDGED else ef.FedAvg()
        first = {k: v for k, v in {"objective": fair, "algorithm": inner}.items() if k in required}
        first |= plain if name == "scaff-pd" else {}
        out[name] = make(**first)
        if "local" in takes:
            out[f"{name}, minibatches"] = make(**first, local=LocalSGD(0.05, 5, batch_size=8))
    out["fair-newton"] = ef.ScaffPD(fair) if BEFORE else ef.FairNewton(fair)
    return out


def play(algorithm: Any, clients: Any, x: torch.Tensor) -> list[Any]:
    """Return the last model, and weights, losses and objective of every round."""
    state, told = algorithm.init(clients, x), []
    for r in range(1, ROUNDS + 1):
        state, info = algorithm.round(state, clients, Stream(5).at("round", r))
        told += [info.weights, () if info.losses is None else info.losses, info.objective or 0.0]
    return [algorithm.model(state).numpy(), *told]


def train(algorithm: Any, clients: Any, x: torch.Tensor) -> list[Any]:
    """Return the same of a training run, with all that training puts around an algorithm."""
    history = ef.train(algorithm, clients, rounds=ROUNDS, seed=5, x=x, give_out="last")
    model, objectives = history.parameters.values(), [r.objective for r in history.rounds]
    return [*(p.numpy() for p in model), *history.weights.values(), objectives]


def run_all(path: Path) -> None:
    """Run everything with the version that is imported; write down numbers, or a refusal."""
    torch.set_num_threads(1)
    found = {}
    for problem, clients in problems().items():
        x = torch.as_tensor(np.random.default_rng(3).normal(0, 0.1, clients.model.size))
        for name, algorithm in algorithms().items():
            both = {name: play, f"{name}, trained": train}
            for title in both if name in ("scaff-pd", "fair-newton") else (name,):
                try:
                    told = both[title](algorithm, clients, x)
                    found[f"{problem}/{title}"] = np.concatenate([np.ravel(one) for one in told])
                except ValueError as error:
                    found[f"{problem}/{title}"] = np.array(str(error))
    np.savez(path, **found)


def compare(a: NDArray[Any] | None, b: NDArray[Any] | None) -> tuple[str, bool]:
    """Return in words how two runs differ, and whether by no more than rounding."""
    if a is None or b is None:
        return "only now" if a is None else "gone", True
    if "U" in (a.dtype.kind, b.dtype.kind) or a.shape != b.shape:
        return (f"refused now: {b}" if b.dtype.kind == "U" else "other shapes"), False
    if np.array_equal(a, b):
        return "bit equal", True
    off = float(np.abs(a - b).max() / np.abs(a).max())
    return f"{off:.1e}", off <= ROUNDING


def main() -> int:
    """Run both versions and print a line for each algorithm and problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a worktree of version 0.2")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.into:
        run_all(asked.into)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "before.npz"), Path(folder, "now.npz")
        there = os.environ | {"PYTHONPATH": str(asked.before.resolve() / "src")}
        subprocess.run([sys.executable, __file__, "--into", old], check=True, env=there)
        run_all(new)
        before, after = dict(np.load(old)), dict(np.load(new))
    wrong = 0
    for key in dict.fromkeys([*after, *before]):
        (words, close), why = compare(before.get(key), after.get(key)), BY_DESIGN.get(key)
        wrong += not close and why is None
        print(f"{key:38} {words}" + (f" (by design: {why})" if why else ""))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
