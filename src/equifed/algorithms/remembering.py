"""Remembering: any algorithm in whose steps absent clients count with their last answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from equifed.algorithms.attendance import PATIENCE, rounds_of_patience
from equifed.algorithms.wrapper import (
    WeightedWrapper,
    WrapperState,
    inner_state,
    unwrap,
    with_inner_state,
)
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors, Moved, hides_sums
from equifed.contract.local import LocalSGD
from equifed.contract.participation import count_absence
from equifed.contract.streams import Stream

LARGEST = 2**28
"""Most numbers (clients times parameters) that are remembered: 2 GiB in double precision."""


@dataclass(frozen=True, eq=False)
class Memory:
    """What every client sent last.

    Parameters
    ----------
    vectors : ClientVectors
        v_i of all clients, which stay with them.
    weights : Weights
        Those with which they counted.
    total : Vector
        The sum of weights_i v_i.
    heard : array of bool
        Whose answer it holds.
    """

    vectors: ClientVectors
    weights: Weights
    total: Vector
    heard: NDArray[np.bool_]


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, the memory, rounds since each client's last answer, and quiet ones."""

    memory: Memory | None = None
    away: Index | None = None  # None before anybody was missing
    quiet: int = 0  # rounds with everybody there, the last ones in a row


@dataclass(frozen=True)
class Remembering(WeightedWrapper):
    r"""Lets absent clients count with the vectors that they sent last.

    An algorithm moves the model by a sum :math:`\sum_i \lambda_i v_i` over the clients, of
    gradients or of local updates. Where clients of S alone are there, that sum is

    .. math::

       G \leftarrow G + \sum_{i \in S} (\lambda_i v_i - h_i), \qquad h_i \leftarrow \lambda_i v_i,
       \qquad \sum_i \lambda_i v_i \approx \frac{N}{|\text{heard}|} G

    with :math:`h_i` the client's last contribution: MIFA (Gu et al. 2021, Algorithm 1), the
    stochastic average gradient of Schmidt et al. (2017) where chance picks the clients. Scaling the
    sum over S alone has the right mean, too, but its noise does not vanish at the solution; this
    does, for there the contributions no longer change. An answer counts until the next one, in
    |heard|/|S| rounds on average, so the model goes |S|/|heard| of the way: it counts once.

    It begins with the first round in which somebody is missing; until then it is the algorithm
    itself, to the bit. Clients keep their vectors (one model each, as with SCAFFOLD), for one more
    sum in a round. When a client was away for the algorithm's ``patience`` (20 rounds where it has
    none) its last answer is of no use any more, and the memory begins anew without it. It ends
    after as many rounds with everybody there.

    Algorithms that sample clients, or draw them by weights, run as without: their noise is their
    own. So do all where sums are hidden from the server: the sum over those who are there of what
    they sent before, taken from the sum of then, would be the vector of one who is missing.

    Parameters
    ----------
    algorithm : Algorithm
        Any whose model moves by the first weighted sum of the gradients at
        ``stream.at("gradient")`` or, without control variates, of the displacements at
        ``stream.at("local")``, with weights :math:`\lambda_i N/|S|`: those of the catalogue.
    largest : int
        Clients times parameters up to which vectors are remembered.

    References
    ----------
    Gu, Huang, Zhang, Huang. "Fast federated learning in the presence of arbitrary device
    unavailability." NeurIPS 2021.
    """

    algorithm: AnyAlgorithm
    largest: int = LARGEST

    def __post_init__(self) -> None:
        if self.largest < 0:
            raise ValueError(f"largest must be at least 0, got {self.largest}; 0 is no memory.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round, in which those who are missing count as before."""
        n, here = len(clients.names), len(clients.index)
        hidden, large = hides_sums(clients), n * len(state.x) > self.largest
        if (state.away is None and here == n) or hidden or large:
            inner, info = self.algorithm.round(state.inner, clients, stream)
            return State(inner), info
        away, limit = count_absence(state.away, clients.index, n), self._limit(n)
        memory = None if (away == limit).any() else state.memory
        view = Recall(clients, stream, memory)
        after, info = self.algorithm.round(state.inner, cast(Clients, view), stream)
        heard = here if view.memory is None else int(view.memory.heard.sum())
        if here < heard:
            part: Vector = state.x + here / heard * (after.x - state.x)
            after = with_inner_state(after, replace(inner_state(after), x=part))
        quiet = state.quiet + 1 if here == n else 0
        return State(after) if quiet >= limit else State(after, view.memory, away, quiet), info

    def _limit(self, n: int) -> int:
        core = unwrap(self.algorithm)
        return int(np.ceil(rounds_of_patience(core, n))) if hasattr(core, "patience") else PATIENCE


class Recall:
    """The clients of one round, whose step holds what absent ones sent last.

    Subsets of them are the engine's own: an algorithm that samples gets no memory.
    """

    def __init__(self, clients: Clients, stream: Stream, memory: Memory | None) -> None:
        self._clients, self._stream = clients, stream
        self._before, self.memory = memory, memory
        if memory is not None:  # asked for at once: clients keep what is still wanted
            self._last = clients.remembered(memory.vectors, clients.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return the losses, and the gradients whose first sum is the step if they are its own."""
        losses, vectors = self._clients.value_and_gradient(x, stream, batch_size)
        return losses, self._own(vectors) if stream == self._stream.at("gradient") else vectors

    def local_steps(
        self, x: Vector, work: LocalSGD, stream: Stream, *, control: ClientVectors | None = None,
        target: Vector | None = None, slopes: Weights | None = None,
    ) -> Moved:  # fmt: skip
        """Return what came of the local work; without control variates its sum is the step."""
        bare = control.vectors if isinstance(control, _Step) else control
        moved = self._clients.local_steps(
            x, work, stream, control=bare, target=target, slopes=slopes
        )
        if control is not None or stream != self._stream.at("local"):
            return moved
        return replace(moved, displacement=self._own(moved.displacement))

    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        """Return the inner products of the plain vectors."""
        bare = vectors.vectors if isinstance(vectors, _Step) else vectors
        return self._clients.inner_products(bare, multiply)

    def _own(self, vectors: ClientVectors) -> ClientVectors:
        return _Step(vectors, self)

    def step(self, vectors: ClientVectors, weights: Weights) -> Vector:
        """Return the sum over all clients, from that over those who are there; remember it."""
        clients, old, n = self._clients, self._before, len(self._clients.names)
        here = clients.index
        plain, counted = vectors.weighted_sum(weights), weights * (len(here) / n)
        mine, heard = np.zeros(n), np.zeros(n, dtype=np.bool_)
        new = plain * (len(here) / n)  # sum over S of lambda_i v_i
        if old is not None and len(here) < n:
            mine, heard = old.weights.copy(), old.heard.copy()
            new = old.total + new - self._last.weighted_sum(mine[here])
        mine[here], heard[here] = counted, True
        kept = clients.remember(None if old is None else old.vectors, here, vectors)
        self.memory = Memory(kept, mine, new, heard)
        return plain if old is None or len(here) == n else new * (n / heard.sum())


class _Step(ClientVectors):
    """Vectors whose first weighted sum is the step of the round; others are as they are."""

    def __init__(self, vectors: ClientVectors, recall: Recall) -> None:
        self.vectors, self._recall, self._taken = vectors, recall, False

    def weighted_sum(self, weights: Weights) -> Vector:
        if self._taken:
            return self.vectors.weighted_sum(weights)
        self._taken = True
        return self._recall.step(self.vectors, weights)

    def squared_norms(self) -> Losses:
        return self.vectors.squared_norms()
