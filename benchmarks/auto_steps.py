"""SCAFF-PD with automatic steps, and FairNewton, on random convex problems: rounds to 1e-6.

Run ``python -m benchmarks.auto_steps`` (or with ``--problems 100``); prints a table for every part,
the first for all methods. ``--brief`` prints the first part alone, ``--only NAME`` one method of
it, ``--hard`` the fifteen hard families alone; ``--horizon`` and ``--local-steps`` change one thing
about SCAFF-PD.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tests.optima import interior_point
from tests.problems import Array, LeastSquares, Logistic, Problem, convex_problem, drawn_objective

from equifed.algorithms.accelerated import Accelerated
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaled import Scaled
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.datasets.small import synthetic_regression
from equifed.objectives import ChiSquare, CVaR, RelativeFairness, SaddleObjective, WorstCase
from equifed.steps.automatic import AutoSteps
from equifed.training.final_model import StopWhen
from equifed.training.loop import train

TOLERANCE, ROUNDS, IA_ROUNDS = 1e-6, 400, 1000


def accelerated(objective: SaddleObjective, **options: Any) -> Accelerated:
    """SCAFF-PD that jumps ahead."""
    return Accelerated(ScaffPD(objective, **options))


def scaled(objective: SaddleObjective, **options: Any) -> Scaled:
    """SCAFF-PD in coordinates of equally steep columns."""
    return Scaled(ScaffPD(objective, **options))


def uncorrelated(objective: SaddleObjective, **options: Any) -> Scaled:
    """SCAFF-PD in coordinates of uncorrelated columns."""
    return Scaled(ScaffPD(objective, **options), "uncorrelated")


METHODS: dict[str, Callable[..., Any]] = {
    "ScaffPD": ScaffPD, "Scaled": scaled, "Uncorrelated": uncorrelated,
    "Accelerated": accelerated, "FairNewton": FairNewton
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Parameters
    ----------
    rounds, certified : int
        Rounds until the model was, and was proved to be, within the tolerance of the optimum.
    slack : float
        Smallest ratio of certificate to true gap.
    halvings : int
        How often the safeguard stepped in.
    """

    rounds: int
    certified: int
    slack: float
    halvings: int


def solve(
    problem: Problem,
    objective: SaddleObjective,
    best: float,
    rounds: int = ROUNDS,
    method: Callable[..., Any] = ScaffPD,
    **options: Any,
) -> Outcome:
    """Run SCAFF-PD or FairNewton until the certificate says that it is done."""
    wanted, stop = TOLERANCE * abs(best), StopWhen(at_gap=TOLERANCE * abs(best))
    history = train(
        method(objective, **options), problem.clients(), rounds=rounds + 1, x=problem.start(),
        stop=stop,
    )  # fmt: skip
    values = [record.objective for record in history.rounds]
    gaps = [record.numbers["gap"] for record in history.rounds]
    near = [r for r, value in enumerate(values) if value - best <= wanted]
    reached = near[0] if near else rounds + 1
    certified = len(gaps) - 1 if gaps[-1] <= wanted else rounds + 1
    info = history.rounds[-1]
    least = min(best, *values)
    true = np.array(values) - least
    rounding = 1e-9 * abs(best)  # of the oracle
    proved, wrong = np.array(gaps) + rounding, true > rounding
    slack = float(np.min(proved[wrong] / true[wrong], initial=np.inf))
    return Outcome(reached, certified, slack, int(info.numbers["halvings"]))


def fifty_problems(count: int, **options: Any) -> dict[str, list[Outcome]]:
    """Return the outcomes by objective, one line printed for each problem."""
    out: dict[str, list[Outcome]] = defaultdict(list)
    for seed in range(count):
        problem = convex_problem(seed)
        name, objective = drawn_objective(seed, problem.n)
        try:
            best, _ = interior_point(problem, objective)
        except RuntimeError:
            print(f"{seed:3d} {problem.loss:9} {name:25} the interior-point solver failed")
            continue
        outcome = solve(problem, objective, best, **options)
        out[name].append(outcome)
        size = f"N={problem.n:<3d}d={problem.d:<3d}"
        print(f"{seed:3d} {problem.loss:9} {name:25} {size} {outcome}", flush=True)
    return out


def table(outcomes: dict[str, list[Outcome]]) -> None:
    print(f"\n{'objective':25} problems  median  worst  certified (median, worst)  least slack")
    rows = {**outcomes, "all": [o for group in outcomes.values() for o in group]}
    for name, group in rows.items():
        rounds = np.array([o.rounds for o in group])
        proved = np.array([o.certified for o in group])
        print(
            f"{name:25} {len(group):8d} {np.median(rounds):7.1f} {rounds.max():6d} "
            f"{np.median(proved):16.1f} {proved.max():8d} {min(o.slack for o in group):12.3f}"
        )


def _one_column(d: int, factor: float) -> Array:
    out = np.ones(d)
    out[0] = factor
    return out


def _with_copies(a: Array, draw: np.random.Generator, noise: float) -> Array:
    """Replace half of the columns by noisy copies of the others."""
    half = a.shape[1] // 2
    return np.hstack([a[:, :half], a[:, :half] + noise * draw.standard_normal((len(a), half))])


Change = Callable[[Array, np.random.Generator, int], Array]
HARD: dict[str, tuple[type[Problem], Change]] = {
    "units, 1e-3 to 1e3": (LeastSquares, lambda a, g, i: a * 10.0 ** np.linspace(-3, 3, 10)),
    "units, classes": (Logistic, lambda a, g, i: a * 10.0 ** np.linspace(-3, 3, 10)),
    "a column x 1000": (LeastSquares, lambda a, g, i: a * _one_column(10, 1e3)),
    "a column / 1000": (Logistic, lambda a, g, i: a * _one_column(10, 1e-3)),
    "rare columns": (Logistic, lambda a, g, i: a * (g.random(a.shape) < np.linspace(0.02, 1, 10))),
    "heavy tails": (LeastSquares, lambda a, g, i: np.sign(a) * np.abs(a) ** 3),
    "units and client scales": (
        LeastSquares, lambda a, g, i: a * 10.0 ** (np.linspace(-2, 2, 10) + g.uniform(-0.5, 0.5))
    ),
    "units of each client": (
        LeastSquares, lambda a, g, i: a * 10.0 ** g.uniform(-1, 1, 10)
    ),
    "copies, noise 0.1": (LeastSquares, lambda a, g, i: _with_copies(a, g, 0.1)),
    "copies, classes": (Logistic, lambda a, g, i: _with_copies(a, g, 0.1)),
    "copies, noise 0.01": (LeastSquares, lambda a, g, i: _with_copies(a, g, 0.01)),
    "means of 10": (LeastSquares, lambda a, g, i: a + 10.0),
    "one class each": (Logistic, lambda a, g, i: a),
    "one class and units": (Logistic, lambda a, g, i: a * 10.0 ** np.linspace(-2, 2, 10)),
    "few samples": (LeastSquares, lambda a, g, i: a[:5] * 10.0 ** np.linspace(-1, 1, 10)),
}  # fmt: skip
"""Families of hard problems: their loss, and what is done to random features of a client."""


def hard_problem(name: str, seed: int = 0) -> Problem:
    """Draw eight clients of 40 samples and ten features, l2 = 1e-3, of a hard family."""
    kind, change = HARD[name]
    draw = np.random.default_rng([seed, *name.encode()])
    inputs = [change(draw.standard_normal((40, 10)), draw, i) for i in range(8)]
    common = draw.standard_normal(10) / np.sqrt(np.mean(np.square(np.vstack(inputs)), axis=0))
    targets = []
    for i, a in enumerate(inputs):
        signal = a @ (common * (1 + 0.3 * draw.standard_normal(10)))
        noisy = signal + 0.3 * draw.standard_normal(len(a))
        classes = np.full(len(a), i % 2) if "one class" in name else (noisy > 0).astype(np.int64)
        targets.append(classes if kind is Logistic else noisy)
    return kind(tuple(inputs), tuple(targets), 1e-3, engine="stacked")


def hard_families(rounds: int = 100) -> None:
    """Relative gap after 100 rounds, and rounds to 1e-3, with and without second order."""
    print(f"\nhard families: gap to the optimum after {rounds} rounds, and rounds to 1e-3")
    print(f"{'family':25} {'objective':11}" + "".join(f"{name:>20}" for name in HARD_METHODS))
    for k, name in enumerate(HARD):
        problem, objective = (
            hard_problem(name),
            (WorstCase(), CVaR(0.5), ChiSquare(0.1, scale=1.0))[k % 3],
        )
        runs = {
            method: train(
                METHODS[method](objective), problem.clients(), rounds=count, x=problem.start()
            )
            for method, count in HARD_METHODS.items()
        }
        proved = [r.objective - r.numbers["gap"] for r in runs["FairNewton"].rounds]
        best, cells = max(proved), []
        for history in runs.values():
            gaps = (np.array([r.objective for r in history.rounds]) - best) / abs(best)
            near = np.flatnonzero(gaps <= 1e-3)
            first = f"{near[0]:4d}" if len(near) else "   -"
            cells.append(f"{gaps[: rounds + 1].min():12.1e} {first:>7}")
        print(f"{name:25} {type(objective).__name__:11}" + "".join(cells), flush=True)


HARD_METHODS = {"ScaffPD": 300, "Scaled": 300, "Uncorrelated": 300, "FairNewton": 100}
"""Methods that are tried on hard families, and for how many rounds."""


def signed_weights(problems: int = 10) -> None:
    """SCAFF-PD-IA: rounds to a saddle point, for growing phi."""
    print(f"\nSCAFF-PD-IA: rounds (of {IA_ROUNDS}) until (Phi - F) / Phi is {TOLERANCE:.0e} and")
    print("|sum w grad f| 1e-5 of its first, and R_AB there, for phi = 0, 0.1, 0.2, 0.3, 0.4")
    for seed in range(problems):
        problem = convex_problem(seed)
        tail = CVaR(max(0.4, 1 / problem.n))
        cells = []
        for phi in (0.0, 0.1, 0.2, 0.3, 0.4):
            rounds, ratio = rounds_to_saddle(problem, RelativeFairness(phi, tail, tail))
            cells.append(f"{rounds:4d} {ratio:.3f}")
        print(f"{seed:3d} N={problem.n:<3d}", " | ".join(cells), flush=True)


def rounds_to_saddle(
    problem: Problem, objective: RelativeFairness, rounds: int = IA_ROUNDS
) -> tuple[int, float]:
    """Return the first round within the tolerance (else one too many), and R_AB at the end."""
    clients, algorithm = problem.clients(), ScaffPD(objective).wrapped()
    state, first = algorithm.init(clients, problem.start()), None
    for r in range(rounds + 1):
        x = state.x
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        assert info.losses is not None and info.objective is not None
        _, gradients = clients.value_and_gradient(x, Stream(0))
        size = float(torch.linalg.vector_norm(gradients.weighted_sum(info.weights)))
        first = first or size
        attained = float(info.weights @ info.losses) - objective.penalty(info.weights)
        relative = (info.objective - attained) / abs(info.objective)
        if relative <= TOLERANCE and size <= 1e-5 * first:
            break
    else:
        r = rounds + 1
    a, b = objective.extremes(info.losses)
    return r, float(a @ info.losses) / float(b @ info.losses)


def papers_problem() -> Problem:
    """Return the regression of SCAFF-PD's Section 6.1."""
    train = synthetic_regression().train
    pairs = [train.client(i) for i in range(5)]
    inputs, targets = (tuple(part) for part in zip(*pairs, strict=True))
    return LeastSquares(inputs, targets, 0.1, "stacked")


def papers_regression() -> None:
    """SCAFF-PD's Section 6.1, automatic: rounds to a squared distance of 1e-10."""
    print("\nsynthetic regression of SCAFF-PD, mu = 0.1: squared distance after 60 and 150 rounds")
    problem = papers_problem()
    for rho in (0.01, 0.05, 0.1):
        _, best = interior_point(problem, ChiSquare(rho, scale=1.0))
        distances = squared_distances(problem, ChiSquare(rho, scale=1.0), best, 150)
        below = np.flatnonzero(distances <= 1e-10)
        first = int(below[0]) if len(below) else None
        print(f"rho={rho:<5} {distances[60]:.1e} {distances[150]:.1e}  1e-10 in round {first}")


def squared_distances(
    problem: Problem, objective: SaddleObjective, best: np.ndarray, rounds: int
) -> np.ndarray:
    """Return |x_r - x*|^2 for every round."""
    clients, algorithm = problem.clients(), ScaffPD(objective).wrapped()
    state, out = algorithm.init(clients, problem.start()), []
    for r in range(rounds + 1):
        out.append(float(np.sum((state.x.numpy() - best) ** 2)))
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    return np.array(out)


def against_drfa(rounds: int = 600) -> None:
    """SCAFF-PD without tuning against DRFA with the best of a grid, on the paper's regression."""
    print(f"\nDRFA, all clients, full gradients, tau = 100, best of a grid over {rounds} rounds")
    problem = papers_problem()
    for rho in (0.01, 0.05, 0.1):
        objective = ChiSquare(rho, scale=1.0)
        _, best = interior_point(problem, objective)
        tried = {
            (lr, gamma): drfa_distances(problem, objective, best, lr, gamma, rounds)
            for lr in (1e-4, 3e-4, 1e-3)
            for gamma in (1e-3, 1e-2, 1e-1)
        }
        (lr, gamma), distances = min(tried.items(), key=lambda one: one[1].min())
        reached = int(distances.argmin())
        ours = squared_distances(problem, objective, best, 150)
        needed = int(np.flatnonzero(ours <= distances.min())[0])
        print(
            f"rho={rho:<5} DRFA (lr {lr}, gamma {gamma}) is best in round {reached}: "
            f"{distances.min():.1e}; SCAFF-PD, automatic: there in round {needed}, "
            f"{reached / needed:.0f} times fewer",
            flush=True,
        )


def drfa_distances(
    problem: Problem,
    objective: SaddleObjective,
    best: np.ndarray,
    lr: float,
    gamma: float,
    rounds: int,
) -> np.ndarray:
    """Return |x_r - x*|^2 for every round of DRFA; infinite from where it overflows."""
    algorithm = DRFA(LocalSGD(lr=lr, steps=100), gamma, objective)
    clients, out = problem.clients(), np.full(rounds + 1, np.inf)
    state = algorithm.init(clients, problem.start())
    for r in range(rounds + 1):
        out[r] = float(np.sum((state.x.numpy() - best) ** 2))
        try:
            state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
        except MissingClients:
            break
    return out


def worst_case_rate() -> None:
    """Slope of log(suboptimality) over log(rounds) for the worst-case objective."""
    print("\nworst case, SCAFF-PD: slope of log gap over log rounds, round 5 to 1e-8 (-2: 1/R^2)")
    for seed in (2, 26, 50, 27, 51, 75):
        slope, last = observed_rate(convex_problem(seed), 300)
        print(f"{seed:3d} slope {slope:.1f} (to round {last})", flush=True)


def observed_rate(problem: Problem, rounds: int) -> tuple[float, int]:
    """Return the slope of the least-squares line through (log r, log of the best gap so far)."""
    objective = WorstCase()
    best, _ = interior_point(problem, objective)
    clients, algorithm = problem.clients(), ScaffPD(objective).wrapped()
    state, values = algorithm.init(clients, problem.start()), []
    for r in range(rounds):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        values.append(info.objective)
    gaps = np.minimum.accumulate(np.array(values) - min(best, *values)) / abs(best)
    index = np.flatnonzero((gaps > 1e-8) & (np.arange(rounds) >= 5))
    return float(np.polyfit(np.log(index + 1), np.log(gaps[index]), 1)[0]), int(index[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--only", default="", choices=["", *METHODS])
    parser.add_argument("--hard", action="store_true", help="the hard families alone")
    parser.add_argument("--brief", action="store_true", help="the rounds of SCAFF-PD alone")
    parser.add_argument("--horizon", type=float, default=4.0)
    parser.add_argument("--local-steps", type=int, default=8)
    torch.set_num_threads(1)
    started, asked = time.perf_counter(), parser.parse_args()
    steps, local = AutoSteps(horizon=asked.horizon), LocalSGD(lr=1.0, steps=asked.local_steps)
    given = {"steps": steps, "local": local}
    options: dict[str, dict[str, Any]] = {name: given for name in METHODS if name != "FairNewton"}
    if asked.hard:
        hard_families()
        return
    for name, method in METHODS.items():
        if asked.only in ("", name):
            print(f"\n{name}")
            found = fifty_problems(asked.problems, method=method, **options.get(name, {}))
            table(found)
    if asked.brief:
        return
    hard_families()
    signed_weights()
    papers_regression()
    against_drfa()
    worst_case_rate()
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
