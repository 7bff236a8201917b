"""Inner products of client vectors: an optional question to clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.contract.clients import Clients, ClientVectors


def inner_products(clients: Clients, vectors: ClientVectors, who: str) -> NDArray[np.float64]:
    """Return the matrix of <v_i, v_j>, or refuse where an engine does not answer ``gram``.

    Engines that have ``gram(vectors)`` answer: loop and stacked. A federation whose
    server must not see a client's vector does not: the matrix gives the vectors up to a rotation.
    """
    ask: Any = getattr(clients, "gram", None)
    if ask is None:
        raise TypeError(
            f"{who} needs the inner products of the clients' updates, which "
            f"{type(clients).__name__} does not give: they would tell the clients' updates up to "
            "a rotation. Use another algorithm here, or the loop or stacked engine."
        )
    found = np.asarray(ask(getattr(vectors, "vectors", vectors)), dtype=np.float64)
    return (found + found.T) / 2
