"""Eight points of the plane: the centres of the smallest circle and of the thinnest ring.

Clients are points, losses are distances to a centre. The smallest largest loss (absolute fairness)
and the smallest difference of the largest and the smallest loss (relative fairness) are both found
to a proved accuracy by branch and bound: either function changes by at most 2 per unit of distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Table
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray

from equifed.metrics import gini

Array = NDArray[np.float64]
SOURCE = "IA, Fig. 1 and Appendix A"
ROOT = np.sqrt(0.5)
POINTS = np.array(
    [
        [1, 0], [-1, 0], [ROOT, ROOT / 2], [-ROOT, ROOT / 2],
        [0, 0.5], [ROOT, -ROOT], [-ROOT, -ROOT], [0, -1],
    ]
)  # fmt: skip
"""The data of Appendix A."""


def distances(centres: Array) -> Array:
    """Return the distances of all points from each centre, shape (centres, 8)."""
    return np.asarray(np.linalg.norm(centres[:, None] - POINTS[None], axis=2))


def largest(centres: Array) -> Array:
    """Return the largest distance from each centre."""
    return np.asarray(distances(centres).max(1))


def difference(centres: Array) -> Array:
    """Return the difference of the largest and the smallest distance from each centre."""
    away = distances(centres)
    return np.asarray(away.max(1) - away.min(1))


def minimum(
    function: Callable[[Array], Array], lipschitz: float, tolerance: float, half: float = 2.0
) -> tuple[Array, float, float]:
    """Return a minimiser in the square [-half, half]^2, its value, and a proved lower bound.

    Squares whose centre is worse than the best by more than the function can change on the way to
    their corners are left out, the others are cut in four.
    """
    centres, size = np.zeros((1, 2)), half
    best, best_value = centres[0], float(function(centres)[0])
    corners = np.array([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    while True:
        values = function(centres)
        here = int(values.argmin())
        if values[here] < best_value:
            best, best_value = centres[here], float(values[here])
        slack = lipschitz * size * np.sqrt(2)
        left = values - slack < best_value
        if slack <= tolerance:
            return best, best_value, best_value - slack
        size /= 2
        centres = (centres[left][:, None] + size * corners[None]).reshape(-1, 2)


MEASURES = {"absolute": (largest, 1.0), "relative": (difference, 2.0)}
"""What is minimised, and by how much it changes at most per unit of distance."""


def find_centre(fairness: str, tolerance: float) -> tuple[list[float], float, float]:
    """Return the best centre, its value and the proved lower bound."""
    at, value, bound = minimum(*MEASURES[fairness], tolerance)
    return at.tolist(), value, bound


def run(context: Context) -> Outcome:
    """Find both centres, and compare the sums of the distances with the printed ones."""
    tolerance = context.settings["tolerance"]
    parts = {
        name: Part(find_centre, {"fairness": name, "tolerance": tolerance}) for name in MEASURES
    }
    rows, lines = [], {}
    for name, (at, value, bound) in compute_parts(context, parts).items():
        away = distances(np.array([at]))[0]
        rows.append(
            (name, float(at[0]), float(at[1]), value, bound, float(away.sum()), float(away.max()),
             float(away.min()), float(away.max() / away.min()), float(gini(away)))
        )  # fmt: skip
        lines[name] = Line(np.arange(1, 9), np.sort(away), dots=True)
    columns = ("fairness", "x", "y", "value", "proved lower bound", "sum of distances",
               "largest", "smallest", "ratio", "Gini")  # fmt: skip
    drawing = figure(
        lines, title="Distances from the two centres, sorted", x_label="point", y_label="distance",
        y_limits=(0.0, 1.2),
    )  # fmt: skip
    return Outcome(
        checks(rows, context.settings["published"]),
        {"centres": Table("The two centres", columns, rows)},
        {"distances": drawing},
    )


def checks(rows: Sequence[Sequence[Any]], published: dict[str, float]) -> list[Check]:
    """Compare with the numbers of Appendix A, which are rounded to three digits."""
    absolute, relative = rows
    return [
        *(
            Check(
                f"the distances from the centre of {name} fairness sum to {published[name]}",
                SOURCE,
                f"{row[5]:.4f}",
                abs(float(row[5]) - published[name]) < 6e-4,
            )
            for name, row in (("absolute", absolute), ("relative", relative))
        ),
        Check(
            "relative fairness distributes the distances more evenly (no number printed)",
            SOURCE,
            f"largest over smallest {absolute[8]:.3f} and {relative[8]:.3f}, "
            f"Gini {absolute[9]:.3f} and {relative[9]:.3f}",
            float(relative[8]) < float(absolute[8]) and float(relative[9]) < float(absolute[9]),
        ),
    ]
