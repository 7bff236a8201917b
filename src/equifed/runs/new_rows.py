"""New labelled rows of a finished run: what its model does with them, client by client."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equifed.contract.arrays import Losses
from equifed.data.columns import group_rows, name_categories, read_columns
from equifed.data.federation import Federation
from equifed.data.preparation import CategoryColumn
from equifed.data.split import DataError, DataWarning
from equifed.engines.evaluate import FederationEvaluator
from equifed.models.flat import FlatModel, as_data
from equifed.models.own_part import OwnPart
from equifed.models.predictor import Predictor, warn_of_strangers
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.runs.load import read_predictor
from equifed.training.files import RunFolderError
from equifed.training.folder import open_run_folder
from equifed.training.history import History
from equifed.training.tables import CONFIG, RUN


@dataclass(frozen=True)
class Drift:
    """One metric on new rows, beside what it was at training."""

    metric: str
    split: str | None
    rows: list[dict[str, Any]]


def evaluate(
    folder: str | Path, table: Any, client: str | None = None, *, trust: bool = False
) -> list[Drift]:
    """Measure the model of a run on new labelled rows, client by client."""
    run = open_run_folder(folder, trust=trust)
    predictor, made = read_predictor(run), run.json(RUN)
    federation = _gather(predictor, table, client, made["samples"]["classes"])
    told = RunConfig.of_run(run).model if CONFIG in run else made  # of equifed.train, or of fit
    losses = SECTIONS["losses"]
    named = {e.load().__name__: e.load() for e in losses.entries().values()}
    if CONFIG not in run and str(told.get("loss")) not in named:
        raise RunFolderError(f"{run.path} has a loss of your own; use equifed.load_predictor.")
    loss = losses[told["loss"]].load() if CONFIG in run else named[told["loss"]]
    dtype, own = getattr(torch, told["dtype"]), predictor.own
    inputs = as_data(federation.train.inputs, dtype, "cpu")
    part = OwnPart(tuple(own), "joint", 0.0) if own else None
    model = FlatModel(predictor.module, loss, inputs[:3], dtype=dtype, own=part)
    rows = own_rows(predictor, federation.names, model) if own else None
    measure = FederationEvaluator(federation, model)
    (found,) = measure(model.flatten(predictor.module), ("train",), own=rows)
    history = History.load(run.path, model=False)
    return [_compare(name, values, federation, history) for name, values in found.metrics.items()]


def own_rows(predictor: Predictor, names: Sequence[str], model: FlatModel) -> Any:
    """Return the own part of every client, the mean for those who took no part in training."""
    parts = [predictor.own[name].flatten(1) for name in model.own_shapes]
    rows = torch.cat(parts, dim=1).to(model.dtype)
    warn_of_strangers(predictor.own, [name for name in names if name not in predictor.clients])
    place = {name: k for k, name in enumerate(predictor.clients)}
    return torch.stack([rows[place[n]] if n in place else rows.mean(0) for n in names])


def _gather(
    predictor: Predictor, table: Any, client: str | None, classes: int | None
) -> Federation:
    """Return new rows as a federation of their clients, prepared as the training rows were."""
    prepared = predictor.preparation
    if prepared is None:
        raise RunFolderError(
            "The run was trained on arrays, whose columns have no names; measure it in Python with "
            "equifed.load_predictor(folder)."
        )
    columns, target = read_columns(table), prepared.target.name
    if target not in columns:
        has = ", ".join(list(columns)[:20])
        raise DataError(f"The table has no column {target!r}, the target; it has {has}.")
    rows = columns.rows
    columns = columns.take(np.flatnonzero([v is not None for v in columns[target]]))
    if not columns.rows:
        raise DataError(f"No row has a value in {target!r}, the target: nothing can be measured.")
    told = f"{rows - columns.rows} of {rows} row(s) without a value in {target!r} are left out."
    unlabelled = [told] if columns.rows < rows else []
    for sentence in [*unlabelled, *find_strangers(predictor, columns, client)]:
        warnings.warn(sentence, DataWarning, stacklevel=3)
    features = predictor.features(columns, client)
    targets = prepared.encode_target(columns[target])
    owners: Sequence[Any] = columns.get(prepared.client or "", [])
    if client is not None:
        owners = [client] * len(features)
    elif not owners:
        raise DataError(
            f"The table has no column {prepared.client!r} that says whose rows they are; name "
            "their owner (--client NAME)."
        )
    elif None in owners:
        row = owners.index(None) + 1
        raise DataError(f"Column {prepared.client!r} lacks a value in row {row}; fill it in.")
    values = targets if classes is not None else targets.astype(np.float64)
    clients = {name: (features[rows], values[rows]) for name, rows in group_rows(owners).items()}
    made = Federation.from_clients(clients, name="new rows", classes=classes)
    return replace(made, preparation=prepared)


def find_strangers(
    predictor: Predictor, columns: dict[str, list[Any]], client: str | None
) -> list[str]:
    """Say which categories and clients of new rows no training row had: predictions are guesses."""
    prepared, told = predictor.preparation, []
    if prepared is None:
        return []
    for column in prepared.columns:
        if not isinstance(column, CategoryColumn) or column.name not in columns:
            continue
        texts = [t for t in name_categories(columns[column.name]) if t is not None]
        new = [t for t in texts if t not in column.categories]
        if new:
            kinds = ", ".join(map(repr, list(dict.fromkeys(new))[:5]))
            told.append(
                f"Column {column.name!r}: {len(new)} row(s) hold {kinds}, which training rows had "
                f"not, or too rarely; they count as {'other' if column.other else 'no category'}."
            )
    held = [client] if client is not None else columns.get(prepared.client or "", [])
    owners = [name for name in held if name is not None]
    names = [n for n in (() if not owners else group_rows(owners)) if n not in predictor.clients]
    if names and predictor.clients and not predictor.own:  # own parts say it themselves
        told.append(
            f"Client(s) {', '.join(names[:5])} took no part in training ({len(predictor.clients)} "
            "did): nothing is known about how well the model serves them."
        )
    return told


def _compare(metric: str, values: Losses, federation: Federation, history: History) -> Drift:
    records = (history.last(metric, split) for split in ("test", "validation", "train"))
    record = next((one for one in records if one is not None), None)
    known = {} if record is None else dict(zip(history.names, record.values.tolist(), strict=True))
    columns = zip(federation.names, federation.train.sizes.tolist(), values.tolist(), strict=True)
    rows = [
        {"client": name, "rows": count, "now": now, "at_training": then, "change": now - then}
        for name, count, now in columns
        for then in [known.get(name, math.nan)]
    ]
    return Drift(metric, None if record is None else record.split, rows)
