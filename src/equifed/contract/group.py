"""Processes that carry out one run together."""

from __future__ import annotations

from typing import Protocol


class Group(Protocol):
    """The processes that share a run, as one of them sees the others.

    All of them go through the same rounds to the same numbers; what could differ (the clock, a
    file) is settled by the first one, who alone writes. Every method is called by all of them.
    """

    rank: int
    size: int

    def from_first(self, text: str) -> str:
        """Return the first process's text in all of them."""
        ...

    def wait(self) -> None:
        """Return when all processes have come here."""
        ...
