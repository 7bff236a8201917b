"""Ratios of times measured in one run: candidates take turns, and the best turn of each counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

PAUSE = 0.02
"""Seconds before every call: a candidate's helper threads spin for some milliseconds after its last
product and would take a core from whoever comes next."""


def best_times(
    candidates: Mapping[str, Callable[[], object]],
    turns: int = 7,
    budget: float = 60.0,
    wall: bool = False,
) -> dict[str, float]:
    """Return the shortest time of each candidate in seconds, all measured turn by turn.

    The machine may be busy with other things; the shortest of several turns is what the code costs
    when it is not disturbed, and taking turns lets all candidates meet the same disturbances. On
    one thread the processor's time is taken, which does not count what other programs use; on
    several threads, or with a device, the time on the wall.
    """
    clock = time.perf_counter if wall or torch.get_num_threads() > 1 else time.process_time
    best = dict.fromkeys(candidates, float("inf"))
    for call in candidates.values():
        call()  # first calls pay for allocation and tracing
    begun = time.perf_counter()
    for _ in range(turns):
        for name, call in candidates.items():
            time.sleep(PAUSE)
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
        if time.perf_counter() - begun > budget:
            break
    return best


def table(title: str, times: Mapping[str, float], base: str) -> str:
    """Return the times and their ratios to one of them as a Markdown table."""
    lines = [f"{title}", "", f"| what | ms | times {base} |", "|---|---:|---:|"]
    for name, seconds in times.items():
        lines.append(f"| {name} | {1e3 * seconds:.1f} | {seconds / times[base]:.2f} |")
    return "\n".join(lines)
