"""Bounds that are declared, and how a budget is split among what a client is asked."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from equifed.contract.arrays import check_settings
from equifed.privacy.ledger import Entry, Unit, check_delta, compose, mu_of

KINDS = ("moments", "losses", "gradients", "steps")
"""What a site answers: second moments, mean losses, mean gradients, gradients of local steps."""

PARTS = {"moments": 1.0, "losses": 1.0, "gradients": 3.0, "steps": 3.0}
"""Parts of mu^2 by kind, of those that are asked."""

ACCURACY = 1.01
"""Factor by which noise of sampled steps may be more than is needed."""

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
    shares: Mapping[str, float] | None = None
    most_rows: int = 1
    preparation: Literal["refused", "public"] = "refused"

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
        if self.shares is not None:
            self._check_shares(self.shares)

    def _check_shares(self, shares: Mapping[str, float]) -> None:
        """Refuse shares of unknown kinds, and what does not sum to one."""
        unknown = [kind for kind in shares if kind not in KINDS]
        if unknown:
            raise ValueError(
                f"Privacy shares are of {', '.join(KINDS)}, got {unknown[0]!r}; a client under "
                "privacy answers nothing else."
            )
        total = math.fsum(shares.values())
        if any(not share > 0 for share in shares.values()) or abs(total - 1) > 1e-6:
            raise ValueError(f"Privacy shares must be positive and sum to 1, got {dict(shares)}.")

    def split(self, planned: Planned) -> dict[str, float]:
        """Return the share of mu^2 of every kind that is asked.

        >>> some = Bounds(epsilon=1.0, rows=1.0, loss=1.0, rounds=10)
        >>> some.split(Planned(moments=1, losses=10, gradients=10))
        {'moments': 0.2, 'losses': 0.2, 'gradients': 0.6}
        """
        asked = planned.counts()
        if self.shares is not None:
            return {kind: float(self.shares[kind]) for kind in asked if kind in self.shares}
        parts = {kind: PARTS[kind] for kind in asked}
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


@functools.lru_cache(maxsize=1024)
def find_factor(epsilon: float, delta: float, each: tuple[tuple[float, float, int], ...]) -> float:
    """Return what to multiply sigma / D with: triples have it with the share of rows, and counts.

    >>> find_factor(4.377178, 1e-5, ((1.0, 1.0, 4),))
    2.0000...
    """
    if all(q == 1 for _, q, _ in each):
        return math.sqrt(sum(n / raw**2 for raw, _, n in each)) / mu_of(epsilon, delta)

    def fits(factor: float) -> bool:
        entries = (Entry("", 1.0, factor * raw, q, n) for raw, q, n in each)
        return compose(entries, delta) <= epsilon

    high = 1 / mu_of(epsilon, delta)
    low = high / 4
    while not fits(high):
        low, high = high, 2 * high
    while high > ACCURACY * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
