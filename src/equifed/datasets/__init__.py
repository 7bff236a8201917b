"""Known data sets by name: some embedded, some fetched from their publishers with checksums."""

from equifed.datasets.registry import DATASETS, DataSet, fetch, load

__all__ = ["DATASETS", "DataSet", "fetch", "load"]
