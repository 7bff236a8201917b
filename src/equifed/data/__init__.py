"""A federation, how to make one from your own data, and its preparation."""

from equifed.data.columns import read_columns
from equifed.data.federation import Federation
from equifed.data.holdout import Holdout
from equifed.data.mapped import FederationWriter, open_federation
from equifed.data.partitions import (
    ByColumn,
    Dirichlet,
    Iid,
    Imbalance,
    OneClass,
    Partition,
    Shards,
    build_partition,
)
from equifed.data.preparation import Preparation
from equifed.data.prepare import Prepare
from equifed.data.preprocess import fill_missing, standardise
from equifed.data.split import DataError, DataWarning, Split

__all__ = [
    "ByColumn",
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
    "fill_missing",
    "open_federation",
    "read_columns",
    "standardise",
]
