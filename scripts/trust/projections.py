"""Projections onto capped simplices against exact arithmetic, at every scale.

    python -m scripts.trust.projections --cases 10000

Points with ties, of sizes from 1e-300 to 1e300, and caps, equal or not, that barely or easily hold
all the weight. The oracle finds the shift in rational numbers. Exit code 1 if a weight is off by
more than 1e-12, leaves its bounds, or is not finite.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.objectives.projections import (
    capped_corner,
    project_capped_simplex,
    project_permutahedron,
)

LARGEST = 1e-12
Array = NDArray[np.float64]


def project_exactly(point: Array, caps: Array) -> list[Fraction]:
    """Return clip(point - t, 0, caps) with the t for which it sums to one (or all the caps do)."""
    p, c = ([Fraction(float(v)) for v in values] for values in (point, caps))
    if sum(c) <= 1:
        return c

    def weights(t: Fraction) -> list[Fraction]:
        return [min(max(a - t, Fraction(0)), b) for a, b in zip(p, c, strict=True)]

    breaks = sorted({*p, *(a - b for a, b in zip(p, c, strict=True))})
    low, high = breaks[0], breaks[-1]  # all caps; nothing
    for t in breaks:
        low, high = (t, high) if sum(weights(t)) >= 1 else (low, min(high, t))
    above, below = sum(weights(low)), sum(weights(high))
    share = Fraction(0) if above == below else (above - 1) / (above - below)
    return weights(low + share * (high - low))


def draw_case(draw: np.random.Generator) -> tuple[Array, Array]:
    """Draw a point and caps."""
    n = int(draw.integers(1, 10))
    point = draw.normal(size=n) * 10.0 ** draw.uniform(-300, 300 if draw.random() < 0.5 else 2)
    if draw.random() < 0.5:
        point = draw.choice(point, size=n)  # ties
    caps = np.full(n, 1.0 / n) if draw.random() < 0.5 else draw.uniform(0.01, 1.0, n)
    return point, caps * max(draw.choice([1.0, 1.5, 3.0]), 1.0000001 / caps.sum())


def measure_error(seed: int) -> float:
    """Return how far the projections of one case are off, at most; infinity outside the set."""
    point, caps = draw_case(np.random.default_rng(seed))
    exact = np.array([float(w) for w in project_exactly(point, caps)])
    found: list[tuple[Array, Array]] = [(project_capped_simplex(point, caps), exact)]
    if caps.min() == caps.max():  # the other way to the same set
        corner: Any = capped_corner(len(caps), min(1.0, 1 / (len(caps) * float(caps[0]))))
        found.append((project_permutahedron(point, corner), exact))
    inside = all(((w >= 0) & (w <= caps * (1 + 1e-15) + 1e-15)).all() for w, _ in found)
    return max(float(np.abs(w - e).max()) for w, e in found) if inside else float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try as many cases as asked, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cases", type=int, default=10_000)
    given = parser.parse_args(arguments)
    errors = [measure_error(seed) for seed in range(given.cases)]
    wrong = [seed for seed, error in enumerate(errors) if not error <= LARGEST]
    print(f"{given.cases:,} points, largest error {max(errors):.1e}; seeds of misses: {wrong[:20]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
