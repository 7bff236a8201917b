"""The model as something that predicts: an optional question to whoever knows the module."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from equifed.contract.arrays import Vector


@runtime_checkable
class KnowsModule(Protocol):
    """Clients whose engine holds the module: not a server that sees vectors alone."""

    def predictor(self, x: Vector) -> Any:
        """Return what predicts for new samples with the model x (a ``Predictor``)."""
        ...
