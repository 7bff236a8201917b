"""Who counts in a round: clients that are away for good leave the dual set until they are back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import Clients
from equifed.contract.participation import count_absence, previous_losses, scale_to_present
from equifed.objectives.among import Among
from equifed.objectives.base import Objective

PATIENCE = 20
"""Rounds without an answer after which a client no longer counts, unless a number is given."""


@dataclass(frozen=True, eq=False)
class Attendance:
    """Who takes part in a round, who is away and who counts.

    Parameters
    ----------
    objective : Objective
        The objective over those who count.
    weights : Weights
        The last ones, in which those who count again have an equal share.
    index, members : Index
        Those who take part; those who count (None: all do).
    away, before : Index
        Rounds since each client's last answer: now, and a round ago (None: there was no round).
    notes : tuple of str
        Who left and who is back, in words.
    """

    objective: Any
    weights: Any
    index: Index
    members: Index | None
    away: Index
    before: Index | None
    notes: tuple[str, ...]

    def counted(self) -> Index:
        """Return who counts, there or not."""
        return np.arange(len(self.away)) if self.members is None else self.members

    def scale(self, weights: Weights) -> Weights:
        """Return the weights of those who take part: lambda_i N / |present|."""
        return scale_to_present(weights, self.index, self.members)

    def previous(self, before: Losses | None, losses: Losses) -> Losses:
        """Return the losses of the last round; the present ones of those who were away then."""
        return previous_losses(before, losses, self.before)


def take_attendance(
    algorithm: Any, state: Any, clients: Clients, objective: Objective | None = None
) -> Attendance:
    """Return who counts in a round in which ``clients`` take part.

    A client that gave no answer for the algorithm's ``patience`` leaves the objective (its
    ``objective`` unless another is given): the others share its weight, and its last loss leads
    nobody any more. It counts again in the round in which it answers. An objective with settings
    for each client (a prior, tails) keeps everybody.
    """
    n, away = len(clients.names), state.away
    now, limit = count_absence(away, clients.index, n), rounds_of_patience(algorithm, n)
    old = np.zeros(n, dtype=bool) if away is None else away >= limit
    chosen = algorithm.objective if objective is None else objective
    counted, members = over_members(chosen, now, limit)
    left = np.flatnonzero((now >= limit) & ~old).tolist()
    back = np.flatnonzero(old & (now < limit)).tolist()
    fate = "its weight is shared among the others until it is back"
    if members is None:
        fate = f"it keeps its weight, since {type(chosen).__name__} has numbers for each client"
    told = [f"client {clients.names[i]} has been away for {now[i]} rounds: {fate}" for i in left]
    told += [f"client {clients.names[i]} is back and counts again" for i in back]
    size = n if members is None else len(members)
    weights = _rejoined(getattr(state, "weights", None), back, size)
    return Attendance(counted, weights, clients.index, members, now, away, tuple(told))


def _rejoined(weights: Any, back: list[int], members: int) -> Any:
    if weights is None or not back:
        return weights
    total = weights.sum()  # 1 but where the sum is free
    out = weights * (1 - len(back) / members)
    out[back] = total / members
    return out


def rounds_of_patience(algorithm: Any, n: int) -> float:
    """Return the rounds without an answer after which a client does not count.

    They are ``patience`` where everybody is asked in a round, and more where a sample is.
    """
    drawn = getattr(algorithm, "clients_per_round", None)
    fraction = min(drawn / n, 1.0) if drawn else getattr(algorithm, "participation", 1.0)
    return float(algorithm.patience / fraction)


def over_members(objective: Any, away: Index | None, limit: float) -> tuple[Any, Index | None]:
    """Return the objective over those who count, and who they are; None: everybody does."""
    if away is None or not (away >= limit).any():
        return objective, None
    members: Index = np.flatnonzero(away < limit)
    try:
        objective.value(np.zeros(len(members)))
    except ValueError:  # it has numbers for each client
        return objective, None
    return Among(objective, tuple(members.tolist())), members
