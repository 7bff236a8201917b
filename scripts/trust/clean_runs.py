"""Guards touch no honest client: 100 runs with clients that differ in every honest way.

    python -m scripts.trust.clean_runs              # 100 runs, a minute or two
    python -m scripts.trust.clean_runs --runs 12 --first 100    # other data

The clients differ in concepts, in labels, in the scale of their features, in label noise and in
size (down to two samples), and some are hard: most of their labels are random, or two classes have
changed places. Every run has its own data; kinds of data and algorithms take turns. A run is clean
if no claim was touched, no update was far too long and nobody was quarantined (the cap is part of
the objective). The same is counted with half these limits, to see how far they are away. Printed is
also by how much sums changed because somebody at the cap, or near it, counted as shorter: the
largest change of each algorithm, in usual lengths, and in how many of its sums there was one. Exit
code 1 if a run with the limits as they are is not clean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from scripts.trust.federations import ALGORITHMS, KINDS, draw_federation

from equifed.algorithms.guard import Guarded, GuardedVectors
from equifed.algorithms.guard_limits import Guard
from equifed.contract.views import ITERATES
from equifed.engines.simulate import simulate
from equifed.training.loop import train

ROUNDS = 30
ON = Guard("on")
NEAR = replace(ON, claims=ON.claims / 2, updates=ON.updates / 2)
Changes = dict[str, list[float]]


@contextmanager
def follow_sums(into: list[float]) -> Iterator[None]:
    """Note by how many usual lengths the guard changes every sum that moves a model."""
    plain_sum = GuardedVectors.see_sum

    def see_sum(self: Any, weights: Any, add: Any) -> Any:
        total = plain_sum(self, weights, add)
        if self.kind not in ITERATES:
            seen = self._bound(weights)
            usual = self._measure()[-1] * float(np.abs(seen).sum())
            if usual > 0:
                into.append(float((total - self.behind.weighted_sum(seen)).norm()) / usual)
        return total

    with mock.patch.object(GuardedVectors, "see_sum", see_sum):
        yield


def find_touched(
    guard: Guard, runs: int, rounds: int = ROUNDS, first: int = 0, changes: Changes | None = None
) -> Iterator[str]:
    """Yield what was touched in clean runs, once per run and client; note how sums changed."""
    names = list(ALGORITHMS)
    for i in range(first, first + runs):
        kind, name = KINDS[i % len(KINDS)], names[(i // len(KINDS)) % len(names)]
        federation = draw_federation(1000 + i, kind=kind, test=5)
        clients = simulate(federation, "logistic", l2=1e-3, dtype=torch.float64)
        noted = [] if changes is None else changes.setdefault(name, [])
        with nullcontext() if changes is None else follow_sums(noted):
            events = train(Guarded(ALGORITHMS[name], guard), clients, rounds=rounds, seed=i).events
        found = [e for e in events if e["event"] in ("guard", "quarantine")]
        for event in {e["client"]: e for e in reversed(found)}.values():
            told = f"round {event['round']}, {event['client']} {event['reason']}"
            yield f"run {i} ({kind}, {name}): {told}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    changes: Changes = {}
    touched = list(find_touched(ON, given.runs, first=given.first, changes=changes))
    print("\n".join(touched))
    for name, sizes in changes.items():
        some, mean = np.mean(np.array(sizes) > 1e-9), np.mean(sizes)
        told = f"largest change {max(sizes):.2f} usual lengths, mean {mean:.3f}"
        print(f"{name:20s} {told}; {some:4.0%} of the sums")
    limits = f"claims {ON.claims:g}, updates {ON.updates:g}, floor {ON.floor:g}"
    print(f"{given.runs} clean runs, {limits}: {len(touched)} honest clients touched", flush=True)
    near = list(find_touched(NEAR, given.runs, first=given.first))
    print("\n".join(near))
    print(f"claims {NEAR.claims:g}, updates {NEAR.updates:g}: {len(near)} honest clients touched")
    return 1 if touched else 0


if __name__ == "__main__":
    sys.exit(main())
