"""A federation, how to make one from your data, and its preparation."""

from equifed.data.columns import read_columns
from equifed.data.federation import Federation
from equifed.data.mapped import FederationWriter, open_federation, standardise
from equifed.data.partitions import (
    Dirichlet,
    Iid,
    Imbalance,
    OneClass,
    Partition,
    Shards,
    build_partition,
)
from equifed.data.preparation import Preparation, Prepare
from equifed.data.split import DataError, DataWarning, Holdout, Split

__all__ = [
    "DataError",
    "DataWarning",
    "Dirichlet",
    "Federation",
    "FederationWriter",
    "Holdout",
    "Iid",
    "Imbalance",
    "OneClass",
    "Partition",
    "Preparation",
    "Prepare",
    "Shards",
    "Split",
    "build_partition",
    "open_federation",
    "read_columns",
    "standardise",
]
