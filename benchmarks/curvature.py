"""FairNewton and SCAFF-PD: what certified relative gaps cost.

Run ``python -m benchmarks.curvature`` for all problems, or with their names; ``EQUIFED_DATA`` is
where the data sets are. For every problem and objective it prints rounds, exchanges, megabytes (up
and down, all clients) and CPU seconds (of all threads; by the clock with ``--wall``) to certified
relative gaps of 1e-1, 1e-2 and 1e-3, for FairNewton and for SCAFF-PD with automatic steps.
``--tuned ROUNDS`` adds DRFA and AFL, each with the best of eight settings; as they prove nothing,
they are judged by the bound that the others proved.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch
from benchmarks.head import head
from experiments.harness.experiment import definition
from experiments.harness.networks import prepared
from rich.console import Console

import equifed as ef
from equifed.algorithms.afl import AFL
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.partitions import Dirichlet, Imbalance
from equifed.datasets.pooled import arrays
from equifed.engines.in_process import InProcessClients
from equifed.models.architectures import build
from equifed.models.features import convexify
from equifed.objectives import ChiSquare, CVaR, SaddleObjective, WorstCase
from equifed.steps.automatic import AutoSteps

LEVELS = (1e-1, 1e-2, 1e-3)
Reached = list[tuple[float, ...]]


def fashion_thirty() -> Federation:
    """Return 30 clients that differ in classes and in size."""
    partition = Imbalance(Dirichlet(clients=30, alpha=0.2, min_samples=40))
    return ef.load("fashion-mnist", partition=partition, seed=0, samples=9000)


def mnist_hundred() -> Federation:
    """Return 100 clients that differ in classes."""
    partition = Dirichlet(clients=100, alpha=0.3, min_samples=20)
    return ef.load("mnist", partition=partition, seed=0, samples=12000)


def tangent() -> Federation:
    """Return 20 clients with 2,048 tangent features of a network that FedAvg trained a little."""
    partition = Imbalance(Dirichlet(clients=20, alpha=0.2, min_samples=40))
    images = ef.load("fashion-mnist", partition=partition, seed=0, samples=4000)
    network = build("cnn", images.input_shape, 10, channels=(8, 16), kernel=3, hidden=32)
    work = FedAvg(LocalSGD(lr=0.05, steps=20, batch_size=20))
    trained = ef.train(work, ef.simulate(images, network), rounds=5, progress=False)
    return convexify(images, network, trained.parameters, coordinates=2048)


def cifar(kind: str) -> Federation:
    """Return experiments/scaff-pd-cifar10's clients with its features, made if they are not yet."""
    path = prepared(kind, definition("scaff-pd-cifar10")["features"][kind], Console())
    base = Dirichlet(clients=20, alpha=0.05, min_samples=100)
    return arrays(path=str(path), partition=Imbalance(base, clients=0.3, samples=0.7))


PROBLEMS: dict[str, Callable[[], Federation]] = {
    "heart-disease": lambda: ef.load("heart-disease"),
    "fashion-three": lambda: ef.load("fashion-three"),
    "vehicle": lambda: ef.load("vehicle"),
    "adult": lambda: ef.load("adult"),
    "fashion-thirty": fashion_thirty,
    "mnist-hundred": mnist_hundred,
    "tangent": tangent,
    "cifar10-frozen": lambda: cifar("frozen"),
    "cifar10-tangent": lambda: cifar("tangent"),
    "head": head,
    "head-100": lambda: head(clients=100, samples=500, classes=100),  # as large as CIFAR-100
}
FEATURES = ("tangent", "cifar10-frozen", "cifar10-tangent")
"""Problems whose loss is squared, as in SCAFF-PD's experiments."""

OBJECTIVES: dict[str, Callable[[int], SaddleObjective]] = {
    "chi-square": lambda n: ChiSquare(0.1, scale=1.0),
    "CVaR": lambda n: CVaR(max(0.2, 1 / n)),
    "worst case": lambda n: WorstCase(),
}


def make_clients(name: str, federation: Federation, device: str = "cpu") -> InProcessClients:
    """Return the clients of a problem, with l2 = 1e-3."""
    model, loss = ("linear", "squared") if name in FEATURES else ("logistic", "auto")
    dtype = torch.float32 if name == "head" else torch.float64
    return ef.simulate(federation, model, loss, l2=1e-3, dtype=dtype, device=device)


def measure(
    algorithm: AnyAlgorithm,
    clients: InProcessClients,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.process_time,
) -> tuple[Reached, float, float]:
    """Return what each level took that was reached, the last gap, and the bound it proved."""
    started, out = clock(), []
    relative, lower = math.inf, -math.inf

    def judge(history: ef.History) -> str | None:
        nonlocal relative, lower
        last, spent = history.rounds[-1], clock() - started
        assert last.objective is not None
        relative = last.numbers["gap"] / last.objective
        lower = last.objective - last.numbers["gap"]
        exchanges, up, down = clients.traffic.totals()
        while len(out) < len(LEVELS) and relative <= LEVELS[len(out)]:
            out.append((len(history.rounds), exchanges, (up + down) / 1e6, spent))
        return "measured" if len(out) == len(LEVELS) or spent > seconds else None

    ef.train(algorithm, clients, rounds=rounds, stop=[judge], evaluate=(), progress=False)
    return out, relative, lower


def measure_against(
    lower: float,
    algorithm: AnyAlgorithm,
    clients: InProcessClients,
    judge: InProcessClients,
    rounds: int,
) -> tuple[Reached, float]:
    """Return the same for an algorithm without proofs; looking at its models is free."""
    objective: SaddleObjective = algorithm.objective  # type: ignore[attr-defined]
    state, out, spent, best = algorithm.init(clients, clients.initial(Stream(0))), [], 0.0, math.inf
    for r in range(1, rounds + 1):
        started = time.process_time()
        try:
            state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
            spent += time.process_time() - started
            exchanges, up, down = clients.traffic.totals()
            value = objective.value(judge.losses(algorithm.model(state), Stream(0)))
        except MissingClients:  # the step was too long
            break
        best = min(best, (value - lower) / value)
        while len(out) < len(LEVELS) and best <= LEVELS[len(out)]:
            out.append((r, exchanges, (up + down) / 1e6, spent))
        if len(out) == len(LEVELS):
            break
    return out, best


def settings(clients: InProcessClients, objective: SaddleObjective) -> Iterator[AnyAlgorithm]:
    """Return eight settings of each rival: step sizes around 1/L, dual steps around 1/100."""
    known = clients.curvature()
    assert not isinstance(known, str)
    steepest = float(known.smoothness.max())
    for lr, dual in itertools.product((0.5, 2.0, 8.0, 32.0), (0.01, 0.1)):
        yield AFL(LocalSGD(lr=lr / steepest, steps=1), 10 * dual, objective)
        yield DRFA(LocalSGD(lr=lr / steepest, steps=10), dual, objective)


def show(name: str, title: str, method: str, out: Reached, last: float) -> None:
    cells = [f"{r} / {e} / {mb:.3g} / {s:.1f}" for r, e, mb, s in out]
    cells += ["-"] * (len(LEVELS) - len(out))
    end = "" if len(out) == len(LEVELS) else f"  (last {last:.2e})"
    print(f"{name:15} {title:11} {method:10}", " | ".join(cells) + end, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="PROBLEM")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--scaff-pd-rounds", type=int, default=300, help="0 leaves it out")
    parser.add_argument("--tuned", type=int, default=0, metavar="ROUNDS", help="of DRFA and AFL")
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, per run")
    parser.add_argument("--wall", action="store_true", help="seconds by the clock, not of the CPU")
    parser.add_argument("--metric", default="auto")
    parser.add_argument("--device", default="cpu", help="seconds are then of little meaning")
    parser.add_argument("--horizon", type=float, default=4.0, help="of SCAFF-PD's steps")
    parser.add_argument("--objective", choices=list(OBJECTIVES), help="this one alone")
    asked = parser.parse_args()
    for name in (name for name in asked.problems if name not in PROBLEMS):
        parser.error(f"unknown problem {name!r}; there are {', '.join(PROBLEMS)}")
    steps = AutoSteps(horizon=asked.horizon)
    clock, unit = (time.perf_counter, "") if asked.wall else (time.process_time, "CPU ")
    print(f"rounds / exchanges / MB / {unit}seconds to a certified relative gap of", *LEVELS)
    for name in asked.problems:
        federation = PROBLEMS[name]()
        for title in [asked.objective] if asked.objective else OBJECTIVES:
            objective, lower = OBJECTIVES[title](len(federation.names)), -math.inf
            newton, paper = FairNewton(objective, asked.metric), ScaffPD(objective, steps=steps)
            for algorithm, rounds in ((newton, asked.rounds), (paper, asked.scaff_pd_rounds)):
                if rounds:
                    clients = make_clients(name, federation, asked.device)
                    out, last, bound = measure(algorithm, clients, rounds, asked.seconds, clock)
                    lower = max(lower, bound)
                    show(name, title, type(algorithm).__name__, out, last)
            best: dict[str, tuple[Reached, float]] = {}
            judge = make_clients(name, federation, asked.device)
            for rival in settings(judge, objective) if asked.tuned else ():
                method, clients = type(rival).__name__, make_clients(name, federation, asked.device)
                found = measure_against(lower, rival, clients, judge, asked.tuned)
                if method not in best or found[1] < best[method][1]:
                    best[method] = found
            for method, (out, last) in best.items():
                show(name, title, method, out, last)


if __name__ == "__main__":
    main()
