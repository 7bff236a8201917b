"""A federation, and how to make one from your own data."""

from equifed.data.checks import DataError
from equifed.data.columns import read_columns
from equifed.data.federation import Federation, Split
from equifed.data.preprocess import standardise

__all__ = ["DataError", "Federation", "Split", "read_columns", "standardise"]
