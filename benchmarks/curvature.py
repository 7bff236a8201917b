"""SCAFF-PD in the metric of the clients' curvature: what certified relative gaps cost.

Run ``python -m benchmarks.curvature`` for all problems, or with their names; ``EQUIFED_DATA`` is
where the data sets are. For every problem and objective it prints rounds, exchanges, megabytes (up
and down, all clients) and seconds to certified relative gaps of 1e-1, 1e-2 and 1e-3, with the
metric that ``"auto"`` takes and without one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import equifed as ef
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation, Split
from equifed.data.partitions import Dirichlet, Imbalance
from equifed.engines.simulate import simulate
from equifed.objectives import ChiSquare, CVaR, SaddleObjective, WorstCase
from equifed.steps.metric import MetricKind

LEVELS = (1e-1, 1e-2, 1e-3)


def fashion_thirty() -> Federation:
    """Return 30 clients that differ in classes and in size."""
    partition = Imbalance(Dirichlet(clients=30, alpha=0.2, min_samples=40))
    return ef.load("fashion-mnist", partition=partition, seed=0, samples=9000)


def mnist_hundred() -> Federation:
    """Return 100 clients that differ in classes."""
    partition = Dirichlet(clients=100, alpha=0.3, min_samples=20)
    return ef.load("mnist", partition=partition, seed=0, samples=12000)


def head(clients: int = 1000, samples: int = 50, features: int = 1280) -> Federation:
    """Return made-up features whose spectrum falls as those of a trained network do."""
    draw, classes = np.random.default_rng(0), 10
    scale = np.arange(1, features + 1) ** -0.5
    centres = draw.standard_normal((classes, features)).astype(np.float32)
    labels = np.concatenate(
        [draw.choice(classes, samples, p=draw.dirichlet(np.full(classes, 0.3)))
         for _ in range(clients)]
    )  # fmt: skip
    noise = 2.5 * draw.standard_normal((len(labels), features), dtype=np.float32)
    inputs = (centres[labels] + noise) * scale.astype(np.float32)
    split = Split(inputs, labels, np.arange(0, len(labels) + 1, samples))
    names = tuple(f"client {i}" for i in range(clients))
    return Federation("head", names, split, classes=classes)


PROBLEMS: dict[str, Callable[[], Federation]] = {
    "heart-disease": lambda: ef.load("heart-disease"),
    "fashion-three": lambda: ef.load("fashion-three"),
    "vehicle": lambda: ef.load("vehicle"),
    "adult": lambda: ef.load("adult"),
    "fashion-thirty": fashion_thirty,
    "mnist-hundred": mnist_hundred,
    "head": head,
}
OBJECTIVES: dict[str, Callable[[int], SaddleObjective]] = {
    "chi-square": lambda n: ChiSquare(0.1),
    "CVaR": lambda n: CVaR(max(0.2, 1 / n)),
    "worst case": lambda n: WorstCase(),
}


def measure(
    federation: Federation,
    objective: SaddleObjective,
    metric: MetricKind,
    rounds: int,
    seconds: float,
    l2: float = 1e-3,
) -> tuple[list[tuple[float, ...]], float]:
    """Return rounds, exchanges, MB and seconds to each level that was reached, and the last gap."""
    dtype = torch.float32 if federation.name == "head" else torch.float64
    clients = simulate(federation, "logistic", l2=l2, dtype=dtype)
    algorithm = ScaffPD(objective, metric=metric).wrapped()
    started = time.perf_counter()
    state, out, relative = algorithm.init(clients, clients.initial(Stream(0))), [], np.inf
    for r in range(1, rounds + 1):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        assert info.objective is not None
        relative = info.numbers["gap"] / info.objective
        spent = time.perf_counter() - started
        exchanges, up, down = clients.traffic.totals()
        while len(out) < len(LEVELS) and relative <= LEVELS[len(out)]:
            out.append((r, exchanges, (up + down) / 1e6, spent))
        if len(out) == len(LEVELS) or spent > seconds:
            break
    return out, relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="PROBLEM")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--plain-rounds", type=int, default=300, help="0 leaves it out")
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, per run")
    parser.add_argument("--metric", default="auto")
    asked = parser.parse_args()
    print("rounds / exchanges / MB / seconds to a certified relative gap of", *LEVELS)
    for name in asked.problems:
        federation = PROBLEMS[name]()
        for title, make in OBJECTIVES.items():
            for metric, rounds in ((asked.metric, asked.rounds), ("none", asked.plain_rounds)):
                if rounds == 0:
                    continue
                objective = make(len(federation.names))
                out, last = measure(federation, objective, metric, rounds, asked.seconds)
                cells = [f"{r} / {e} / {mb:.3g} / {s:.1f}" for r, e, mb, s in out]
                cells += ["-"] * (len(LEVELS) - len(out))
                end = "" if len(out) == len(LEVELS) else f"  (last {last:.2e})"
                print(f"{name:15} {title:11} {metric:5}", " | ".join(cells) + end, flush=True)


if __name__ == "__main__":
    main()
