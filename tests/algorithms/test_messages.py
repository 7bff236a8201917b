"""Wrong arguments are refused with what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.problems import PROBLEMS, start

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FedAvg,
    QFedAvg,
    RFedFair,
    Scaffold,
    drfa_by_theory,
    rfedfair_by_theory,
    tilted_erm,
)
from equifed.contract.local import LocalSGD
from equifed.objectives import KL, ProjectedGradient

WORK = LocalSGD(lr=0.1, steps=2)
EPOCHS = LocalSGD(lr=0.1, epochs=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(WORK, participation=0.0), r"participation .* in \(0, 1\], got 0.0"),
        (
            lambda: Scaffold(WORK, variates="old"),
            "'stored-gradient' or 'fresh', got 'old'",
        ),
        (lambda: AFL(WORK, 0.0), "dual_step must be positive, got 0.0"),
        (lambda: AFL(WORK, clients_per_round=0), "clients_per_round must be at least 1, got 0"),
        (lambda: AFL(WORK, output="best"), "'last' or 'average', got 'best'"),
        (lambda: AFL(WORK, objective=KL(1.0), dual=ProjectedGradient()), "KL.*Euclidean"),
        (lambda: drfa_by_theory(0, 1.0, 2), "iterations > 1"),
        (lambda: rfedfair_by_theory(0.0, 1.0, 5), "smoothness > 0"),
        (lambda: AgnosticFedAvg(WORK, -1.0), "dual_step must be positive, got -1.0"),
        (lambda: DRFA(EPOCHS), "needs local.steps"),
        (lambda: DRFA(WORK, 0.0), "dual_step must be positive"),
        (lambda: DRFA(WORK, clients_per_round=0), "clients_per_round must be at least 1, got 0"),
        (lambda: DRFA(WORK, output="best"), "'last' or 'average', got 'best'"),
        (lambda: DRFA(WORK, ascent="half"), "'snapshot' or 'full', got 'half'"),
        (lambda: RFedFair(EPOCHS), "needs local.steps"),
        (lambda: RFedFair(WORK, tails=1.5), r"must lie in \(0, 1\], got 1.5"),
        (lambda: RFedFair(WORK, tails=(0.5, 0.0)), r"must lie in \(0, 1\]"),
        (lambda: RFedFair(WORK, smoothing=0.0), "smoothing must be positive"),
        (lambda: RFedFair(WORK, clients_per_round=0), "at least 1, got 0"),
        (lambda: RFedFair(WORK, output="best"), "'last' or 'average', got 'best'"),
        (lambda: QFedAvg(WORK, -0.1), "q must be at least 0, got -0.1"),
        (lambda: QFedAvg(WORK, 1.0, 0.0), "lipschitz must be positive, got 0.0"),
        (lambda: DeltaFL(WORK, 0.0), r"level must lie in \(0, 1\], got 0.0"),
        (lambda: tilted_erm(WORK, float("nan")), "finite number, got nan"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("tails", "message"),
    [((0.5, 0.5), "2 tails for 4 clients"), ((0.01, 0.5, 0.5, 0.5), "below its share")],
)
def test_tails_must_fit_the_clients(tails: tuple[float, ...], message: str) -> None:
    problem = PROBLEMS["least squares"]
    with pytest.raises(ValueError, match=message):
        RFedFair(WORK, tails).init(problem.clients(), torch.as_tensor(start(problem)))
