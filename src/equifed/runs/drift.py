"""The model of a run on new labelled rows, beside what it was at training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses
from equifed.data.columns import group_rows, name_categories, read_columns
from equifed.data.federation import Federation
from equifed.data.preparation import CategoryColumn
from equifed.data.split import DataError, DataWarning, Split
from equifed.runs.catalogue import SECTIONS
from equifed.runs.trained import dtype_of, load_predictor, read_run
from equifed.training.files import RunFolderError
from equifed.training.history import History

if TYPE_CHECKING:
    from equifed.models.flat import FlatModel
    from equifed.models.predictor import Predictor


@dataclass(frozen=True, eq=False)
class Drift:
    """One metric of every client on new rows, beside what it was at training.

    Parameters
    ----------
    metric : str
        Its name.
    split : str, optional
        Where it was measured at training: test if there was one; None: it was not.
    clients : tuple of str
        Those with new rows, in order of appearance.
    sizes : array of int
        New rows of each.
    values, before : array
        The metric now and then; NaN for a client that did not take part.
    """

    metric: str
    split: str | None
    clients: tuple[str, ...]
    sizes: Index
    values: Losses
    before: Losses

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per client."""
        columns = zip(self.clients, self.sizes, self.values, self.before, strict=True)
        return [
            {"client": name, "rows": int(n), "now": float(v), "at_training": float(b),
             "change": float(v - b)}
            for name, n, v, b in columns
        ]  # fmt: skip


def evaluate(
    folder: str | Path, table: Any, client: str | None = None, *, trust: bool = False
) -> list[Drift]:
    """Measure the model of a run on new labelled rows, client by client.

    Parameters
    ----------
    folder : path
        Folder of a complete run on a table.
    table : path, DataFrame or mapping of columns
        New rows with the target's column and, unless ``client`` names the owner of all of them, the
        client's column.
    trust : bool
        Load the code that the folder names; see :func:`equifed.load_predictor`.
    """
    from equifed.engines.evaluate import FederationEvaluator
    from equifed.models.flat import FlatModel, as_data
    from equifed.models.own_part import OwnPart

    path, predictor = Path(folder), load_predictor(folder, trust=trust)
    config, told = read_run(path)
    federation = _gather(predictor, table, client, told["classes"])
    inputs = as_data(federation.train.inputs, dtype_of(config), "cpu")
    loss = SECTIONS["losses"][config.model["loss"]].load()
    part = OwnPart(tuple(predictor.own), "joint", 0.0) if predictor.own else None
    model = FlatModel(predictor.module, loss, inputs[:3], dtype=dtype_of(config), own=part)
    x = model.flatten(predictor.module)
    (found,) = FederationEvaluator(federation, model, ("train",))(
        x, own=_own_rows(predictor, federation.names, model) if predictor.own else None
    )
    history = History.load(path, model=False)
    return [
        _compare(metric, values, federation, history) for metric, values in found.metrics.items()
    ]


def _own_rows(predictor: Predictor, names: Sequence[str], model: FlatModel) -> Any:
    """Return the own part of every client, the mean for those who took no part in training."""
    import torch

    from equifed.models.predictor import warn_of_strangers

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
    columns = read_columns(table)
    if prepared.target.name not in columns:
        raise DataError(
            f"The table has no column {prepared.target.name!r}, the target; it has "
            f"{', '.join(list(columns)[:20])}."
        )
    for sentence in find_strangers(predictor, columns, client):
        warnings.warn(sentence, DataWarning, stacklevel=3)
    features = predictor.features(columns, client)
    targets = prepared.encode_target(columns[prepared.target.name])
    owners = _find_owners(columns, prepared.client, client, len(features))
    groups = group_rows(owners)
    order = np.concatenate(list(groups.values()))
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in groups.values()])])
    values = targets if classes is not None else targets.astype(np.float64)
    split = Split(features[order], values[order], offsets.astype(np.int64))
    return Federation("new rows", tuple(groups), split, classes=classes)


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


def _find_owners(
    columns: dict[str, list[Any]], title: str | None, client: str | None, count: int
) -> Sequence[Any]:
    if client is not None:
        return [client] * count
    if title is None or title not in columns:
        raise DataError(
            f"The table has no column {title!r} that says whose rows they are; name their owner "
            "(--client NAME)."
        )
    gap = next((k for k, name in enumerate(columns[title]) if name is None), None)
    if gap is not None:
        raise DataError(f"Column {title!r} lacks a value in row {gap + 1}; every row has a client.")
    return columns[title]


def _compare(metric: str, values: Losses, federation: Federation, history: History) -> Drift:
    for split in ("test", "validation", "train"):
        record = history.last(metric, split)
        if record is not None:
            known = dict(zip(history.names, record.values, strict=True))
            break
    else:
        split, known = "", {}
    before = np.array([known.get(name, np.nan) for name in federation.names])
    sizes = federation.train.sizes
    return Drift(metric, split or None, federation.names, sizes, values, before)
