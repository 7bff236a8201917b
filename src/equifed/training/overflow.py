"""Numbers near the largest float: the client that sent them is missing, and the others go on.

A number of one client can be finite and yet make the numbers of everybody overflow: a loss of 1e308
in a sum, an update so long that all clients diverge from the model that it leads to. Every run sees
its clients through this view. What it looks at costs nothing in an ordinary round: the losses, and
the length of every sum; only where that is absurd does it ask whose vector was too long.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView, VectorsView

LARGEST = 1e100
"""A loss beyond this is no loss: sums, squares and powers of it overflow."""

FAR = 1e6
"""A vector is absurd if it is so many times as long as the median one, and as the model."""


class CheckedVectors(VectorsView):
    """Client vectors of which none takes the others along."""

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        total = self.behind.weighted_sum(weights)
        if not float(total.norm()) <= FAR:  # not finite, or much longer than models are
            self._find_absurd(self.behind.squared_norms())
        return total

    @override
    def squared_norms(self) -> Losses:
        squares = self.behind.squared_norms()
        if not squares.max() <= FAR**2:
            self._find_absurd(squares)
        return squares

    def _find_absurd(self, squares: Losses) -> None:
        """Raise for those whose vectors are absurdly long beside the others and the model."""
        lengths = np.sqrt(np.where(np.isnan(squares), np.inf, squares))
        usual = float(np.sort(lengths)[(len(lengths) - 1) // 2])
        model = 0.0 if self.x is None else float(self.x.norm())
        if not np.isfinite(usual) and np.isfinite(lengths).any():  # most of those who are asked
            refuse(self.clients, lengths, ~np.isfinite(lengths), "its vector is not finite")
        if np.isfinite(usual) and np.isfinite(model):
            named = self.kind.replace("_", " ")
            what = f"length of its {named} is {{:.3g}}, that of the median client {usual:.3g}"
            refuse(self.clients, lengths, lengths > FAR * max(usual, 1.0 + model), what)


class CheckedClients(ClientsView):
    """Clients whose losses stay below :data:`LARGEST` and whose vectors are not absurd."""

    Vectors = CheckedVectors

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        sizes = np.abs(numbers)
        bad = ~np.isfinite(numbers)
        if np.sort(sizes)[(len(sizes) - 1) // 2] <= LARGEST:  # else everybody's grow: it diverges
            bad |= sizes > LARGEST
        refuse(self, numbers, bad, f"{what} is {{:.3g}}")
        return numbers


def refuse(clients: ClientsView, numbers: Losses, bad: NDArray[np.bool_], what: str) -> None:
    """Raise :class:`MissingClients` for those whose numbers are bad."""
    if bad.any():
        places = np.flatnonzero(bad)
        reasons = {int(clients.index[k]): what.format(numbers[k]) for k in places}
        raise MissingClients(reasons, clients.names)
