"""Federations: bring your own, load a known one, or generate one."""

from equifed.data.checks import DataError
from equifed.data.federation import Federation, Split

__all__ = ["DataError", "Federation", "Split"]
