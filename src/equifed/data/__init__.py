"""Federations: bring your own, load a known one, or generate one."""

from equifed.data.checks import DataError
from equifed.data.federation import Federation, Split
from equifed.data.registry import DATASETS, DataSet, fetch, load

__all__ = ["DATASETS", "DataError", "DataSet", "Federation", "Split", "fetch", "load"]
