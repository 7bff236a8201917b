"""Inner products of client vectors: an optional question to clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients, ClientVectors


def multiply_rows(rows: Vector) -> Vector:
    """Return the inner products of the rows of a matrix, in float64."""
    rows = rows.double().contiguous()  # products of other strides may have other bits
    return rows @ rows.T


def inner_products(clients: Clients, vectors: ClientVectors, who: str) -> NDArray[np.float64]:
    """Return the matrix of <v_i, v_j>, or refuse for an algorithm where an engine declines.

    A federation whose server must not see a client's vector does: the matrix gives the vectors up
    to a rotation.
    """
    found = clients.inner_products(getattr(vectors, "vectors", vectors), multiply_rows)
    if isinstance(found, str):
        raise TypeError(
            f"{who} needs the inner products of the clients' updates, which "
            f"{type(clients).__name__} does not give: {found}. Use another algorithm here, or the "
            "loop or stacked engine."
        )
    return found
