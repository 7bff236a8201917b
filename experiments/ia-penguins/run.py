"""Three species of penguins as clients: relative unfairness against phi, exactly and federated.

bill length = t1 + t2 bill depth + t3 flipper length, f_i the squared errors of ten penguins of a
species, A = B = simplex. The paper's text leaves two things open: which ten penguins (rows without
any gap, or rows whose three measurements are there), and that the unknowns were restricted to a
grid in a box (Appendix J.1). All four readings are solved exactly.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from experiments.harness.drawing import Line, figure
from experiments.harness.exact import Quadratics, solve, solve_in_box
from experiments.harness.experiment import Check, Context, Outcome, Table
from experiments.harness.running import Part, compute_parts
from numpy.typing import NDArray

from equifed import Federation, ScaffPD, simulate, train
from equifed.data import read_columns, standardise
from equifed.datasets import EMBEDDED
from equifed.models import build
from equifed.objectives import (
    CVaR,
    RelativeFairness,
    integrated_bound,
    largest_skewness,
    limit_skewness,
)

Array = NDArray[np.float64]
SOURCE = "IA, Section 4.3, Fig. 3 and Appendix J.1"
SPECIES = ("Adelie", "Chinstrap", "Gentoo")
USED = ("bill_depth_mm", "flipper_length_mm", "bill_length_mm")
LOW, HIGH = np.array([0.0, 0.0, -35.0]), np.array([1.0, 1.0, -25.0])
"""The box of Appendix J.1 for (t2, t3, t1)."""

ENOUGH = 0.1
"""What a bound may add to a loss of -1 or 1 and still say something."""

READINGS = {"measured": "first ten with all three measurements", "complete": "first ten gapless"}


def federation(reading: str, first: int = 10) -> Federation:
    """Return the penguins of a reading, in the unit of the table (mm)."""
    table = read_columns(EMBEDDED / "penguins.csv")
    needed = USED if reading == "measured" else tuple(table)
    clients = {}
    for species in SPECIES:
        rows = [
            r
            for r, name in enumerate(table["species"])
            if name == species and all(table[column][r] is not None for column in needed)
        ][:first]
        numbers = np.array([[float(str(table[c][r])) for c in USED] for r in rows])
        clients[species] = (numbers[:, :2], numbers[:, 2])
    return Federation.from_clients(clients, name=f"penguins ({reading})")


def unfairness(losses: Array) -> float:
    """Return the largest over the smallest loss, (3) of the paper with A = B = simplex."""
    return float(np.max(losses) / np.min(losses))


def run(context: Context) -> Outcome:
    """Solve for every phi, exactly and by SCAFF-PD-IA, and compare."""
    settings, rows = context.settings, []
    parts = {
        f"{reading}-{phi:g}": Part(
            measure, {"reading": reading, "phi": phi, "rounds": settings["rounds"]}
        )
        for reading, phi in itertools.product(READINGS, settings["phi"])
    }
    for part, told in zip(parts.values(), compute_parts(context, parts).values(), strict=True):
        inside, free, ours = (np.array(told[name]) for name in ("in the box", "exact", "federated"))
        rows.append((part.given["reading"], part.given["phi"], unfairness(inside),
                     unfairness(free), unfairness(ours), float(inside.max()), float(free.max()),
                     told["gap"]))  # fmt: skip
    columns = ("penguins", "phi", "R in the box", "R exact", "R of SCAFF-PD-IA",
               "worst loss in the box", "worst loss exact", "relative difference")  # fmt: skip
    lines = {}
    for reading in READINGS:
        mine = [row for row in rows if row[0] == reading]
        x = [row[1] for row in mine]
        lines[f"{reading}, in the box"] = Line(x, [row[2] for row in mine], dots=True)
        lines[f"{reading}, free"] = Line(x, [row[3] for row in mine], dots=True)
    drawing = figure(
        lines, title="Relative unfairness of the exact solutions", x_label="phi",
        y_label="largest over smallest loss",
    )  # fmt: skip
    return Outcome(
        checks(rows),
        {
            "unfairness": Table("Relative unfairness against phi", columns, rows),
            "generalisation": generalisation(settings["phi"]),
        },
        {"unfairness": drawing},
    )


def measure(reading: str, phi: float, rounds: int) -> dict[str, Any]:
    """Return the losses of the three species at the exact solutions and at SCAFF-PD-IA's."""
    data, objective = federation(reading), RelativeFairness(phi)
    raw = Quadratics.of_regression(data, intercept=True)
    inside = raw.losses(solve_in_box(raw, objective, LOW, HIGH).x)
    free, ours, gap = _both(data, objective, rounds)
    return {"in the box": inside.tolist(), "exact": free.tolist(), "federated": ours.tolist(),
            "gap": gap}  # fmt: skip


def added(phi: float, samples: int) -> float:
    """Return what IA's Theorem 4 adds for three clients with so many samples each."""
    return integrated_bound(0.0, RelativeFairness(phi), len(SPECIES), samples, dimension=3)


def generalisation(phis: Sequence[float]) -> Table:
    """Return what the weights of each phi add to a loss on training samples, by IA's Theorem 4.

    For losses -1 and 1 (is a bill longer than predicted?) of affine functions of two measurements,
    whose VC dimension is 3. With ten penguins nothing follows; what phi costs is seen in how many
    one would need.
    """
    rows = []
    for phi in phis:
        needed = bisect_left(range(10**8), True, lo=2, key=lambda m, p=phi: added(p, m) <= ENOUGH)
        rows.append((phi, largest_skewness(RelativeFairness(phi), 3), added(phi, 10), needed))
    columns = ("phi", "skewness of the weights", "added with 10 penguins each",
               f"penguins each for {ENOUGH} added")  # fmt: skip
    return Table("Generalisation bound, IA's Theorem 4 (95 %)", columns, rows)


def _both(data: Federation, objective: RelativeFairness, rounds: int) -> tuple[Array, Array, float]:
    """Return the losses of the exact solution and of SCAFF-PD-IA, and how far they are apart.

    Features are standardised for the gradient method; with an intercept in the model that only
    changes the coordinates.
    """
    scaled = standardise(data)
    exact = Quadratics.of_regression(scaled, intercept=True)
    best = solve(exact, objective)
    x = _federated(scaled, objective, rounds)
    gap = (objective.value(exact.losses(x)) - best.value) / best.value
    return exact.losses(best.x), exact.losses(x), float(gap)


def _federated(data: Federation, objective: RelativeFairness, rounds: int) -> Array:
    """Return the model of SCAFF-PD-IA with automatic steps."""
    module = build("linear", (2,), 1)
    clients = simulate(data, module, "squared", dtype=torch.float64)
    history = train(ScaffPD(objective), clients, rounds=rounds)
    assert history.parameters is not None
    parts = [p.detach().numpy().ravel() for p in history.parameters.values()]
    return np.asarray(np.concatenate(parts), dtype=np.float64)  # weights, then intercept


def checks(rows: list[Any]) -> list[Check]:
    """Compare with Fig. 3, whose values the text does not print."""
    out = []
    for column, place in ((2, "in the paper's box"), (3, "without bounds")):
        for reading, words in READINGS.items():
            values = [row[column] for row in rows if row[0] == reading]
            falls = all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(values))
            flat = max(values) - min(values) < 1e-6
            shown = ", ".join(f"{v:.3f}" for v in values)
            out.append(
                Check(
                    "the relative unfairness decreases in phi",
                    SOURCE,
                    f"{words}, {place}: {shown}",
                    falls and not flat,
                    "constant: the worst-case solution already has equal losses" if flat else "",
                )
            )
    worst = max(abs(row[7]) for row in rows)
    out.append(skewness_check())
    out.append(
        Check(
            "SCAFF-PD-IA solves the problem (Theorem 3)",
            "IA, Section 5",
            f"objective within {worst:.1e} (relative) of the exact solution for every phi",
            worst < 1e-4,
        )
    )
    return out


def skewness_check(tail: float = 0.2, phi: float = 0.2, clients: int = 10_000) -> Check:
    """Hold what Proposition 5 prints for many clients against the exact skewness of many."""
    sets = RelativeFairness(phi, CVaR(tail), CVaR(tail))
    exact, scale = largest_skewness(sets, clients), 1 / ((1 - phi) * tail)
    printed = tail * ((scale - 1) ** 2 + (phi * scale + 1) ** 2) + 1  # as in the paper
    return Check(
        f"the skewness of the weights of many clients with CVaR({tail}) and phi = {phi} is "
        f"{printed:g}",
        "IA, Proposition 5, on which its bound on generalisation depends",
        f"{exact:g} with {clients} clients, exactly; {limit_skewness(tail, phi):g} in the limit",
        abs(exact - printed) < 1e-2,
        "its proof leaves out the clients whose weight is zero: short by 1 - 2 alpha",
    )
