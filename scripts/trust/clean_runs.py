"""Guards touch no honest client: 100 runs with clients that differ in every honest way.

    python -m scripts.trust.clean_runs              # 100 runs, a minute or two
    python -m scripts.trust.clean_runs --runs 12 --first 100    # other data

The clients differ in concepts, in labels, in the scale of their features, in label noise and in
size (down to two samples), and some are hard: most of their labels are random, or two classes have
changed places. Every run has its own data; kinds of data and algorithms take turns. A run is clean
if no claim and no update was touched and nobody was quarantined (the cap is part of the objective).
The same is counted with half the limit of claims and nine tenths of that of updates, to see how far
they are away. Exit code 1 if a run with the limits as they are is not clean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from scripts.trust.federations import ALGORITHMS, KINDS, draw_federation

from equifed.algorithms.guard import Guard, Guarded
from equifed.engines.simulate import simulate
from equifed.training.loop import train

ROUNDS = 30
ON = Guard("on")
NEAR = replace(ON, claims=ON.claims / 2, updates=0.9 * ON.longest(20))


def find_touched(guard: Guard, runs: int, rounds: int = ROUNDS, first: int = 0) -> Iterator[str]:
    """Yield what was touched in clean runs, once per run and client."""
    names = list(ALGORITHMS)
    for i in range(first, first + runs):
        kind, name = KINDS[i % len(KINDS)], names[(i // len(KINDS)) % len(names)]
        federation = draw_federation(1000 + i, kind=kind, test=5)
        clients = simulate(federation, "logistic", l2=1e-3, dtype=torch.float64)
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
    touched = list(find_touched(ON, given.runs, first=given.first))
    print("\n".join(touched))
    limits = f"claims {ON.claims:g}, updates {ON.longest(20):g}, floor {ON.floor:g}"
    print(f"{given.runs} clean runs, {limits}: {len(touched)} honest clients touched", flush=True)
    near = list(find_touched(NEAR, given.runs, first=given.first))
    print("\n".join(near))
    print(f"claims {NEAR.claims:g}, updates {NEAR.updates:g}: {len(near)} honest clients touched")
    return 1 if touched else 0


if __name__ == "__main__":
    sys.exit(main())
