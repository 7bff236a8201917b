"""Who takes part in a round, and what becomes of those who do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.arrays import ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView, VectorsView

if TYPE_CHECKING:
    import torch

Mean = TypeVar("Mean", "torch.Tensor", Weights)

PATIENCE = 20
"""Rounds without an answer after which a client no longer counts, unless a number is given."""

LARGEST = 2**28
"""Most numbers (clients times parameters) that are remembered: 2 GiB in double precision."""


def sample_clients(clients: Clients, participation: float, stream: Stream) -> Clients:
    """Return a uniform sample of ``ceil(participation * N)`` of the N clients of the federation."""
    if participation == 1:
        return clients
    wanted = int(np.ceil(participation * len(clients.names)))
    return ask_clients(clients, wanted, stream, "participants")


def ask_clients(
    clients: Clients, size: int | None, stream: Stream, purpose: str = "asked"
) -> Clients:
    """Return a uniform sample of ``size`` clients, at most of those there; None means everybody."""
    if size is None:
        return clients
    pick, wanted = stream.at(purpose).generator(), min(size, len(clients.index))
    return clients.subset(np.sort(pick.choice(clients.index, size=wanted, replace=False)))


def draw_clients(
    clients: Clients, weights: Weights, size: int, stream: Stream
) -> tuple[Clients, Weights]:
    """Return ``size`` draws with replacement, by ``weights``, from the clients that are there.

    A client that is drawn k times works once and counts ``k / size``: same model, same samples,
    same result. The second part of the answer holds these numbers; they sum to one. Where those who
    are there have no weight at all, everybody is as likely.
    """
    chances = weights if len(clients.index) == len(weights) else weights[clients.index]
    if chances.min() < 0:
        raise ValueError(
            f"Clients cannot be drawn by negative weights (least: {chances.min():.3g}), which this "
            "objective allows; let all clients take part in every round instead."
        )
    if not chances.any():
        chances = np.ones(len(chances))
    pick = stream.at("participants").generator()
    drawn = pick.choice(clients.index, size=size, p=chances / chances.sum())
    index, counts = np.unique(drawn, return_counts=True)
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


def scale_to_present(weights: Weights, index: Index, members: Index | None = None) -> Weights:
    r"""Return the weights of clients ``index``, scaled for those who are absent.

    .. math:: w_i = \lambda_i\, N / |\text{present}|, \qquad i \text{ present}

    Whoever is missing at random, the mean of :math:`\sum_i w_i v_i` is
    :math:`\sum_i \lambda_i v_i`, and signs stay. The :math:`w_i` do not sum to one: a step that
    holds them twice scales one of the two (SCAFF-PD), and a mean of models is a mean of steps. With
    everybody present this is ``weights`` itself.

    ``members`` are the N clients that count, if not all do; the others have no weight.

    >>> scale_to_present(np.array([-1.0, 0.0, 2.0]), np.array([0, 1]))
    array([-1.5,  0. ])
    """
    if len(index) == len(weights):
        return weights
    n, here = len(weights), len(index)
    if members is not None:
        n, here = len(members), len(np.intersect1d(index, members))
    return np.asarray(weights[index] * (n / max(here, 1)), dtype=np.float64)


def bound_share(cap: float, n: int, here: int | None = None) -> float:
    """Return the largest share of n clients' weight that one may have: a cap, or two equal shares.

    Where only few of them are ``here`` it is one and a half equal shares of theirs, if that is
    more.

    >>> bound_share(0.2, 100), bound_share(0.2, 4), bound_share(0.2, 1), bound_share(0.2, 100, 5)
    (0.2, 0.5, 1.0, 0.3)
    """
    return min(1.0, max(cap, 2.0 / n, 1.5 / (here or n)))


def limit_shares(weights: Weights, most: float | Weights) -> Weights:
    """Return weights >= 0 of the same sum of which none is above ``most`` of it.

    Those below keep their proportions: w_i = min(most_i, s p_i), the nearest weights in relative
    entropy.

    >>> limit_shares(np.array([8.0, 1.0, 1.0]), 0.5)
    array([5. , 2.5, 2.5])
    """
    total = float(weights.sum())
    limits = np.broadcast_to(np.asarray(most) * total, weights.shape)
    if not total > 0 or not (weights > limits).any():
        return weights
    order = np.argsort(-weights / limits, kind="stable")
    ordered, allowed = weights[order], limits[order]
    below = np.cumsum(ordered[::-1])[::-1]  # of each and all after it: the small ones first
    scale = 1.0
    for k in range(1, len(weights)):  # the first k are at their limits
        left = total - float(allowed[:k].sum())
        if below[k] <= 0 or left <= 0:  # what is left goes to the others in equal parts
            out = np.full(len(limits), max(0.0, left) / (len(limits) - k))
            out[order[:k]] = allowed[:k]
            return out
        scale = left / float(below[k])
        if ordered[k] * scale <= allowed[k]:
            break
    return np.asarray(np.minimum(weights * scale, limits), dtype=np.float64)


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


def count_absence(away: Index | None, index: Index, n: int) -> Index:
    """Return for all n clients the rounds since its last answer, with one of ``index`` now.

    >>> count_absence(np.array([0, 4, 1]), np.array([1]), 3)
    array([1, 0, 2])
    """
    out = np.ones(n, dtype=np.int64) if away is None else away + 1
    out[index] = 0
    return out


# -- what absent clients sent last -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sent:
    """What every client sent last: vectors v_i that stay there, their weights, and the sum.

    ``heard`` tells whose answer it holds.
    """

    vectors: ClientVectors
    weights: Weights
    total: Vector
    heard: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Memory:
    """What is kept from round to round once somebody was missing.

    ``away`` counts the rounds since each client's last answer, ``quiet`` those in a row in which
    everybody answered.
    """

    sent: Sent | None = None
    away: Index | None = None  # None before anybody was missing
    quiet: int = 0


class _Recalled(VectorsView):
    """Vectors whose step holds what absent clients sent last."""

    @override
    def step(self, weights: Weights, everyone: Weights | None = None) -> Vector:
        recalled: Vector = self.clients.step(self.behind, weights)
        return recalled


class Recall(ClientsView):
    r"""Clients in whose step those who are missing count with what they sent last.

    .. math::

       G \leftarrow G + \sum_{i \in S} (\lambda_i v_i - h_i), \qquad h_i \leftarrow \lambda_i v_i,
       \qquad \sum_i \lambda_i v_i \approx \frac{N}{|\text{heard}|} G

    with :math:`h_i` a client's last contribution to the sum that moves the model
    (:meth:`ClientVectors.step`): the memory of MIFA (Algorithm 1), but not its step. An answer
    counts in |heard|/|S| rounds on average, so the step is shortened by |S|/|heard|. Scaling the
    sum over S alone has the right mean, too, but noise at the solution, where contributions no
    longer change (as for the stochastic average gradient, Schmidt et al. 2017).

    It begins with the first round in which somebody is missing; until then sums are the engine's,
    to the bit. It begins anew when a client was away for ``patience`` rounds, and ends after as
    many rounds with everybody there. Subsets are the engine's own. Where sums are hidden there is
    no memory: the difference of two of its sums would be the vector of one who is missing.

    References
    ----------
    Gu, Huang, Zhang, Huang. "Fast federated learning in the presence of arbitrary device
    unavailability." NeurIPS 2021.
    """

    Vectors = _Recalled

    def __init__(self, behind: Clients, memory: Memory, patience: int = PATIENCE) -> None:
        super().__init__(behind)
        self.patience, self._old = patience, memory
        n, here = len(self.names), self.index
        may = behind.can_remember() and not behind.hides_sums
        self.on = may and (memory.away is not None or len(here) < n)
        self.away = count_absence(memory.away, here, n) if self.on else None
        forget = self.away is None or bool((self.away == patience).any())
        self.sent = None if forget else memory.sent
        if self.sent is not None:  # asked for at once: clients keep what is still wanted
            self._last = behind.remembered(self.sent.vectors, here)

    def memory(self) -> Memory:
        """Return what to keep for the next round."""
        quiet = self._old.quiet + 1 if len(self.index) == len(self.names) else 0
        return (
            Memory(self.sent, self.away, quiet) if self.on and quiet < self.patience else Memory()
        )

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        return self.behind.remembered(vectors, index)

    @override
    def subset(self, index: Iterable[int] | Index) -> Any:
        return self.behind.subset(index)

    def step(self, vectors: ClientVectors, weights: Weights) -> Vector:
        """Return the sum over all clients, from that over those who are there; remember it."""
        n, here, old = len(self.names), self.index, self.sent
        plain = vectors.weighted_sum(weights)
        if not self.on or n * plain.numel() > LARGEST:
            return plain
        counted = weights * (len(here) / n)
        mine, heard = np.zeros(n), np.zeros(n, dtype=np.bool_)
        new = plain * (len(here) / n)  # sum over S of lambda_i v_i
        if old is not None and len(here) < n:
            mine, heard = old.weights.copy(), old.heard.copy()
            new = old.total + new - self._last.weighted_sum(mine[here])
        mine[here], heard[here] = counted, True
        kept = self.behind.remember(None if old is None else old.vectors, here, vectors)
        self.sent = Sent(kept, mine, new, heard)
        if old is None or len(here) == n:
            return plain
        everybody = int(heard.sum())
        return new * (n / everybody) * (len(here) / everybody)
