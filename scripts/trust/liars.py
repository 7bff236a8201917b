"""What lying clients of twenty cost the honest ones, with guards and without.

    python -m scripts.trust.liars                 # liars alone and in groups, some minutes
    python -m scripts.trust.liars --single        # thirteen lies of one client, some minutes
    python -m scripts.trust.liars --write         # and put the tables into benchmarks/guards.md

Every algorithm trains on drawn data (20 clients that differ, 1,000 test samples each) with some
clients honest and with the same ones lying. Printed is what the honest client that is served worst
loses by the lie, in points of test accuracy, mean over the data seeds: against the same run, with
guards or without, in which everybody is honest. Liars alone (f = 1) and in groups (f = 4) must cost
guarded algorithms at most 3 and 7 points, colluding groups 10; and what is left of the fair gain is
printed. With --single a lie about a loss, an update that is too long or an absurd number of samples
must cost at most two points, and no weight may be above the cap. Exit code 1 where it is not so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripts.trust.federations import ALGORITHMS, CLASSES, TURN, draw_federation
from scripts.trust.groups import (
    FAIR,
    RIVALS,
    find_excess,
    measure_gain,
    measure_group,
    write_gains,
    write_groups,
)
from typing_extensions import override

from equifed.algorithms.guard import Guarded
from equifed.algorithms.guard_limits import Guard, find_usual
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses
from equifed.contract.clients import Clients
from equifed.engines.simulate import simulate
from equifed.testing.liars import with_liar
from equifed.training.history import History, RoundRecord
from equifed.training.loop import train
from equifed.training.play_round import TrainingError
from equifed.training.trackers import Callback

PAGE = Path(__file__).parents[2] / "benchmarks" / "guards.md"
ROUNDS, SEEDS, POINTS = 30, (0, 1, 2), 2.0
OFF, ON = Guard("off"), Guard("on")


def claim_just_below(losses: Losses, place: int) -> float:
    """Return the largest claim that the guard does not clip, nearly."""
    others = np.delete(losses, place)
    centre = float(np.median(others))
    spread = max(1.4826 * float(np.median(np.abs(others - centre))), ON.floor * np.log(CLASSES))
    return centre + 0.95 * ON.claims * spread


class UpdateJustBelow:
    """Makes updates and gradients as long as the guard lets pass, nearly."""

    def __call__(self, lengths: Losses, place: int, kind: str) -> float:
        """Return by what to multiply a vector, given everybody's true lengths."""
        seen = lengths.copy()
        seen[place] = np.inf
        n, usual = len(lengths), find_usual(seen)
        return max(1.0, 0.95 * ON.share(n) * n * usual / max(lengths[place], 1e-300))


@dataclass(frozen=True)
class Lie:
    """What client 0 does; ``bound`` tells whether guards must keep it to two points."""

    told: dict[str, Any]
    bound: bool = True
    flipped: bool = False


LIES = {
    "loss 10": Lie({"loss": 10.0}),
    "loss 100": Lie({"loss": 100.0}),
    "loss 1e308": Lie({"loss": 1e308}),
    "loss -1e6": Lie({"loss": -1e6}),
    "loss just below the limit": Lie({"loss": claim_just_below}),
    "the same from round 10": Lie({"loss": claim_just_below, "start": 10}),
    "update x 100": Lie({"update": 100.0}),
    "update x 1e30": Lie({"update": 1e30}),
    "10^12 samples": Lie({"size": 10**12}),
    "update just below the limit": Lie({"update": UpdateJustBelow}),
    "such an update from round 10": Lie({"update": UpdateJustBelow, "start": 10}),
    "update x -1": Lie({"update": -1.0}, bound=False),
    "labels flipped": Lie({}, bound=False, flipped=True),
}
QUICK = ("loss 100", "loss 1e308", "update x 100", "10^12 samples")


@dataclass(frozen=True)
class Outcome:
    """The worst honest accuracy of a run, and the liar's largest weight; NaN: the run ended."""

    worst: float
    weight: float


class LiarsWeight(Callback):
    """Hears what weight client 0 has, at most."""

    largest = 0.0

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        self.largest = max(self.largest, abs(float(info.weights[0])))


def play(
    algorithm: Any, guard: Guard, seed: int, lie: Lie | None, rounds: int, turn: float
) -> Outcome:
    """Train with client 0 honest (no lie) or lying."""
    flip = 0 if lie is not None and lie.flipped else None
    federation = draw_federation(seed, flip=flip, turn=turn)
    clients: Clients = simulate(federation, "logistic", l2=1e-2, dtype=torch.float64)
    if lie is not None and lie.told:
        told = {k: value() if isinstance(value, type) else value for k, value in lie.told.items()}
        clients = with_liar(clients, 0, **told)
    seen = LiarsWeight()
    given: dict[str, Any] = {"rounds": rounds, "seed": seed, "callbacks": [seen]}
    try:
        history = train(
            Guarded(algorithm, guard), clients, evaluate=("test",), every=rounds, **given
        )
    except TrainingError:
        return Outcome(float("nan"), float("nan"))
    return Outcome(worst_honest(history), seen.largest)


def worst_honest(history: History) -> float:
    """Return the smallest test accuracy of clients 1 to 19."""
    record = history.last("accuracy", "test")
    assert record is not None
    return float(record.values[1:].min())


def measure(
    names: Sequence[str],
    lies: Sequence[str],
    seeds: Sequence[int],
    rounds: int = ROUNDS,
    turn: float = TURN,
) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return points lost and the liar's largest weight, by algorithm, lie and mode."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        for guard in (OFF, ON):
            honest = [play(ALGORITHMS[name], guard, s, None, rounds, turn).worst for s in seeds]
            for lie in lies:
                runs = [play(ALGORITHMS[name], guard, s, LIES[lie], rounds, turn) for s in seeds]
                lost = 100 * float(np.mean(honest) - np.mean([run.worst for run in runs]))
                weight = float(np.max([run.weight for run in runs]))
                found[name, lie, guard.mode] = lost, weight
                print(f"{name:20s} {lie:28s} {guard.mode:4s} {lost:7.1f} {weight:6.2f}", flush=True)
    return found


def measure_one(name: str, **more: Any) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return the same for one algorithm."""
    return measure([name], **more)


def write_table(found: dict[tuple[str, str, str], tuple[float, float]]) -> str:
    """Return a Markdown table: lies by algorithms, each "off / on"."""
    names, lies = (list(dict.fromkeys(key[k] for key in found)) for k in (0, 1))

    def cell(name: str, lie: str) -> str:
        return " / ".join(write_points(found[name, lie, mode][0]) for mode in ("off", "on"))

    rows = [[lie, *(cell(name, lie) for name in names)] for lie in lies]
    weights = [
        " / ".join(
            f"{np.nanmax([found[name, lie, mode][1] for lie in lies]):.2f}"
            for mode in ("off", "on")
        )
        for name in names
    ]
    rows.append(["largest weight of the liar", *weights])
    lines = [["lie", *names], ["---"] * (len(names) + 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_points(lost: float) -> str:
    """Return points lost as text; a run that ended has none."""
    return "ended" if np.isnan(lost) else f"{max(lost, 0.0) if abs(lost) < 0.05 else lost:.1f}"


def find_misses(found: dict[tuple[str, str, str], tuple[float, float]]) -> list[str]:
    """Return where the figure is missed."""
    misses = []
    for (name, lie, mode), (lost, weight) in found.items():
        if mode != "on":
            continue
        if LIES[lie].bound and not lost <= POINTS:
            misses.append(f"{name}, {lie}: {lost:.1f} points lost")
        if not weight <= ON.cap + 1e-9:
            misses.append(f"{name}, {lie}: weight {weight:.2f}")
    return misses


def run_all(work: Callable[[str], Any], names: Sequence[str], jobs: int) -> dict[Any, Any]:
    """Return what some processes found for all names."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return {key: value for part in pool.imap(work, names) for key, value in part.items()}


def put_into_page(mark: str, table: str) -> None:
    """Replace a table of the page."""
    pattern, text = rf"<!-- {mark} -->\n.*?<!-- end -->", PAGE.read_text(encoding="utf-8")
    new = f"<!-- {mark} -->\n{table}\n<!-- end -->"
    PAGE.write_text(re.sub(pattern, lambda _: new, text, flags=re.DOTALL), encoding="utf-8")


def show_single(given: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the table of one client's lies, and where it misses the figure."""
    lies, seeds = (QUICK, SEEDS[:1]) if given.quick else (tuple(LIES), SEEDS)
    work = partial(measure_one, lies=given.lie or lies, seeds=seeds, turn=given.turn)
    found = run_all(work, given.algorithm or list(ALGORITHMS), given.jobs)
    return {"single": write_table(found)}, find_misses(found)


def show_groups(given: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the tables of groups and of gains, and where they miss the figures."""
    seeds = range(1 if given.quick else given.seeds)
    names = given.algorithm or [*ALGORITHMS, *RIVALS]
    work = partial(measure_group, seeds=seeds, rounds=given.rounds)
    lost = run_all(work, names, given.jobs)
    gains = run_all(partial(measure_gain, seeds=seeds), list(FAIR), given.jobs)
    return {"groups": write_groups(lost), "gains": write_gains(gains)}, find_excess(lost)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write if asked to, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--single", action="store_true", help="lies of one client")
    parser.add_argument("--quick", action="store_true", help="one seed, with --single four lies")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--algorithm", action="append", choices=[*ALGORITHMS, *RIVALS])
    parser.add_argument("--lie", action="append", choices=list(LIES), help="with --single")
    parser.add_argument("--turn", type=float, default=TURN, help="how clients differ (--single)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of groups (not --single)")
    parser.add_argument("--seeds", type=int, default=5, help="of groups (not --single)")
    parser.add_argument("--jobs", type=int, default=1, help="algorithms at a time")
    given = parser.parse_args(arguments)
    tables, misses = (show_single if given.single else show_groups)(given)
    for mark, table in tables.items():
        print(table)
        if given.write:
            put_into_page(mark, table)
    print("\n".join(misses) or "every lie that is to be borne costs no more than it may")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
