"""A client that comes after training: its own part, fitted to its labelled rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.local import OwnL2
from equifed.contract.streams import Stream
from equifed.data.columns import read_columns
from equifed.data.split import DataError
from equifed.runs.trained import load_predictor
from equifed.training.files import RunFolderError

if TYPE_CHECKING:
    from equifed.models.predictor import Predictor

FOLDS = 5
Columns = Mapping[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Newcomer:
    """A new client's model, and what its own part changes on rows that it was not fitted to.

    Parameters
    ----------
    predictor : Predictor
        Predicts for this client.
    rows : int
        Labelled rows of the fit.
    metric : str
        accuracy, or mse of a regression.
    before, after : float
        With the mean of the others' own parts, and with its own by five folds; NaN below 10 rows.
    """

    predictor: Predictor
    rows: int
    metric: str
    before: float
    after: float


def fit_newcomer(
    folder: str | Path,
    table: Any,
    client: str,
    *,
    own_l2: OwnL2 | None = None,
    personalised: bool = False,
    trust: bool = False,
) -> Newcomer:
    """Fit the own part of a client that took no part in training to its labelled rows.

    Parameters
    ----------
    folder : path
        Folder of a complete run on a table, of a model with own parts.
    table : path, DataFrame or mapping of columns
        The client's rows, with the target's column.
    client : str
        Its name.
    own_l2 : float, optional
        Strength of the penalty on the own part; that of training by default.
    personalised : bool
        The run's own parts are those of ``equifed personalise``.
    trust : bool
        Load the code that the folder names; see :func:`equifed.load_predictor`.
    """
    predictor = load_predictor(folder, personalised=personalised, trust=trust)
    columns = read_columns(table)
    if predictor.only is not None:
        raise RunFolderError(
            f"{folder} is the model of {predictor.only!r}, with its own part, as it was given out; "
            "give the run's own folder. In a federation a site that comes after the end gets its "
            "own by: equifed flower welcome"
        )
    prepared = predictor.preparation
    if prepared is None:
        raise RunFolderError(
            "The run was trained on arrays, whose columns have no names; fit the own part in Python"
            " with equifed.load_predictor(folder).for_new_client(rows, targets)."
        )
    if prepared.target.name not in columns:
        raise DataError(
            f"The table has no column {prepared.target.name!r}, the target, which an own part is "
            f"fitted to; it has {', '.join(list(columns)[:20])}."
        )
    mean = predictor.for_new_client(client=client)  # refuses who took part, and models without
    owners = {str(name) for name in columns.get(prepared.client or "", [])} - {client}
    if owners:
        raise DataError(
            f"The table has rows of {', '.join(sorted(owners)[:5])}; give those of {client!r}."
        )
    found = _fit(predictor, columns, client, own_l2)
    rows = len(columns[prepared.target.name])
    metric = "mse" if predictor.classes is None else "accuracy"
    numbers = _measure(predictor, mean, columns, client, own_l2)
    return Newcomer(found, rows, metric, *numbers)


def _fit(predictor: Predictor, columns: Columns, client: str, own_l2: OwnL2 | None) -> Predictor:
    assert predictor.preparation is not None
    truth = columns[predictor.preparation.target.name]
    return predictor.for_new_client(columns, truth, client, own_l2)


def _measure(
    predictor: Predictor, mean: Predictor, columns: Columns, client: str, own_l2: OwnL2 | None
) -> tuple[float, float]:
    """Return the metric with the mean of own parts, and by folds with the client's own."""
    assert predictor.preparation is not None
    truth = predictor.encode_targets(columns[predictor.preparation.target.name])
    if len(truth) < 2 * FOLDS:
        return float("nan"), float("nan")
    after = np.empty(len(truth))
    order = Stream(0).at("folds", client).generator().permutation(len(truth))
    for fold in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, fold)
        told = _fit(predictor, _take(columns, rest), client, own_l2)
        after[fold] = _errors(told, _take(columns, fold), client, truth[fold])
    before = _errors(mean, columns, client, truth)
    return float(before.mean()), float(after.mean())


def _take(columns: Columns, rows: Any) -> Columns:
    return {name: [values[k] for k in rows] for name, values in columns.items()}


def _errors(predictor: Predictor, columns: Columns, client: str, truth: Any) -> Any:
    """Return one number for each row: whether it is right, or the squared error."""
    told = predictor.predict(columns, client)
    if predictor.classes is None:
        return np.square(told - truth).reshape(len(truth), -1).sum(axis=1)
    return np.asarray(predictor.encode_targets(told) == truth, dtype=np.float64)
