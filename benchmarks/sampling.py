"""What sampling clients costs beside losing as many: with and without a memory, last model or mean.

    python -m benchmarks.sampling [--share 0.3] [--rounds 600] [--drawn 20] [--only NAME]
    python -m benchmarks.sampling --steps     # how far a round with a memory may go
    python -m benchmarks.sampling --mean      # from which round on a mean is better than the last
    python -m benchmarks.sampling --ratio     # relative fairness, half of the clients sampled

Problems: four of twelve clients (least squares, logistic), and as many drawn ones as wanted (2 to
30 clients, condition numbers of some thousands). FedAvg and AFL take one local step, whose fixed
point is the optimum; AFL's dual step is its default. Cells: by how much the objective is above the
optimum, in percent, the worst of all problems (the median after a slash).
The optimum is an interior-point solver's; that of SCAFF-PD-IA, which no such solver has, is what
all clients come to. Missing clients are as many as are not sampled, drawn in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tests.optima import interior_point
from tests.problems import Problem, classification, convex_problem, least_squares, logistic

from equifed.algorithms import AFL, FedAvg, Remembering, ScaffPD, ScaffPDIA, remembering
from equifed.contract.absence import Memory, Recall, sample_clients
from equifed.contract.algorithm import as_run
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.objectives import Average, RelativeFairness, WorstCase
from equifed.steps.schedules import share_of_latest

NAMES = ("scaff-pd", "fedavg", "afl", "scaff-pd-ia")
COLUMNS = ("all clients", "sampled", "sampled, mean", "sampled, Remembering", "missing",
           "missing, Remembering", "batches of 8")  # fmt: skip
PHI = 0.05


@dataclass(frozen=True)
class Case:
    """An algorithm on a problem, what it minimises and the least value of that."""

    problem: Problem
    algorithm: Any
    objective: Any
    best: float

    def above(self, x: torch.Tensor) -> float:
        """Return by how much a model is above the optimum, in percent."""
        losses = self.problem.losses(x.numpy())
        finite = bool(np.isfinite(losses).all())
        return 100 * (self.objective.value(losses) / self.best - 1) if finite else np.nan


def make_case(name: str, problem: Problem, rounds: int) -> Case:
    """Return an algorithm in which all clients take part."""
    largest = [np.linalg.eigvalsh(problem.hessian_of(i, np.zeros(problem.d)))[-1]
               for i in range(problem.n)]  # fmt: skip
    one = LocalSGD(lr=1 / max(largest), steps=1)
    if name == "scaff-pd-ia":
        case = Case(problem, ScaffPDIA(PHI), RelativeFairness(PHI), 1.0)
        x, _ = play(case.algorithm, problem.clients("stacked"), problem.start(), rounds)
        return replace(case, best=case.objective.value(problem.losses(x.numpy())))
    objective = Average(tuple(problem.sizes)) if name == "fedavg" else WorstCase()
    best, _ = interior_point(problem, objective)
    algorithms = {"scaff-pd": ScaffPD(WorstCase()), "fedavg": FedAvg(one), "afl": AFL(one)}
    return Case(problem, algorithms[name], objective, best)


def play(
    algorithm: Any, clients: Clients, x: torch.Tensor, rounds: int, lose: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last model and the mean; NaN where it diverged. ``lose``: share of missing."""
    algorithm, memory, mean, stream = as_run(algorithm), Memory(), x, Stream(0)
    state = algorithm.init(clients, x)
    for r in range(1, rounds + 1):
        here = sample_clients(clients, 1 - lose, stream.at("here", r)) if lose else clients
        seen = Recall(here, memory)
        try:
            state, _ = algorithm.round(state, seen, stream.at("round", r))
        except MissingClients:
            return x * torch.nan, x * torch.nan
        memory, mean = seen.memory(), mean + share_of_latest(r) * (state.x - mean)
    return state.x, mean


def problems(drawn: int) -> Iterator[Problem]:
    """Yield the problems."""
    for seed in (0, 1):
        yield least_squares(seed, n=12, d=5)
        yield logistic(seed, n=12, d=5)
    yield from map(convex_problem, range(drawn))


def compare(case: Case, share: float, rounds: int) -> list[float]:
    """Return the cells of a problem."""
    clients, x, whole = case.problem.clients("stacked"), case.problem.start(), case.algorithm
    part = replace(whole, participation=share)
    batches = replace(whole, local=replace(whole.local, batch_size=8))
    if isinstance(whole, ScaffPD | ScaffPDIA):
        batches = replace(batches, gradient_batch_size=8, loss_batch_size=8)
    every, _ = play(whole, clients, x, rounds)
    last, mean = play(part, clients, x, rounds)
    kept, _ = play(Remembering(part), clients, x, rounds)
    lost, _ = play(whole, clients, x, rounds, 1 - share)
    held, _ = play(Remembering(whole), clients, x, rounds, 1 - share)
    _, noisy = play(batches, clients, x, rounds)
    return [case.above(found) for found in (every, last, mean, kept, lost, held, noisy)]


def show(percent: float) -> str:
    """Return a cell."""
    return "< 0.01" if percent < 0.01 else f"{percent:.2g}"


def print_table(names: tuple[str, ...], share: float, rounds: int, drawn: int) -> None:
    """Print absence and sampling side by side."""
    heads = [name.replace("missing", f"{1 - share:.0%} missing") for name in COLUMNS]
    print(f"\n| {share:.0%} of the clients | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for name in names:
        rows = [compare(make_case(name, p, rounds), share, rounds) for p in problems(drawn)]
        cells = [f"{show(max(c))} / {show(float(np.median(c)))}" for c in np.array(rows).T]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


# -- how far a round may go ------------------------------------------------------------------------


class Saga(remembering._Table):
    """The stored sum, and what the sample changes in it, times N / |S|."""

    def step(self, clients: Any, vectors: Any, weights: Any, everyone: Any) -> Any:
        """Return the unbiased estimate of the sum over all clients."""
        n, here, old = len(clients.names), clients.index, self.sent
        base = clients.remembered(old, np.arange(n)).weighted_sum(everyone)
        last = clients.remembered(old, here).weighted_sum(everyone[here])
        self.sent = clients.remember(old, here, vectors)
        return base + n / len(here) * (vectors.weighted_sum(everyone[here]) - last)


class Further(Remembering):
    """Full steps of the model and of the weights."""

    def _shortened(self, old: Any, new: Any, share: float) -> Any:
        return new


class FullDual(Remembering):
    """Full steps of the weights alone."""

    def _shortened(self, old: Any, new: Any, share: float) -> Any:
        return replace(new, x=old.x + share * (new.x - old.x))


STEPS: dict[str, tuple[type[Remembering], type[remembering._Table]]] = {
    "share of the way": (Remembering, remembering._Table),
    "full steps": (Further, remembering._Table),
    "full dual steps": (FullDual, remembering._Table),
    "SAGA, share of the way": (Remembering, Saga),
    "SAGA, full steps": (Further, Saga),
}


def print_steps(share: float, rounds: int, drawn: int) -> None:
    """Print what becomes of other steps with a memory: solved to 1 %, and the worst."""
    print("| step | scaff-pd: within 1 % | worst, % | scaff-pd-ia: within 1 % | worst, % |")
    print("|---|---|---|---|---|")
    kept = remembering._Table
    cases = {n: [make_case(n, p, rounds) for p in problems(drawn)] for n in (NAMES[0], NAMES[3])}
    for step, (wrapper, remembering._Table) in STEPS.items():
        cells = []
        for found in cases.values():
            made = (replace(case.algorithm, participation=share) for case in found)
            pairs = [(case, case.problem.clients("stacked"), wrapper(a))
                     for case, a in zip(found, made, strict=True)]  # fmt: skip
            ends = [c.above(play(a, e, c.problem.start(), rounds)[0]) for c, e, a in pairs]
            good = sum(end < 1 for end in ends)
            worst = "diverges" if np.isnan(ends).any() else f"{max(ends):.2g}"
            cells += [f"{good} of {len(ends)}", worst]
        print(f"| {step} | " + " | ".join(cells) + " |", flush=True)
    remembering._Table = kept


# -- the mean or the last model --------------------------------------------------------------------


def print_means(share: float, drawn: int) -> None:
    """Print on how many problems a mean is better than the last model, after how many rounds."""
    marks = (10, 20, 50, 100, 200)
    print("| mean better than the last after | " + " | ".join(map(str, marks)) + " |")
    print("|---" * (len(marks) + 1) + "|")
    for name in NAMES:
        cases = [make_case(name, p, 100) for p in problems(drawn)]
        runs = [(c.above, replace(c.algorithm, participation=share),
                 c.problem.clients("stacked"), c.problem.start()) for c in cases]  # fmt: skip
        _print_wins(name, runs, marks)
    runs = []
    for seed in range(3):
        data = classification((20, 30, 40, 50) * 3, shape=(8,), classes=4, seed=seed)
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        clients = simulate(data, net, "cross_entropy", dtype=torch.float64)
        work = LocalSGD(lr=0.1, steps=5, batch_size=10)
        worst = lambda x, clients=clients: float(clients.losses(x, Stream(0)).max())  # noqa: E731
        for method in (FedAvg(work, participation=share), AFL(work, participation=share)):
            runs.append((worst, method, clients, clients.initial(Stream(0))))
    _print_wins("networks (fedavg, afl)", runs, marks)


def _print_wins(
    name: str,
    runs: list[tuple[Callable[[torch.Tensor], float], Any, Clients, torch.Tensor]],
    marks: tuple[int, ...],
) -> None:
    cells = []
    for r in marks:
        ends = [[value(x) for x in play(a, e, x0, r)] for value, a, e, x0 in runs]
        cells.append(f"{sum(mean < last for last, mean in ends)} of {len(ends)}")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def print_ratios(rounds: int) -> None:
    """Print the largest loss over the least of SCAFF-PD-IA with phi = 0.3."""
    print("| problem | all clients | half of them sampled | Remembering |\n|---|---|---|---|")
    for seed in range(5):
        problem = least_squares(seed, n=12, d=5)
        whole, cells = ScaffPDIA(0.3), []
        half = replace(whole, participation=0.5)
        for algorithm in (whole, half, Remembering(half)):
            x, _ = play(algorithm, problem.clients("stacked"), problem.start(), rounds)
            losses = problem.losses(x.numpy())
            cells.append(f"{losses.max() / losses.min():.2f}")
        print(f"| {seed} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--drawn", type=int, default=20)
    parser.add_argument("--only", default="")
    for name in ("--steps", "--mean", "--ratio"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.steps:
        print_steps(given.share, given.rounds, given.drawn)
    elif given.mean:
        print_means(given.share, given.drawn)
    elif given.ratio:
        print_ratios(given.rounds)
    else:
        names = tuple(name for name in NAMES if given.only in (name, ""))
        print_table(names, given.share, given.rounds, given.drawn)


if __name__ == "__main__":
    main()
