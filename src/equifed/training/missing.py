"""A round with those who give a usable answer, and what to do about those who do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from equifed.contract.absence import PATIENCE, Memory, Recall
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Index
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.streams import Stream
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
    """A round that was played: its end, who was left out, what is kept of absent clients."""

    state: Any
    info: Info
    lost: Index
    memory: Memory
    witness: Witness


def play_round(
    algorithm: AnyAlgorithm,
    state: Any,
    clients: Clients,
    stream: Stream,
    r: int,
    policy: MissingPolicy,
    memory: Memory,
    tell: Callable[[dict[str, Any]], None],
) -> Played:
    """Repeat round r without those who give no usable answer, until the others all do.

    Those who are missing count in the step with what they sent last.
    """
    left = clients.index
    while True:
        everybody = len(left) == len(clients.index)
        present = clients if everybody else clients.subset(left)
        try:
            witness = Witness(present)
            seen = Recall(witness, memory, patience_of(algorithm))
            new, info = algorithm.round(state, seen, stream.at("round", r))
            info = info if info.index is not None else replace(info, index=present.index)
            for note in clients.take_notes():
                tell({"event": "stale", "round": r, "reason": note})
            lost = np.setdiff1d(clients.index, left)
            return Played(new, info, lost, seen.memory(), witness)
        except MissingClients as lost:
            for i, reason in lost.reasons.items():
                told = {"round": r, "client": clients.names[i], "reason": reason}
                tell({"event": "quarantine", **told})
            left = np.setdiff1d(left, np.fromiter(lost.reasons, dtype=np.int64))
            policy.check(r, len(left), len(clients.names), lost)


def patience_of(algorithm: Any) -> int:
    """Return after how many rounds without an answer a client's last one is forgotten."""
    inner = getattr(algorithm, "algorithm", None)
    return int(getattr(algorithm, "patience", PATIENCE)) if inner is None else patience_of(inner)
