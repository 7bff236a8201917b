"""A round with those who give a usable answer, and what to do about those who do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from equifed.contract.absence import PATIENCE, Recall
from equifed.contract.algorithm import AnyAlgorithm, Info, Proof, Wrappable
from equifed.contract.arrays import Index, Vector
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.streams import Stream
from equifed.training.final_model import Kept
from equifed.training.witness import Witness


class TrainingError(RuntimeError):
    """Training cannot go on; the last good state is saved."""


@dataclass(frozen=True)
class MissingPolicy:
    """What to do about clients that give no usable answer.

    ``"continue"`` goes on with the others in that round as long as ``quorum`` of all clients are
    left; ``"fail"`` stops.
    """

    policy: Literal["continue", "fail"] = "continue"
    quorum: float = 0.0

    def check(self, r: int, left: int, everybody: int, lost: MissingClients) -> None:
        """Refuse to go on with too few."""
        if self.policy == "fail":
            raise TrainingError(
                f"Round {r}: {lost}. The policy for missing clients is 'fail'."
            ) from lost
        if left == 0:
            raise TrainingError(
                f"Round {r}: no client gave a usable answer ({lost}). If training diverged, use "
                "smaller step sizes; the model of the round before is saved."
            ) from lost
        if left < self.quorum * everybody:
            raise TrainingError(
                f"Round {r}: {left} of {everybody} clients are left, fewer than the quorum of "
                f"{self.quorum:.0%} ({lost})."
            ) from lost


@dataclass(frozen=True, eq=False)
class Played:
    """A round that was played: its end, who was left out, what is kept, and who saw it."""

    state: Any
    info: Info
    lost: Index
    kept: Kept
    witness: Witness


def play_round(
    algorithm: AnyAlgorithm,
    state: Any,
    clients: Clients,
    stream: Stream,
    r: int,
    policy: MissingPolicy,
    kept: Kept,
    tell: Callable[..., None],
) -> Played:
    """Repeat round r without those who give no usable answer, until the others all do.

    Those who are missing count in the step with what they sent last. Clients start from the own
    parts of the round before, and those with which their last local steps ended are in the next.
    """
    left = clients.index
    while True:
        everybody = len(left) == len(clients.index)
        present = bind_own(clients if everybody else clients.subset(left), kept.own)
        try:
            witness = Witness(present)
            seen = Recall(witness, kept.memory, patience_of(algorithm))
            new, info = algorithm.round(state, seen, stream.at("round", r))
            info = info if info.index is not None else replace(info, index=present.index)
            for note in clients.take_notes():
                tell("stale", r, note)
            own = None if kept.own is None else present.own_after()
            kept = replace(kept, memory=seen.memory(), own=own)
            return Played(new, info, np.setdiff1d(clients.index, left), kept, witness)
        except MissingClients as lost:
            for i, reason in lost.reasons.items():
                tell("quarantine", r, reason, client=clients.names[i])
            left = np.setdiff1d(left, np.fromiter(lost.reasons, dtype=np.int64))
            policy.check(r, len(left), len(clients.names), lost)


def as_run(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """Return an algorithm as training runs it, with what a default puts around it."""
    return algorithm.wrapped() if isinstance(algorithm, Wrappable) else algorithm


def certify(played: Played, about: Any) -> tuple[Info, Kept, Any]:
    """Return what a round tells, with its certificate or why there is none, and what to keep.

    ``about`` is the objective that certificates were about so far; the new one comes last.
    """
    info, kept, proof = played.info, played.kept, played.info.proof
    found: Any = proof
    if isinstance(proof, Proof):
        if not proof.final:
            return info, kept, about
        if about not in (None, proof.objective):  # what is known is about another problem
            kept = replace(kept, proved=None, mean=None, lower=None)
        about = proof.objective
        found, lower = played.witness.certify(proof, info.index, kept.lower)
        kept = replace(kept, lower=lower)
    if isinstance(found, str):
        info = replace(info, notes=(*info.notes, f"no certificate: {found}"))
    elif found is not None:
        info = replace(info, numbers=info.numbers | found.numbers())
    return info, kept, about


def bind_own(clients: Clients, own: Vector | None) -> Clients:
    """Return the clients with these own parts, if there are any."""
    return clients if own is None else clients.with_own(own)


def patience_of(algorithm: Any) -> int:
    """Return after how many rounds without an answer a client's last one is forgotten."""
    inner = getattr(algorithm, "algorithm", None)
    return int(getattr(algorithm, "patience", PATIENCE)) if inner is None else patience_of(inner)
