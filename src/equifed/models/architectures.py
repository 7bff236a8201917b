"""Models by name, and initialisation with an address.

A builder takes the shape of one sample and the number of outputs and returns a module that maps
``(batch, *input_shape)`` to ``(batch, outputs)``. None of them keeps running statistics, so every
engine can train it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equifed.contract.streams import Stream
from equifed.models.losses import import_object

Init = Literal["given", "fresh"]
"""Where training starts: at the parameters that a module has, or at freshly drawn ones."""

# Largest layers, and most of them: beyond that it is a slip, and building them takes forever
MOST_UNITS, MOST_LAYERS = 1 << 20, 1000

Shape = tuple[int, ...]
Builder = Callable[..., nn.Module]


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero: convex problems need no random start."""

    def reset_parameters(self) -> None:
        """Set weights and bias to zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def linear(input_shape: Shape, outputs: int, *, bias: bool = True) -> nn.Module:
    """One linear map of the flattened features, starting at zero."""
    return nn.Sequential(nn.Flatten(), ZeroLinear(prod(input_shape), outputs, bias=bias))


def logistic(input_shape: Shape, outputs: int, *, bias: bool = True) -> nn.Module:
    """Scores of logistic regression: ``linear``, with one output per class or a single one."""
    return linear(input_shape, outputs, bias=bias)


def mlp(
    input_shape: Shape, outputs: int, *, hidden: Sequence[int] = (50,), dropout: float = 0.0
) -> nn.Module:
    """Fully connected layers with ReLU, and dropout after each hidden layer if asked for."""
    _check("mlp", dropout, hidden=tuple(hidden))
    layers: list[nn.Module] = [nn.Flatten()]
    widths = [prod(input_shape), *hidden]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(
    input_shape: Shape,
    outputs: int,
    *,
    channels: Sequence[int] = (16, 32),
    kernel: int = 5,
    hidden: int = 64,
    groups: int = 0,
    dropout: float = 0.0,
) -> nn.Module:
    """Convolutions that each halve the image, GroupNorms if ``groups``, then one hidden layer."""
    _check("cnn", dropout, channels=tuple(channels), kernel=kernel, hidden=hidden)
    shape = (1, *input_shape) if len(input_shape) == 2 else input_shape
    if len(shape) != 3 or min(shape[1:]) < 2 ** len(channels):
        raise ValueError(
            f"cnn with {len(channels)} convolutions needs images (channels, height, width) of at "
            f"least {2 ** len(channels)} pixels a side, got samples of shape {input_shape}."
        )
    layers: list[nn.Module] = [nn.Unflatten(1, (1, shape[1]))] if len(input_shape) == 2 else []
    for fan_in, fan_out in pairwise([shape[0], *channels]):
        layers.append(nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2))
        layers += [nn.GroupNorm(groups, fan_out)] if groups else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    with torch.no_grad():
        width = nn.Sequential(*layers)(torch.zeros(1, *input_shape)).numel()
    layers += [nn.Flatten(), nn.Linear(width, hidden), nn.ReLU()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


class NextToken(nn.Module):
    """Embedding, LSTM, and a linear map of its last state: what comes after the sequence."""

    def __init__(
        self, vocabulary: int, outputs: int, embedding: int, hidden: int, layers: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to scores (batch, outputs)."""
        states, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.output(states[:, -1])
        return scores


def lstm(
    input_shape: Shape,
    outputs: int,
    *,
    embedding: int = 8,
    hidden: int = 100,
    layers: int = 1,
    vocabulary: int | None = None,
) -> nn.Module:
    """LSTM over tokens that predicts the next one; ``vocabulary`` defaults to the outputs."""
    if len(input_shape) != 1:
        raise ValueError(f"lstm needs sequences of tokens, got samples of shape {input_shape}.")
    _check("lstm", embedding=embedding, hidden=hidden, layers=layers)
    return NextToken(vocabulary or outputs, outputs, embedding, hidden, layers)


MODELS: dict[str, Builder] = {one.__name__: one for one in (linear, logistic, mlp, cnn, lstm)}


def build(name: str, input_shape: Sequence[int], outputs: int, **params: Any) -> nn.Module:
    """Build a model of the catalogue, or of ``package.module:factory``.

    A factory is called like the builders here: ``factory(input_shape, outputs, **params)``. The
    global random state is left as it was; call :func:`initialise` for a start with an address.

    >>> build("mlp", (2,), 3, hidden=[4])
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=2, out_features=4, bias=True)
      (2): ReLU()
      (3): Linear(in_features=4, out_features=3, bias=True)
    )
    """
    builder: Builder = MODELS[name] if name in MODELS else import_object(name, "model", MODELS)
    if outputs < 1:
        raise ValueError(f"A model needs at least one output, got {outputs}.")
    allowed = list(inspect.signature(builder).parameters)[2:]
    if name in MODELS and (wrong := sorted(set(params) - set(allowed))):
        known = ", ".join(allowed)
        raise ValueError(f"Model {name} has no parameter {wrong[0]!r}; it has {known}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = builder(tuple(input_shape), outputs, **params)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} must return a torch.nn.Module, got {type(module).__name__}.")
    return module


def initialise(module: nn.Module, stream: Stream) -> nn.Module:
    """Draw the parameters anew, in place, from the address of ``stream``; return the module.

    Every submodule with ``reset_parameters`` draws its own default distribution, from the address
    extended by its name: in float32 on the CPU, so that all dtypes and devices start alike.

    >>> first, second = (initialise(build("mlp", (3,), 2), Stream(1)) for _ in range(2))
    >>> all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    True
    """
    draft = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, part in draft.named_modules():
            reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
            if callable(reset):
                seed = int(stream.at("initialise", name).generator().integers(2**63))
                torch.default_generator.manual_seed(seed)
                reset()
        for parameter, drawn in zip(module.parameters(), draft.parameters(), strict=True):
            parameter.copy_(drawn)
    return module


def choose_init(model: nn.Module | str, init: Init | None) -> Init:
    """Return where training starts: a module that is handed over keeps its parameters."""
    if init not in (None, "given", "fresh"):
        raise ValueError(f"init must be 'given' or 'fresh', got {init!r}.")
    return init or ("fresh" if isinstance(model, str) else "given")


def _check(model: str, dropout: float = 0.0, **values: int | tuple[int, ...]) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"Model {model}: dropout must lie in [0, 1), got {dropout}.")
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        most = MOST_LAYERS if name == "layers" else MOST_UNITS
        whole = all(isinstance(v, int) and 1 <= v <= most for v in numbers)
        if not whole or len(numbers) > MOST_LAYERS:
            seen = value if len(numbers) < 10 else f"{len(numbers)} numbers"
            raise ValueError(
                f"Model {model}: {name} must be whole numbers above 0, at most {most:,} (of "
                f"{MOST_LAYERS:,} layers), got {seen}."
            )
