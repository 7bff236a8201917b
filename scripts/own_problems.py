"""FairNewton and SCAFF-PD on profile losses, against an interior-point solution.

    python scripts/own_problems.py [--problems 40] [--rounds 1000] [--first 0]

Every client of a random problem has an intercept of its own: least squares, logistic regression
and softmax regression in turn, with shifted targets, rare and absent classes and one-class clients,
under every saddle objective in turn. FairNewton runs with its defaults, then SCAFF-PD with
automatic steps. The interior-point solver (Clarabel) has shared and own parameters as unknowns of
one joint problem and knows nothing of profile losses. Exits 1 if a problem is not solved to 1e-6 of
its objective, is not proved to be, or if a certificate is below the truth.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import torch
from tests.optima import interior_point, softmax_optimum
from tests.problems import drawn_objective, skewed_problem

import equifed as ef
from equifed.algorithms import FairNewton, ScaffPD
from equifed.engines.in_process import InProcessClients
from equifed.objectives import SaddleObjective
from equifed.training.final_model import StopWhen

WANTED = 1e-6
"""Of the objective: how close it must come, and be proved to be."""
SLACK = 2e-8
"""Of the objective: what the interior-point solver's own answer may be off."""


@dataclass(frozen=True)
class Outcome:
    """What came of one problem; fractions of its objective."""

    seed: int
    words: str
    rounds: int | None
    error: float
    proved: float
    below: float

    @property
    def good(self) -> bool:
        """Whether it was solved and proved, and no certificate was below the truth."""
        return self.rounds is not None and self.proved <= WANTED and self.below <= SLACK

    def __str__(self) -> str:
        found = "never" if self.rounds is None else f"{self.rounds:4d} rounds"
        return (
            f"{'ok    ' if self.good else 'MISSED'} {self.seed:3d} {self.words:52s} {found:11s} "
            f"error {self.error:+.1e}  proved {self.proved:.1e}  certificate below truth by "
            f"{self.below:+.1e}"
        )


def draw_softmax(seed: int) -> tuple[ef.Federation, float]:
    """Draw clients whose classes are rare, absent or all there is, and an l2."""
    draw = np.random.default_rng(seed)
    n, d, k = (int(draw.integers(*ends)) for ends in ((2, 13), (2, 9), (3, 6)))
    common, shift = draw.standard_normal((d, k)), 10 ** draw.uniform(-1, 0.5)
    clients = {}
    for i in range(n):
        inputs = draw.standard_normal((int(draw.integers(d + 5, 80)), d)) * draw.uniform(0.5, 2)
        scores = inputs @ (common + shift * draw.standard_normal((d, k)))
        level = np.log(draw.dirichlet(np.full(k, 0.3)) + 1e-9)
        labels = (scores + level + draw.gumbel(size=scores.shape)).argmax(axis=1)
        if draw.random() < 0.15:
            labels[:] = labels[0]
        clients[f"client {i}"] = (inputs, labels)
    return ef.Federation.from_clients(clients, classes=k), 10 ** draw.uniform(-3, -1)


def draw_problem(seed: int) -> tuple[str, SaddleObjective, InProcessClients, float]:
    """Return a problem in words, its objective, its clients and the joint optimum."""
    if seed % 3 == 2:
        data, l2 = draw_softmax(seed)
        name, objective = drawn_objective(seed, len(data.names))
        clients: InProcessClients = ef.simulate(
            data, "logistic", l2=l2, own="bias", dtype=torch.float64
        )
        assert clients.own is not None and clients.own.steps == "profile"
        best, _ = softmax_optimum(data, objective, l2, clients.own.l2)
        return f"softmax, {name}, {len(data.names)} clients", objective, clients, best
    kind = skewed_problem(2 * seed + seed % 3)
    name, objective = drawn_objective(2 * seed + seed % 3, kind.n)
    clients = kind.clients_with_own("stacked")
    assert clients.own is not None and clients.own.steps == "profile"
    best, _ = interior_point(kind, objective, clients.own.l2)
    return f"{kind.loss}, {name}, {kind.n} clients", objective, clients, best


def try_one(seed: int, rounds: int, method: type = FairNewton) -> Outcome:
    """Solve one problem by one method."""
    words, objective, clients, best = draw_problem(seed)
    size, words = abs(best), f"{words}, {method.__name__}"
    history = ef.train(
        method(objective), clients, rounds=rounds,
        x=torch.zeros(clients.model.size).double(), stop=[StopWhen(at_relative_gap=WANTED / 2)],
    )  # fmt: skip
    values = np.array([record.objective for record in history.rounds])
    gaps = np.array([record.numbers["gap"] for record in history.rounds])
    reached = np.flatnonzero(values - best <= (WANTED + SLACK) * size)
    error = float(values[np.argmin(gaps)] - best) / size
    below = float((values - best - gaps).max()) / size
    found = int(reached[0]) if len(reached) and abs(error) <= WANTED + SLACK else None
    return Outcome(seed, words, found, error, float(gaps.min()) / size, below)


def main() -> None:
    """Try all, and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    missed = 0
    for method in (FairNewton, ScaffPD):
        outcomes = []
        for seed in range(given.first, given.first + given.problems):
            outcomes.append(try_one(seed, given.rounds, method))
            print(outcomes[-1], flush=True)
        good = [one for one in outcomes if one.good]
        missed += len(outcomes) - len(good)
        rounds = [one.rounds for one in good if one.rounds is not None]
        if rounds:
            print(f"rounds to {WANTED:g}: median {int(np.median(rounds))}, most {max(rounds)}")
        worst = max(one.below for one in outcomes)
        told = f"{len(good)} of {len(outcomes)} solved and proved"
        print(f"{method.__name__}: {told}; certificate - truth >= {-worst:+.1e}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
