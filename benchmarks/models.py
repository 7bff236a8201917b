"""A FedAvg round for models that are not fully connected, against a plain PyTorch loop.

    python -m benchmarks.models [cnn resnet lstm transformer lora] [--threads 2]
    python -m benchmarks.models cnn --threads 2 --profile     (where the time goes)

10 clients x 60 samples, batch 20, three local steps. The plain loop is what one would write without
a library: a copy of the module for each client, ``torch.optim.SGD``, and the average. Networks on a
GPU: ``benchmarks.gpu_networks``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.model_profile import print_profile
from benchmarks.results import FOLDER, store
from benchmarks.timing import best_times, table
from tests.problems import classification
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as plain_loss

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import Federation, Split
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.threads import products_in
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy

SAMPLES, BATCH, STEPS, LR, CLASSES, LENGTH = 60, 20, 3, 0.05, 10, 80
IMAGE = (3, 32, 32)
BASE = "plain loop"


class Block(nn.Module):
    """Two convolutions with GroupNorm beside a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, fan_out) for _ in range(2))
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to images of half the size."""
        hidden = torch.relu(self.norms[0](self.first(images)))
        return torch.relu(self.norms[1](self.second(hidden)) + self.shortcut(images))


def resnet() -> nn.Module:
    """Return a residual network of three blocks."""
    blocks = [Block(a, b, 2) for a, b in ((16, 16), (16, 32), (32, 64))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)


class Transformer(nn.Module):
    """Tokens, two encoder layers, and a linear map of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(64, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to scores."""
        scores: Tensor = self.output(self.encoder(self.embedding(tokens)).mean(dim=1))
        return scores


class Adapter(nn.Module):
    """A frozen linear map plus a trained product of low rank (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return W h + B A h."""
        result: Tensor = self.frozen(features) + self.up(self.down(features))
        return result


def lora() -> nn.Module:
    """Return adapters in a frozen network, and a trained head."""
    hidden = [Adapter(nn.Linear(3072, 512)), nn.ReLU(), Adapter(nn.Linear(512, 512)), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: build("cnn", IMAGE, CLASSES),
    "resnet": resnet,
    "lstm": lambda: build("lstm", (LENGTH,), CLASSES),
    "transformer": Transformer,
    "lora": lora,
}


def federation(name: str, clients: int) -> Federation:
    """Return images, or tokens for models of sequences."""
    if name not in ("lstm", "transformer"):
        return classification([SAMPLES] * clients, IMAGE, CLASSES, dtype=np.float32)
    draw = np.random.default_rng(0)
    count = clients * SAMPLES
    tokens = draw.integers(CLASSES, size=(count, LENGTH))
    split = Split(tokens, draw.integers(CLASSES, size=count), np.arange(clients + 1) * SAMPLES)
    names = tuple(f"client {i}" for i in range(clients))
    return Federation("tokens", names, split, classes=CLASSES)


def plain_round(module: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the average of the clients' models after their local steps."""
    ends = []
    for inputs, targets in data:
        own = copy.deepcopy(module)
        optimiser = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=LR)
        order = torch.randperm(len(inputs), device=inputs.device)
        for step in range(STEPS):
            rows = order[step * BATCH : (step + 1) * BATCH]
            optimiser.zero_grad()
            with products_in("full", inputs.device):  # no tf32 for convolutions, as in ours
                plain_loss(own(inputs[rows]), targets[rows]).backward()
            optimiser.step()
        ends.append(own.state_dict())
    return {k: torch.stack([end[k] for end in ends]).mean(dim=0) for k in ends[0]}


def our_round(clients: InProcessClients, x: Tensor) -> Tensor:
    """Return the same with an engine."""
    work = LocalSGD(lr=LR, steps=STEPS, batch_size=BATCH)
    moved = clients.local_steps(x, work, Stream(0))  # type: ignore[attr-defined]
    n = len(clients.names)
    total: Tensor = x - moved.displacement.weighted_sum(np.full(n, 1 / n))
    return total


def explain(name: str, clients: int, turns: int) -> None:
    """Print where the time of the plain loop goes, and that of ours, on a CPU."""
    torch.manual_seed(0)
    module = MODELS[name]()
    held = LoopClients(federation(name, clients), module, cross_entropy, init="given")
    plain = partial(plain_round, module, pairs_of(held))
    ours = partial(our_round, held, held.flatten(module))
    print_profile(name, plain, ours, torch.get_num_threads(), turns)


def pairs_of(held: InProcessClients) -> list[tuple[Tensor, Tensor]]:
    """Return every client's inputs and targets."""
    begins = range(0, len(held.names) * SAMPLES, SAMPLES)
    return [(held._inputs[a : a + SAMPLES], held._targets[a : a + SAMPLES]) for a in begins]


def compare(name: str, clients: int, turns: int) -> dict[str, float]:
    """Print the times of one model, and return them."""
    torch.manual_seed(0)
    module, data = MODELS[name](), federation(name, clients)
    given = {"init": "given"}
    engines: dict[str, InProcessClients] = {
        "loop": LoopClients(data, module, cross_entropy, **given),
        "stacked": StackedClients(data, module, cross_entropy, **given),
        "auto": simulate(data, module, cross_entropy, **given),
    }
    x = engines["loop"].flatten(module)
    candidates: dict[str, Callable[[], object]] = {
        BASE: partial(plain_round, copy.deepcopy(module), pairs_of(engines["loop"]))
    }
    candidates |= {k: partial(our_round, engine, x) for k, engine in engines.items()}
    ends = {key: our_round(engine, x) for key, engine in engines.items()}
    times = best_times(candidates, turns=turns)
    apart = max(float((end - ends["stacked"]).abs().max()) for end in ends.values())
    if apart > 1e-4:
        raise SystemExit(f"{name}: the engines disagree by {apart}")
    chosen = engines["auto"].engine
    title = f"\n{name}, {clients} clients, {torch.get_num_threads()} threads, auto is {chosen}"
    print(table(title, times, BASE), flush=True)
    return times


def main() -> None:
    """Compare the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--store", type=Path, nargs="?", const=FOLDER, help="keep the times")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    names = given.models or list(MODELS)
    if given.profile:
        for name in names:
            explain(name, given.clients, given.turns)
        return
    rows = {name: compare(name, given.clients, given.turns) for name in names}
    if given.store is not None:
        store(f"models-cpu-{given.clients}", BASE, rows, given.store)


if __name__ == "__main__":
    main()
