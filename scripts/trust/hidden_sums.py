"""Plays the server of hidden sums: subtracts whatever it saw at one model, and looks for clients.

    python scripts/trust/hidden_sums.py                      # every algorithm, every point of loss
    python scripts/trust/hidden_sums.py --only scaff-pd --every 5

Every algorithm of the catalogue trains for three rounds under ``privacy = "secure"``. In each run
one client is lost with its k-th reply, for every k, and is back in the next round, or never. The
server writes down every sum that it opened. Then it forms *every* linear combination of those of
one round and of one model, whether it knows the factors or not, and compares with every vector that
a client computed then: one that lies in their span up to 1 % is a recovery. Those of the whole run
are combined as well; there one in a million counts, since models that hardly move show who is
missing whatever is hidden (``successive_rounds.py``). Prints a table and exits with 1 if there was
a recovery.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Error, Message
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the grid in memory is the tests'
from tests.conformance import cases
from tests.flower.grid import QUICK, MemoryGrid, convex, flower_clients, memory_grid, task

from equifed.algorithms.afl import AFL
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.rfedfair import RFedFair
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD
from equifed.flower.memory import Memory
from equifed.flower.messenger import SecureSums
from equifed.flower.wire import Request, digest_model
from equifed.objectives import ChiSquare, CVaR
from equifed.runs.catalogue import ALGORITHMS, NEED_GRAM
from equifed.training.loop import train
from equifed.training.play_round import MissingPolicy, TrainingError

CLIENTS, ROUNDS, LOST = 6, 3, 2
CLOSE, EXACT = 0.01, 1e-6
WORK = LocalSGD(lr=0.1, steps=3, batch_size=5)
REFUSED = (*NEED_GRAM, "centred-clipping", "fair-newton", "private-fedavg", "remembering")
"""Where sums are hidden; the errors say why."""

CASES: dict[str, Any] = {
    name: cases.CASES[f"{name}/plain"] for name in ALGORITHMS if name not in REFUSED
} | {
    "scaffold stored": Scaffold(WORK),
    "scaffold stored-gradient": Scaffold(WORK, variates="stored-gradient"),
    "scaffold fresh": Scaffold(WORK, variates="fresh"),
    "scaffold sampled": Scaffold(WORK, participation=0.7),
    "afl worst case": AFL(WORK, 0.1, CVaR(0.5)),
    "drfa average": DRFA(WORK, 0.1, ChiSquare(0.5, scale=1.0), output="average"),
    "rfedfair average": RFedFair(WORK, 0.5, output="average"),
    "scaff-pd measured": ScaffPD(ChiSquare(0.5, scale=1.0)),
    "scaff-pd cvar": ScaffPD(CVaR(0.5)),
}


@dataclass
class Seen:
    """What there was to see: opened sums, and what clients computed, by round and by model."""

    sums: dict[Any, list[NDArray[Any]]] = field(default_factory=lambda: defaultdict(list))
    truth: dict[Any, list[tuple[str, str, NDArray[Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    model: str = ""
    round: int = 0

    def places(self) -> tuple[Any, ...]:
        """Return where something belongs that happens now."""
        return ("round", self.round), ("model", self.model), ("run", "")

    def recoveries(self) -> list[str]:
        """Return whose vector lies in the span of the sums of one round or model."""
        found = []
        for place, sums in self.sums.items():
            basis = np.linalg.svd(np.stack(sums).T, full_matrices=False)
            inside = basis[0][:, basis[1] > 1e-9 * basis[1][0]]
            for client, key, vector in self.truth[place]:
                length = float(np.linalg.norm(vector))
                rest = np.linalg.norm(vector - inside @ (inside.T @ vector))
                if length > 1e-9 and rest < (EXACT if place[0] == "run" else CLOSE) * length:
                    found.append(f"{client}: {key} from {len(sums)} sums of {place[0]} {place[1]}")
        return found


class WatchedSums(SecureSums):
    """Hidden sums whose server writes down what it opens."""

    def total(self, *args: Any) -> NDArray[np.float64]:
        """Open a sum, and remember it."""
        value = super().total(*args)
        for place in self.seen.places():  # type: ignore[attr-defined]
            self.seen.sums[place].append(value)  # type: ignore[attr-defined]
        return value


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Write down every vector that a client computes, before it is deleted or hidden."""
    plain = Memory.put

    def put(memory: Memory, key: str, vector: NDArray[Any], *args: Any) -> None:
        for place in seen.places():
            seen.truth[place].append((memory.folder.name, key, vector.astype(np.float64)))
        plain(memory, key, vector, *args)

    Memory.put = put  # type: ignore[method-assign]
    try:
        yield
    finally:
        Memory.put = plain  # type: ignore[method-assign]


class LosingGrid:
    """Loses a client with its k-th reply, for the rest of the round or for good."""

    def __init__(self, grid: MemoryGrid, seen: Seen, k: int, back: bool) -> None:
        self.seen, self.k, self.back, self.count, self.lost_in = seen, k, back, 0, -1
        deliver = grid._delivered

        def delivered(message: Message) -> list[Message]:
            request = Request.from_records(message.content)
            seen.round = max(seen.round, int(request.args.get("round", 0)))
            if "x" in request.arrays:
                seen.model = digest_model(np.asarray(request.arrays["x"]).tobytes())
            replies = deliver(message)
            if request.client != LOST:
                return replies
            self.count += 1
            if self.count == self.k:
                self.lost_in = seen.round
            gone = self.lost_in >= 0 and (seen.round == self.lost_in or not self.back)
            return [Message(Error(2, ""), reply_to=message)] if gone else replies

        grid._delivered = delivered  # type: ignore[method-assign]


def play(algorithm: Any, k: int, back: bool = True) -> tuple[Seen, int, str]:
    """Train with a client that is lost at its k-th reply; return what was seen, and the end."""
    seen, federation, the_task = Seen(), convex(CLIENTS, d=40), task()
    with tempfile.TemporaryDirectory() as folder, watching(seen):
        grid = memory_grid(federation, the_task, Path(folder))
        sums = WatchedSums()
        sums.seen = seen  # type: ignore[attr-defined]
        patient = replace(QUICK, on_missing="continue", quorum=0.5)
        clients = flower_clients(grid, the_task, patient, sums)
        losing, end = LosingGrid(grid, seen, k, back), ""
        try:
            train(algorithm, clients, rounds=ROUNDS, missing=MissingPolicy("continue", 0.5))
        except (TrainingError, RuntimeError) as error:
            end = f"{type(error).__name__}: {error}"
    return seen, losing.count, end


def try_all(
    names: list[str], every: int = 1
) -> Iterator[tuple[str, int, int, list[str], set[str]]]:
    """Yield, by algorithm, points of loss, sums opened, recoveries, and how runs ended early."""
    for name in names:
        seen, points, end = play(CASES[name], k=0)
        sums, found, ends = 0, seen.recoveries(), {end} - {""}
        for k in range(1, points + 1, every):
            for back in (True, False):
                seen, _, end = play(CASES[name], k, back)
                sums += sum(len(s) for place, s in seen.sums.items() if place[0] == "round")
                found += [f"lost at {k}, {where}" for where in seen.recoveries()]
                ends |= {f"lost at {k}: {end}"} if end else set()
        yield name, points, sums, found, ends


def main() -> int:
    """Try every point, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of algorithms")
    parser.add_argument("--every", type=int, default=1, help="try every so-manieth point of loss")
    args = parser.parse_args()
    names = args.only or list(CASES)
    recovered = 0
    print(
        "| algorithm | points of loss | sums opened | recoveries | ended early |\n"
        + "|---" * 5
        + "|"
    )
    for name, points, sums, found, ends in try_all(names, args.every):
        print(f"| {name} | {points} | {sums} | {len(found)} | {len(ends)} |", flush=True)
        for line in [*found[:5], *sorted(ends)[:3]]:
            print(f"    {line}", flush=True)
        recovered += len(found)
    return int(recovered > 0)


if __name__ == "__main__":
    sys.exit(main())
