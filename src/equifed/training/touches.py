"""What guards did and saw becomes events; so does a client that leads the others for long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from equifed.contract.algorithm import Info
from equifed.contract.arrays import Weights
from equifed.training.given_out import Kept
from equifed.training.history import History

ROUNDS = 5
"""Rounds in a row after which somebody leads for long."""

LEADS = f"has had more than half of the weight for {ROUNDS} rounds: it leads the others"


def tell_touches(
    kept: Kept, history: History, r: int, info: Info, tell: Callable[[dict[str, Any]], None]
) -> Kept:
    """Tell what a guard did, once per client what it only saw, and who has led for long.

    Returns what to keep.
    """
    seen = {event.get("client") for event in history.events if event["event"] == "watch"}
    for i, kind, reason in info.touches:
        name = history.names[i]
        if kind != "watch" or name not in seen:
            seen.add(name)
            tell({"event": kind, "round": r, "client": name, "reason": reason})
    kept, leader = follow_leader(kept, info.weights)
    if leader is not None:
        tell({"event": "watch", "round": r, "client": history.names[leader], "reason": LEADS})
    return kept


def follow_leader(kept: Kept, weights: Weights) -> tuple[Kept, int | None]:
    """Return what to keep after a round, and who has led for long as of this round.

    Of two clients one has more than half as a rule, which says nothing.

    >>> kept, found = Kept(), []
    >>> for _ in range(6):
    ...     kept, leader = follow_leader(kept, np.array([0.1, 0.7, 0.2]))
    ...     found.append(leader)
    >>> found
    [None, None, None, None, 1, None]
    """
    total = float(np.abs(weights).sum())
    first = int(np.abs(weights).argmax())
    if len(weights) < 3 or not abs(float(weights[first])) > 0.5 * total:
        return replace(kept, leader=-1, leads=0), None
    leads = kept.leads + 1 if kept.leader == first else 1
    return replace(kept, leader=first, leads=leads), first if leads == ROUNDS else None
