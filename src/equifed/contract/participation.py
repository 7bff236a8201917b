"""Who takes part in a round, and what becomes of those who do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream

if TYPE_CHECKING:
    import torch

Mean = TypeVar("Mean", "torch.Tensor", Weights)


def check_participation(participation: float) -> None:
    """Refuse a fraction of clients outside (0, 1]."""
    if not 0 < participation <= 1:
        raise ValueError(
            f"participation is the fraction of clients in a round, in (0, 1], got {participation}."
        )


def check_draws(who: str, clients_per_round: int | None, output: str) -> None:
    """Refuse fewer than one draw, and what is neither the last model nor the average."""
    if clients_per_round is not None and clients_per_round < 1:
        raise ValueError(f"{who} clients_per_round must be at least 1, got {clients_per_round}.")
    if output not in ("last", "average"):
        raise ValueError(f"{who} output is 'last' or 'average', got {output!r}.")


def sample_clients(clients: Clients, participation: float, stream: Stream) -> Clients:
    """Return a uniform sample without repeats of the clients that are there.

    The number is ``ceil(participation * N)`` of the N clients of the federation, at most those that
    are there.
    """
    if participation == 1:
        return clients
    wanted = min(int(np.ceil(participation * len(clients.names))), len(clients.index))
    pick = stream.at("participants").generator()
    return clients.subset(np.sort(pick.choice(clients.index, size=wanted, replace=False)))


def draw_clients(
    clients: Clients, weights: Weights, size: int, stream: Stream
) -> tuple[Clients, Weights]:
    """Return ``size`` draws with replacement, by ``weights``, from the clients that are there.

    A client that is drawn k times works once and counts ``k / size``: same model, same samples,
    same result. The second part of the answer holds these numbers; they sum to one.
    """
    chances = scale_to_present(weights, clients.index)
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


def scatter(weights: Weights, index: Index, n: int) -> Weights:
    """Return weights of all n clients: those given at ``index``, zero elsewhere.

    >>> scatter(np.array([0.4, 0.6]), np.array([0, 2]), 3)
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


def scale_to_present(weights: Weights, index: Index) -> Weights:
    """Return the weights of clients ``index``, scaled to keep the total of all.

    With everybody present this is ``weights`` itself. Clients that hold the whole weight may be
    absent; then those present share it equally, so that a round still moves.

    >>> scale_to_present(np.array([0.5, 0.25, 0.25]), np.array([1, 2]))
    array([0.5, 0.5])
    """
    if len(index) == len(weights):
        return weights
    present, total = weights[index], weights.sum()
    held = present.sum()
    if abs(held) <= 1e-12 * max(1.0, float(np.abs(present).sum())):
        return np.full(len(index), total / len(index))
    return np.asarray(present * (total / held), dtype=np.float64)


def carry_over(everyone: Losses | None, index: Index, values: Losses, n: int) -> Losses:
    """Return the numbers of all n clients after those of ``index`` answered.

    The others keep their last. A client that never answered takes the mean of those that did, so it
    neither leads nor trails the dual step.

    >>> carry_over(np.array([1.0, 2.0, 3.0]), np.array([1]), np.array([9.0]), 3)
    array([1., 9., 3.])
    """
    out = np.full(n, values.mean()) if everyone is None else everyone.copy()
    out[index] = values
    return out
