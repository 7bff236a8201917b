"""What a terminal shows of experiments."""

from __future__ import annotations

from pathlib import Path

from experiments.harness.experiment import EXPERIMENTS, Outcome


def listing() -> str:
    """Return the experiments, a line each."""
    width = max(map(len, EXPERIMENTS))
    return "\n".join(
        f"{name:{width}}  {one.title} ({one.paper})" for name, one in EXPERIMENTS.items()
    )


def outcome_lines(outcome: Outcome, folder: Path) -> list[str]:
    """Return published and measured, check by check, and where the rest is."""
    lines = []
    for one in outcome.checks:
        lines += [f"published: {one.claim} [{one.source}]", f" measured: {one.measured}"]
        lines.append("    agree: " + ("yes" if one.agrees else "NO" + (one.why and f", {one.why}")))
    lines += [f"failed: {problem}" for problem in outcome.problems]
    return [*lines, f"results: {folder / 'results'}, figures: {folder / 'figures'}"]
