"""FairNewton against an interior-point solver: the model that is given out, and its certificate.

    python -m scripts.trust.exactness --problems 60

Convex problems and objectives are drawn; each is trained until the certificate says 1e-6 of the
optimum. Exit code 1 if a model that was given out is farther away than its certificate says, or
than 1e-6 of the optimum, or if a run did not get there in 400 rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from tests.optima import interior_point
from tests.problems import convex_problem, drawn_objective

from equifed.algorithms.fair_newton import FairNewton
from equifed.training.final_model import StopWhen
from equifed.training.loop import train

CLOSE, SOLVER = 1e-6, 1e-7
"""Wanted, and what the solver's own answer may be off, relative to the optimum."""


def play(seed: int) -> tuple[int, str | None]:
    """Return the rounds of one problem, and what is wrong with its end; None if nothing is."""
    problem = convex_problem(seed)
    _, objective = drawn_objective(seed, problem.n)
    best, _ = interior_point(problem, objective)
    size = abs(best)
    rules = StopWhen(at_gap=CLOSE * size)
    given = {"rounds": 400, "x": problem.start(), "stop": rules}
    history = train(FairNewton(objective), problem.clients(), **given)
    parameters, chosen = history.parameters, history.given_out
    assert parameters is not None
    off = objective.value(problem.losses(parameters["weight"].numpy().ravel())) - best
    rounds = len(history.rounds)
    if chosen is None or chosen.gap is None or not chosen.gap <= CLOSE * size:
        return rounds, f"seed {seed}: no certificate of {CLOSE:g} after {rounds} rounds"
    if off > min(chosen.gap, CLOSE * size) + SOLVER * size:
        return rounds, f"seed {seed}: {off / size:.1e} off, certificate {chosen.gap / size:.1e}"
    return rounds, None


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve as many problems as asked, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--problems", type=int, default=60)
    found = [play(seed) for seed in range(parser.parse_args(arguments).problems)]
    misses = [wrong for _, wrong in found if wrong is not None]
    reached = f"{len(found) - len(misses)} of {len(found)} within {CLOSE:g}"
    print("\n".join([*misses, f"{reached}, median {median(r for r, _ in found):g} rounds"]))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
