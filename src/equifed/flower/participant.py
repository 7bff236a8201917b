"""One client of a federation: its data, its task, the folder of its memory, its policy and keys."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.streams import Stream
from equifed.data.columns import blank, name_category, read_numbers, to_numbers
from equifed.data.describe import describe_values
from equifed.data.federation import Federation
from equifed.data.preparation import Preparation
from equifed.data.site_table import SiteTable, find_stretched
from equifed.flower.budget import Refused
from equifed.flower.memory import Memory
from equifed.flower.secure.masking import Identity
from equifed.flower.site import Policy, SiteData
from equifed.flower.task import Candidate, OneClient, Task

log = logging.getLogger("equifed")


class Stale(Exception):
    """The request refers to something that this client does not hold."""


@dataclass
class Client:
    """One client: its data, its task, the folder of its memory, its policy and keys.

    A table becomes samples when the preparation of all sites is known. ``results`` is the folder
    for models of runs that ended.
    """

    data: Federation | SiteData
    task: Task
    root: Path
    partition: int | None = None
    policy: Policy = field(default_factory=Policy)
    identity: Identity = field(default_factory=Identity)
    results: Path | None = None
    _prepared: tuple[str, Federation] | None = None
    _engine: tuple[Federation, tuple[int, Any], OneClient] | None = None
    _first: float | None = None

    @property
    def name(self) -> str:
        """The client's name."""
        return self.data.table.name if isinstance(self.data, SiteData) else self.data.names[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of every split."""
        if isinstance(self.data, SiteData):
            return self.data.table.sizes
        return {k: len(split) for k, split in self.data.splits().items()}

    def prepare(self, memory: Memory) -> Federation:
        """Return the samples; those of a table prepared as the run has it."""
        if isinstance(self.data, Federation):
            return self.data
        told = memory.read_record("preparation")
        if not told:
            raise Stale("this client does not hold the preparation of the run")
        key = json.dumps(told, sort_keys=True)
        if self._prepared is None or self._prepared[0] != key:
            fitted, table = Preparation.from_json(told), self.data.table
            for sentence in (*table.told, *table.find_duplicates(fitted)):
                log.warning("equifed: %s", sentence)
            made, agreed = table.prepare(fitted, self.data.settings.dtype), table.request.prepare
            column = find_stretched(made, fitted, agreed)
            if column:
                raise Refused(
                    f"column {column!r:.60} is not scaled as the rows here are; are its units "
                    "those of the others?"
                )
            self._prepared = key, made
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
        if isinstance(self.data, SiteData):
            return told | describe_table(self.data.table)
        return told | describe_arrays(self.data)


# -- what it tells of its rows before a run --------------------------------------------------------

FAR = 3.0
"""Deviations of the others by which a site's mean must lie apart to be called outlying."""

MOST_COLUMNS, MOST_LABELS = 200, 50
"""Columns without names, and labels, that are told at most."""


def describe_table(table: SiteTable) -> dict[str, Any]:
    """Return columns and labels of a table's training rows."""
    target, told = table.request.target, dict[str, Any]()
    columns = table.take([*table.features, target], "train")
    told["columns"] = {name: describe_values(columns[name]) for name in table.features}
    task, values = table.request.task, columns[target]
    numbers = to_numbers(values)
    if task == "regression" or (numbers is not None and not (numbers == np.rint(numbers)).all()):
        told["columns"][target] = describe_values(values)
    else:
        labels = Counter(name_category(v) for v in values)
        told["labels"] = {text: labels[text] for text in sorted(labels)[:MOST_LABELS]}
    return told


def describe_arrays(federation: Federation) -> dict[str, Any]:
    """Return columns and labels of a client's training arrays."""
    train, prepared = federation.train, federation.preparation
    flat = train.inputs.reshape(len(train), -1).astype(np.float64)
    names: Sequence[str] = () if prepared is None else prepared.feature_names
    if len(names) != flat.shape[1]:
        names = [f"feature {k + 1}" for k in range(min(flat.shape[1], MOST_COLUMNS))]
    told = {"columns": {c: describe_values(flat[:, k].tolist()) for k, c in enumerate(names)}}
    if federation.classes is not None:
        counts = np.bincount(train.targets.ravel(), minlength=federation.classes).tolist()
        titles = federation.class_names or [f"class {k}" for k in range(len(counts))]
        told["labels"] = dict(zip(titles, counts, strict=True))
    return told


def find_far(table: SiteTable, totals: Mapping[str, Any]) -> list[str]:
    """Name the columns whose mean here is far from that of the other sites.

    ``totals`` are count, mean and deviation of every column over all sites.
    """
    found = []
    for name, (count, mean, deviation) in totals.items():
        if name not in table.features:  # of other columns nothing is told
            continue
        own = read_numbers(name, blank(table.take([name], "train")[name], "words"))
        own = own[~np.isnan(own)]
        n, left = len(own), int(count) - len(own)
        if n < 2 or left < 2:
            continue
        here, there = float(own.mean()), mean + (mean - own.mean()) * n / left  # (N M - n m)/(N-n)
        square = (count * deviation**2 - n * (own.var() + (here - mean) ** 2)) / left
        scale = math.sqrt(max(square - (there - mean) ** 2, 0.0))
        scale = max(scale, 1e-12 * abs(there))
        if scale > 0 and abs(here - there) > FAR * scale:
            found.append(
                f"its column {name!r} has a mean that lies {abs(here - there) / scale:.1f} "
                "deviations from that of the other sites; are its units the same?"
            )
    return found
