"""Bounds that are declared, and how a budget is split among what a client is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from equifed.contract.arrays import check_settings
from equifed.privacy.ledger import Unit, check_delta, find_factor

KINDS = ("moments", "losses", "gradients", "steps")
"""What a site answers: second moments, mean losses, mean gradients, gradients of local steps."""

PARTS = {"moments": 1.0, "losses": 1.0, "gradients": 3.0, "steps": 3.0}
"""Parts of mu^2 by kind, of those that are asked."""

IDLE = 0.1
"""Part of losses that are recorded but decide nothing."""


@dataclass(frozen=True)
class Planned:
    """How often one client is asked in all rounds together.

    ``q`` is the share of its rows in each local step; ``idle`` means that losses decide nothing.
    """

    moments: int = 0
    losses: int = 0
    gradients: int = 0
    steps: int = 0
    q: float = 1.0
    idle: bool = False

    def counts(self) -> dict[str, int]:
        """Return the kinds that are asked, and how often."""
        return {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind)}


@dataclass(frozen=True)
class Bounds:
    """Bounds on rows, and the budget of their client; see :class:`equifed.Privacy`."""

    epsilon: float
    rows: float
    loss: float
    rounds: int
    delta: float = 1e-5
    unit: Unit = "record"
    gradient: float | None = None
    most_rows: int = 1
    preparation: Literal["refused", "public"] = "refused"
    secret: bool = False

    def __post_init__(self) -> None:
        bounds = dict.fromkeys(("epsilon", "rows", "loss", "gradient"), "(0, inf)")
        check_settings(self, **bounds, rounds="[1, inf)", most_rows="[1, inf)", unit=get_args(Unit))
        check_settings(self, preparation=("refused", "public"))
        check_delta(self.delta)
        for name in ("rounds", "most_rows"):
            if getattr(self, name) != int(getattr(self, name)):
                raise ValueError(
                    f"Privacy {name} must be a whole number, got {getattr(self, name)}."
                )
        if self.most_rows > 1 and self.unit == "record":
            raise ValueError(
                f"Privacy most_rows={self.most_rows} applies to persons; use unit='person'."
            )

    def split(self, planned: Planned) -> dict[str, float]:
        """Return the share of mu^2 of every kind that is asked."""
        parts = {kind: PARTS[kind] for kind in planned.counts()}
        if planned.idle and "losses" in parts:
            parts["losses"] *= IDLE
        whole = math.fsum(parts.values())
        return {kind: part / whole for kind, part in parts.items()}

    def multipliers(self, planned: Planned) -> dict[str, float]:
        """Return sigma / D of every kind, so that all planned answers meet the budget.

        Where steps are about a sample of the rows an accountant finds the common factor.
        """
        shares, asked = self.split(planned), planned.counts()
        per = {kind: planned.q if kind == "steps" else 1.0 for kind in shares}
        raw = {kind: per[kind] * math.sqrt(asked[kind] / shares[kind]) for kind in shares}
        each = tuple((raw[kind], per[kind], asked[kind]) for kind in shares)
        factor = find_factor(self.epsilon, self.delta, each)
        return {kind: factor * value for kind, value in raw.items()}

    def to_dict(self) -> dict[str, object]:
        """Return the settings as a configuration has them, without what is not given."""
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in held.items() if value is not None}
