"""What training itself sees of the clients' answers, before any wrapper or algorithm does.

Two things depend on it. **Numbers near the largest float**: a number of one client can be finite
and yet make those of all overflow (a loss of 1e308 in a sum, an update so long that all clients
diverge from the model that it leads to); such a client is missing, and the others go on.
**Proofs**: a certificate rests on answers about all samples of all clients, so those are remembered
for the round, and what a round hands out as its proof must be what the clients said. Neither costs
anything in an ordinary round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.algorithm import Bound, Proof
from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.curvature import CurvatureSum, Form
from equifed.contract.streams import Stream
from equifed.contract.vectors import ClientVectors
from equifed.contract.views import ClientsView, VectorsView
from equifed.steps.certificate import Certificate, certify

LARGEST = 1e100
"""A loss beyond this is no loss: sums, squares and powers of it overflow."""

FAR = 1e6
"""A vector is absurd if it is so many times as long as the median one, and as the model."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What all clients said about all their samples at a model, and sums of their gradients."""

    x: Vector
    losses: Losses
    sums: list[tuple[Weights, Vector]] = field(default_factory=list)

    def find_sum(self, weights: Weights) -> Vector | None:
        """Return the sum by these weights, if it or a multiple of it was asked for."""
        for asked, total in self.sums:
            if np.array_equal(asked, weights):
                return total
        for asked, total in self.sums:
            size = float(asked @ asked)
            scale = float(weights @ asked) / size if size > 0 else 0.0
            if np.allclose(scale * asked, weights, rtol=1e-12, atol=1e-14 * np.abs(weights).max()):
                return scale * total
        return None


class WitnessedVectors(VectorsView):
    """Client vectors of which none takes the others along."""

    answer: Answer | None = None  # gradients of all samples of all clients

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        total = add(weights)
        if not float(total.norm()) <= FAR:  # not finite, or much longer than models are
            self._find_absurd(self.behind.squared_norms())
        if self.answer is not None:
            self.answer.sums.append((weights, total))
        return total

    @override
    def squared_norms(self) -> Losses:
        squares = self.behind.squared_norms()
        if not squares.max() <= FAR**2:
            self._find_absurd(squares)
        return squares

    def _find_absurd(self, squares: Losses) -> None:
        """Raise for those whose vectors are absurdly long beside the others and the model."""
        lengths = np.sqrt(np.where(np.isnan(squares), np.inf, squares))
        usual = float(np.sort(lengths)[(len(lengths) - 1) // 2])
        model = 0.0 if self.x is None else float(self.x.norm())
        if not np.isfinite(usual) and np.isfinite(lengths).any():  # most of those who are asked
            refuse(self.clients, lengths, ~np.isfinite(lengths), "its vector is not finite")
        if np.isfinite(usual) and np.isfinite(model):
            named = self.kind.replace("_", " ")
            what = f"length of its {named} is {{:.3g}}, that of the median client {usual:.3g}"
            refuse(self.clients, lengths, lengths > FAR * max(usual, 1.0 + model), what)


class Witness(ClientsView):
    """Clients as training sees them: no absurd numbers, and what they said can be confirmed."""

    Vectors = WitnessedVectors

    def __init__(self, behind: Clients) -> None:
        super().__init__(behind)
        self.answers: list[Answer] = []
        self.curvatures: list[CurvatureSum] = []

    @override
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        losses, gradients = super().value_and_gradient(x, stream, batch_size)
        if batch_size is None and len(self.index) == len(self.names):
            answer = Answer(x, losses.copy())
            self.answers.append(answer)
            assert isinstance(gradients, WitnessedVectors)
            gradients.answer = answer
        return losses, gradients

    @override
    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        found = super().curvature_sum(x, weights, form, thin)
        if not isinstance(found, str) and len(self.index) == len(self.names):
            self.curvatures.append(found)
        return found

    def certify(
        self, proof: Proof, index: Index | None, lower: float | None
    ) -> tuple[Certificate | str, float | None]:
        """Return the certificate of a round of clients ``index``, or why there is none.

        ``lower`` is the best bound on the optimum so far; with the answer comes the new one.
        """
        if min(len(self.index), len(self.index if index is None else index)) < len(self.names):
            return "not all clients took part", lower
        confirmed = self.confirm(proof)
        if confirmed is None:
            return "a wrapper or a guard has changed what the clients answered", lower
        known = self.curvature() if proof.curvature is None else proof.curvature
        return certify(confirmed, known, self.inexactness(proof.x), lower)

    def confirm(self, proof: Proof) -> Proof | None:
        """Return the proof with the clients' own numbers; None if it is made of others."""
        for answer in self.answers:
            if answer.x is not proof.x and not bool((answer.x == proof.x).all()):
                continue
            gradient = answer.find_sum(proof.weights)
            told = gradient is not None and _same(gradient, proof.gradient)
            if gradient is not None and told and np.array_equal(answer.losses, proof.losses):
                bound = self._confirm_bound(proof.bound, answer)
                return replace(proof, gradient=gradient, bound=bound)
        return None

    def _confirm_bound(self, bound: Bound | None, answer: Answer) -> Bound | None:
        if bound is None or not any(bound.summed is found for found in self.curvatures):
            return None
        gradient = answer.find_sum(bound.weights)
        return bound if gradient is not None and _same(gradient, bound.gradient) else None

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        sizes = np.abs(numbers)
        bad = ~np.isfinite(numbers)
        if np.sort(sizes)[(len(sizes) - 1) // 2] <= LARGEST:  # else everybody's grow: it diverges
            bad |= sizes > LARGEST
        refuse(self, numbers, bad, f"{what} is {{:.3g}}")
        return numbers


def _same(one: Vector, other: Vector) -> bool:
    """Tell whether two vectors are the same up to rounding."""
    difference, size = float((one - other).norm()), float(one.norm())
    return difference <= 1e-5 * size if one.dtype.itemsize < 8 else difference <= 1e-12 * size


def refuse(clients: ClientsView, numbers: Losses, bad: NDArray[np.bool_], what: str) -> None:
    """Raise :class:`MissingClients` for those whose numbers are bad."""
    if bad.any():
        places = np.flatnonzero(bad)
        reasons = {int(clients.index[k]): what.format(numbers[k]) for k in places}
        raise MissingClients(reasons, clients.names)
