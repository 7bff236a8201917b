r"""Which sums the server opened, and which it may open besides.

Sums at one model can be subtracted. With the rows :math:`w^{(1)}, \dots, w^{(k)}` of public weights
the server can form :math:`\sum_i c_i v_i` for every c in their span, so it is the span that must
show nobody. With H the orthogonal projection onto it, :math:`h_{ii}` is the largest share of
:math:`|c|^2` that one client can have, and the larger eigenvalue of a 2 x 2 block that of a pair.

A sum is opened only if, among all of its round and of its model,

* its members (those with a weight) are those of every other sum, or at least three of them differ,
* no combination with others of the same vectors leaves fewer than three members, and none has more
  than 0.99 of its squared weights on one client.

What may not be opened is answered from what was: by the nearest combination of the sums of these
vectors at this model, which the server could have formed anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_MEMBERS = 3  # of a sum: of two, each would know the other's vector
APART = 3  # members by which two sums at one model differ at least, if at all
LARGEST_SHARE = 0.99  # of the squared weights of a sum, or of a difference, that one client has
PAIR_SHARE = 1 - 1e-6  # of those of a difference that two clients have
REMEMBERED, TOTALS = 4096, 64  # sums whose rows, and whose totals are remembered


class PrivacyError(RuntimeError):
    """A sum that would show one client's vector."""


@dataclass(frozen=True, eq=False)
class Sum:
    """One weighted sum: of what, at which model, in which round, with which weights of all N.

    ``about`` tells functions apart whose vectors do not stand in for each other's.
    """

    kind: str
    model: str
    round: int
    row: NDArray[np.float64]
    about: str = ""

    @property
    def members(self) -> frozenset[int]:
        """Positions of those with a weight."""
        return frozenset(np.flatnonzero(self.row).tolist())


@dataclass
class Ledger:
    """The sums that were opened in a run, and what was said about those that were not."""

    sums: list[Sum] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _totals: list[tuple[Sum, Tensor]] = field(default_factory=list)

    def refuse(self, wanted: Sum) -> str | None:
        """Return why a sum may not be opened; None: it may."""
        if len(wanted.members) < LEAST_MEMBERS:
            return f"only {len(wanted.members)} of the clients have any weight, 3 are needed"
        return find_exposed(self.sums, wanted)

    def add(self, opened: Sum, total: Tensor) -> None:
        """Write down a sum that was opened."""
        self.sums = [*self.sums[-REMEMBERED + 1 :], opened]
        self._totals = [*self._totals[-TOTALS + 1 :], (opened, total)]

    def stand_in(self, wanted: Sum, size: int | None = None) -> Tensor | None:
        """Return the nearest combination of opened sums of the same vectors; None without any.

        ``size`` tells vectors of one kind apart that have several forms.
        """
        held = [
            (s.row, total)
            for s, total in self._totals
            if (s.kind, s.model, s.about) == (wanted.kind, wanted.model, wanted.about)
            and size in (None, total.numel())
        ]
        if not held:
            return None
        rows, totals = np.stack([row for row, _ in held]), torch.stack([t for _, t in held])
        shares = np.linalg.lstsq(rows.T, wanted.row, rcond=1e-9)[0]
        return torch.as_tensor(shares, dtype=totals.dtype, device=totals.device) @ totals

    def take_notes(self) -> list[str]:
        """Return what was said since the last call."""
        notes, self.notes = list(dict.fromkeys(self.notes)), []
        return notes


def find_exposed(opened: Iterable[Sum], wanted: Sum) -> str | None:
    """Return whom a sum would show beside others of its round or model; None: nobody."""
    near = [s for s in opened if s.model == wanted.model or s.round == wanted.round]
    for other in near:
        count = len(wanted.members ^ other.members)
        if 0 < count < APART:
            members = f"{count} member{'s' if count > 1 else ''} more or fewer"
            return f"a sum opened before at this model has {members}"
    rows = np.stack([*(s.row for s in near if s.kind == wanted.kind), wanted.row])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    _, sizes, basis = np.linalg.svd(rows / lengths, full_matrices=False)
    basis = basis[sizes > 1e-9 * sizes[0]]
    leverage = np.square(basis).sum(axis=0)
    if leverage.max() > LARGEST_SHARE:
        return "it would show one client's vector, or nearly so"
    for i in np.flatnonzero(leverage >= 0.5 * PAIR_SHARE) if len(basis) > 1 else ():
        shared = basis[:, i] @ basis
        half, mean = (leverage[i] - leverage) / 2, (leverage[i] + leverage) / 2
        largest = mean + np.sqrt(half**2 + shared**2)
        largest[i] = 0.0
        if largest.max() > PAIR_SHARE:
            return "the difference to sums opened before would have two members"
    return None
