"""What four liars of twenty cost after more rounds, and what a bound on their whole influence does.

    python -m scripts.trust.long_runs --write      # two minutes; into benchmarks/guards.md

Guards bound what a client has of every step. Tried here besides is a bound over all rounds: who has
had more than an equal share, summed over the rounds, by half of the whole weight, counts with an
equal share from then on. It is no part of the package; the table says why.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from scripts.trust.groups import FAIR, WORK, guard_against, train_group, write_table
from scripts.trust.liars import put_into_page
from typing_extensions import override

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.guard import Guarded, GuardedClients, GuardedVectors
from equifed.algorithms.guard_limits import Guard
from equifed.contract.arrays import Weights

BUDGET, ROUNDS, FAIREST = 0.5, (30, 100), "AFL, chi-square"
LIED = ("reversed", "collusion")


class Budgeted(GuardedVectors):
    """Guarded vectors of clients whose whole influence is bounded, too."""

    spent: ClassVar[defaultdict[int, float]] = defaultdict(float)

    @override
    def factors(self, weights: Weights) -> Weights:
        factors = super().factors(weights).copy()
        equal, whole = 1 / len(self.clients.names), max(float(np.abs(weights).sum()), 1e-300)
        for k, i in enumerate(self.clients.index.tolist()):
            share = abs(weights[k]) * factors[k] / whole
            if self.spent[i] > BUDGET and share > equal:
                factors[k], share = factors[k] * equal / share, equal
            self.spent[i] = max(0.0, self.spent[i] + share - equal)
        return factors


def train_one(budget: bool, *given: Any, **more: Any) -> Any:
    """Return the accuracies of honest clients, of a run with the bound over all rounds or not."""
    Budgeted.spent.clear()
    with patch.object(GuardedClients, "Vectors", Budgeted if budget else GuardedVectors):
        return train_group(*given, **more)


def find_costs(name: str, budget: bool, rounds: int, seeds: Sequence[int]) -> str:
    """Return the points that the honest client served worst loses by each lie of four."""
    guarded = guard_against(name, 4)

    def mean_worst(lie: Any) -> float:
        runs = [train_one(budget, guarded, s, 4, lie, rounds=rounds).min() for s in seeds]
        return float(np.mean(runs))

    honest = mean_worst(None)
    return " / ".join(f"{honest - mean_worst(lie):.1f}" for lie in LIED)


def find_gain(budget: bool, rounds: int, seeds: Sequence[int]) -> str:
    """Return what is left of the fair gain of the client served worst, two of them being hard."""
    ways = FedAvg(WORK), Guarded(FAIR[FAIREST], Guard(dishonest=1)), FAIR[FAIREST]

    def mean_worst(way: Any) -> float:
        runs = [train_one(budget, way, s, 1, None, 2, 1e-3, rounds=rounds).min() for s in seeds]
        return float(np.mean(runs))

    average, guarded, fair = map(mean_worst, ways)
    return f"{guarded - average:.1f} of {fair - average:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into guards.md")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds, ways = range(given.seeds), [(False, "the guard"), (True, "with a bound over all rounds")]
    rows = [["", *(f"{rounds} rounds" for rounds in ROUNDS)]]
    for name in ("afl", "scaff-pd", "scaff-pd chi-square"):
        for budget, words in ways:
            cells = [find_costs(name, budget, rounds, seeds) for rounds in ROUNDS]
            rows.append([f"{name}, {words}: {' / '.join(LIED)}", *cells])
            print(rows[-1], flush=True)
    for budget, words in ways:
        cells = [find_gain(budget, rounds, seeds) for rounds in ROUNDS]
        rows.append([f"{FAIREST}, f = 1, 2 hard, {words}: gain kept", *cells])
        print(rows[-1], flush=True)
    table = write_table(rows)
    print(table)
    if given.write:
        put_into_page("long", table)


if __name__ == "__main__":
    main()
