"""The data of a site without code: a file, a mapping of its columns, and what all agreed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from equifed.data.preparation import Prepare
from equifed.data.split import DataError, Holdout
from equifed.data.table import TableRequest
from equifed.flower.site import name_site, read_site
from equifed.flower.site_table import SiteTable


@dataclass(frozen=True)
class TableSettings:
    """``[data]`` of an app whose sites give tables: what all of them agreed on.

    Parameters
    ----------
    target : str
        Column to predict.
    client : str
        Title of the column with the client's name; files need not have it.
    features : tuple of str, optional
        Columns to predict from, matched by name. Without it, all columns but those named here, and
        every site must have the same in the same order.
    split, group, time, groups, task, classes, dtype
        As for :meth:`equifed.Federation.from_table`.
    class_names : tuple of str, optional
        All classes in order; a site with another label is refused. By default the labels of all
        sites, sorted.
    units : dict, optional
        Units of columns; a site whose file says another one is refused.
    prepare : Prepare
        How columns become features; fitted on the training rows of all sites, by sums.
    holdout : Holdout
        Fractions of every site's rows to hold out, before anything is fitted.
    """

    target: str
    client: str = "client"
    features: tuple[str, ...] | None = None
    split: str | None = None
    group: str | None = None
    time: str | None = None
    groups: str | None = None
    task: Literal["classification", "regression"] | None = None
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    units: dict[str, str] | None = None
    dtype: Literal["float32", "float64"] = "float32"
    prepare: Prepare = field(default_factory=Prepare)
    holdout: Holdout = field(default_factory=Holdout)

    def __post_init__(self) -> None:
        if self.prepare.per_client:
            raise DataError(
                "prepare.per_client tells the scales of every single site to all; leave it out."
            )
        if self.class_names is not None and (
            self.task == "regression" or self.classes is not None or len(self.class_names) < 2
        ):
            raise DataError(
                "class_names are two or more, and go with neither classes nor a regression."
            )
        odd = [c for c, unit in (self.units or {}).items() if not isinstance(unit, str)]
        if odd:
            raise DataError(f"units: the unit of {odd[0]!r} must be text.")
        self.to_request()  # refuses what cannot be

    def to_request(self) -> TableRequest:
        """Return what a table is asked for."""
        wanted = None if self.features is None else tuple(self.features)
        columns = self.client, self.target, wanted, self.split, self.group, self.time
        target = self.task, self.classes
        return TableRequest(*columns, *target, self.holdout, self.prepare, self.groups)


@dataclass(frozen=True)
class SiteData:
    """One site's table with what was agreed, and the units that its file is said to have."""

    table: SiteTable
    settings: TableSettings
    units: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, settings: TableSettings, node: Mapping[str, Any]) -> SiteData:
        """Read the file that a node's settings name, see :func:`equifed.flower.site.read_site`."""
        told = read_site(node)
        if "data" not in told:
            raise DataError(
                "This site names no file; start its node with --node-config 'data=\"FILE.csv\"', "
                "or 'site=\"SITE.toml\"', a file that names it."
            )
        name, titles = name_site(told, 0), told.get("columns", {})
        table = SiteTable.read(str(told["data"]), name, settings.to_request(), titles)
        units = told.get("units", {})
        strange = [c for c in units if c not in (*table.features, settings.target)]
        if strange:
            raise DataError(
                f"Client {name!r}: [units] names {strange[0]!r}, which is no column that is used; "
                "use the agreed names."
            )
        return cls(table, settings, units)


def read_arrays(path: str | Path) -> dict[str, Any]:
    """Return the splits of an ``.npz`` file with ``X_train``, ``y_train`` and perhaps others."""
    parts = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for split in ("train", "validation", "test"):
                if f"X_{split}" in arrays:
                    parts[split] = (arrays[f"X_{split}"], arrays[f"y_{split}"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"Cannot read {path} as arrays: {error}.") from None
    if "train" not in parts:
        raise DataError(f"{path} has no arrays X_train and y_train.")
    return parts
