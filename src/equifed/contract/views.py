"""Clients seen through something: a guard, a check or a test double behind an algorithm's back.

A view changes numbers (:meth:`ClientsView.see_numbers`) and handles
(:meth:`ClientsView.see_vectors`); everything else it passes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter, methodcaller
from typing import Any, Literal, Self

from typing_extensions import override

from equifed.contract.arrays import ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, Moved
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream

Kind = Literal[
    "gradient", "displacement", "snapshot", "average", "mean_gradient", "multiplier", "memory"
]
ITERATES = ("snapshot", "average")
"""Kinds of vectors that are models; the others are steps or gradients."""


def _pass_on(name: str) -> Any:
    """Return a method that asks the clients or vectors behind."""

    def ask(self: Any, *given: Any, **named: Any) -> Any:
        return methodcaller(name, *given, **named)(self.behind)

    return ask


class VectorsView(ClientVectors):
    """A handle behind which there is another one: vectors of a kind, of ``clients`` at a model.

    A memory has no model ``x``; ``corrected``: they come from local steps with a control.
    """

    def __init__(
        self,
        behind: ClientVectors,
        clients: Any,
        kind: Kind,
        x: Vector | None = None,
        corrected: bool = False,
    ) -> None:
        self._behind, self.clients, self.kind, self.x = behind, clients, kind, x
        self.corrected = corrected

    @property
    @override
    def behind(self) -> ClientVectors:
        return self._behind

    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        """Return a sum as the algorithm gets it; ``add`` asks the handle behind."""
        return add(weights)

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        return self.see_sum(weights, self.behind.weighted_sum)

    @override
    def step(self, weights: Weights, everyone: Weights | None = None) -> Vector:
        if type(self).weighted_sum is not VectorsView.weighted_sum:  # sums of its own
            return self.weighted_sum(weights)
        return self.see_sum(weights, lambda seen: self.behind.step(seen, everyone))

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        if not self.claimed:
            return self.weighted_sum(weights) - old.weighted_sum(weights)
        return self.behind.weighted_difference(old.behind, weights)

    @override
    def allows(self, weights: Weights) -> bool:
        return self.behind.allows(weights)

    squared_norms: Any = _pass_on("squared_norms")
    at_hand: Any = property(attrgetter("behind.at_hand"))
    claimed: Any = property(attrgetter("behind.claimed"))


class ClientsView(Clients):
    """Clients behind which there are others; by itself it changes nothing."""

    Vectors: type[VectorsView] = VectorsView

    def __init__(self, behind: Clients) -> None:
        self.behind = behind
        self.traffic, self.model = behind.traffic, behind.model
        self.engine, self.choice = behind.engine, behind.choice

    # -- what a view may change -------------------------------------------------------------------

    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        """Return numbers that the clients said of themselves, as the algorithm gets them."""
        return numbers

    def see_vectors(
        self,
        vectors: ClientVectors,
        kind: Kind,
        x: Vector | None,
        stream: Stream | None,
        corrected: bool = False,
    ) -> ClientVectors:
        """Return a handle as the algorithm gets it."""
        return self.Vectors(vectors, self, kind, x, corrected)

    # -- the verbs --------------------------------------------------------------------------------

    @override
    def losses(self, x: Vector, stream: Stream, batch_size: int | None = None) -> Losses:
        return self.see_numbers(self.behind.losses(x, stream, batch_size), "loss", stream)

    @override
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        losses, gradients = self.behind.value_and_gradient(x, stream, batch_size)
        seen = self.see_vectors(gradients, "gradient", x, stream)
        return self.see_numbers(losses, "loss", stream), seen

    @override
    def local_steps(
        self,
        x: Vector,
        local: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        plain, work = None if control is None else control.behind, local.work()
        moved = self.behind.local_steps(
            x, work, stream, control=plain, target=target, slopes=slopes
        )
        kinds: Any = work.results
        seen: dict[str, Any] = {
            kind: self.see_vectors(vars(moved)[kind], kind, x, stream, control is not None)
            for kind in kinds
        }
        if moved.thresholds is not None:
            seen["thresholds"] = self.see_numbers(moved.thresholds, "threshold", stream)
        return replace(moved, **seen)

    @override
    def subset(self, index: Iterable[int] | Index) -> Self:
        return self._of(self.behind.subset(index))

    @override
    def with_own(self, own: Vector) -> Self:
        return self._of(self.behind.with_own(own))

    def _of(self, behind: Clients) -> Self:
        """Return the same view of other clients."""
        part = copy.copy(self)
        part.behind = behind
        return part

    # -- what takes vectors, which are those behind -----------------------------------------------

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        found = self.behind.remembered(vectors, index)
        return self.subset(index).see_vectors(found, "memory", None, None)

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        return self.behind.remember(memory, index, vectors.behind)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        return self.behind.inner_products(vectors.behind, multiply)

    @property
    @override
    def index(self) -> Index:
        return self.behind.index

    # -- what is passed on ------------------------------------------------------------------------

    names: Any = property(attrgetter("behind.names"))
    sizes: Any = property(attrgetter("behind.sizes"))
    hides_sums: Any = property(attrgetter("behind.hides_sums"))
    initial: Any = _pass_on("initial")
    flatten: Any = _pass_on("flatten")
    parameters: Any = _pass_on("parameters")


for _question in vars(Clients).keys() - vars(ClientsView).keys():
    if callable(getattr(Clients, _question)):  # no view forgets one
        setattr(ClientsView, _question, _pass_on(_question))
