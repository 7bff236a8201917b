"""ServerOptimised: any algorithm whose server steps by momentum, Adagrad, Adam or Yogi."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from equifed.algorithms.around import (
    Averaged,
    Certified,
    WeightedWrapper,
    WrapperState,
    change_state,
)
from equifed.algorithms.safeguarded import Safeguarded
from equifed.contract import AnyAlgorithm, Clients, Info, Stream, Vector
from equifed.contract.algorithm import as_run, layers
from equifed.contract.arrays import check_settings

Optimiser = Literal["momentum", "adagrad", "adam", "yogi"]


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, the model that it was left with, and the two moments."""

    left: Vector
    m: Vector
    v: Vector | None = None  # none for momentum


@dataclass(frozen=True)
class ServerOptimised(WeightedWrapper):
    r"""Applies a server optimiser to the change of each round.

    .. math::

       d &= x - x' && \text{from the model before the round to the algorithm's next} \\
       m &\leftarrow \beta_1 m + d, \quad x \leftarrow x - \text{lr}\, m && \text{momentum} \\
       m &\leftarrow \beta_1 m + (1 - \beta_1)\, d, \quad
       x \leftarrow x - \text{lr}\, m / (\sqrt v + \tau) && \text{the others, with} \\
       v &\leftarrow v + d^2 && \text{Adagrad} \\
       v &\leftarrow \beta_2 v + (1 - \beta_2)\, d^2 && \text{Adam} \\
       v &\leftarrow v - (1 - \beta_2)\, d^2 \operatorname{sign}(v - d^2) && \text{Yogi}

    (Reddi et al. 2021, Algorithm 2; momentum as FedAvgM, Hsu et al. 2019.) v begins at
    :math:`\tau^2`, the least that the paper allows. Momentum with ``betas=(0, 0)`` and ``lr=1`` is
    the algorithm itself. Where a safeguard moves the model between two rounds, the moments begin
    anew. ``Averaged`` and the safeguard belong outside; training puts them there.

    Parameters
    ----------
    algorithm : Algorithm
        Any whose state has its model in ``x``.
    optimiser : {"momentum", "adagrad", "adam", "yogi"}
        Which.
    lr : float, optional
        The server's step. None is 1 for momentum and 0.1 for the others, whose steps have about
        this length in every coordinate: the paper tunes it between 0.001 and 10.
    betas : tuple of two floats
        beta_1 and beta_2, in [0, 1).
    tau : float
        How adaptive: the smaller, the more.

    References
    ----------
    Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. "Adaptive federated
    optimization." ICLR 2021.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> faster = ef.ServerOptimised(ef.FedAvg())
    >>> history = ef.train(faster, clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    algorithm: AnyAlgorithm
    optimiser: Optimiser = "momentum"
    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_settings(self, optimiser=get_args(Optimiser), lr="(0, inf)", tau="(0, inf)")
        object.__setattr__(self, "betas", tuple(self.betas))  # a file has lists
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}.")
        for inner in layers(self.algorithm):
            if isinstance(inner, Safeguarded | Averaged):
                name = type(inner).__name__
                raise ValueError(
                    f"{name} goes around ServerOptimised, not into it: write "
                    f"{name}(ServerOptimised(...))."
                )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return self._begin(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm and the optimiser's step."""
        inner, info = self.algorithm.round(state.inner, clients, stream)
        if not torch.equal(state.x, state.left):
            state = self._begin(state.inner)
        d, (b1, b2) = state.x - inner.x, self.betas
        if state.v is None:
            m = b1 * state.m + d
            x, v = state.x - self.rate * m, None
        else:
            m, v = b1 * state.m + (1 - b1) * d, _second(self.optimiser, state.v, d * d, b2)
            x = state.x - self.rate * m / (v.sqrt() + self.tau)
        return State(change_state(inner, x=x), x, m, v), info

    def wrapped(self) -> AnyAlgorithm:
        """Return it as training runs it: around the algorithm, inside safeguard and proofs."""
        return self._into(as_run(self.algorithm))

    @property
    def rate(self) -> float:
        """The server's step size."""
        return self.lr if self.lr is not None else 1.0 if self.optimiser == "momentum" else 0.1

    def _into(self, outer: AnyAlgorithm) -> AnyAlgorithm:
        if isinstance(outer, Safeguarded | Certified):
            return replace(outer, algorithm=self._into(outer.algorithm))
        return replace(self, algorithm=outer)

    def _begin(self, inner: Any) -> State:
        none = torch.zeros_like(inner.x)
        return State(
            inner, inner.x, none, None if self.optimiser == "momentum" else none + self.tau**2
        )


def _second(optimiser: Optimiser, v: Vector, square: Vector, beta: float) -> Vector:
    """Return the second moment after a squared step."""
    if optimiser == "adagrad":
        return v + square
    if optimiser == "adam":
        return beta * v + (1 - beta) * square
    return v - (1 - beta) * square * torch.sign(v - square)  # Yogi
