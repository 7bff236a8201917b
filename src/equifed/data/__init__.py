"""A federation, and how to make one from your own data."""

from equifed.data.checks import DataError
from equifed.data.federation import Federation, Split
from equifed.data.partitions import Dirichlet, Iid, Imbalance, OneClass, Shards

__all__ = [
    "DataError",
    "Dirichlet",
    "Federation",
    "Iid",
    "Imbalance",
    "OneClass",
    "Shards",
    "Split",
]
