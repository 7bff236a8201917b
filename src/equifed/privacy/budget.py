"""The kinds of answers, the bounds that are declared, and how a budget is split among answers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
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
IDLE = 0.1  # part of losses that are recorded but decide nothing


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
        bounds |= dict.fromkeys(("rounds", "most_rows"), "[1, inf)")
        check_settings(self, unit=get_args(Unit), preparation=("refused", "public"), **bounds)
        check_delta(self.delta)
        if self.most_rows > 1 and self.unit == "record":
            raise ValueError(f"Privacy most_rows={self.most_rows} needs unit='person'.")

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
        shares, each = self.split(planned), {}
        for kind, times in planned.counts().items():
            q = planned.q if kind == "steps" else 1.0
            each[kind] = q * math.sqrt(times / shares[kind]), q, times
        factor = find_factor(self.epsilon, self.delta, tuple(each.values()))
        return {kind: factor * raw / math.sqrt(planned.part) for kind, (raw, *_) in each.items()}

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
        self, kind: str, planned: Planned, reach: float, size: int, count: int | None = None,
        steps: int = 1, slack: float = 1.0,
    ) -> Entry:  # fmt: skip
        """Return what answers of a planned kind cost, of a client with ``size`` rows.

        They are about ``count`` of them, by default as many as planned.
        """
        count = count or (round(planned.q * size) if kind == "steps" else size)
        moved, scale = reach / count * self.most_rows, self.multipliers(planned)[kind]
        return Entry(kind, moved * slack, scale * moved * slack, count / size, steps)

    def describe(self) -> str:
        """Say what is protected, and by what budget."""
        whose = f"every {'row' if self.unit == 'record' else 'person'} of a client"
        budget = f"epsilon {self.epsilon:g} at delta {self.delta:g}"
        return f"Privacy: {whose} has {budget} by noise added at the client"

    def to_dict(self) -> dict[str, object]:
        """Return the settings as a configuration has them, without what is not given."""
        return {name: value for name, value in asdict(self).items() if value is not None}
