"""A proof is made of what the clients said: whoever changes that on the way loses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import convex_problem

from equifed.algorithms import FairNewton, Scaffold, ScaffPD
from equifed.contract.algorithm import Proof
from equifed.contract.curvature import CurvatureSum
from equifed.contract.local import LocalSGD
from equifed.contract.views import ClientsView, VectorsView
from equifed.objectives import CVaR, WorstCase
from equifed.training.history import History
from equifed.training.loop import train

PROBLEM = convex_problem(24)
METHODS = [ScaffPD(CVaR(0.4)), FairNewton(CVaR(0.4)), Scaffold(LocalSGD(lr=0.01, steps=3), "fresh")]


class Scaled(VectorsView):
    """Sums of a tenth, written by somebody who knows this library well."""

    def see_sum(self, weights: np.ndarray, add: Callable[..., Any]) -> torch.Tensor:
        return 0.1 * add(weights)


class Rough(VectorsView):
    """The same, by somebody who overrides what there is."""

    def weighted_sum(self, weights: np.ndarray) -> torch.Tensor:
        return 0.1 * self.behind.weighted_sum(weights)


class Smaller(ClientsView):
    """Clients whose losses look smaller than they are."""

    def see_numbers(self, numbers: np.ndarray, what: str, stream: Any) -> np.ndarray:
        return 0.5 * numbers


class Steeper(ClientsView):
    """Clients whose curvature looks four times what it is."""

    def curvature_sum(self, *asked: Any, **more: Any) -> CurvatureSum | str:
        found = super().curvature_sum(*asked, **more)
        return found if isinstance(found, str) else replace(found, blocks=4 * found.blocks)


def view_of(vectors: type[VectorsView]) -> type[ClientsView]:
    return type("View", (ClientsView,), {"Vectors": vectors})


@dataclass(frozen=True)
class Between:
    """A wrapper that no list of this package knows."""

    algorithm: Any
    view: type[ClientsView]

    def init(self, clients: Any, x: torch.Tensor) -> Any:
        return self.algorithm.init(clients, x)

    def round(self, state: Any, clients: Any, stream: Any) -> Any:
        return self.algorithm.round(state, self.view(clients), stream)

    def model(self, state: Any) -> torch.Tensor:
        return self.algorithm.model(state)


def play(algorithm: Any) -> History:
    return train(algorithm, PROBLEM.clients("stacked"), rounds=8, x=PROBLEM.start())


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("view", [view_of(Scaled), view_of(Rough), Smaller])
def test_a_wrapper_that_changes_answers_loses_its_proof(algorithm: Any, view: Any) -> None:
    history = play(Between(algorithm, view))
    assert not any("gap" in record.numbers for record in history.rounds)
    why = [e["reason"] for e in history.events if "no certificate" in e.get("reason", "")]
    assert any("has changed what the clients answered" in reason for reason in why)


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_a_wrapper_that_changes_nothing_keeps_it(algorithm: Any) -> None:
    plain, wrapped = play(algorithm), play(Between(algorithm, ClientsView))
    gaps = [[r.numbers["gap"] for r in h.rounds] for h in (plain, wrapped)]
    assert gaps[0] == gaps[1]


def test_curvature_of_somebodys_own_makes_no_bound() -> None:
    """Steps in a wrong metric are slow; what is proved of them is true all the same."""
    best, _ = interior_point(PROBLEM, CVaR(0.4))
    for record in play(Between(FairNewton(CVaR(0.4)), Steeper)).rounds:
        assert record.objective is not None
        assert record.numbers["gap"] >= record.objective - best - 1e-9 * abs(best)


@dataclass(frozen=True)
class Claims(ScaffPD):
    """SCAFF-PD that says it minimises something else than it does."""

    def round(self, state: Any, clients: Any, stream: Any) -> Any:
        after, info = super().round(state, clients, stream)
        assert isinstance(info.proof, Proof)
        return after, replace(info, proof=replace(info.proof, objective=CVaR(0.9)))


def test_weights_that_are_not_feasible_prove_nothing() -> None:
    history = play(Claims(WorstCase()))
    notes = " ".join(e.get("reason", "") for e in history.events)
    assert "the weights are not feasible for the objective" in notes
    assert "gap" not in history.rounds[-1].numbers  # by then one client has most of the weight
