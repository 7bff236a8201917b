"""A round with those who give a usable answer: who is missing, and what the round proves.

Training looks at the answers before any wrapper or algorithm does. A finite number can make those
of all clients overflow (a loss of 1e308 in a sum): such a client is missing. And what a round hands
out as its proof must be what all clients said about all their samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.absence import PATIENCE, Recall
from equifed.contract.algorithm import AnyAlgorithm, Bound, Info, Proof, layers
from equifed.contract.arrays import BlockMatrix, ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.curvature import CurvatureSum, Form
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView, VectorsView
from equifed.steps.certificate import Certificate, certify
from equifed.training.final_model import Kept

LARGEST = 1e100  # a loss beyond this is no loss: sums, squares and powers of it overflow

# What the reasons say of clients whose numbers have grown out of bounds
NOT_FINITE = re.compile(r"\b(inf|nan)\b|not finite")

DIVERGED = (
    "no client gave a usable answer, none of their numbers is finite: training diverged. Use "
    "smaller step sizes, or scale features and targets; the model of the round before is saved."
)

FAR = 1e6  # a vector is absurd if it is so many times as long as the median one, and as the model


class TrainingError(RuntimeError):
    """Training cannot go on; the last good state is saved."""


@dataclass(frozen=True)
class MissingPolicy:
    """What to do about clients that give no usable answer.

    ``"continue"`` goes on with the others in that round as long as ``quorum`` of all clients are
    left; ``"fail"`` stops.

    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> half = ef.MissingPolicy(quorum=0.5)  # two of three clients must answer
    >>> len(ef.train(ef.FedAvg(), clients, rounds=2, missing=half).rounds)
    2
    """

    policy: Literal["continue", "fail"] = "continue"
    quorum: float = 0.0

    def check(self, r: int, left: int, everybody: int, lost: MissingClients) -> None:
        """Refuse to go on with too few."""
        if self.policy == "fail":
            why = f"{lost}. The policy for missing clients is 'fail'."
        elif left == 0:
            why = (
                f"no client gave a usable answer ({lost}). If training diverged, use smaller step "
                "sizes; the model of the round before is saved."
            )
        elif left < self.quorum * everybody:
            few = f"{left} of {everybody} clients are left, fewer than the quorum of"
            why = f"{few} {self.quorum:.0%} ({lost})."
        else:
            return
        raise TrainingError(f"Round {r}: {why}") from lost


@dataclass(frozen=True, eq=False)
class Answer:
    """What all clients said about all their samples at a model, and sums of their gradients."""

    x: Vector
    losses: Losses
    sums: list[tuple[Weights, Vector]] = field(default_factory=list)

    def confirm_sum(self, told: Proof | Bound) -> Vector | None:
        """Return the clients' gradient by the weights told, or a multiple; None: another one."""
        exact_first = sorted(self.sums, key=lambda pair: not np.array_equal(pair[0], told.weights))
        for asked, total in exact_first:
            size, least = float(asked @ asked), 1e-14 * np.abs(told.weights).max()
            scale = float(told.weights @ asked) / size if size > 0 else 0.0
            if np.allclose(scale * asked, told.weights, rtol=1e-12, atol=least):
                found, rounding = scale * total, 1e-5 if total.dtype.itemsize < 8 else 1e-12
                same = float((found - told.gradient).norm()) <= rounding * float(found.norm())
                return found if same else None
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
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        squares = self.behind.squared_norms(scale)
        if not squares.max() <= FAR**2:
            self._find_absurd(squares if scale is None else self.behind.squared_norms())
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
        """Return the certificate of a round, or why there is none, and the best lower bound."""
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
            gradient = answer.confirm_sum(proof)
            if gradient is not None and np.array_equal(answer.losses, proof.losses):
                bound = proof.bound
                if bound is not None and not (
                    any(bound.summed is found for found in self.curvatures)
                    and answer.confirm_sum(bound) is not None
                ):
                    bound = None
                return replace(proof, gradient=gradient, bound=bound)
        return None

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        sizes, bad = np.abs(numbers), ~np.isfinite(numbers)
        if np.sort(sizes)[(len(sizes) - 1) // 2] <= LARGEST:  # else everybody's grow: it diverges
            bad |= sizes > LARGEST
        refuse(self, numbers, bad, f"{what} is {{:.3g}}")
        return numbers


def refuse(clients: ClientsView, numbers: Losses, bad: NDArray[np.bool_], what: str) -> None:
    """Raise :class:`MissingClients` for those whose numbers are bad."""
    if bad.any():
        places = np.flatnonzero(bad)
        reasons = {int(clients.index[k]): what.format(numbers[k]) for k in places}
        raise MissingClients(reasons, clients.names)


@dataclass(frozen=True, eq=False)
class Played:
    """A round that was played: its end, who was left out, what is kept, and who saw it."""

    state: Any
    info: Info
    lost: Index
    kept: Kept
    witness: Witness


def play_round(
    algorithm: AnyAlgorithm, state: Any, clients: Clients, stream: Stream, r: int,
    policy: MissingPolicy, kept: Kept, tell: Callable[..., None],
) -> Played:  # fmt: skip
    """Repeat round r without those who give no usable answer, until the others all do.

    Missing clients count with what they sent last; own parts go from each round to the next.
    """
    left, found = clients.index, dict[int, str]()
    while True:
        everybody = len(left) == len(clients.index)
        present = bind_own(clients if everybody else clients.subset(left), kept.own)
        try:
            witness = Witness(present)
            patience = getattr(layers(algorithm)[-1], "patience", PATIENCE)
            seen = Recall(witness, kept.memory, int(patience))
            new, info = algorithm.round(state, seen, stream.at("round", r))
            for i, reason in found.items():
                tell("quarantine", r, reason, client=clients.names[i])
            info = info if info.index is not None else replace(info, index=present.index)
            for kind, note in clients.take_notes():
                tell(kind, r, note)
            own = None if kept.own is None else present.own_after()
            kept = replace(kept, memory=seen.memory(), own=own)
            away = left[:0] if everybody else np.setdiff1d(clients.index, left)
            return Played(new, info, away, kept, witness)
        except MissingClients as lost:
            found |= lost.reasons
            before, left = left, np.setdiff1d(left, np.fromiter(lost.reasons, dtype=np.int64))
            if len(left) == len(before):  # the algorithm holds what they sent in another round
                raise TrainingError(f"Round {r}: {lost}, and were left out already.") from lost
            if len(left) == 0 and all(map(NOT_FINITE.search, found.values())):
                raise TrainingError(f"Round {r}: {DIVERGED}") from None  # nobody's fault
            try:
                policy.check(r, len(left), len(clients.names), lost)
            except TrainingError:
                for i, reason in found.items():
                    tell("quarantine", r, reason, client=clients.names[i])
                raise


def certify_round(played: Played, about: Any) -> tuple[Info, Kept, Any]:
    """Return what a round tells with its certificate, what to keep, and the objective."""
    info, kept, found = played.info, played.kept, played.info.proof
    if isinstance(found, Proof):
        if not found.final:
            return info, kept, about
        if about not in (None, found.objective):  # what is known is about another problem
            kept = replace(kept, proved=None, mean=None, lower=None)
        about = found.objective
        proved, lower = played.witness.certify(found, info.index, kept.lower)
        kept = replace(kept, lower=lower)
        if isinstance(proved, Certificate):
            numbers, value = info.numbers | proved.numbers(), found.objective.value(found.losses)
            return replace(info, numbers=numbers, objective=value), kept, about
        found = proved
    if found is not None:
        info = replace(info, notes=(*info.notes, f"no certificate: {found}"))
    return info, kept, about


def bind_own(clients: Clients, own: Vector | None) -> Clients:
    """Return the clients with these own parts, if there are any."""
    return clients if own is None else clients.with_own(own)
