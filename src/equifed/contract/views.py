"""Clients seen through something: a view asks the clients behind it and looks at their answers.

A view is what lets a guard, a check or a test double stand between an algorithm and an engine
without either knowing. It changes numbers (:meth:`ClientsView.see_numbers`) and handles
(:meth:`ClientsView.see_vectors`); everything else it passes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from typing_extensions import override

from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, Group, Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.evaluation import SPLITS, Details, Evaluation, SampleMetric
from equifed.contract.local import LocalSGD
from equifed.contract.own import Inexactness
from equifed.contract.streams import Stream
from equifed.contract.vectors import ClientVectors

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
        self._behind, self.clients, self.kind, self.x = behind, clients, kind, x
        self.corrected = corrected

    @property
    @override
    def behind(self) -> ClientVectors:
        return self._behind

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        return self.behind.weighted_sum(weights)

    @override
    def squared_norms(self) -> Losses:
        return self.behind.squared_norms()

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        if not self.claimed:
            return self.weighted_sum(weights) - old.weighted_sum(weights)
        return self.behind.weighted_difference(old.behind, weights)

    @override
    def allows(self, weights: Weights) -> bool:
        return self.behind.allows(weights)

    @property
    @override
    def at_hand(self) -> bool:
        return self.behind.at_hand

    @property
    @override
    def claimed(self) -> bool:
        return self.behind.claimed


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

    # -- what it passes on ------------------------------------------------------------------------

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
        local: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        plain = None if control is None else control.behind
        moved = self.behind.local_steps(
            x, local, stream, control=plain, target=target, slopes=slopes
        )
        seen: dict[str, Any] = {}
        for kind in local.work().results:
            vectors = getattr(moved, kind)
            seen[kind] = self.see_vectors(vectors, kind, x, stream, control is not None)  # type: ignore[arg-type]
        if moved.thresholds is not None:
            seen["thresholds"] = self.see_numbers(moved.thresholds, "threshold", stream)
        return replace(moved, **seen)

    @override
    def evaluate(
        self, x: Vector, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        return self.behind.evaluate(x, splits, metrics)

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
        return self.behind.inner_products(vectors.behind, multiply)

    @override
    def hessian(self, x: Vector, weights: Weights) -> Vector | str:
        return self.behind.hessian(x, weights)

    @property
    @override
    def hides_sums(self) -> bool:
        return self.behind.hides_sums

    @override
    def inexactness(self, x: Vector) -> Inexactness | str | None:
        return self.behind.inexactness(x)

    @override
    def describe(self, x: Vector, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        return self.behind.describe(x, split, metrics)

    @override
    def feature_scales(self) -> Losses | str | None:
        return self.behind.feature_scales()

    @override
    def predictor(self, x: Vector) -> Any:
        return self.behind.predictor(x)

    @override
    def origin(self) -> dict[str, Any]:
        return self.behind.origin()

    @override
    def take_notes(self) -> list[str]:
        return self.behind.take_notes()

    @override
    def group(self) -> Group | None:
        return self.behind.group()

    @override
    def describe_own(self) -> str | None:
        return self.behind.describe_own()

    @override
    def warn_of_own(self) -> str | None:
        return self.behind.warn_of_own()

    @override
    def remembers_own(self) -> bool:
        return self.behind.remembers_own()

    @override
    def own_parts(self, x: Vector) -> Vector | None:
        return self.behind.own_parts(x)

    @override
    def with_own(self, own: Vector) -> Self:
        return self._of(self.behind.with_own(own))

    @override
    def own_after(self) -> Vector:
        return self.behind.own_after()

    @override
    def own_parameters(self, own: Vector) -> dict[str, Vector]:
        return self.behind.own_parameters(own)

    @override
    def evaluate_shared(self, x: Vector, splits: Sequence[str]) -> list[Evaluation]:
        return self.behind.evaluate_shared(x, splits)

    @override
    def subset(self, index: Iterable[int] | Index) -> Self:
        return self._of(self.behind.subset(index))

    def _of(self, behind: Clients) -> Self:
        """Return the same view of other clients."""
        part = copy.copy(self)
        part.behind = behind
        return part

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        found = self.behind.remembered(vectors, index)
        return self.subset(index).see_vectors(found, "memory", None, None)

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        return self.behind.remember(memory, index, vectors.behind)
