"""The frontier: its ends are the average and the worst case, certified, cheap, picked fairly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import equifed as ef
from equifed.contract.clients import Clients
from equifed.metrics.intervals import Interval
from equifed.runs.frontier import Frontier, FrontierPoint, _pick
from equifed.training.files import RunFolderError
from equifed.training.stopping import StopAtGap

pytestmark = pytest.mark.long


def clients(l2: float = 0.05) -> Clients:
    data = ef.load("fashion-three", train=120, test=20).split(validation=0.3)
    return ef.simulate(data, "logistic", l2=l2)


def walk(**options: object) -> Frontier:
    return ef.frontier(ef.ScaffPD(ef.objectives.Average()), clients(), **options)  # type: ignore[arg-type]


def test_the_ends_are_average_and_worst_case() -> None:
    path = walk(points=4)
    for point, objective in (
        (path.points[0], ef.objectives.Average()),
        (path.points[-1], ef.objectives.WorstCase()),
    ):
        alone = ef.train(
            ef.ScaffPD(objective),
            clients(),
            rounds=200,
            stop=[StopAtGap(0.005, relative=True)],
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


def test_twelve_points_cost_less_than_four_cold_runs() -> None:
    path = walk(points=12)
    cold = [
        len(
            ef.train(
                ef.ScaffPD(point.objective),
                clients(),
                rounds=200,
                stop=[StopAtGap(0.005, relative=True)],
                progress=False,
            ).rounds
        )
        for point in path.points
    ]
    assert path.rounds < 4 * max(cold)


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
    average = ef.ScaffPD(ef.objectives.Average())
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
    assert list(path.to_frame()["strength"]) == [0, 0.5, 1]
    assert path.plot().get_xlabel() == "validation accuracy, average over clients"
    assert "chosen" in repr(path)
    out = path.save(tmp_path / "out")
    assert (out / "frontier.png").stat().st_size > 1000
    assert (out / "frontier.csv").read_text().count("\n") == 4
    assert ef.History.load(out / "chosen").per_client() == path.chosen.history.per_client()
    with pytest.raises(RunFolderError, match="holds a frontier"):
        path.save(out)
