"""Do this version and an older one compute the same? Every algorithm of the catalogue, both run.

    git worktree add ../before ce7986b4     # or any since version 0.2, c8e8bd3
    python -m scripts.agreement --before ../before

Every algorithm plays 12 rounds on a convex problem (softmax regression with an L2 penalty) and on a
network (one hidden layer), in float64, with its defaults and with minibatches. Models, weights,
losses and objectives are compared: equal to the bit, or the largest relative difference. Algorithms
run bare; SCAFF-PD is that of 0.2 without a metric, FairNewton 0.2's SCAFF-PD as it was by default,
and both are trained once more as usual. Strengths of objectives are in the unit of the loss, as
they were. Where automatic steps differ, since smoothness is measured in another way, the same
method is compared once more with the smoothness given (AFL: with the dual step of then). Exits 1
if anything but ``BY_DESIGN`` differs.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
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
from equifed.steps.automatic import AutoSteps

ROUNDS, ROUNDING, SMOOTHNESS = 12, 1e-9, 4.0
BEFORE = "fair-newton" not in ALGORITHMS  # version 0.2
JUDGED = ("safeguarded", "accelerated")  # wrappers of algorithms with step sizes
REQUIRED = {"epsilon": 8.0, "rounds": ROUNDS, "clip": 1.0}  # what an algorithm has no default for
MEASURED = "smoothness is measured by losses and lengths alone, which hidden sums let through"
FOLLOWS = "the dual step follows the coupling where none is given"
BOUNDED = "a guard bounds the product of a client's weight and length, not each"
SMALL, LARGE = 2e-4, 0.3  # of what another smoothness changes in 12 rounds: convex, or a network
BY_DESIGN = {
    "convex/scaff-pd, trained": (LARGE, f"{MEASURED}; 0.2 added Anderson's acceleration, too"),
    "convex/scaff-pd*": (SMALL, MEASURED),
    "convex/safeguarded": (SMALL, MEASURED),
    "convex/accelerated": (SMALL, MEASURED),
    "network/scaff-pd*": (LARGE, MEASURED),
    "network/safeguarded": (LARGE, MEASURED),
    "network/accelerated": (LARGE, MEASURED),
    "convex/fair-newton*": (1e-6, "its inner problem is solved until rounding ends it"),
    "network/fair-newton*": (np.inf, "it refuses networks, where 0.2 ran SCAFF-PD"),
    "*/afl": (1.0, FOLLOWS),
    "*/afl, minibatches": (1.0, FOLLOWS),
    "convex/guarded": (SMALL, BOUNDED),
    "network/guarded": (LARGE, BOUNDED),
    "*/fedeba": (LARGE, "models are aligned as well, as in the paper"),
    "*/fedeba, minibatches": (LARGE, "models are aligned as well, as in the paper"),
}
"""What is meant to differ since version 0.2: by how much at most, and why. The first match counts;
what is compared with smoothness or dual step given, without aligned models or with a guard that
only watches, does not differ."""


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
        given = {"objective": fair, "algorithm": inner, **REQUIRED}
        first = {k: v for k, v in given.items() if k in required}
        first |= plain if name == "scaff-pd" else {}
        out[name] = make(**first)
        if "local" in takes:
            out[f"{name}, minibatches"] = make(**first, local=LocalSGD(0.05, 5, batch_size=8))
        if name == "afl":
            out[f"{name}, given dual step"] = make(dual_step=0.08)
        if name == "guarded":
            out[f"{name}, watching"] = make(inner, ef.Guard("watch"))
        if "align_model" in takes:
            out[f"{name}, plain models"] = make(**first, align_model=False)
        elif name == "fedeba":
            out[f"{name}, plain models"] = make(**first)
        if "steps" in takes and name in ("scaff-pd", "scaff-pd-ia"):
            out[f"{name}, given smoothness"] = make(**first, steps=AutoSteps(smoothness=SMOOTHNESS))
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
    if find_spec("equifed.training.units"):  # strengths are multiples of a scale since
        algorithm = import_module("equifed.training.units").with_scale(algorithm, 1.0)
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


def compare(a: NDArray[Any] | None, b: NDArray[Any] | None) -> tuple[str, float]:
    """Return in words and as a number how two runs differ; infinite: one of them is refused."""
    if a is None or b is None:
        return "only now" if a is None else "gone", 0.0
    if a.dtype.kind == b.dtype.kind == "U":
        return "refused in both", 0.0
    if "U" in (a.dtype.kind, b.dtype.kind) or a.shape != b.shape:
        return (f"refused now: {b}" if b.dtype.kind == "U" else "other shapes"), np.inf
    if np.array_equal(a, b):
        return "bit equal", 0.0
    off = float(np.abs(a - b).max() / np.abs(a).max())
    return f"{off:.1e}", off


def meant(key: str) -> tuple[float, str]:
    """Return how much a comparison may differ, and why."""
    exact = key.endswith(("given smoothness", "given dual step", "plain models", "watching"))
    found = [why for name, why in BY_DESIGN.items() if fnmatch(key, name) and not exact]
    return found[0] if found else (ROUNDING, "")


def main() -> int:
    """Run both versions and print a line for each algorithm and problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a worktree of the older version")
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
        words, off = compare(before.get(key), after.get(key))
        most, why = meant(key)
        wrong += not off <= most
        print(f"{key:38} {words}" + (f" (by design: {why})" if off > ROUNDING and why else ""))
    print(f"{wrong} differ that are not meant to")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
