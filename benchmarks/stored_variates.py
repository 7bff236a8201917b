"""Where stored variates diverge on a network where FedAvg trains: the curvature of single clients.

    python -m benchmarks.stored_variates [--writers 24] [--rounds 60] [--lr 0.4] [--steps 5]
                                         [--batch-size N] [--network deep|shallow] [--momentum]

FEMNIST's writers, an MLP, all samples of a client in every local step (unless ``--batch-size`` says
how many), so that nothing is noise. For FedAvg, for SCAFF-PD with the average objective and
gradients at the model, and for SCAFFOLD's option II (a = 1, 0.5, 0.3: the part that counts),
it prints the training loss and lr times the largest curvature of the pooled loss and of single
clients' losses, at the last model or the last one before a client's update was not finite. The
memory of stored variates is stable up to 2 (an even number of steps; 2.96 for five), see
:class:`equifed.Scaffold`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from experiments.harness.network_parts import folded_femnist
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.functional import cross_entropy

import equifed as ef
from equifed.contract import AnyAlgorithm, Stream
from equifed.contract.clients import MissingClients
from equifed.objectives import Average
from equifed.steps import ConstantSteps

NETWORKS = {"shallow": (64,), "deep": (64, 64, 64)}
ITERATIONS = 25


def network(hidden: tuple[int, ...]) -> nn.Module:
    """Return an MLP for FEMNIST's images."""
    layers: list[nn.Module] = [nn.Flatten()]
    sizes = (784, *hidden)
    for fan_in, fan_out in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 62))


def largest_curvature(module: nn.Module, parameters: dict[str, Tensor], x: Any, y: Any) -> float:
    """Return the largest eigenvalue of the Hessian of the loss, by power iteration."""
    inputs, targets = torch.as_tensor(np.asarray(x)), torch.as_tensor(np.asarray(y))

    def loss(given: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(module, given, (inputs,)), targets)

    draw = torch.Generator().manual_seed(0)
    v = {name: torch.randn(p.shape, generator=draw) for name, p in parameters.items()}
    length = 1.0
    for _ in range(ITERATIONS):
        norm = torch.sqrt(sum((one * one).sum() for one in v.values()))  # type: ignore[arg-type]
        v = {name: one / norm for name, one in v.items()}
        _, v = jvp(grad(loss), (parameters,), (v,))
        length = float(torch.sqrt(sum((one * one).sum() for one in v.values())))  # type: ignore[arg-type]
    return length


def methods(lr: float, steps: int, batch_size: int | None) -> dict[str, AnyAlgorithm]:
    """Return FedAvg, and SCAFF-PD with the average objective and one kind of variates each."""
    work = ef.LocalSGD(lr=lr, steps=steps, batch_size=batch_size)
    sizes = ConstantSteps(primal=lr * steps, dual=0.1, extrapolation=1.0, local=lr)
    core = ef.ScaffPD(Average(), work, sizes)
    kept = {f"kept, a = {a}": ef.Scaffold(replace(work, correction=a)) for a in (1.0, 0.5, 0.3)}
    return {"FedAvg": ef.FedAvg(work, weighting="uniform"), "gradients at x": core, **kept}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--network", choices=NETWORKS, default="deep")
    parser.add_argument("--momentum", action="store_true", help="of the server, 0.9, step 0.3")
    given = parser.parse_args()
    data = folded_femnist(validation=True, writers=given.writers)
    torch.manual_seed(0)
    module = network(NETWORKS[given.network])
    print(f"{'':16} round   loss  lr h, pooled  lr h of a client: median, largest")
    for name, algorithm in methods(given.lr, given.steps, given.batch_size).items():
        if given.momentum:
            algorithm = ef.ServerOptimised(algorithm, "momentum", lr=0.3)
        clients = ef.simulate(data, module)
        x = clients.initial(Stream(0))
        state, last, end = algorithm.init(clients, x), x, ""
        for t in range(1, given.rounds + 1):
            try:
                state, _ = algorithm.round(state, clients, Stream(0).at(t))
            except MissingClients:
                end = "  diverged in the next round"
                break
            if not (state.x.norm() < 1e3):
                end = "  diverged"
                break
            last = state.x
        loss = float(clients.losses(last, Stream(0)).mean())
        parameters = {name: p.detach() for name, p in clients.parameters(last).items()}
        each = [
            given.lr * largest_curvature(module, parameters, *data.train.client(i))
            for i in range(0, len(data.names), 3)
        ]
        pooled = given.lr * largest_curvature(
            module, parameters, data.train.inputs, data.train.targets
        )
        print(
            f"{name:16} {t:5} {loss:6.3f} {pooled:13.2f} {np.median(each):25.2f} {max(each):8.2f}"
            f"{end}",
            flush=True,
        )


if __name__ == "__main__":
    main()
