"""What an algorithm is: a state, and a round that maps it to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from equifed.arrays import Index, Losses, Vector, Weights
from equifed.clients import Clients, shares
from equifed.streams import Stream

if TYPE_CHECKING:
    import torch

S = TypeVar("S")
Mean = TypeVar("Mean", "torch.Tensor", Weights)


@dataclass(frozen=True)
class Info:
    """What a round can tell about itself; it is recorded and never read back by the algorithm.

    Parameters
    ----------
    weights : array, shape (N,)
        Weight that each client of the federation had in the round's update.
    losses : array, shape (N,), optional
        Client losses at the round's starting point, where the algorithm asked for them; the last
        known ones for clients that took no part.
    objective : float, optional
        Value of the objective at these losses.
    index : array of int, optional
        Clients that took part; None means all.
    numbers : dict of float
        Anything else worth a column (step sizes, a certificate).
    notes : tuple of str
        What a reader of the run should know; each is recorded once, as an event.
    """

    weights: Weights
    losses: Losses | None = None
    objective: float | None = None
    index: Index | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Algorithm(Protocol[S]):
    """State in, state out.

    ``State`` is a frozen dataclass with the model ``x`` in it, sufficient to go on from. Nothing in
    the algorithm itself changes after construction, so the same state, clients and stream give the
    same result twice.
    """

    def init(self, clients: Clients, x: Vector) -> S:
        """Return the state before the first round."""
        ...

    def round(self, state: S, clients: Clients, stream: Stream) -> tuple[S, Info]:
        """Return the state after one round, and what there is to tell."""
        ...

    def answer(self, state: S) -> Vector:
        """Return the model that training would give out now."""
        ...


AnyAlgorithm = Algorithm[Any]


def check_participation(participation: float) -> None:
    """Refuse a fraction of clients outside (0, 1]."""
    if not 0 < participation <= 1:
        raise ValueError(
            f"participation is the fraction of clients in a round, in (0, 1], got {participation}."
        )


def sampled(clients: Clients, participation: float, stream: Stream) -> Clients:
    """Return a uniform sample without repeats of the clients that are there.

    The number is ``ceil(participation * N)`` of the N clients of the federation, at most those that
    are there.
    """
    if participation == 1:
        return clients
    wanted = min(int(np.ceil(participation * len(clients.names))), len(clients.index))
    pick = stream.at("participants").generator()
    return clients.subset(np.sort(pick.choice(clients.index, size=wanted, replace=False)))


def drawn(clients: Clients, weights: Weights, size: int, stream: Stream) -> tuple[Clients, Weights]:
    """Return ``size`` draws with replacement, by ``weights``, from the clients that are there.

    A client that is drawn k times works once and counts ``k / size``: same model, same samples,
    same result. The second part of the answer holds these numbers; they sum to one.
    """
    chances = shares(weights, clients.index)
    if chances.min() < 0:
        raise ValueError(
            f"Clients cannot be drawn by negative weights (least: {chances.min():.3g}), which this "
            "objective allows; let all clients take part in every round instead."
        )
    pick = stream.at("participants").generator()
    index, counts = np.unique(
        pick.choice(clients.index, size=size, p=chances / chances.sum()), return_counts=True
    )
    return clients.subset(index), np.asarray(counts / size, dtype=np.float64)


def spread(weights: Weights, index: Index, n: int) -> Weights:
    """Return weights of all n clients: those given at ``index``, zero elsewhere.

    >>> spread(np.array([0.4, 0.6]), np.array([0, 2]), 3)
    array([0.4, 0. , 0.6])
    """
    out = np.zeros(n)
    out[index] = weights
    return out


def running_mean(mean: Mean | None, new: Mean, count: int) -> Mean:
    """Return the mean of ``count`` values from that of all but the newest (None: there is none).

    >>> running_mean(np.array([1.0, 3.0]), np.array([4.0, 3.0]), 3)
    array([2., 3.])
    """
    return new if mean is None else mean + (new - mean) / count
