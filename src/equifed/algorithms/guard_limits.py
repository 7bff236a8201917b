"""What a guard allows, and what it knows of a run: limits, usual lengths, who went beyond."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from equifed.algorithms.around import WrapperState
from equifed.contract import Index, Losses, Weights
from equifed.contract.absence import bound_share
from equifed.contract.arrays import check_settings

# Among fewer clients there is nobody to compare with; of fewer vectors, if they are not all, the
# usual length is that of the rounds before
LEAST, FEW = 3, 5
TOGETHER = 0.4  # largest share of the weight that the dishonest clients have together

Mode = Literal["watch", "on", "off"]


@dataclass(frozen=True)
class Guard:
    r"""Settings of a guard against dishonest or broken clients.

    A claimed loss :math:`l_i` enters clipped, and a vector :math:`v_i` (an update, a gradient) of
    weight :math:`\lambda_i` counts as if it were shorter, beyond

    .. math:: |l_i - m| > k \max(1.4826\, \mathrm{MAD}, \beta m_0), \qquad
              |\lambda_i|\, |v_i| > \gamma_n u, \qquad
              \gamma_n = \max\{\min(\gamma, 0.4 / f), 2 / n\}

    with m the median of all current claims, :math:`m_0` that of the first round, u the usual length
    (the median of those who answered, or up to twice that: the median by weight of what is left
    when the dishonest are the longest), and :math:`\gamma_n` the **cap** of n clients, the largest
    share of the weight of one: f dishonest clients have at most 0.4 of it together. A client at the
    cap counts with one usual length, one of less weight may be longer, up to c usual lengths;
    beyond them it counts with one. A loss below the least that is possible is raised to it. A
    client with more than ``samples`` times the median number of samples counts as the median one.

    Parameters
    ----------
    mode : {"watch", "on", "off"}
        ``"watch"`` tells of claims and updates beyond these limits and changes nothing.
    dishonest : int, optional
        f, how many dishonest clients are to be borne; at most a fifth of all. If it is not given, a
        tenth of the clients, and at least one.
    claims, updates, floor, samples : float
        k, c, :math:`\beta`; and how many medians of samples one may have.
    cap : float
        :math:`\gamma`; 1 is none, and bounds no product of weight and length.
    rounding : float
        Losses enter as multiples of this number, so that they tell less; 0 leaves them as they are.
        On a federation with hidden sums the sites round before a loss leaves.

    Examples
    --------
    >>> lengths = np.array([1.0, 1.0, 1.0, 40.0])  # of four equal updates; one is far too long
    >>> Guard().shorten(lengths, np.full(4, 0.25), usual=1.0, share=0.5)
    array([1., 1., 1., 1.])
    """

    mode: Mode = "on"
    dishonest: int | None = None
    claims: float = 50.0
    updates: float = 15.0
    floor: float = 0.1
    samples: float = 1000.0
    cap: float = 0.2
    rounding: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self, mode=get_args(Mode), updates="[1, inf)", cap="(0, 1]")
        check_settings(self, claims="(0, inf)", floor="(0, inf)", samples="(0, inf)")
        check_settings(self, rounding="[0, inf)", dishonest="[1, inf)")

    @property
    def bounds(self) -> bool:
        """Whether weights and lengths are bounded."""
        return self.mode == "on" and self.cap < 1

    @property
    def limit(self) -> float:
        """The cap where it is more than two equal shares."""
        return self.cap if self.cap == 1 else min(self.cap, TOGETHER / (self.dishonest or 1))

    def among(self, n: int) -> Guard:
        """Return the guard of n clients, with the number of dishonest ones said.

        >>> [Guard().among(n).dishonest for n in (4, 20, 57)]
        [1, 2, 5]
        """
        found = self.dishonest or max(1, n // 10)
        if self.bounds and found > max(1, n // 5):
            raise ValueError(
                f"Guard dishonest = {found} of {n} clients is more than a fifth of them, which no "
                f"guard withstands: use at most {max(1, n // 5)}."
            )
        return replace(self, dishonest=found)

    def share(self, n: int, here: int | None = None) -> float:
        """Return the largest share of the weight of one of n clients, of whom some are here.

        >>> Guard().share(20), Guard(dishonest=4).share(20), Guard().share(4), Guard().share(1000)
        (0.2, 0.1, 0.5, 0.004)
        """
        return 1.0 if self.cap == 1 else bound_share(self.among(n).limit, n, here)

    def shorten(self, lengths: Losses, weights: Weights, usual: float, share: float) -> Losses:
        """Return as how long vectors of these lengths and weights count, with a cap of the share.

        >>> lengths, weights = np.array([0.5, 3.0, 8.0, 16.0]), np.array([0.4, 0.2, 0.2, 0.2])
        >>> Guard().shorten(lengths, weights, 1.0, share=0.5)
        array([0.5, 2.5, 2.5, 1. ])
        """
        sizes = np.abs(weights)
        whole, most = abs(float(weights.sum())), float(sizes.sum())  # signed ones sum to one, too
        whole = most if whole < 0.1 * most else whole  # a change of weights sums to nothing
        honest = max(0.0, 1 - share * (self.dishonest or 1))  # the others may be the longest
        common = min(max(usual, find_usual(lengths, sizes, honest / 2)), 2 * usual)
        most = share * common * whole
        room = np.divide(most, sizes, out=np.full(len(sizes), np.inf), where=sizes > 0)
        counted = lengths if self.cap == 1 else np.minimum(lengths, room)
        return np.where(lengths > self.updates * usual, np.minimum(counted, usual), counted)


def round_losses(losses: Losses, step: float) -> Losses:
    """Return losses as multiples of a step; those that are multiples stay as they are.

    >>> round_losses(np.array([0.62, 0.49]), 0.25).tolist()
    [0.5, 0.5]
    """
    return losses if step == 0 else np.rint(losses / step) * step


def find_usual(lengths: Losses, weights: Weights | None = None, part: float = 0.5) -> float:
    """Return the length that half of some vectors, or a part of their weight, do not exceed.

    >>> lengths = np.array([1.0, 2.0, 3.0, 1e9])
    >>> find_usual(lengths), find_usual(lengths, np.array([0.1, 0.3, 0.4, 0.2]))
    (2.0, 3.0)
    """
    weights = np.ones(len(lengths)) if weights is None or not weights.any() else weights
    order = np.argsort(lengths, kind="stable")
    below = np.cumsum(weights[order])
    return float(lengths[order[np.searchsorted(below, part * below[-1] * (1 - 1e-9))]])


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, the last claims, and what was usual."""

    claims: Losses | None = None  # as they were accepted; None before the first ones
    first_claim: float = 0.0
    lengths: tuple[float, ...] = (0.0, 0.0)  # of updates and gradients; 0: there was none yet


class Watch:
    """What a guard knows, from the state before, and finds in one round."""

    def __init__(self, guard: Guard, has_objective: bool, state: State) -> None:
        self.guard, self.acts = guard, guard.mode == "on"
        self.bounds_sums = guard.bounds and not has_objective  # no objective bounds the weights
        self.claims, self.first_claim = state.claims, state.first_claim
        self.lengths = list(state.lengths)
        self.heard: set[int] = set()  # who made a claim in this round
        self.shortened: dict[int, None] = {}  # whose vectors counted as shorter in a sum
        self.touches: dict[tuple[int, str], str] = {}
        self.opposed: dict[int, float] = {}  # cosines of vectors at the cap with the others
        self.notes: dict[str, None] = {}

    def usual_length(self, kind: int, lengths: Losses, n: int) -> float:
        """Return the length that those of n clients are measured by, and remember it."""
        known, now = self.lengths[kind], find_usual(lengths)
        usual = known if len(lengths) < min(FEW, n) and known > 0 else now
        if np.isfinite(usual):
            more = 0.2 * (min(now, 2 * usual) - usual)
            self.lengths[kind] = usual if usual == now else usual + more
        return usual

    def limits(self, claims: Losses, index: Index) -> tuple[float, float]:
        """Return the least and the largest claim that is not touched."""
        others = claims[:0] if self.claims is None else np.delete(self.claims, index)
        pool = np.concatenate([others, claims])
        centre = float(np.median(pool))
        self.first_claim = self.first_claim or abs(centre)
        spread = 1.4826 * float(np.median(np.abs(pool - centre)))
        reach = self.guard.claims * max(spread, self.guard.floor * self.first_claim, 1e-300)
        return centre - reach, centre + reach

    def remember(self, claims: Losses, index: Index, n: int) -> None:
        """Keep accepted claims; a client that made none so far has the median one."""
        old = self.claims
        self.claims = np.full(n, float(np.median(claims))) if old is None else old.copy()
        self.claims[index] = claims
