"""The limits of a guard, and what it knows and finds in a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from equifed.contract import Index, Losses

FEW = 5
"""Of fewer vectors, if they are not all, the usual length is that of the rounds before."""
USUAL, LEAST_LENGTH = 0.75, 0.4
"""Share of the vectors that are not longer than the usual one, and how much of the first round's
usual length it is at least: where most have nothing left to learn, the others are not too long."""
SHORTEST, FEWER = 4.0, 60
"""What is never too long, in usual lengths: honest ones of twenty clients come to 3.5. Of fewer
than 15 clients the usual length says less, and 60 / n of them are not too long."""

Mode = Literal["watch", "on", "off"]


@dataclass(frozen=True)
class Guard:
    r"""What a guard does, and when.

    A claimed loss :math:`l_i` and an update :math:`d_i` are touched beyond

    .. math:: |l_i - m| > k \max(1.4826\, \mathrm{MAD}, \beta m_0), \qquad
              |d_i| > c_n \max(u, 0.4\, u_0), \quad
              c_n = \min(c, \max(4, \gamma n, 60 / n))

    with m the median of all current claims, u the length that three quarters of the updates do not
    exceed, :math:`m_0` and :math:`u_0` those of the first round, and :math:`\gamma` the cap, of n
    clients. A claim enters clipped at the limit. So does an update, which is shortened by a smaller
    weight; one longer than c usual ones counts as if it had the usual length. A loss below the
    least that is possible is raised to it. A client that says it has more than ``samples`` times as
    many samples as the median one counts as that one.

    Parameters
    ----------
    mode : {"watch", "on", "off"}
        ``"watch"`` tells of claims and updates beyond these limits and changes nothing.
    claims, updates, floor, samples : float
        k, c, :math:`\beta`; and how many medians of samples one may have.
    cap : float
        :math:`\gamma`, largest share of the weight of one client (two equal shares if these are
        more); 1 is none.
    """

    mode: Mode = "on"
    claims: float = 50.0
    updates: float = 15.0
    floor: float = 0.1
    samples: float = 1000.0
    cap: float = 0.2

    def __post_init__(self) -> None:
        if self.mode not in ("watch", "on", "off"):
            raise ValueError(f"guard mode is 'watch', 'on' or 'off', got {self.mode!r}.")
        for name in ("claims", "updates", "floor", "samples", "cap"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise ValueError(f"guard {name} must be a finite number > 0, got {value}.")
        if self.updates < 1:
            raise ValueError(f"guard updates must be at least 1 usual length, got {self.updates}.")
        if self.cap > 1:
            raise ValueError(f"guard cap is a share of the weight, at most 1, got {self.cap}.")

    def longest(self, n: int) -> float:
        """Return how many usual lengths the update of one of n clients may have.

        >>> [Guard().longest(n) for n in (4, 10, 20, 40, 1000)]
        [15.0, 6.0, 4.0, 8.0, 15.0]
        """
        most = max(SHORTEST, self.cap * n, FEWER / n)
        return self.updates if self.cap == 1 else min(self.updates, most)

    def shorten(self, lengths: Losses, usual: float, n: int) -> Losses:
        """Return as how long vectors of these lengths count.

        >>> Guard().shorten(np.array([0.5, 3.0, 8.0, 16.0]), 1.0, 20)
        array([0.5, 3. , 4. , 1. ])
        """
        clipped = np.minimum(lengths, self.longest(n) * usual)
        return np.where(lengths > self.updates * usual, usual, clipped)


@dataclass
class Watch:
    """What a guard knows and finds in one round.

    Parameters
    ----------
    guard : Guard
        The limits.
    bounds_sums : bool
        Whether weights are bounded in sums, because no objective bounds them.
    claims : array, shape (N,), optional
        The last claims of all clients, as they were accepted.
    first_claim : float
        Size of the median claim when the first ones were made.
    lengths, first_lengths : dict
        The usual length of vectors by their kind: last, and when the first ones came.
    """

    guard: Guard
    bounds_sums: bool
    claims: Losses | None
    first_claim: float
    lengths: dict[str, float]
    first_lengths: dict[str, float]
    touches: dict[tuple[int, str], str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        """Whether it changes what it finds."""
        return self.guard.mode == "on"

    def usual_length(self, kind: str, lengths: Losses, n: int) -> float:
        """Return the length that those of n clients are measured by, and remember it."""
        known = self.lengths.get(kind, 0.0)
        now = find_usual(lengths)
        usual = known if len(lengths) < min(FEW, n) and known > 0 else now
        if not np.isfinite(usual):
            return usual
        self.first_lengths.setdefault(kind, usual)
        self.lengths[kind] = usual if usual == now else usual + 0.2 * (min(now, 2 * usual) - usual)
        return max(usual, LEAST_LENGTH * self.first_lengths[kind])

    def limits(self, claims: Losses, index: Index, n: int) -> tuple[float, float]:
        """Return the least and the largest claim that is not touched."""
        pool = claims if self.claims is None else np.delete(self.claims, index)
        pool = claims if self.claims is None else np.concatenate([pool, claims])
        centre = float(np.median(pool))
        self.first_claim = self.first_claim or abs(centre)
        spread = 1.4826 * float(np.median(np.abs(pool - centre)))
        reach = self.guard.claims * max(spread, self.guard.floor * self.first_claim, 1e-300)
        return centre - reach, centre + reach

    def remember(self, claims: Losses, index: Index, n: int) -> None:
        """Keep accepted claims; a client that made none so far has the median one."""
        if self.claims is None:
            self.claims = np.full(n, float(np.median(claims)))
        self.claims = self.claims.copy()
        self.claims[index] = claims


def find_usual(lengths: Losses) -> float:
    """Return the length that three quarters of some vectors do not exceed, one of them.

    >>> float(find_usual(np.array([1.0, 2.0, 3.0, 1e9])))
    3.0
    """
    return float(np.quantile(lengths, USUAL, method="lower"))
