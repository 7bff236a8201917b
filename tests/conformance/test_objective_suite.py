"""The conformance suite that other repositories use, on every objective of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.test_objectives import CATALOGUE, N, new, numbers, some, steps

from equifed.objectives import ChiSquare, CVaR, QFair, Tilted
from equifed.testing import OBJECTIVE_CHECKS, check_objective
from equifed.testing.objectives import POINTLESS, Points, draw_points, run_check

pytestmark = pytest.mark.long

SADDLES = pytest.mark.parametrize("build", CATALOGUE.values(), ids=list(CATALOGUE))


def drawn(n: int) -> st.SearchStrategy[Points]:
    vector = st.lists(numbers, min_size=n, max_size=n).map(np.array)
    return st.builds(Points, vector, vector, vector, steps)


@SADDLES
def test_it_keeps_what_is_asked_at_chosen_numbers(build):
    for n in (1, N):
        objective, (at,) = new(build, n), draw_points(n, 1)
        for name, check in OBJECTIVE_CHECKS.items():
            if check in POINTLESS:
                run_check(objective, name, partial(check, objective, at))


@SADDLES
@some
@given(at=drawn(N))
def test_it_keeps_the_contract(build, at):
    objective = new(build)
    for name, check in OBJECTIVE_CHECKS.items():
        if check not in POINTLESS:
            run_check(objective, name, partial(check, objective, at))


@pytest.mark.parametrize(
    "objective",
    [CVaR(0.5), ChiSquare(0.1), QFair(0.0), QFair(2.0), Tilted(1.5), Tilted(-1.0), Tilted(0.0)],
    ids=repr,
)
def test_the_suite_passes_without_a_search(objective):
    check_objective(objective)


@dataclass(frozen=True)
class Shifted(CVaR):
    """Its value is too large."""

    def value(self, losses):
        return super().value(losses) + 0.1


@dataclass(frozen=True)
class Inexact(CVaR):
    """Its dual step stops short, inside the set."""

    def prox(self, point, step):
        return 0.99 * super().prox(point, step) + 0.01 * self.start(len(point))


@dataclass(frozen=True)
class Outside(CVaR):
    """Its weights leave the set."""

    def weights(self, losses):
        return np.eye(len(losses))[int(np.argmax(losses))]


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (Shifted(0.5), "Fenchel-Young"),
        (Inexact(0.5), "the prox is optimal"),
        (Outside(0.5), "every answer is feasible"),
    ],
)
def test_a_broken_promise_is_found(objective, name):
    check = OBJECTIVE_CHECKS[name]
    with pytest.raises(AssertionError):
        for points in draw_points(6, 12):
            check(objective, points)
    with pytest.raises(AssertionError, match="fails the check"):
        check_objective(objective)
