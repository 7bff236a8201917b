"""Where the time of a round goes: what ``python -m benchmarks.models NAME --profile`` prints.

Against the plain loop on T threads, clients on a core each take

    ratio = (ours on one thread / plain on one thread) * (plain's gain by T threads / our gain),

and the last factor is at best plain's gain over T: what torch already makes of the cores by
dividing single operations cannot be gained again.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from benchmarks.timing import PAUSE
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Iterator

OPERATIONS = 12
"""Operations that are listed, by the time they take."""

Call = Callable[[], object]


def print_profile(name: str, plain: Call, ours: Call, threads: int, turns: int) -> None:
    """Print times, the factors of their ratio, and what takes how long."""
    calls = {"plain": plain, "ours": ours}
    ways = {(who, t): call for t in (1, threads) for who, call in calls.items()}
    costs = measure(ways, turns)
    print(f"\n{name}: a round, best of {turns} turns\n")
    print("| who | threads | ms | processor ms | system ms | page faults |")
    print("|---|---:|---:|---:|---:|---:|")
    for (who, t), (wall, used, system, faults) in costs.items():
        print(f"| {who} | {t} | {wall:.1f} | {used:.1f} | {system:.1f} | {faults:.0f} |")
    wall = {way: cost[0] for way, cost in costs.items()}
    work = wall["ours", 1] / wall["plain", 1]
    gains = [wall[who, 1] / wall[who, threads] for who in ("plain", "ours")]
    ratio = wall["ours", threads] / wall["plain", threads]
    print(
        f"\nratio {ratio:.2f} = {work:.2f} (ours over plain on one thread) * {gains[0]:.2f} (what "
        f"plain gains by {threads} threads) / {gains[1]:.2f} (what we gain); with a gain of "
        f"{threads} it would be {work * gains[0] / threads:.2f}.\n"
    )
    seen = [("plain", 1), ("plain", threads), ("ours", 1)]  # of the thread that calls
    columns = {way: operations(ways[way], way[1]) for way in seen}
    heads = [f"{who}, {t} thread{'s' * (t > 1)}" for who, t in seen]
    print(f"| operation, ms | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    total = {op: max(column.get(op, 0.0) for column in columns.values())
             for op in set().union(*columns.values())}  # fmt: skip
    for op in sorted(total, key=total.__getitem__, reverse=True)[:OPERATIONS]:
        numbers = " | ".join(f"{column.get(op, 0.0):.1f}" for column in columns.values())
        print(f"| `{op}` | {numbers} |")


def measure(
    ways: Mapping[tuple[str, int], Call], turns: int
) -> dict[tuple[str, int], tuple[float, float, float, float]]:
    """Return wall, processor and system milliseconds, and page faults: the least of each."""
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {way: [] for way in ways}
    for turn in range(1 + turns):
        for way, call in ways.items():
            with on_threads(way[1]):
                time.sleep(PAUSE)
                before = _counters()
                call()
                spent = tuple(b - a for a, b in zip(before, _counters(), strict=True))
            if turn:  # the first turn pays for allocation
                found[way].append(spent)
    return {way: tuple(map(min, zip(*all_, strict=True))) for way, all_ in found.items()}  # type: ignore[misc]


def operations(call: Call, threads: int) -> dict[str, float]:
    """Return the milliseconds that each of torch's operations takes by itself."""
    with on_threads(threads):
        call()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
    return {event.key: event.self_cpu_time_total / 1e3 for event in seen.key_averages()}


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let torch have so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _counters() -> tuple[float, float, float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    wall, user, system = time.perf_counter(), used.ru_utime, used.ru_stime
    return 1e3 * wall, 1e3 * (user + system), 1e3 * system, float(used.ru_minflt)
