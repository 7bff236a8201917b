"""Numbers that documents and docstrings tell are those that the code decides by.

A document is the oracle of a threshold: nothing else says what it should be.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equifed as ef
from equifed.algorithms import fair_newton
from equifed.contract import absence
from equifed.engines.stacked import clients as stacked
from equifed.runs import alone, candidates, personalise
from equifed.steps import metric
from equifed.training import checkpoint, events, show

ROOT = Path(__file__).parents[1]
WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10, "forty": 40, "half": 0.5, "fifth": 0.2,
    "eighth": 0.125, "hundredfold": 100,
}  # fmt: skip
FIT, STATISTICS = "docs/guides/fit.md", "docs/statistics.md"

TOLD: list[tuple[Any, str, tuple[float, ...]]] = [
    (FIT, r"(\w+) penalties \((\S+) to (\S+)\)",
     (len(candidates.L2), candidates.L2[0], candidates.L2[-1])),
    (FIT, r"rho from (\S+) to (\S+);", (candidates.RHOS[0], candidates.RHOS[-1])),
    (FIT, r"client with (\w+) penalties `own_l2`", (len(candidates.OWN_L2),)),
    (FIT, r"own bias and fair objective with (\w+) rho", (len(candidates.OWN_RHOS),)),
    (FIT, r"a (\w+) of the rest validation", (candidates.SHARE,)),
    (FIT, r"fewer than (\d+) validation rows, there are (\w+) folds",
     (candidates.ENOUGH, candidates.FOLDS)),
    (FIT, r"at most (\w+) the loss of the chosen one, on at least (\d+) held-out",
     (candidates.HALF, candidates.ENOUGH)),
    (FIT, r"More than ([\d,]+) clients", (fair_newton.MOST_CLIENTS,)),
    (STATISTICS, r"at most (\d+) parameters", (alone.FEW_PARAMETERS,)),
    (STATISTICS, r"at most (\d+) clients, at most (\d+) million",
     (alone.FEW_CLIENTS, alone.LITTLE_WORK / 1e6)),
    (STATISTICS, r"differ more than a (\w+)", (events.MOST_SCALES,)),
    (ef.run, r"at most (\d+) parameters and (\d+) clients",
     (alone.FEW_PARAMETERS, alone.FEW_CLIENTS)),
    (ef.alone, r"a grid from (\S+) to (\S+),", (alone.GRID[0], alone.GRID[-1])),
    (ef.personalise, r"at least (\d+) validation", (personalise.ENOUGH,)),
    (ef.personalise, r"by (\w+) folds", (personalise.FOLDS,)),
    ("docs/own-part.md", r"at least (\d+) validation samples", (personalise.ENOUGH,)),
    ("docs/trust.md", r"half of the weight for (\w+) rounds", (events.ROUNDS,)),
    ("docs/reference/run-folder.md", r"the newest (\w+) states", (checkpoint.KEEP,)),
    (ef.FairNewton, r"then (\d+) directions of each block", (metric.AXES,)),
    (metric.choose_form, r"up to ([\d,]+) parameters \(``\"auto\"``: ([\d,]+)\)",
     (metric.WHOLE["full"], metric.WHOLE["auto"])),
    (ef.simulate, r"By default (\d+) GiB, on a GPU an (\w+)",
     (stacked.MEMORY / 2**30, 1 / stacked.SHARE)),
    ("src/equifed/contract/absence.py", r"remembered: (\d+) GiB in double precision",
     (8 * absence.LARGEST / 2**30,)),
    (show.tabulate_clients, r"more than (\w+) clients only", (show.SHOWN_CLIENTS,)),
    (ef.History.plot, r"More than (\w+) clients", (show.MOST_LINES,)),
]  # fmt: skip


def read_number(text: str) -> float:
    return WORDS[text] if text in WORDS else float(text.replace(",", ""))


@pytest.mark.parametrize(("where", "pattern", "expected"), TOLD)
def test_a_number_in_a_text_is_that_of_the_code(
    where: Any, pattern: str, expected: tuple[float, ...]
) -> None:
    text = (ROOT / where).read_text(encoding="utf-8") if isinstance(where, str) else where.__doc__
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, f"{where} no longer says {pattern}"
    assert tuple(map(read_number, found.groups())) == pytest.approx(expected)


def test_all_candidates_are_as_many_as_the_guide_says() -> None:
    each = 1 + len(candidates.RHOS) + len(candidates.OWN_L2) + len(candidates.OWN_RHOS)
    text = (ROOT / FIT).read_text(encoding="utf-8")
    assert f"All {len(candidates.L2) * each} candidates" in text


@pytest.mark.parametrize(
    "grid",
    [candidates.L2, candidates.RHOS, candidates.OWN_L2, candidates.OWN_RHOS, alone.GRID,
     personalise.TEMPERATURES, personalise.PENALTIES, personalise.RATES, personalise.STEPS],
)  # fmt: skip
def test_values_that_are_tried_are_as_far_apart_as_each_other(grid: tuple[float, ...]) -> None:
    steps = np.abs(np.diff(np.log(grid)))
    assert np.ptp(steps) <= 0.12  # 1, 3, 10 is as even as round numbers are
