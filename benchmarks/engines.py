"""A FedAvg round on every engine, against the bare products and gathers that it cannot avoid.

    python -m benchmarks.engines [--clients 100] [--threads 2] [--quick]

100 clients x 600 samples x 784 features, batch 50, 12 local steps (one pass over all samples) for
an MLP 784-50-10 and for logistic regression. Every engine must end at the same loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from benchmarks.timing import best_times, table
from tests.problems import classification
from torch import Tensor, nn

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy
from equifed.objectives.cvar import CVaR
from equifed.steps.schedules import ConstantSteps

SAMPLES, FEATURES, CLASSES, HIDDEN, BATCH, STEPS = 600, 784, 10, 50, 50, 12


def federation(clients: int) -> Federation:
    """Return that many clients of the benchmark's size."""
    return classification([SAMPLES] * clients, (FEATURES,), CLASSES, dtype=np.float32)


def bare_products(data: Tensor, clients: int, module: nn.Module, chunk: int) -> Callable[[], None]:
    """Gather the same minibatches, and multiply matrices of the shapes a round multiplies."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    order = torch.argsort(torch.rand(clients, SAMPLES), dim=1)
    rows = order + SAMPLES * torch.arange(clients).unsqueeze(1)
    weights = [torch.rand(chunk, w.out_features, w.in_features) / 30 for w in layers]

    def once() -> None:
        for first in range(0, clients, chunk):
            for step in range(STEPS):
                part = rows[first : first + chunk, step * BATCH : (step + 1) * BATCH]
                flat = data.index_select(0, part.reshape(-1))
                hidden = [flat.view(len(part), BATCH, FEATURES)]
                for w in weights:
                    hidden.append(torch.bmm(hidden[-1], w[: len(part)].transpose(1, 2)))
                out = hidden.pop()
                for layer in reversed(range(len(weights))):
                    torch.bmm(out.transpose(1, 2), hidden[layer])
                    if layer:
                        out = torch.bmm(out, weights[layer][: len(part)])

    return once


def fedavg_round(clients: InProcessClients, x: Tensor, work: LocalSGD) -> Tensor:
    """Return the model after one round of FedAvg from x."""
    algorithm = FedAvg(work)
    state, _ = algorithm.round(algorithm.init(clients, x), clients, Stream(0).at("round", 0))
    return state.x


def compare(name: str, module: nn.Module, clients: int, quick: bool) -> None:
    data = federation(clients)
    work = LocalSGD(lr=0.05, steps=STEPS, batch_size=BATCH)
    engines = {
        "loop": LoopClients(data, module, cross_entropy),
        "stacked, torch.func": StackedClients(data, module, cross_entropy, fast=False),
        "stacked": StackedClients(data, module, cross_entropy),
    }
    x = engines["loop"].initial(Stream(0))
    floor = "bare products and gather"
    candidates = {k: partial(fedavg_round, engine, x, work) for k, engine in engines.items()}
    candidates[floor] = bare_products(engines["loop"]._inputs, clients, module, 10)
    times = best_times(candidates, turns=2 if quick else 3)
    slow = times.pop("loop")
    del candidates["loop"]
    times |= best_times(candidates, turns=5 if quick else 30)  # the close ones take more turns
    times["loop"] = slow
    judge = engines["loop"]
    losses = {
        key: float(judge.losses(fedavg_round(engine, x, work), Stream(0)).mean())
        for key, engine in engines.items()
    }
    spread = max(losses.values()) - min(losses.values())
    if spread > 1e-4 * losses["loop"]:
        raise SystemExit(f"The engines disagree: {losses}")
    print(table(f"\n{name}, {clients} clients", times, floor))
    print(f"\nloss after the round {losses['loop']:.6f} for all, to {spread:.1e}; ", end="")
    print(f"stacked is {times['loop'] / times['stacked']:.1f} times as fast as loop")


def forward_backward(clients: StackedClients, x: Tensor, block: int = 6000) -> Callable[[], None]:
    """One plain pass over all samples: the gradient of the mean loss at one model."""

    def once() -> None:
        for a in range(0, len(clients._inputs), block):
            leaf = x.detach().requires_grad_()
            inputs, targets = clients._inputs[a : a + block], clients._targets[a : a + block]
            torch.autograd.grad(clients.model.sample_losses(leaf, inputs, targets).sum(), leaf)

    return once


def compare_scaff_pd(name: str, module: nn.Module, clients: int, quick: bool) -> None:
    """SCAFF-PD's round against a FedAvg round of the same local steps plus one plain pass."""
    engine = StackedClients(federation(clients), module, cross_entropy)
    work, x = LocalSGD(lr=0.05, steps=STEPS, batch_size=BATCH), engine.initial(Stream(0))
    algorithm = ScaffPD(CVaR(0.3), work, ConstantSteps(primal=0.3, dual=0.1))
    first, stream = algorithm.init(engine, x), Stream(0).at("round", 0)
    state, _ = algorithm.round(first, engine, stream)  # chooses step sizes once
    times = best_times(
        {
            "SCAFF-PD round": partial(algorithm.round, state, engine, stream),
            "FedAvg round": partial(fedavg_round, engine, x, work),
            "forward and backward": forward_backward(engine, x),
        },
        turns=3 if quick else 15,
    )
    times["sum of the two"] = times["FedAvg round"] + times["forward and backward"]
    print(table(f"\n{name}, {clients} clients, SCAFF-PD", times, "sum of the two"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--clients", type=int, default=100)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    shape = (FEATURES,)
    models = {"MLP 784-50-10": "mlp", "Logistic regression": "logistic"}
    for name, model in models.items():
        module = build(model, shape, CLASSES)
        compare(name, module, given.clients, given.quick)
        compare_scaff_pd(name, module, given.clients, given.quick)


if __name__ == "__main__":
    main()
