"""Flower's own strategies with its own messages: which round the wrapper ends with, and why."""

from __future__ import annotations

import json
import logging
from functools import partial

import numpy as np
import pytest

pytest.importorskip("flwr")
from flwr.app import (
    ArrayRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy
from flwr.serverapp.strategy import FedAvg
from tests.flower.grid import MemoryGrid

from equifed.flower.best_round import BestRound

WORST = {  # accuracy of each node by round; the mean is best in round 3, the worst in round 2
    11: [0.2, 0.60, 0.95, 0.7],
    12: [0.3, 0.60, 0.95, 0.7],
    13: [0.4, 0.59, 0.30, 0.5],
}


class Grid(MemoryGrid):
    """Flower's loop waits for all replies at once."""

    def create_message(self, *args, **kwargs):
        return Message(*args, **kwargs)

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


def site(values, key="accuracy", broken=()):
    """Return an app that adds 1 to the model, and answers with its number of the round."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = [a + 1 for a in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
        held = {"arrays": ArrayRecord(arrays), "metrics": metrics}
        return Message(RecordDict(held), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        now = int(message.content["config"]["server-round"])
        if now in broken:
            return Message(Error(3, "no data"), reply_to=message)
        metrics = MetricRecord({"num-examples": 10 + context.node_id, key: values[now - 1]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def play(strategy, table=WORST, rounds=4, key="accuracy", broken=None, **options):
    broken = broken or {}
    apps = {node: site(values, key, broken.get(node, ())) for node, values in table.items()}
    best = BestRound(strategy, key, **options)
    grid = Grid(apps, {node: {} for node in apps})
    start = ArrayRecord([np.zeros(3, np.float32)])
    return best, best.start(grid, start, num_rounds=rounds)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


STOCK = "FedAvg FedAvgM FedMedian FedTrimmedAvg FedAdam FedAdagrad FedYogi Krum MultiKrum Bulyan"


@pytest.mark.parametrize(
    "kind",
    [
        *(getattr(strategy, name) for name in STOCK.split()),
        partial(strategy.FedProx, proximal_mu=0.1),
        partial(strategy.QFedAvg, client_learning_rate=0.1),
    ],
)
def test_the_round_of_the_best_worst_site(kind):
    best, result = play(kind())
    plain = kind().start(
        Grid({n: site(v) for n, v in WORST.items()}, {n: {} for n in WORST}),
        ArrayRecord([np.zeros(3, np.float32)]),
        num_rounds=2,
    )
    assert best.round == 2
    (found,), (wanted,) = result.arrays.to_numpy_ndarrays(), plain.arrays.to_numpy_ndarrays()
    np.testing.assert_array_equal(found, wanted)
    assert result.evaluate_metrics_clientapp.keys() == {1, 2, 3, 4}


def test_what_the_strategy_does_is_untouched():
    _, result = play(FedAvg())
    grid = Grid({n: site(v) for n, v in WORST.items()}, {n: {} for n in WORST})
    plain = FedAvg().start(grid, ArrayRecord([np.zeros(3, np.float32)]), num_rounds=4)
    for round, found in result.evaluate_metrics_clientapp.items():  # Flower adds in any order
        wanted = dict(plain.evaluate_metrics_clientapp[round])
        assert dict(found) == pytest.approx(wanted, rel=1e-12)
    assert result.train_metrics_clientapp == plain.train_metrics_clientapp
    assert plain.arrays.to_numpy_ndarrays()[0].tolist() == [4, 4, 4]


def test_lower_may_be_better_and_ties_go_to_the_earlier():
    table = {1: [3.0, 1.0, 1.0], 2: [1.0, 2.0, 2.0]}
    assert play(FedAvg(), table, 3, "eval_loss", higher_is_better=False)[0].round == 2
    assert play(FedAvg(), table, 3, "eval_acc", higher_is_better=True)[0].round == 1


def test_the_worst_fifth_is_another_choice():
    table = {k: [0.9, 0.9] for k in range(1, 9)} | {9: [0.1, 0.2], 10: [0.9, 0.3]}
    assert play(FedAvg(), table, 2, by="site")[0].round == 2  # 0.1 < 0.2
    assert play(FedAvg(), table, 2, by="fifth")[0].round == 1  # mean of two: 0.5 > 0.25


@pytest.mark.parametrize("broken", [{13: (2,)}, {13: (1, 2)}])
def test_a_round_without_a_site_does_not_count(broken):
    assert play(FedAvg(), broken=broken)[0].round == 4


def test_without_a_whole_round_the_last_model_is_returned_with_a_warning():
    gone = {11: (1, 3), 12: (2, 4), 13: ()}
    with pytest.warns(UserWarning, match=r"No round was evaluated by all 3 sites"):
        best, result = play(FedAvg(), broken=gone)
    assert best.round is None and result.arrays.to_numpy_ndarrays()[0].tolist() == [4, 4, 4]
    nan = {11: [0.5] * 4, 12: [0.5, float("nan"), 0.9, float("nan")]}
    assert play(FedAvg(), nan)[0].round == 1


def test_the_report_is_about_the_chosen_round(tmp_path):
    best, _ = play(FedAvg(), names={11: "north", 12: "south"})
    history = best.history()
    assert history.per_client() == {"north": 0.60, "south": 0.60, "node 13": 0.59}
    assert history.given_out.round == 2
    page = best.write_report(tmp_path / "report.html")
    assert "node 13" in page.read_text("utf-8")
    assert "node 13" in json.dumps(json.loads(page.with_suffix(".json").read_text("utf-8")))
    lower, _ = play(FedAvg(), WORST, key="eval_acc", higher_is_better=True)
    assert lower.history().summary() is not None
    assert lower.history().metrics[0].metric == "eval_acc_score"


class OwnLoop(FedAvg):
    def start(self, *args, **kwargs):
        return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BestRound(OwnLoop()), "OwnLoop overrides start"),
        (lambda: BestRound(FedAvg(), "eval_acc"), "Which way is 'eval_acc' better"),
        (lambda: BestRound(FedAvg(), by="mean"), "by must be 'site' or 'fifth'"),
        (lambda: BestRound(FedAvg(), higher_is_better=False), "a known direction"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_site_without_the_number_is_named():
    apps = {n: site(v) for n, v in WORST.items()}
    grid, start = Grid(apps, {n: {} for n in apps}), ArrayRecord([np.zeros(3, np.float32)])
    with pytest.raises(ValueError, match=r"node 1\d sent no number 'loss' .* sent .*accuracy"):
        BestRound(FedAvg(), "loss").start(grid, start, num_rounds=1)
