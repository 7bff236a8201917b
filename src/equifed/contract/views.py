"""Clients seen through something: a view asks the clients behind it and looks at their answers.

A view is what lets a guard, a check or a test double stand between an algorithm and an engine
without either knowing. It changes numbers (:meth:`ClientsView.see_numbers`) and handles
(:meth:`ClientsView.see_vectors`); everything else it passes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from typing_extensions import override

from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import (
    Clients,
    ClientVectors,
    Moved,
    Traffic,
    may_sum,
    weighted_difference,
)
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.evaluation import SPLITS, Evaluation, SampleMetric
from equifed.contract.group import Group
from equifed.contract.local import LocalSGD
from equifed.contract.own import Inexactness, KeepsOwn, TellsOwn
from equifed.contract.questions import KnowsHessians
from equifed.contract.streams import Stream

Kind = Literal[
    "gradient", "displacement", "snapshot", "average", "mean_gradient", "multiplier", "memory"
]
ITERATES = ("snapshot", "average")
"""Kinds of vectors that are models; the others are steps or gradients."""


class VectorsView(ClientVectors):
    """A handle behind which there is another one.

    Parameters
    ----------
    behind : ClientVectors
        The handle that is looked at.
    clients : ClientsView
        Whose they are.
    kind : str
        What the vectors are.
    x : Vector, optional
        The model that they belong to; a memory has none.
    corrected : bool
        Whether they come from local steps with a control.
    """

    def __init__(
        self,
        behind: ClientVectors,
        clients: Any,
        kind: Kind,
        x: Vector | None = None,
        corrected: bool = False,
    ) -> None:
        self.behind, self.clients, self.kind, self.x = behind, clients, kind, x
        self.corrected = corrected

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        return self.behind.weighted_sum(weights)

    @override
    def squared_norms(self) -> Losses:
        return self.behind.squared_norms()

    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        """Return sum_i weights_i (v_i - old_i): as one sum where sums are hidden."""
        if not self.claimed:
            return self.weighted_sum(weights) - old.weighted_sum(weights)
        return weighted_difference(self.behind, _behind(old) or old, weights)

    def allows(self, weights: Weights) -> bool:
        """Tell whether a sum may be asked for."""
        return may_sum(self.behind, weights)

    @property
    def at_hand(self) -> bool:
        """Whether norms cost neither an exchange nor work done again."""
        return bool(getattr(self.behind, "at_hand", False))

    @property
    def claimed(self) -> bool:
        """Whether norms are the clients' own word, because nobody sees their vectors."""
        return bool(getattr(self.behind, "claimed", False))


class ClientsView(Clients):
    """Clients behind which there are others; by itself it changes nothing."""

    Vectors: type[VectorsView] = VectorsView

    def __init__(self, behind: Clients) -> None:
        self.behind = behind

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

    # -- what it passes on ------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """The ledger of the clients behind."""
        return self.behind.traffic

    @property
    def hidden(self) -> object | None:
        """How sums are hidden from the server; None: they are not."""
        return getattr(self.behind, "hidden", None)

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.behind.names

    @property
    @override
    def index(self) -> Index:
        return self.behind.index

    @property
    @override
    def sizes(self) -> Index:
        return self.behind.sizes

    @override
    def initial(self, stream: Stream) -> Vector:
        return self.behind.initial(stream)

    @override
    def flatten(self, model: Any) -> Vector:
        return self.behind.flatten(model)

    @override
    def parameters(self, x: Vector) -> dict[str, Vector]:
        return self.behind.parameters(x)

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
        work: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        moved = self.behind.local_steps(
            x, work, stream, control=_behind(control), target=target, slopes=slopes
        )
        seen: dict[str, Any] = {}
        for kind in work.results:
            vectors = getattr(moved, kind)
            seen[kind] = self.see_vectors(vectors, kind, x, stream, control is not None)  # type: ignore[arg-type]
        if moved.thresholds is not None:
            seen["thresholds"] = self.see_numbers(moved.thresholds, "threshold", stream)
        return replace(moved, **seen)

    @override
    def evaluate(
        self, x: Vector, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        return self.behind.evaluate(x, splits, *([metrics] if metrics else []))

    @override
    def curvature(self) -> Curvature | str:
        return self.behind.curvature()

    @override
    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        return self.behind.curvature_sum(x, weights, form, thin)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        plain = _behind(vectors)
        assert plain is not None
        return self.behind.inner_products(plain, multiply)

    def hessian(self, x: Vector, weights: Weights) -> Vector | str:
        """Return the weighted sum of second derivatives; KnowsHessians asks."""
        if isinstance(self.behind, KnowsHessians):
            return self.behind.hessian(x, weights)
        return "these clients do not add up second derivatives"

    @override
    def group(self) -> Group | None:
        return self.behind.group()

    # -- own parts --------------------------------------------------------------------------------

    def _keeper(self) -> KeepsOwn | None:
        return self.behind if isinstance(self.behind, KeepsOwn) else None

    def describe_own(self) -> str | None:
        """Say what the own parts are; None: there are none."""
        return self.behind.describe_own() if isinstance(self.behind, TellsOwn) else None

    def warn_of_own(self) -> str | None:
        """Say for which clients own parts rest on their penalty alone."""
        return self.behind.warn_of_own() if isinstance(self.behind, TellsOwn) else None

    def remembers_own(self) -> bool:
        """Tell whether a state must hold the own parts."""
        keeper = self._keeper()
        return keeper is not None and keeper.remembers_own()

    def with_own(self, own: Vector) -> Self:
        """Return a view of the same clients with these own parts."""
        part, keeper = copy.copy(self), self._keeper()
        assert keeper is not None
        part.behind = keeper.with_own(own)  # type: ignore[assignment]
        return part

    def own_after(self) -> Vector:
        """Return the own parts after the last local steps."""
        keeper = self._keeper()
        assert keeper is not None
        return keeper.own_after()

    def own_parts(self, x: Vector) -> Vector:
        """Return the own part that every client uses with the shared model x."""
        keeper = self._keeper()
        assert keeper is not None
        return keeper.own_parts(x)

    def own_parameters(self, own: Vector) -> dict[str, Vector]:
        """Return own parts by the parameters' names."""
        keeper = self._keeper()
        assert keeper is not None
        return keeper.own_parameters(own)

    def inexactness(self, x: Vector) -> Inexactness | str | None:
        """Return how far answers at x may be off."""
        return self.behind.inexactness(x) if isinstance(self.behind, TellsOwn) else None

    @override
    def subset(self, index: Index) -> Self:
        part = copy.copy(self)
        part.behind = self.behind.subset(index)
        return part

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        found = self.behind.remembered(vectors, index)
        return self.subset(index).see_vectors(found, "memory", None, None)

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        kept = _behind(vectors)
        assert kept is not None
        return self.behind.remember(memory, index, kept)


def _behind(vectors: ClientVectors | None) -> ClientVectors | None:
    return vectors.behind if isinstance(vectors, VectorsView) else vectors
