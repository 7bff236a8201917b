"""Rounds against what they cannot avoid, as ratios; ``make bench`` runs them, nothing else does.

Processor time of one thread, so that other programs on the machine matter little. Every ratio is
kept with the result (``extra_info``), and has a limit: what it was, and a quarter more.
``--benchmark-save NAME`` and ``--benchmark-compare`` compare runs with each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import engines as dense
from benchmarks import models
from benchmarks.timing import best_times

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy
from equifed.objectives.cvar import CVaR

TURNS, SLACK = 5, 1.25
LIMITS = {"cnn": 0.85, "resnet": 0.75, "lstm": 1.0, "transformer": 0.95, "lora": 0.45}
"""Times the plain loop, on one thread."""

pytestmark = pytest.mark.benchmark(timer=time.process_time, disable_gc=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch have one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def watch(
    benchmark: Any, ours: Callable[[], object], floor: Callable[[], object], limit: float
) -> None:
    """Measure both by turns, keep the ratio, and fail beyond the limit."""
    times = best_times({"floor": floor, "ours": ours}, turns=TURNS)
    benchmark.pedantic(ours, rounds=TURNS)
    ratio = times["ours"] / times["floor"]
    benchmark.extra_info |= {"ratio": ratio, "limit": limit, "torch": torch.__version__}
    assert ratio <= SLACK * limit, f"{ratio:.2f} times the floor, where it was {limit:.2f}"


@pytest.mark.parametrize("name", LIMITS)
def test_a_round_against_the_plain_loop(benchmark: Any, name: str) -> None:
    torch.manual_seed(0)
    module, data = models.MODELS[name](), models.federation(name, 4)
    kind: type[InProcessClients] = StackedClients if name == "lora" else LoopClients
    clients = kind(data, module, cross_entropy, init="given")
    ours = partial(models.our_round, clients, clients.flatten(module))
    plain = partial(models.plain_round, module, models.pairs_of(clients))
    watch(benchmark, ours, plain, LIMITS[name])


@pytest.mark.parametrize(("name", "limit"), [("mlp", 1.3), ("logistic", 1.2)])
def test_a_dense_round_against_its_products(benchmark: Any, name: str, limit: float) -> None:
    module, data = build(name, (dense.FEATURES,), dense.CLASSES), dense.federation(20)
    clients = StackedClients(data, module, cross_entropy)
    work = LocalSGD(lr=0.05, steps=dense.STEPS, batch_size=dense.BATCH)
    ours = partial(dense.fedavg_round, clients, clients.initial(Stream(0)), work)
    watch(benchmark, ours, dense.bare_products(clients._inputs, 20, module, 10), limit)


def test_a_dual_step_of_many_clients_against_a_sort(benchmark: Any) -> None:
    losses, objective = np.random.default_rng(0).random(200_000), CVaR(0.1)
    weights = objective.weights(losses)
    ours = partial(objective.prox, weights + 0.1 * losses, 0.1)
    watch(benchmark, ours, partial(np.sort, losses), 14.0)
