"""Remembering: sampled rounds in which clients that were not asked count with their last answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from equifed.algorithms.absence import rounds_of_patience
from equifed.algorithms.around import Wrapper, WrapperState, change_state, inner_state, unwrap
from equifed.contract import AnyAlgorithm, Clients, ClientVectors, Index, Info, Stream, Vector
from equifed.contract.absence import LARGEST
from equifed.contract.algorithm import as_run, layers
from equifed.contract.arrays import KeyedMemory, Weights
from equifed.contract.views import ClientsView, VectorsView

NEVER = 2**31  # rounds since the last answer of a client that gave none


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, what each client sent last, and the rounds since then."""

    sent: ClientVectors | None = None  # None before the first round without all clients
    away: Index | None = None


class _Recalled(VectorsView):
    """Vectors whose step is a sum over all clients."""

    @override
    def step(self, weights: Weights, everyone: Weights | None = None) -> Vector:
        assert everyone is not None
        table: _Table = self.clients.table
        return table.step(self.clients.behind, self.behind, weights, everyone)


class _Asked(ClientsView):
    """Clients whose vectors go into a table."""

    Vectors = _Recalled
    table: _Table


class _Table:
    """What each client sent last, during one round."""

    def __init__(self, state: State, patience: float) -> None:
        self.sent, self.away, self.patience = state.sent, state.away, patience

    def step(
        self, clients: Clients, vectors: ClientVectors, weights: Weights, everyone: Weights
    ) -> Vector:
        """Return the sum over all clients by their weights now; put the new vectors in."""
        n, here, plain = len(clients.names), clients.index, vectors.weighted_sum
        if len(here) == n and self.sent is None:
            return plain(weights)
        away = np.full(n, NEVER) if self.away is None else np.minimum(self.away + 1, NEVER)
        away[here] = 0
        kept = clients.remember(self.sent, here, vectors)
        table = clients.remembered(kept, np.arange(n))
        if isinstance(kept, KeyedMemory) and not table.at_hand:  # a server that started anew
            kept = clients.remember(None, here, vectors)
            table = clients.remembered(kept, np.arange(n))
            away = np.where(away == 0, 0, NEVER)
        self.sent, self.away = kept, away
        if len(here) == n:
            return plain(weights)
        counted = np.where(away < self.patience, everyone, 0.0)
        known = float(np.abs(counted).sum())
        scale = float(np.abs(everyone).sum()) / known if known > 0 else 0.0
        return table.weighted_sum(scale * counted)


@dataclass(frozen=True)
class Remembering(Wrapper):
    r"""Counts clients that were not sampled with their last answer.

    .. math::

       h_i \leftarrow v_i \quad (i \in S), \qquad
       (x^+, \lambda^+) = \text{the algorithm's round with } \textstyle\sum_i \lambda_i h_i, \qquad
       (x, \lambda) \leftarrow (x, \lambda) + \tfrac{|S|}{N}\,(x^+ - x, \lambda^+ - \lambda)

    S is the sample, :math:`v_i` what a client sends for the sum that moves the model, and
    :math:`h_i` the last of it; losses are the last known ones, too. A sum over S alone has noise
    that does not vanish at the solution; here nothing changes there. Clients that were never asked
    share the weight of the others. With all clients there it *is* the algorithm.

    This is SAG (Schmidt et al. 2017) over clients, as in MIFA (Gu et al. 2021), but the weights in
    the sum are those of now, and model and weights go only |S|/N of their way, because an answer
    counts in N/|S| rounds (``python -m benchmarks.sampling --steps``).

    The server holds N x d numbers, so it is refused where sums are hidden, and under a guard that
    acts. Sampled rounds have no certificate and no :class:`.Safeguarded`.

    Parameters
    ----------
    algorithm : Algorithm
        SCAFF-PD, SCAFF-PD-IA, FedAvg, FedProx, AFL, agnostic FedAvg or a reweighted method (TERM,
        PropFair, Semi-VRed), with ``participation`` below 1; other wrappers go around this one.

    Examples
    --------
    >>> from equifed.algorithms import FedAvg
    >>> Remembering(FedAvg(participation=0.3)).algorithm.participation
    0.3

    References
    ----------
    Schmidt, Le Roux, Bach. "Minimizing finite sums with the stochastic average gradient."
    Mathematical Programming 2017.
    Gu, Huang, Zhang, Huang. "Fast federated learning in the presence of arbitrary device
    unavailability." NeurIPS 2021, Algorithm 1.
    """

    algorithm: AnyAlgorithm

    remembers: ClassVar = True

    def __post_init__(self) -> None:
        core: Any = unwrap(self.algorithm)
        name = type(core).__name__
        for part in layers(self.algorithm)[:-1]:
            if getattr(getattr(part, "guard", None), "mode", "on") == "on":
                around = type(part).__name__
                raise ValueError(
                    f"Remembering goes directly around the algorithm, not around {around}: write "
                    f"{around}(Remembering(...)), or for a guard that acts leave Remembering out."
                )
        if not getattr(core, "one_sum", False):
            raise ValueError(
                f"Remembering needs one sum over uniformly sampled clients, which {name} has not; "
                "use SCAFF-PD, FedAvg or AFL, or Averaged around this algorithm."
            )
        if getattr(core, "clients_per_round", None) or getattr(core, "output", "last") != "last":
            raise ValueError(
                f"Remembering needs uniform samples and the last model, and {name} draws clients "
                "by their weights or returns a mean; set participation instead of "
                "clients_per_round, and use Averaged instead of output='average'."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        numbers = len(clients.names) * x.numel()
        why = "this engine keeps no vectors of clients" if not clients.can_remember() else ""
        why = f"{numbers:,} are more than {LARGEST:,}" if numbers > LARGEST else why
        why = "their sums are hidden from the server" if clients.hides_sums else why
        if why:
            raise ValueError(
                "Remembering holds the last vector of every client at the server, and here "
                f"{why}; run the algorithm without it."
            )
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        n = len(clients.names)
        table = _Table(state, rounds_of_patience(unwrap(self.algorithm), n))
        view = _Asked(clients.subset(clients.index))  # without what training recalls itself
        view.table = table
        new, info = self.algorithm.round(state.inner, view, stream)
        asked = clients.index if info.index is None else info.index
        if len(asked) < n:
            new = self._shortened(inner_state(state.inner), new, len(asked) / n)
        return State(new, table.sent, table.away), info

    def _shortened(self, old: Any, new: Any, share: float) -> Any:
        """Return the new state with model and weights ``share`` of the way from the old ones."""
        to = inner_state(new)
        names = {"x", "weights"} & vars(to).keys()
        moves = {name: (getattr(old, name), getattr(to, name)) for name in names}
        return change_state(new, **{k: a + share * (b - a) for k, (a, b) in moves.items()})

    @override
    def wrapped(self) -> AnyAlgorithm:
        """Return it as training runs it: inside the safeguard only if all clients are asked."""
        run: Any = as_run(self.algorithm)
        sampled = unwrap(self.algorithm).participation < 1  # type: ignore[attr-defined]
        return self if sampled or run is self.algorithm else replace(run, algorithm=self)


def refuse_memory(algorithm: AnyAlgorithm, what: str) -> None:
    """Refuse what changes the vectors of one round around an algorithm that keeps them."""
    if any(isinstance(part, Remembering) for part in layers(algorithm)):
        told = "and Remembering adds those of earlier ones; use one of the two"
        raise ValueError(f"{what} the vectors of one round, {told}.")
