"""The frontier: its ends are the average and the worst case, certified, cheap, picked fairly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.optima import interior_point
from tests.problems import Problem, least_squares, logistic

import equifed as ef
from equifed.contract.clients import Clients
from equifed.metrics import Interval
from equifed.runs.frontier import Frontier, FrontierPoint, _pick
from equifed.training.files import RunFolderError
from equifed.training.final_model import StopWhen

pytestmark = pytest.mark.long


def clients(l2: float = 0.05) -> Clients:
    data = ef.load("fashion-three", train=120, test=20).split(validation=0.3)
    return ef.simulate(data, "logistic", l2=l2)


def walk(**options: object) -> Frontier:
    return ef.frontier(ef.FairNewton(ef.objectives.Average()), clients(), **options)  # type: ignore[arg-type]


def test_the_ends_are_average_and_worst_case() -> None:
    path = walk(points=4)
    for point, objective in (
        (path.points[0], ef.objectives.Average()),
        (path.points[-1], ef.objectives.WorstCase()),
    ):
        alone = ef.train(
            ef.FairNewton(objective),
            clients(),
            rounds=200,
            stop=[StopWhen(at_relative_gap=0.005)],
            progress=False,
        )
        ours, theirs = (h.given_out for h in (point.history, alone))
        assert ours is not None
        assert theirs is not None
        assert ours.objective == pytest.approx(theirs.objective, rel=0.01)


def test_every_point_is_certified_and_training_losses_trade_off() -> None:
    path = walk(points=6, split="train", metric="loss")
    for point in path.points:
        assert point.gap is not None
        assert point.history.given_out is not None
        assert point.gap <= 0.005 * (point.history.given_out.objective or 0.0)
    # Losses without the penalty of the weights: nearly monotone, up to what is certified.
    average = np.array([p.average.estimate for p in path.points])
    worst = np.array([max(p.history.per_client("loss", "train").values()) for p in path.points])
    assert (np.diff(average) >= -0.01 * average[0]).all()
    assert (np.diff(worst) <= 0.01 * worst[0]).all()
    assert worst[-1] < worst[0]


@pytest.mark.parametrize("make", [logistic, least_squares])
def test_every_point_is_within_its_gap_of_an_interior_point_solution(
    make: Callable[..., Problem],
) -> None:
    problem = make(3, n=6, d=4, l2=0.05)
    behind = problem.clients()
    path = ef.frontier(
        ef.FairNewton(ef.objectives.Average()), behind, points=6, split="train", metric="loss"
    )
    assert path.rounds < sum(len(p.history.rounds) for p in path.points)  # it is walked, not begun
    for found in path.points:
        assert found.history.parameters is not None
        x = behind.flatten(found.history.parameters).double().numpy()
        value, best = (
            found.objective.value(problem.losses(x)),
            interior_point(problem, found.objective)[0],
        )
        told = found.history.given_out
        assert told is not None
        assert told.objective == pytest.approx(value, rel=1e-9)
        assert found.gap is not None
        assert -1e-7 * value <= value - best <= found.gap + 1e-7 * value
        assert found.gap <= 0.005 * value


@pytest.mark.parametrize("l2", [1e-2, 1e-3])
@pytest.mark.parametrize("name", ["hospitals", "penguins", "fashion"])
def test_twelve_points_cost_less_than_four_cold_runs(name: str, l2: float) -> None:
    data = {
        "hospitals": lambda: ef.load("heart-disease", test=0.3, validation=0.2),
        "penguins": lambda: ef.load(
            "penguins", clients="species", target="sex", test=0.3, validation=0.2
        ),
        "fashion": lambda: ef.load("fashion-three", train=60, test=20).split(validation=0.3),
    }[name]()
    behind = ef.simulate(data, "logistic", l2=l2)
    before = behind.traffic.totals()[0]
    path = ef.frontier(ef.FairNewton(ef.objectives.Average()), behind)
    assert path.exchanges == behind.traffic.totals()[0] - before  # nothing is left out
    assert all(p.gap is not None for p in path.points)
    runs = [
        ef.train(
            ef.FairNewton(p.objective),
            behind,
            rounds=200,
            stop=StopWhen(at_relative_gap=0.005),
            progress=False,
        ).rounds
        for p in path.points[1::3]
    ]
    assert path.rounds < 4 * np.median([len(rounds) for rounds in runs])
    assert path.exchanges < 4 * np.median([sum(r.exchanges for r in rounds) for rounds in runs])


def test_rounds_of_others_are_those_of_runs_one_after_the_other() -> None:
    chosen = ef.ScaffPD(ef.objectives.Average())
    path = ef.frontier(chosen, clients(), points=3, rounds=4)
    x = None
    for found in path.points:
        alone = ef.train(
            replace(chosen, objective=found.objective), clients(), rounds=4, x=x, progress=False,
            stop=StopWhen(at_relative_gap=0.005),
        )  # fmt: skip
        x = alone.parameters
        assert x is not None
        assert found.history.parameters is not None
        assert found.rounds == len(alone.rounds)
        assert found.exchanges == sum(r.exchanges for r in alone.rounds)
        assert all(bool((x[k] == found.history.parameters[k]).all()) for k in x)


def test_points_without_a_certificate_take_their_rounds_and_no_more() -> None:
    path = ef.frontier(ef.FairNewton(ef.objectives.Average()), clients(0.0), points=3, rounds=2)
    assert [p.gap for p in path.points] == [None] * 3
    assert [len(p.history.rounds) for p in path.points] == [2, 2, 2]
    assert all(not p.way for p in path.points)


def test_a_run_of_a_point_tells_what_it_is() -> None:
    path = walk(points=3)
    told = path.points[1].history.provenance["algorithm"]
    assert (told["name"], told["objective"]["name"]) == ("FairNewton", "ChiSquare")
    assert [len(p.way) > 0 for p in path.points] == [False, False, True]
    assert all("continued" in p.history.rounds[0].numbers for p in path.points[1:])


def point(strength: float, average: float, tail: float) -> FrontierPoint:
    held = [Interval(value, np.nan, np.nan) for value in (average, tail)]
    return FrontierPoint(strength, ef.objectives.Average(), ef.History(("a",)), *held)


def test_the_rule() -> None:
    points = [point(0, 0.80, 0.5), point(0.4, 0.795, 0.6), point(0.7, 0.789, 0.9)]
    assert _pick(points, "accuracy", 0.01)[0].strength == 0.4
    assert _pick(points, "accuracy", 0.02)[0].strength == 0.7
    assert _pick(points, "accuracy", 0.0)[0].strength == 0
    costs = [point(0, 2.0, 4.0), point(0.5, 2.01, 3.0), point(1, 2.5, 2.0)]
    assert _pick(costs, "mse", 0.01)[0].strength == 0.5
    equal = [point(0, 0.8, 0.5), point(1, 0.8, 0.5)]
    assert _pick(equal, "accuracy", 0.01)[0].strength == 0


def test_what_is_refused() -> None:
    average = ef.FairNewton(ef.objectives.Average())
    for options, message in (
        ({"split": "test"}, "not tested by them"),
        ({"points": 1}, "at least two"),
        ({"points": [0.5, 1]}, "rise from 0"),
        ({"give_up": -1}, "give_up"),
    ):
        with pytest.raises(ValueError, match=message):
            ef.frontier(average, clients(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FedAvg has no objective"):
        ef.frontier(ef.FedAvg(ef.LocalSGD(lr=0.1, steps=1)), clients())
    plain = ef.simulate(ef.load("fashion-three", train=20, test=5), "logistic", l2=0.1)
    with pytest.raises(ValueError, match=r"validation"):
        ef.frontier(average, plain, points=2, rounds=2)


def test_folder_frame_and_picture(tmp_path: Path) -> None:
    path = walk(points=3)
    assert [row["strength"] for row in path.rows()] == [0, 0.5, 1]
    assert path.plot().get_xlabel() == "validation accuracy, average over clients"
    assert "chosen" in repr(path)
    out = path.save(tmp_path / "out")
    assert (out / "frontier.png").stat().st_size > 1000
    assert (out / "frontier.csv").read_text().count("\n") == 4
    assert ef.History.load(out / "chosen").per_client() == path.chosen.history.per_client()
    with pytest.raises(RunFolderError, match="holds a frontier"):
        path.save(out)
