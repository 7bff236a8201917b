"""Known data sets by name: some embedded, some fetched from their publishers with checksums."""

from equifed.datasets.files import cache_folder, find
from equifed.datasets.registry import DATASETS, DataSet, fetch, load
from equifed.datasets.small import EMBEDDED

__all__ = ["DATASETS", "EMBEDDED", "DataSet", "cache_folder", "fetch", "find", "load"]
