"""The kinds of answers, the bounds that are declared, and how a budget is split among answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from equifed.contract.arrays import check_settings
from equifed.privacy.ledger import Entry, Unit, check_delta, find_factor


class Mechanism(NamedTuple):
    """One kind of answer: what it is, and its part of mu^2 of those that are asked."""

    words: str
    part: float


MECHANISMS = {
    "moments": Mechanism("second moments", 1.0),
    "losses": Mechanism("mean loss", 1.0),
    "gradients": Mechanism("mean gradient", 3.0),
    "steps": Mechanism("gradient of a local step", 3.0),
    "updates": Mechanism("sum of updates", 0.0),  # at the server, of whole clients
}
IDLE = 0.1
"""Part of losses that are recorded but decide nothing."""


@dataclass(frozen=True)
class Planned:
    """How often one client is asked in all rounds together.

    ``q`` is the share of its rows in each local step; ``idle`` means that losses decide nothing;
    ``part`` is that of mu^2 for this plan, where a client has several.
    """

    moments: int = 0
    losses: int = 0
    gradients: int = 0
    steps: int = 0
    q: float = 1.0
    idle: bool = False
    part: float = 1.0

    def counts(self) -> dict[str, int]:
        """Return the kinds that are asked, and how often."""
        return {kind: count for kind in MECHANISMS if (count := getattr(self, kind, 0))}


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
            if (value := getattr(self, name)) != int(value):
                raise ValueError(f"Privacy {name} must be a whole number, got {value}.")
        if self.most_rows > 1 and self.unit == "record":
            raise ValueError(
                f"Privacy most_rows={self.most_rows} applies to persons; use unit='person'."
            )

    def split(self, planned: Planned) -> dict[str, float]:
        """Return the share of mu^2 of every kind that is asked."""
        parts = {kind: MECHANISMS[kind].part for kind in planned.counts()}
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
        return {kind: factor * value / math.sqrt(planned.part) for kind, value in raw.items()}

    def reach(self, slope: float = 1.0, bias: bool = True, squared: bool = False) -> dict[str, Any]:
        """Return how far another row moves the sum of each kind of answer, at most.

        Gradients of rows are at most as long as the loss's ``slope`` in the outputs times the row,
        with the one of a bias; moments are of rows with the targets of a ``squared`` loss.
        """
        long = math.sqrt(self.rows**2 + bias)
        longest = slope * long if self.gradient is None else self.gradient
        square = long**2 + (self.loss if squared else 0.0)
        moved = {"moments": math.sqrt(2.0) * square, "losses": self.loss}
        return moved | dict.fromkeys(("gradients", "steps"), 2 * longest)

    def price(
        self, kind: str, reach: float, scale: float, size: int, count: int, *,
        steps: int = 1, slack: float = 1.0,
    ) -> Entry:  # fmt: skip
        """Return what answers cost that are about ``count`` of a client's ``size`` rows."""
        moved = reach / count * self.most_rows
        return Entry(kind, moved * slack, scale * moved * slack, count / size, steps)

    def describe(self) -> str:
        """Say what is protected, and by what budget."""
        whose = "row" if self.unit == "record" else "person"
        return (
            f"Privacy: every {whose} of a client has epsilon {self.epsilon:g} at delta "
            f"{self.delta:g} by noise added at the client"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the settings as a configuration has them, without what is not given."""
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in held.items() if value is not None}
