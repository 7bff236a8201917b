"""Clients whose numbers are not numbers are quarantined at once, and the others train on.

    python -m scripts.trust.nan_clients

One, three and five of ten clients answer NaN or infinity, as losses or as updates, from the first
round on, with every algorithm, guards off and on. Every one of them that is asked must be
quarantined within a round, nobody else may be, the run must finish, and the model must be finite.
Exit code 1 where it is not so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from scripts.trust.federations import ALGORITHMS, draw_federation

from equifed.algorithms.guard import Guarded
from equifed.algorithms.guard_limits import Guard
from equifed.contract.clients import Clients
from equifed.engines.simulate import simulate
from equifed.testing.liars import with_liar
from equifed.training.events import check_finite
from equifed.training.loop import train
from equifed.training.play_round import TrainingError

CLIENTS, ROUNDS = 10, 3
LIES = {
    "loss NaN": {"loss": float("nan")},
    "loss infinite": {"loss": float("inf")},
    "update NaN": {"update": float("nan")},
    "update infinite": {"update": float("inf")},
}


def play(name: str, lie: str, broken: int, mode: str) -> str | None:
    """Return what is wrong with a run in which so many clients are broken; None if nothing is."""
    federation = draw_federation(broken, CLIENTS, test=5)
    clients: Clients = simulate(federation, "logistic", l2=1e-2, dtype=torch.float64)
    bad = range(0, 2 * broken, 2)
    for i in bad:
        clients = with_liar(clients, i, **LIES[lie])  # type: ignore[arg-type]
    try:
        history = train(Guarded(ALGORITHMS[name], Guard(mode)), clients, rounds=ROUNDS, seed=1)  # type: ignore[arg-type]
    except TrainingError as error:
        return f"the run ended: {error}"
    lost = [(e["round"], e["client"]) for e in history.events if e["event"] == "quarantine"]
    named = {f"client {i}" for i in bad}
    if {client for _, client in lost} - named:
        return f"honest clients were quarantined: {lost}"
    heard = "update" in lie or name not in ("fedavg", "fedprox", "scaffold")  # who ask no losses
    # A vector is looked at when it first has a weight; a loss at once.
    due = 1 if "loss" in lie else ROUNDS
    if heard and {client for round, client in lost if round <= due} != named:
        return f"not all were quarantined: {lost}"
    return check_finite(history.parameters or {})


def find_misses(names: Sequence[str], counts: Sequence[int]) -> Iterator[str | None]:
    """Yield what is wrong with each run; None where nothing is."""
    for name in names:
        for lie in LIES:
            for broken in counts:
                for mode in ("off", "on"):
                    wrong = play(name, lie, broken, mode)
                    told = f"{name}, {lie}, {broken} of {CLIENTS}, guard {mode}"
                    yield None if wrong is None else f"{told}: {wrong}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print what went wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--algorithm", action="append", choices=list(ALGORITHMS))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = list(find_misses(given.algorithm or list(ALGORITHMS), (1, 3, 5)))
    misses = [one for one in found if one is not None]
    print("\n".join([*misses, f"{len(found)} runs, {len(misses)} missed"]))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
