"""Averaged: any algorithm that gives out a mean of its last models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from equifed.algorithms.wrapper import WrapperState
from equifed.contract.algorithm import AnyAlgorithm, Info, Wrappable
from equifed.contract.arrays import Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, the mean model, the mean weights, and the rounds they are of."""

    mean: Vector
    weights: Weights | None = None  # None before the first round
    rounds: int = 0
    models: tuple[Vector, ...] = ()  # the last ones, where their number is given
    duals: tuple[Weights, ...] = ()


@dataclass(frozen=True)
class Averaged:
    r"""Gives out a mean of the models, in which later ones count more.

    .. math:: \bar x_t = \Bigl(1 - \frac{\eta + 1}{t + \eta}\Bigr) \bar x_{t-1}
              + \frac{\eta + 1}{t + \eta}\, x_t, \qquad
              \bar\lambda_t \text{ likewise}

    (polynomial-decay averaging, Shamir and Zhang 2013, Section 4). Round s counts about as
    :math:`s^\eta`: all rounds alike for :math:`\eta = 0`, those of the last half about 94 % for
    :math:`\eta = 3`. It needs no horizon, and a run that goes on later gets the same mean.

    Steps of constant length leave noise where clients are missing at random or gradients are of
    minibatches; a mean takes it out. The means of model and weights are what the ergodic guarantees
    of primal-dual methods speak of. The algorithm itself runs as without.

    Parameters
    ----------
    algorithm : Algorithm
        Any; other wrappers may be inside or outside.
    decay : float
        :math:`\eta`, at least 0.
    exponential : float, optional
        In place of the polynomial: round s of t counts as this number to the power t - s, in
        (0, 1). About the last 1/(1 - exponential) rounds matter.
    last : int, optional
        In place of both: the plain mean of the last so many models, which the state then holds
        (stochastic weight averaging, Izmailov et al. 2018).
    """

    algorithm: AnyAlgorithm
    decay: float = 3.0
    exponential: float | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if not self.decay >= 0:
            raise ValueError(f"decay must be at least 0, got {self.decay}; 0 is the plain mean.")
        if self.exponential is not None and not 0 < self.exponential < 1:
            raise ValueError(f"exponential must lie in (0, 1), got {self.exponential}.")
        if self.last is not None and not (isinstance(self.last, int) and self.last >= 1):
            raise ValueError(f"last must be a whole number of models, at least 1, got {self.last}.")
        if self.exponential is not None and self.last is not None:
            raise ValueError("Averaged takes exponential or last, not both.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x), x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm, which counts in the mean."""
        inner, info = self.algorithm.round(state.inner, clients, stream)
        t = state.rounds + 1
        if self.last is not None:
            models = (*state.models, inner.x)[-self.last :]
            duals = (*state.duals, info.weights)[-self.last :]
            x = torch.stack(models).mean(dim=0)
            return State(inner, x, np.mean(duals, axis=0), t, models, duals), info
        share = (self.decay + 1) / (t + self.decay)
        if self.exponential is not None:
            share = (1 - self.exponential) / (1 - self.exponential**t)
        last = info.weights if state.weights is None else state.weights
        mean = state.mean + share * (inner.x - state.mean)
        return State(inner, mean, last + share * (info.weights - last), t), info

    def model(self, state: State) -> Vector:
        """Return the mean model."""
        return state.mean

    def wrapped(self) -> Averaged:
        """Return it around the algorithm as training runs it."""
        inner = self.algorithm
        return replace(self, algorithm=inner.wrapped()) if isinstance(inner, Wrappable) else self
