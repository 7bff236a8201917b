"""Second derivatives: an optional question to clients whose samples are at hand."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from equifed.contract.arrays import Vector, Weights


@runtime_checkable
class KnowsHessians(Protocol):
    """Clients that can add up second derivatives of their losses."""

    def hessian(self, x: Vector, weights: Weights) -> Vector | str:
        """Return the matrix sum_i weights_i Hess f_i(x), shape (d, d), or why there is none."""
        ...
