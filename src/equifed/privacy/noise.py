"""Noise, and who is drawn for a step: reproducible in simulations, secret at a site."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.streams import Stream

GRID = 2.0**-10  # part of the sensitivity by which the grid moves two answers apart, at most


@dataclass(frozen=True)
class StreamNoise:
    """Gaussian noise of a simulation, which the seed draws again: it protects nothing."""

    stream: Stream
    slack: float = 1.0

    def add(self, value: Tensor, sensitivity: float, sigma: float, *where: str | int) -> Tensor:
        """Return the value with Gaussian noise from this address."""
        drawn = self.stream.at("noise", *where).generator().standard_normal(tuple(value.shape))
        return value + sigma * torch.as_tensor(drawn).to(value)

    def draw(self, count: int, size: int, *where: str | int) -> NDArray[np.int64]:
        """Return rows drawn at this address."""
        return self.stream.at("rows", *where).generator().choice(size, count, replace=False)


class SecretNoise:
    r"""Discrete Gaussian noise on a grid, from the operating system's cryptographic source.

    d numbers of sensitivity D are rounded to multiples of :math:`\gamma = 2^{-10} D / \sqrt d`: the
    ledger counts :math:`(1 + 2^{-10}) D`. Noise is by rejection from a discrete Laplace variable
    (Canonne, Kamath and Steinke 2020), with 64 random bits at a time: its total variation distance
    from the exact one is below 1e-11 for sigma up to :math:`10^6 \gamma`.
    """

    slack = 1 + GRID

    def add(self, value: Tensor, sensitivity: float, sigma: float, *where: str | int) -> Tensor:
        """Return the value on the grid with discrete Gaussian noise."""
        if value.numel() == 0:
            return value
        step = GRID * sensitivity / math.sqrt(value.numel())
        wide = value.double()
        noise = torch.as_tensor(discrete_gaussian(sigma / step, value.numel()), device=wide.device)
        return (step * (torch.round(wide / step) + noise.reshape(wide.shape))).to(value)

    def draw(self, count: int, size: int, *where: str | int) -> NDArray[np.int64]:
        """Return rows drawn secretly."""
        return np.array(secrets.SystemRandom().sample(range(size), count))


Noise: TypeAlias = StreamNoise | SecretNoise


def make_noise(stream: Stream, secret: bool) -> Noise:
    """Return noise at addresses of a stream, or such as nobody can draw again."""
    return SecretNoise() if secret else StreamNoise(stream)


def discrete_gaussian(sigma: float, count: int) -> NDArray[np.float64]:
    r"""Return whole numbers k with probability proportional to :math:`e^{-k^2 / (2 \sigma^2)}`."""
    scale, found = math.floor(sigma) + 1, np.empty(0)
    while len(found) < count:
        some = 2 * (count - len(found)) + 16
        size = np.floor(-scale * np.log(uniform(some)))  # geometric: discrete Laplace, its sign
        sign = np.where(uniform(some) < 0.5, -1.0, 1.0)  # drawn apart, zero counted once
        bend = (size - sigma**2 / scale) ** 2 / (2 * sigma**2)
        kept = (uniform(some) <= np.exp(-bend)) & ~((size == 0) & (sign < 0))
        found = np.concatenate([found, (sign * size)[kept].astype(np.float64)])
    return found[:count]


def uniform(count: int) -> NDArray[np.longdouble]:
    """Return numbers in (0, 1] of 64 secret bits, where the machine's long numbers hold them."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return (bits.astype(np.longdouble) + np.longdouble(1)) / np.longdouble(2.0**64)
