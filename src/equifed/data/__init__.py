"""A federation, and how to make one from your own data."""

from equifed.data.checks import DataError
from equifed.data.federation import Federation, Split

__all__ = ["DataError", "Federation", "Split"]
