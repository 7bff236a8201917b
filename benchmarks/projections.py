"""Speed of exact dual steps: a million clients, and a ratio against a generic solver at 1,000.

Run ``python -m benchmarks.projections``; ``--clients`` and ``--solver-clients`` change the sizes.
Times are processor seconds of one thread, best of three; memory is the most that one step allocates
beyond its input (tracemalloc).
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from tests.oracles import solver_prox

from equifed.objectives import (
    KL,
    ChiSquare,
    CVaR,
    HeterogeneousCVaR,
    L1Distance,
    RelativeFairness,
    SaddleObjective,
    WorstCase,
)

SYMMETRIC: dict[str, SaddleObjective] = {
    "worst case": WorstCase(),
    "CVaR 0.1": CVaR(0.1),
    "CVaR 0.5": CVaR(0.5),
    "chi-square": ChiSquare(0.1, scale=1.0),
    "chi-square on CVaR 0.5": ChiSquare(0.1, CVaR(0.5), scale=1.0),
    "relative fairness, worst over best": RelativeFairness(0.3),
    "relative fairness, 20:20": RelativeFairness(0.2, CVaR(0.2), CVaR(0.2)),
    "relative fairness, Palma + chi-square": RelativeFairness(
        0.3, CVaR(0.1), CVaR(0.4), rho=0.1, scale=1.0
    ),
}
OTHERS: dict[str, SaddleObjective] = {
    "heterogeneous CVaR 0.3": HeterogeneousCVaR(0.3),
    "KL": KL(0.5, scale=1.0),
    "l1 distance": L1Distance(1e-3, scale=1.0),
}
SCALES = (1e-6, 1e-3, 1.0, 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--solver-clients", type=int, default=1_000)
    arguments = parser.parse_args()
    many(arguments.clients)
    against_solver(arguments.solver_clients)


def many(n: int) -> None:
    print(f"prox at n = {n:,}: slowest over points of scale {SCALES}")
    print(f"{'objective':<40}{'seconds':>9}{'MB':>8}")
    WorstCase().prox(np.zeros(3), 1.0)  # imports scipy
    rng = np.random.default_rng(0)
    points = [scale * rng.standard_normal(n) for scale in SCALES]
    for name, objective in {**SYMMETRIC, **OTHERS}.items():
        seconds = max(best_time(objective, point) for point in points)
        memory = max(peak_memory(objective, point) for point in points)
        print(f"{name:<40}{seconds:>9.3f}{memory / 1e6:>8.0f}", flush=True)


def against_solver(n: int) -> None:
    print(f"\nprox at n = {n:,} against cvxpy + Clarabel (one solve, with its set-up)")
    print(f"{'objective':<40}{'exact ms':>10}{'solver ms':>11}{'ratio':>8}{'difference':>12}")
    point = np.random.default_rng(1).standard_normal(n) / n
    solver_prox(WorstCase(), point[:3], 1.0)  # imports cvxpy
    for name, objective in {**SYMMETRIC, **OTHERS}.items():
        fast = best_time(objective, point)
        began = time.process_time()
        solved = solver_prox(objective, point, 1.0)
        slow = time.process_time() - began
        away = float(np.abs(solved - objective.prox(point, 1.0)).max())
        print(f"{name:<40}{1e3 * fast:>10.2f}{1e3 * slow:>11.0f}{slow / fast:>8.0f}{away:>12.1e}")


def best_time(objective: SaddleObjective, point: np.ndarray, repeats: int = 3) -> float:
    return min(timed(lambda: objective.prox(point, 1.0)) for _ in range(repeats))


def timed(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def peak_memory(objective: SaddleObjective, point: np.ndarray) -> int:
    tracemalloc.start()
    objective.prox(point, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    main()
