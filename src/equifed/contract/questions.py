"""Questions to an engine that holds data and model, and that others decline by not having them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from equifed.contract.arrays import Vector, Weights


@runtime_checkable
class KnowsOrigin(Protocol):
    """Clients whose engine holds the data: not a server that sees vectors alone."""

    def origin(self) -> dict[str, Any]:
        """Return model, loss, precision, and name, checksum, source and preparation of the data."""
        ...


@runtime_checkable
class ChoseEngine(Protocol):
    """Clients whose engine may have been chosen by measuring."""

    engine: str
    """Its name in the catalogue."""
    choice: str | None
    """Which engine, and why; None: there was nothing to choose."""


@runtime_checkable
class KnowsModule(Protocol):
    """Clients whose engine holds the module: not a server that sees vectors alone."""

    def predictor(self, x: Vector) -> Any:
        """Return what predicts for new samples with the model x (a ``Predictor``)."""
        ...


@runtime_checkable
class KnowsHessians(Protocol):
    """Clients that can add up second derivatives of their losses."""

    def hessian(self, x: Vector, weights: Weights) -> Vector | str:
        """Return the matrix sum_i weights_i Hess f_i(x), shape (d, d), or why there is none."""
        ...
