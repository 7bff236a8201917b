"""What 30 % of the clients missing in every round cost, for every algorithm with an objective.

    python -m benchmarks.absence [--rounds 200] [--absent 0.3] [--seeds 3] [--first 0] [--only NAME]
                                 [--drawn 20]

A second table has absence and sampling side by side (``benchmarks.sampling``).

Each line is an algorithm with its objective on convex problems (least squares, logistic and softmax
regression) with three data seeds each. Clients are missing independently and at random. Compared is
what training gives out: the mean of the models where clients are missing, the last one where
everybody takes part, and rFedFair's own mean in both cases. The last models of Delta-FL (whose tail
changes) and of DRFA (whose snapshot is drawn) never settle, whoever is there; the former swings by
some 10 %. TERM and FedEBA+, whose tilt multiplies the curvature that step lengths are measured by,
may end up jumping between two models with everybody there. For these a mean is compared with a
mean.
Columns: by how much the worst client's loss and the objective's value are above those of full
participation, the worst case over the problems, and the value furthest below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from benchmarks import sampling
from tests.problems import classification, least_squares, logistic

from equifed.algorithms import (
    AFL,
    DRDM,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FairNewton,
    FedAvg,
    FedDyn,
    FedEBA,
    QFedAvg,
    Reweighted,
    RFedFair,
    Scaffold,
    ScaffPD,
    ScaffPDIA,
    fedprox,
    propfair,
    qfedsgd,
    semi_vred,
    tilted_erm,
    with_measured_step,
)
from equifed.algorithms.around import Averaged
from equifed.contract.absence import Memory, Recall
from equifed.contract.algorithm import AnyAlgorithm, Wrappable
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import InProcessClients
from equifed.engines.simulate import simulate
from equifed.objectives import (
    Average,
    ChiSquare,
    CVaR,
    HeterogeneousCVaR,
    Objective,
    Proportional,
    QFair,
    RelativeFairness,
    SemiVariance,
    Tilted,
    WorstCase,
)

WORK = LocalSGD(lr=0.02, steps=10)


@dataclass(frozen=True)
class Case:
    """An algorithm, the objective that it minimises for clients of these sizes, and how it ends.

    ``swings`` tells that its last model never settles, so that a mean is compared with a mean.
    """

    algorithm: AnyAlgorithm
    objective: Callable[[tuple[float, ...]], Objective]
    swings: bool = False


CASES: dict[str, Case] = {
    "fedavg": Case(FedAvg(WORK), lambda sizes: Average(sizes)),
    "fedprox": Case(fedprox(0.1, WORK), lambda sizes: Average(sizes)),
    "scaffold": Case(Scaffold(WORK), lambda sizes: Average()),
    "scaffold, by size": Case(Scaffold(WORK, weighting="size"), lambda sizes: Average(sizes)),
    "scaffold, fresh": Case(Scaffold(WORK, "fresh"), lambda sizes: Average()),
    "scaffold, gradient": Case(Scaffold(WORK, "stored-gradient"), lambda sizes: Average()),
    "afl": Case(AFL(WORK), lambda sizes: WorstCase()),
    "afl, one step": Case(AFL(LocalSGD(lr=0.02, steps=1)), lambda sizes: WorstCase()),
    "drfa": Case(DRFA(WORK), lambda sizes: WorstCase(), swings=True),
    "drfa, chi-square": Case(
        DRFA(WORK, 0.02, ChiSquare(0.1, scale=1.0)),
        lambda sizes: ChiSquare(0.1, scale=1.0),
        swings=True,
    ),
    "feddyn": Case(FedDyn(WORK), lambda sizes: Average()),
    "drdm": Case(DRDM(WORK), lambda sizes: WorstCase(), swings=True),
    "rfedfair": Case(RFedFair(WORK), lambda sizes: HeterogeneousCVaR(0.5, sizes)),
    "q-fedavg": Case(QFedAvg(WORK), lambda sizes: QFair(0.2)),
    "q-fedsgd": Case(qfedsgd(), lambda sizes: QFair(0.2)),
    "delta-fl": Case(DeltaFL(WORK), lambda sizes: HeterogeneousCVaR(0.5, sizes), swings=True),
    "agnostic-fedavg": Case(AgnosticFedAvg(WORK), lambda sizes: WorstCase()),
    "tilted-erm": Case(
        tilted_erm(WORK, scale=1.0), lambda sizes: Tilted(1.0, scale=1.0), swings=True
    ),
    "reweighted": Case(
        Reweighted(Tilted(0.5, scale=1.0), WORK), lambda sizes: Tilted(0.5, scale=1.0)
    ),
    "propfair": Case(
        propfair(100.0, local=WORK, scale=1.0), lambda sizes: Proportional(100.0, 0.2, scale=1.0)
    ),
    "fedeba": Case(FedEBA(WORK, scale=1.0), lambda sizes: Tilted(1.0, scale=1.0), swings=True),
    "semi-vred": Case(
        semi_vred(0.05, WORK, scale=1.0), lambda sizes: SemiVariance(0.05, scale=1.0)
    ),
    "scaff-pd, worst case": Case(ScaffPD(WorstCase()), lambda sizes: WorstCase()),
    "scaff-pd, CVaR": Case(ScaffPD(CVaR(0.5)), lambda sizes: CVaR(0.5)),
    "scaff-pd, chi-square": Case(
        ScaffPD(ChiSquare(0.1, scale=1.0)), lambda sizes: ChiSquare(0.1, scale=1.0)
    ),
    "fair-newton, worst case": Case(FairNewton(WorstCase()), lambda sizes: WorstCase()),
    "fair-newton, chi-square": Case(
        FairNewton(ChiSquare(0.1, scale=1.0)), lambda sizes: ChiSquare(0.1, scale=1.0)
    ),
    "scaff-pd-ia": Case(ScaffPDIA(0.2), lambda sizes: RelativeFairness(0.2)),
}
"""Every algorithm that minimises something; step sizes of those without a rule are measured."""


def engines(seed: int) -> dict[str, InProcessClients]:
    """Return three convex problems with twelve clients."""
    torch.manual_seed(seed)  # modules start from their own weights
    sizes = np.random.default_rng(seed).integers(20, 60, 12)
    softmax = classification(sizes, shape=(5,), seed=seed)
    return {
        "least squares": least_squares(seed, n=12, d=5).clients("stacked"),
        "logistic": logistic(seed, n=12, d=5).clients("stacked"),
        "softmax": simulate(
            softmax, torch.nn.Linear(5, 3), "cross_entropy", l2=0.1, dtype=torch.float64
        ),
    }


def train(case: Case, clients: InProcessClients, rounds: int, absent: float) -> np.ndarray:
    """Return every client's loss at the model given out."""
    algorithm, stream = case.algorithm, Stream(0)
    x = clients.initial(stream.at("initial"))
    if not isinstance(algorithm, ScaffPD | ScaffPDIA | FairNewton):
        algorithm = with_measured_step(algorithm, clients, x, stream.at("smoothness"))
    if isinstance(algorithm, AgnosticFedAvg):  # its dual step is in the inverse unit of the loss
        unit = float(clients.losses(x, stream.at("unit")).mean())
        algorithm = replace(algorithm, dual_step=algorithm.dual_step / max(unit, 1.0))
    algorithm = algorithm.wrapped() if isinstance(algorithm, Wrappable) else algorithm
    averaged, memory = Averaged(algorithm), Memory()
    state = averaged.init(clients, x)
    for r in range(1, rounds + 1):
        here = missing(len(clients.names), absent, stream.at("absent", r))
        view = Recall(clients.subset(here), memory)
        state, _ = averaged.round(state, view, stream.at("round", r))
        memory = view.memory()
    model = algorithm.model(state.inner)
    own = model is not state.x  # a mean of its own
    mean = (absent or case.swings) and not own
    return clients.losses(state.mean if mean else model, stream.at("evaluate"))


def missing(n: int, absent: float, stream: Stream) -> np.ndarray:
    """Return who is there when everybody is missing with the same chance; at least one is."""
    draw = stream.generator()
    here = np.flatnonzero(draw.random(n) >= absent)
    return here if len(here) else draw.integers(n, size=1)


def cost(case: Case, clients: InProcessClients, rounds: int, absent: float) -> tuple[float, float]:
    """Return by how much the worst loss and the value are above those with everybody there."""
    objective = case.objective(tuple(map(float, clients.sizes)))
    full, part = (train(case, clients, rounds, share) for share in (0.0, absent))
    worst = part.max() / full.max() - 1
    return float(worst), objective.value(part) / objective.value(full) - 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--absent", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="first data seed")
    parser.add_argument("--only", default="")
    parser.add_argument("--drawn", type=int, default=20, help="problems of the second table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| algorithm | worst client's loss | objective, above | objective, below |")
    print("|---|---|---|---|")
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        found = [
            cost(case, clients, arguments.rounds, arguments.absent)
            for seed in range(arguments.first, arguments.first + arguments.seeds)
            for clients in engines(seed).values()
        ]
        worst, values = (np.array(column) for column in zip(*found, strict=True))
        cells = (worst.max(), values.max(), values.min())
        print(
            f"| {name} | " + " | ".join(f"{100 * cell:+.1f} %" for cell in cells) + " |", flush=True
        )
    asked = tuple(name for name in sampling.NAMES if arguments.only in name)
    if asked:
        sampling.print_table(asked, 0.3, 600, arguments.drawn)


if __name__ == "__main__":
    main()
