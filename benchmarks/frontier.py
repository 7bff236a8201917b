"""What a frontier of 12 points costs beside four cold runs: rounds, exchanges, seconds.

    python -m benchmarks.frontier [PROBLEM ...] [--turns 3] [--every 1]

Logistic regression, FairNewton, every objective certified to be within 0.5 % of its minimum. A cold
run is ``ef.train`` from the beginning for the objective of a point, evaluated on the validation
split as the point is; it counts with the median over the path's objectives (``--every 3``: over
every third one), four times. Seconds are the least of the turns: of the whole call (the
processor's), and of its rounds alone, without what evaluates, describes and gives intervals to
twelve models in one case and four in the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import equifed as ef
from equifed.contract.clients import Clients
from equifed.data.partitions import Dirichlet, Imbalance
from equifed.training.final_model import StopWhen

HELD: dict[str, Any] = {"test": 0.3, "validation": 0.2}
DRAWN = Imbalance(Dirichlet(clients=30, alpha=0.2, min_samples=40))
PROBLEMS: dict[str, Callable[[], Any]] = {
    "hospitals": lambda: ef.load("heart-disease", **HELD),
    "penguins": lambda: ef.load("penguins", clients="species", target="sex", **HELD),
    "vehicle": lambda: ef.load("vehicle", **HELD),
    "three": lambda: ef.load("fashion-three").split(validation=0.2),
    "dirichlet": lambda: ef.load("fashion-mnist", partition=DRAWN, samples=9000).split(
        validation=0.2
    ),
}
GAP, ROUNDS, SPLIT = 0.005, 200, "validation"
Cost = np.ndarray[Any, Any]
"""Rounds, exchanges, seconds of the whole call, seconds of its rounds."""


def walk(clients: Clients) -> tuple[Cost, list[Any]]:
    """Return what a path costs, and its objectives."""
    begun = time.process_time()
    path = ef.frontier(ef.FairNewton(ef.objectives.Average()), clients, gap=GAP, rounds=ROUNDS)
    spent = time.process_time() - begun
    assert all(p.gap is not None for p in path.points)
    inside = sum(r.seconds for p in path.points for r in (*p.way, *p.history.rounds))
    cost = np.array([path.rounds, path.exchanges, spent, inside])
    return cost, [p.objective for p in path.points]


def begin(clients: Clients, objective: Any) -> Cost:
    """Return what a cold run costs."""
    begun = time.process_time()
    history = ef.train(
        ef.FairNewton(objective), clients, rounds=ROUNDS, evaluate=[SPLIT], every=ROUNDS,
        stop=StopWhen(at_relative_gap=GAP), progress=False,
    )  # fmt: skip
    spent, rounds = time.process_time() - begun, history.rounds
    told = (sum(r.exchanges for r in rounds), spent, sum(r.seconds for r in rounds))
    return np.array([len(rounds), *told])


def compare(name: str, l2: float, turns: int, every: int) -> str:
    """Return a row of the table."""
    clients = ef.simulate(PROBLEMS[name](), "logistic", l2=l2)
    paths, runs = [], []
    for _ in range(turns):
        cost, objectives = walk(clients)
        paths.append(cost)
        runs.append([begin(clients, objective) for objective in objectives[every // 2 :: every]])
    path, cold = np.min(paths, axis=0), 4 * np.median(np.min(runs, axis=0), axis=0)
    cells = [f"{a:.0f} / {b:.0f}" for a, b in zip(path[:2], cold[:2], strict=True)]
    cells += [f"{a:.2f} / {b:.2f}" for a, b in zip(path[2:], cold[2:], strict=True)]
    return f"| {name}, l2 {l2:g} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), help=", ".join(PROBLEMS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| path / four cold runs | rounds | exchanges | seconds | seconds in rounds |")
    print("|---|---:|---:|---:|---:|")
    for name in given.problems:
        for l2 in (1e-2, 1e-3):
            print(compare(name, l2, given.turns, given.every), flush=True)


if __name__ == "__main__":
    main()
