"""The same data in another unit are the same model: every strength, wherever it can be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import equifed as ef
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    L1Distance,
    L2Distance,
    LpDistance,
    Proportional,
    QFair,
    RelativeFairness,
    SemiVariance,
    Tilted,
    Transport,
    mean_variance,
)
from equifed.objectives.base import Relative
from equifed.runs.catalogue import OBJECTIVES
from equifed.training.units import lacks_scale, with_scale

COSTS = ((0.0, 1.0, 2.0), (1.0, 0.0, 1.0), (2.0, 1.0, 0.0))
STRENGTHS: dict[str, Any] = {
    "chi-square": ChiSquare(0.3),
    "chi-square of KL": ChiSquare(0.2, base=KL(0.4)),
    "mean-variance": mean_variance(0.8),
    "kl": KL(0.5),
    "l1-distance": L1Distance(0.5),
    "l2-distance": L2Distance(0.5),
    "lp-distance": LpDistance(1.5, 0.5),
    "transport": Transport(0.5, COSTS),
    "relative-fairness": RelativeFairness(0.2, rho=0.3),
    "semi-variance": SemiVariance(0.7),
    "tilted": Tilted(1.5),
    "proportional": Proportional(4.0),
}
"""One of every objective whose strength has the unit of a loss, or its inverse."""

FACTORS = (1e-6, 1e-3, 1e3, 1e6)


def test_every_objective_with_a_strength_is_here() -> None:
    """Those of the catalogue that take a scale; a prior or a level has no unit."""
    from equifed.runs.schema import settings

    known = {type(objective) for objective in STRENGTHS.values()}
    for name, entry in OBJECTIVES.items():
        made = entry.load()
        if "scale" in settings(made):
            kind = made if isinstance(made, type) else type(STRENGTHS["mean-variance"])
            assert kind in known, name


@pytest.mark.parametrize("objective", STRENGTHS.values(), ids=STRENGTHS)
@settings(deadline=None)
@given(
    losses=st.lists(st.floats(0.01, 3.0), min_size=3, max_size=3),
    factor=st.floats(-6.0, 6.0).map(lambda e: 10.0**e),
)
def test_a_scaled_objective_is_the_same_function(
    objective: Any, losses: list[float], factor: float
) -> None:
    one, other = (with_scale(objective, s) for s in (1.0, factor))
    given = np.array(losses)
    beside = [one.weights(given + step * np.arange(3)) for step in (-1e-9, 1e-9)]
    assume(np.allclose(*beside, atol=1e-6))  # else a tie, which rounding breaks
    assert not lacks_scale(other) and isinstance(other, Relative)
    value, weights = factor * one.value(given), one.weights(given)
    if isinstance(objective, Proportional):  # the same but for a factor and a constant
        value, weights = one.value(given) - np.log(factor), weights / factor
    small = 1e-9 * max(1.0, factor)
    assert other.value(factor * given) == pytest.approx(value, rel=1e-6, abs=small)
    assert other.weights(factor * given) == pytest.approx(weights, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("objective", [Average(), QFair(1.0), ef.objectives.CVaR(0.5)], ids=repr)
def test_what_has_no_strength_needs_no_scale(objective: Any) -> None:
    assert not lacks_scale(objective)


# -- training ---------------------------------------------------------------------------------


def rows() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Three clients that differ in concept and in noise."""
    draw = np.random.default_rng(3)
    out = {}
    for i, name in enumerate("abc"):
        x = draw.normal(size=(40, 3))
        out[name] = x, x @ [1.0, -2.0, 0.5 * i] + 3.0 * i + draw.normal(size=40) * (0.2 + i)
    return out


def arrays(factor: float) -> ef.Federation:
    return ef.Federation.from_clients({n: (x, factor * y) for n, (x, y) in rows().items()})


def predict(algorithm: Any, factor: float) -> np.ndarray:
    """Return predictions in the unit of the first target."""
    clients = ef.simulate(arrays(factor), "linear", "squared", l2=1e-2)
    history = ef.train(algorithm, clients, rounds=12)
    return np.asarray(history.predictor().predict(rows()["c"][0])).ravel() / factor


ALGORITHMS = {
    **{name: ef.FairNewton(STRENGTHS[name]) for name in ("chi-square", "kl", "l2-distance")},
    "scaff-pd": ef.ScaffPD(ChiSquare(0.3)),
    "scaff-pd-ia": ef.ScaffPDIA(0.2, rho=0.3),
}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_automatic_steps_find_the_same_model_in_every_unit(algorithm: Any) -> None:
    wanted = predict(algorithm, 1.0)
    for factor in FACTORS:
        assert predict(algorithm, factor) == pytest.approx(wanted, rel=1e-3, abs=1e-3), factor


def table(factor: float) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"site": [], "p": [], "q": [], "r": [], "cost": []}
    for name, (x, y) in rows().items():
        for features, target in zip(x.tolist(), (factor * y).tolist(), strict=True):
            for column, value in zip(columns.values(), (name, *features, target), strict=True):
                column.append(value)
    return columns


def of_configuration(factor: float, folder: Path) -> np.ndarray:
    import pandas as pd

    frame = pd.DataFrame(table(factor))
    frame.to_csv(folder / "rows.csv", index=False)
    data = {"name": "table", "path": str(folder / "rows.csv"), "client": "site", "target": "cost"}
    algorithm = {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 0.3}}
    given = {"rounds": 12, "data": data, "model": {"name": "linear", "loss": "squared", "l2": 1e-2}}
    history = ef.run({**given, "algorithm": algorithm}, folder / "run")
    return np.asarray(history.predictor().predict(frame)).ravel()


def of_an_estimator(factor: float, folder: Path) -> np.ndarray:
    from equifed.sklearn import FairRegressor

    owners = np.repeat(list(rows()), 40)
    x = np.concatenate([x for x, _ in rows().values()])
    y = np.concatenate([y for _, y in rows().values()])
    fair = FairRegressor(objective=ChiSquare(0.3), l2=1e-2)
    return np.asarray(fair.fit(x, factor * y, clients=owners).predict(x)).ravel()


@pytest.mark.long
@pytest.mark.parametrize("ways", [of_configuration, of_an_estimator])
def test_predictions_are_in_the_unit_of_the_target(ways: Any, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    wanted = ways(1.0, tmp_path / "one")
    assert np.abs(wanted).max() > 1
    for k, factor in enumerate(FACTORS):
        (tmp_path / str(k)).mkdir()
        found = ways(factor, tmp_path / str(k)) / factor
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3), factor
