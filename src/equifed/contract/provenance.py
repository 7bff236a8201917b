"""What a run was made of: an optional question to whoever holds data and model."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


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
