"""What sums in one order cost a round: the same round with sums in any order, in one process.

    python -m benchmarks.order [--clients 100] [--threads 1] [--turns 15] [--quick]

In double precision on a CPU, rounds of FedAvg and SCAFF-PD with equal clients (784 features, 10
classes, 600 samples, batch 50) are computed as they are, and without what makes their bits
independent of chunks and processes: sums over blocks of eight and a tree, batches padded to whole
blocks, samples copied to where blocks begin. The two take turns. Printed are the shortest times of
each by the clock of the processor and by that on the wall. Exit code 1 if a round takes more than
5 % longer by both clocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from benchmarks.timing import PAUSE
from tests.problems import classification

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines import ordered_sums
from equifed.engines.stacked import clients as stacked
from equifed.engines.stacked import samples
from equifed.engines.stacked.clients import StackedClients
from equifed.objectives.cvar import CVaR
from equifed.steps.schedules import ConstantSteps

SAMPLES, FEATURES, CLASSES, BATCH, MOST = 600, 784, 10, 50, 1.05


@contextmanager
def any_order() -> Iterator[None]:
    """Compute as in single precision: in whatever order is fastest."""
    places = (ordered_sums, samples, stacked)
    for place in places:
        place.has_one_order = lambda dtype, device: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for place in places:
            place.has_one_order = ONE_ORDER  # type: ignore[attr-defined]


ONE_ORDER = ordered_sums.has_one_order
Times = dict[str, tuple[float, float]]


def take_turns(candidates: Mapping[str, Callable[[], object]], turns: int) -> Times:
    """Return the shortest processor's and wall's time of each candidate, in seconds."""
    for call in candidates.values():
        call()  # first calls pay for allocation
    best = dict.fromkeys(candidates, (float("inf"), float("inf")))
    for _ in range(turns):
        for name, call in candidates.items():
            time.sleep(PAUSE)
            wall, processor = time.perf_counter(), time.process_time()
            call()
            took = time.process_time() - processor, time.perf_counter() - wall
            best[name] = min(best[name][0], took[0]), min(best[name][1], took[1])
    return best


def prepare(model: str, clients: int, algorithm: AnyAlgorithm, ordered: bool) -> Callable[[], None]:
    """Return a round of equal clients, computed in one order or in any."""
    data = classification([SAMPLES] * clients, (FEATURES,), CLASSES, dtype=np.float64)

    def start() -> tuple[StackedClients, object]:
        engine = StackedClients(data, model, dtype=torch.float64)
        first = algorithm.init(engine, engine.initial(Stream(0)))
        return engine, algorithm.round(first, engine, Stream(0).at("round", 0))[0]

    def round_of(engine: StackedClients, state: object) -> None:
        algorithm.round(state, engine, Stream(0).at("round", 1))

    if ordered:
        return partial(round_of, *start())
    with any_order():
        started = start()

    def once() -> None:
        with any_order():
            round_of(*started)

    return once


def main() -> int:
    """Measure, print a table and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="ten clients, three turns")
    given = parser.parse_args()
    clients, turns = (10, 3) if given.quick else (given.clients, given.turns)
    torch.set_num_threads(given.threads)
    works = {f"{k} local steps": LocalSGD(lr=0.05, steps=k, batch_size=BATCH) for k in (12, 1)}
    algorithms: dict[str, AnyAlgorithm] = {f"FedAvg, {k}": FedAvg(w) for k, w in works.items()}
    steps = ConstantSteps(primal=0.3, dual=0.1)
    algorithms["SCAFF-PD, 12 local steps"] = ScaffPD(CVaR(0.3), works["12 local steps"], steps)
    print(f"{clients} clients, {given.threads} thread(s), milliseconds")
    clocks = " | ".join(
        f"{clock}: any order | one order | ratio" for clock in ("processor", "wall")
    )
    print(f"| model | round | {clocks} |\n" + "|---" * 8 + "|")
    bad = False
    for model in ("mlp", "logistic"):
        for name, algorithm in algorithms.items():
            both = {
                kind: prepare(model, clients, algorithm, kind == "one") for kind in ("any", "one")
            }
            times = take_turns(both, turns)
            cells, ratios = [], []
            for clock in (0, 1):
                free, ordered = times["any"][clock], times["one"][clock]
                ratios.append(ordered / free)
                cells += [f"{1e3 * free:.1f}", f"{1e3 * ordered:.1f}", f"{ordered / free:.3f}"]
            bad |= min(ratios) > MOST
            print(f"| {model} | {name} | " + " | ".join(cells) + " |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
