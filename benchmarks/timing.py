"""Ratios of times measured in one run: candidates take turns, and the best turn of each counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_times(
    candidates: Mapping[str, Callable[[], object]], turns: int = 7, budget: float = 60.0
) -> dict[str, float]:
    """Return the shortest wall time of each candidate, all measured turn by turn.

    The machine may be busy with other things; the shortest of several turns is what the code costs
    when it is not disturbed, and taking turns lets all candidates meet the same disturbances.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for call in candidates.values():
        call()  # first calls pay for allocation and tracing
    begun = time.perf_counter()
    for _ in range(turns):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
        if time.perf_counter() - begun > budget:
            break
    return best


def table(title: str, times: Mapping[str, float], base: str) -> str:
    """Return the times and their ratios to one of them as a Markdown table."""
    lines = [f"{title}", "", f"| what | ms | times {base} |", "|---|---:|---:|"]
    for name, seconds in times.items():
        lines.append(f"| {name} | {1e3 * seconds:.1f} | {seconds / times[base]:.2f} |")
    return "\n".join(lines)
