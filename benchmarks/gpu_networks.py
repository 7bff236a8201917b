"""A FedAvg round of networks on a GPU, as ``auto`` computes it, beside one shared model.

    python -m benchmarks.gpu_networks [MODEL ...] [--clients 100 1000] [--jobs 5] [--store]

Clients of ``benchmarks.models``: 60 samples, batch 20, three local steps. Beside them as many steps
of one model on the minibatches of all clients, in the same precision. *as it is* is batched by
``torch.func`` and replayed as CUDA graphs; *auto* was told of a run of 10,000 rounds, so that it
compiles where that is faster, and says what it did. First ``--jobs`` processes fill torch's cache
of compiled programs, so that what follows also shows what a second run waits for.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from benchmarks.models import BATCH, MODELS, STEPS, federation, our_round
from benchmarks.results import FOLDER, store
from benchmarks.timing import best_times
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as plain_loss

from equifed.contract.streams import Stream
from equifed.data import Federation
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.stacked.compiling import WATCHED, CompiledRule
from equifed.engines.threads import Precision, products_in
from equifed.models.losses import cross_entropy

ROUNDS = 10_000
"""Of the run that ``auto`` is told of."""

SHARED = "one shared model"


def shared_round(module: nn.Module, inputs: Tensor, targets: Tensor, precision: Precision) -> None:
    """Take as many steps with one model on all clients' minibatches: what a GPU can do at best."""
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-9)
    count = len(inputs) // STEPS
    order = torch.randperm(len(inputs), device=inputs.device)
    for step in range(STEPS):
        rows = order[step * count : (step + 1) * count]
        optimiser.zero_grad()
        with products_in(precision, inputs.device):
            plain_loss(module(inputs[rows]), targets[rows]).backward()
        optimiser.step()


def clients_of(data: Federation, module: nn.Module, precision: Precision) -> StackedClients:
    """Return clients on the GPU that start from the module."""
    given = {"device": "cuda", "init": "given", "precision": precision}
    return StackedClients(data, module, cross_entropy, **given)


def prepare(name: str, clients: int, precision: Precision) -> str:
    """Compile once, so that torch's cache has the programs, and return the seconds."""
    data, module = federation(name, clients), MODELS[name]()
    engine = clients_of(data, module, precision)
    plain, shape = engine.rule.data, (clients, BATCH, *data.train.inputs.shape[1:])
    engine.rule.data = CompiledRule(engine.model, plain, {torch.Size(shape)})  # type: ignore[arg-type]
    started = time.perf_counter()
    wait_for(partial(our_round, engine, engine.flatten(module)))
    return f"{name}, {clients}, {precision}: {time.perf_counter() - started:.0f} s"


def compare(
    name: str, data: Federation, module: nn.Module, precision: Precision, turns: int
) -> tuple[dict[str, float], Tensor, str]:
    """Return the seconds of a round, the update, and what ``auto`` says."""
    engine = clients_of(data, module, precision)
    x = engine.flatten(module)
    assert engine.trial is not None
    engine.trial.expect(WATCHED)  # too short a run to compile
    one = copy.deepcopy(module).to("cuda")
    shared = partial(shared_round, one, engine._inputs, engine._targets, precision)
    ours = partial(our_round, engine, x)
    for _ in range(WATCHED):
        ours()
    plain = {SHARED: partial(wait_for, shared), "as it is": partial(wait_for, ours)}
    times = best_times(plain, turns=turns, wall=True)
    engine.expect(None, ROUNDS, Stream(0))
    for _ in range(2 * WATCHED):
        ours()
    told = [note for _, note in engine.take_notes() if note.startswith("Gradients")]
    times |= best_times({"auto": partial(wait_for, ours)}, turns=turns, wall=True)
    return times, ours() - x, told[-1]


def wait_for(call: Callable[[], object]) -> None:
    """Call, and wait for the device."""
    call()
    torch.cuda.synchronize()


def main() -> None:
    """Compare the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=5, help="0: do not prepare")
    parser.add_argument("--store", type=Path, nargs="?", const=FOLDER, help="keep the times")
    given = parser.parse_args()
    asked = given.models or list(MODELS), given.clients
    started = time.perf_counter()
    if given.jobs:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.jobs, spawn, max_tasks_per_child=1) as pool:
            tasks = [pool.submit(prepare, *one) for one in product(*asked, get_args(Precision))]
            print("first:", *(task.exception() or task.result() for task in tasks), sep="\n")
    print(f"{time.perf_counter() - started:.0f} s of preparing", flush=True)
    rows: dict[str, dict[str, float]] = {}
    for name, clients in product(*asked):
        torch.manual_seed(0)
        module, data, exact = MODELS[name](), federation(name, clients), None
        for precision in get_args(Precision):
            times, moved, told = compare(name, data, module, precision, given.turns)
            rows[f"{name}, {clients:,}, {precision}"] = times
            exact = moved if exact is None else exact
            off = float((moved - exact).norm() / exact.norm())
            each = ", ".join(f"{key} {1e3 * took:.1f}" for key, took in times.items())
            print(
                f"{name}, {clients}, {precision}: {each} ms "
                f"({times['auto'] / times[SHARED]:.2f}); off by {off:.1e}; {told}",
                flush=True,
            )
            torch.cuda.empty_cache()
            if given.store is not None:
                store("gpu-networks", SHARED, rows, given.store)


if __name__ == "__main__":
    main()
