"""One client of a federation: its data in any form, and what is told of them before a run."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract import Stream
from equifed.contract.evaluation import SPLITS
from equifed.data import DataError, Federation, Holdout, Preparation
from equifed.data.columns import blank, name_category, read_numbers, to_numbers
from equifed.data.describe import describe_values
from equifed.data.fields import Layout, Packed, compare_layouts
from equifed.data.items import Named, take_items
from equifed.data.site_table import SiteTable, TableSettings, find_stretched
from equifed.flower.memory import Memory, Stale, refuse_if
from equifed.flower.site import Policy, Site
from equifed.flower.task import Candidate, OneClient, Schema, Task, shorten_names
from equifed.training.keys import read_key_file, read_private

MOST_COLUMNS, MOST_LABELS = 200, 50  # without names, and labels, that are told at most
Rows = tuple[dict[str, Sequence[Any]], Sequence[str] | None]  # columns, and labels if there are any

log = logging.getLogger("equifed")


@dataclass
class Client:
    """One client: its data, its task, and its site with policy and keys (``peers``: of all sites).

    A table becomes samples when the preparation of all sites is known.
    """

    data: Federation | SiteData
    task: Task
    site: Site
    _prepared: tuple[str, Federation] | None = None
    _engine: tuple[Federation, tuple[int, Any], OneClient] | None = None
    _first: float | None = None

    def __post_init__(self) -> None:
        told, data, self.root = self.site.settings, self.data, self.site.memory
        self.policy = Policy.of(told)
        self.peers = read_key_file(Path(str(told["peers"]))) if "peers" in told else None
        self.key = read_private(Path(str(told["node-key"]))) if "node-key" in told else None
        if isinstance(data, SiteData):
            self.name, self.sizes = data.table.name, data.table.sizes
        else:
            self.name = data.names[0]
            self.sizes = {split: len(rows) for split, rows in data.splits().items()}

    def prepare(self, memory: Memory) -> Federation:
        """Return the samples; those of a table prepared as the run has it."""
        if isinstance(self.data, Federation):
            return self.data
        told = memory.read_record("preparation")
        if not told:
            raise Stale("this client does not hold the preparation of the run")
        key = json.dumps(told, sort_keys=True)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = key, self.data.prepare(Preparation.from_json(told))
        return self._prepared[1]

    def build_engine(
        self, federation: Federation, position: int, told: Mapping[str, Any] | None = None
    ) -> OneClient:
        """Return the engine for a position in the federation, or for a candidate of a fit."""
        kept, task, rows = self._engine, self.task, federation
        if kept is None or kept[0] is not federation or kept[1] != (position, told):
            if told is not None:
                candidate = Candidate(**told)
                task, rows = candidate.task(task, federation), candidate.rows(federation)
            kept = federation, (position, told), task.build_engine(rows, position)
            self._engine = kept
        return kept[2]

    def measure_first(self, engine: OneClient, seed: int) -> float:
        """Return the length of the first model of a run."""
        if self._first is None:
            self._first = float(engine.initial(Stream(seed, ("initial",))).double().norm())
        return self._first

    def describe_rows(self) -> dict[str, Any]:
        """Return how many rows there are, and their columns and labels where these are shown."""
        told: dict[str, Any] = {"rows": self.sizes}
        if not self.policy.show_by_name:
            return told
        data = self.data
        columns, labels = data.list_rows() if isinstance(data, SiteData) else list_arrays(data)
        told["columns"] = {name: describe_values(values) for name, values in columns.items()}
        if labels is not None:
            counts = Counter(labels)
            told["labels"] = {text: counts[text] for text in sorted(counts)[:MOST_LABELS]}
        return told


# -- arrays and data sets --------------------------------------------------------------------------

AGREED = "[data] of the app"


def to_federation(
    value: Any, name: str, classes: int | None = None, samples: Layout | None = None
) -> Federation:
    """Return the data of one client as a federation of one.

    Parameters
    ----------
    value : Federation, (X, y), mapping or dataset
        A federation with one client is taken as it is (its name too); a mapping has ``(X, y)`` or
        a dataset under "train" and, where there are any, "validation" and "test".
    name : str
        The client's name.
    classes : int, optional
        Number of classes of the whole federation.
    samples : Layout, optional
        The agreed arrays of a sample; sequences are filled up to the agreed length.

    Examples
    --------
    >>> import numpy as np
    >>> to_federation((np.ones((3, 2)), np.array([0, 1, 0])), "north", classes=4).classes
    4
    """
    if isinstance(value, Federation):
        if len(value) != 1:
            raise DataError(
                f"load_data must return the data of one client, got a federation of {len(value)}; "
                "choose one with federation.subset([i])."
            )
        if samples is not None:
            compare_layouts(samples, value.layout, "its X", AGREED)
        return value
    parts = value if isinstance(value, Mapping) else {"train": value}
    if "train" not in parts or not set(parts) <= set(SPLITS):
        raise DataError(
            f"load_data must return (X, y) or a mapping with 'train' and possibly 'validation' and "
            f"'test', got the keys {sorted(map(str, parts))}."
        )
    held: dict[str, Any] = {label: {name: part} for label, part in parts.items()}
    titles: tuple[str, ...] = ()
    if samples is not None:
        named = _name_columns(parts["train"], samples)
        held, _, titles = take_items(held, named, Holdout(), samples.whole, None, loose=True)
        for label, part in held.items():
            if isinstance(part[name], Sequence) and len(part[name]) > 1:
                rows = samples.pack(part[name][0], f"its {label} X", AGREED)
                held[label] = {name: (Packed(rows, samples), *part[name][1:])}
    return Federation.from_clients(
        held["train"], validation=held.get("validation"), test=held.get("test"),
        classes=classes or len(titles) or None, class_names=titles,
    )  # fmt: skip


def _name_columns(part: Any, samples: Layout) -> Named:
    """Return which columns are the agreed arrays, for a data set whose items have names."""
    found = None if isinstance(part, Sequence) or not hasattr(part, "__getitem__") else part[0]
    if not samples.named or not isinstance(found, Mapping):
        return Named()
    added = None if samples.padding is None else samples.padding.mask
    return Named(features=[one.name for one in samples.fields if one.name != added])


def read_arrays(path: str | Path) -> dict[str, Any]:
    """Return the splits of an ``.npz`` file with ``X_train``, ``y_train`` and perhaps others.

    Of samples of several arrays every one has its name: ``X_train.tokens``, ``X_train.mask``.
    """
    parts = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for split in SPLITS:
                start = f"X_{split}."
                x = {k.removeprefix(start): arrays[k] for k in arrays if k.startswith(start)}
                if x or f"X_{split}" in arrays:
                    parts[split] = (x or arrays[f"X_{split}"], arrays[f"y_{split}"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"Cannot read {path} as arrays: {error}.") from None
    if "train" not in parts:
        raise DataError(f"{path} has no arrays X_train and y_train.")
    return parts


def list_arrays(federation: Federation) -> Rows:
    """Return the columns and labels of a client's training arrays."""
    train, prepared = federation.train, federation.preparation
    flat = train.inputs.reshape(len(train), -1).astype(np.float64)
    names: Sequence[str] = () if prepared is None else prepared.feature_names
    if len(names) != flat.shape[1]:
        names = [f"feature {k + 1}" for k in range(min(flat.shape[1], MOST_COLUMNS))]
    columns = {name: flat[:, k].tolist() for k, name in enumerate(names)}
    if federation.classes is None:
        return columns, None
    titles = federation.class_names or [f"class {k}" for k in range(federation.classes)]
    return columns, [titles[k] for k in train.targets.ravel().tolist()]


# -- tables ----------------------------------------------------------------------------------------

FAR = 3.0  # deviations of the others by which an outlying site's mean lies apart


@dataclass(frozen=True)
class SiteData:
    """One site's table with what was agreed, and the units that its file is said to have."""

    table: SiteTable
    settings: TableSettings
    units: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, settings: TableSettings, node: Mapping[str, Any]) -> SiteData:
        """Read the file that a node's settings name, see :func:`equifed.flower.site.read_site`."""
        site = Site(settings=node)
        told, name = site.settings, site.name
        if "data" not in told:
            raise DataError(
                "This site names no file; start its node with --node-config 'data=\"FILE.csv\"', "
                "or 'site=\"SITE.toml\"', a file that names it."
            )
        table = SiteTable.read(str(told["data"]), name, settings, told.get("columns", {}))
        units = told.get("units", {})
        for column in [c for c in units if c not in (*table.features, settings.target)]:
            raise DataError(
                f"Client {name!r}: [units] names {column!r}, which is not a column that is used; "
                "use the agreed names."
            )
        return cls(table, settings, units)

    def describe(self) -> dict[str, Any]:
        """Return what a hello says of a table that is not prepared yet."""
        table, names = self.table, self.table.features
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        kind = (len(names),), self.settings.dtype, (), "float64", None
        schema = Schema(*kind, digest, shorten_names(names))
        target, units = table.describe_target(), dict(self.units)
        told = {"columns": table.describe_kinds(), "target": target, "rest": table.rest}
        return {"schema": schema.to_dict(), "model": "", "table": {**told, "units": units}}

    def prepare(self, fitted: Preparation) -> Federation:
        """Return the samples as a preparation makes them; refuse one that is not of such rows."""
        for sentence in (*self.table.told, *self.table.find_duplicates(fitted)):
            log.warning("equifed: %s", sentence)
        made = self.table.prepare(fitted, self.settings.dtype)
        column = find_stretched(made, fitted, self.table.request.prepare)
        cure = "are its units those of the others?"
        refuse_if({f"column {column!r:.60} is not scaled as the rows here are; {cure}": column})
        return made

    def list_rows(self) -> Rows:
        """Return the columns of the training rows, and the labels, if the target has any."""
        request, names = self.table.request, [*self.table.features, self.table.request.target]
        columns: dict[str, Any] = dict(self.table.take(names, "train"))
        numbers = to_numbers(columns[request.target])
        fractions = numbers is not None and not (numbers == np.rint(numbers)).all()
        if request.task == "regression" or fractions:
            return columns, None
        return columns, [name_category(value) for value in columns.pop(request.target)]

    def find_far(self, totals: Mapping[str, Any]) -> list[str]:
        """Name the columns whose mean here is far from that of the other sites.

        ``totals`` are count, mean and deviation of every column over all sites.
        """
        found = []
        for name in [c for c in totals if c in self.table.features]:  # of others nothing is told
            count, mean, deviation = totals[name]
            own = read_numbers(name, blank(self.table.take([name], "train")[name], "words"))
            own = own[~np.isnan(own)]
            n, left = len(own), int(count) - len(own)
            if n < 2 or left < 2:
                continue
            here, there = (
                float(own.mean()),
                mean + (mean - own.mean()) * n / left,
            )  # (N M-n m)/(N-n)
            square = (count * deviation**2 - n * (own.var() + (here - mean) ** 2)) / left
            scale = max(math.sqrt(max(square - (there - mean) ** 2, 0.0)), 1e-12 * abs(there))
            if scale > 0 and abs(here - there) > FAR * scale:
                found.append(
                    f"its column {name!r} has a mean that lies {abs(here - there) / scale:.1f} "
                    "deviations from that of the other sites; are its units the same?"
                )
        return found
