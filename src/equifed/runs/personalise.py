"""A client's own part or model after training, and that of a client that comes later."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from equifed.contract.arrays import Index, Losses
from equifed.contract.local import OwnL2
from equifed.data.columns import read_columns
from equifed.data.federation import Federation
from equifed.data.split import DataError
from equifed.metrics import Interval, count_pairs, mean_interval, newcombe_interval
from equifed.models.predictor import Predictor
from equifed.runs.build import load_data
from equifed.runs.config import RunConfig
from equifed.runs.fine_tune import (
    FOLDS,
    Choice,
    Tuned,
    fine_tune,
    fit_parts,
    module_for,
    split_folds,
)
from equifed.runs.load import PERSONAL_PARTS, PERSONALISED, load_predictor
from equifed.training.files import RunFolderError, digest, read_json, seal, write_file
from equifed.training.history import History
from equifed.training.tables import CONFIG, MODEL, RUN

Columns = Mapping[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Personalised:
    """A finished model with an own part for every client, and what that changed.

    Parameters
    ----------
    predictor : Predictor
        Predicts with every client's own part.
    names : tuple of str
        The own parameters.
    choices : mapping of {"validation", "train"} to Choice or Tuned
        What held-out samples chose for own parts fitted to these samples.
    fitted_on : tuple of str
        Of each client: "validation", "train", or "nothing" where it has no samples.
    metric, split : str
        What is compared: accuracy, or mse of a regression; "" if there is no test split.
    sizes : array of int
        Test samples of each client.
    before, after : array
        The metric per client; NaN without test samples.
    differences : tuple of Interval or None
        After minus before on the same samples, with 95 % limits.
    average : Interval, optional
        The same of the average over these clients.
    """

    predictor: Predictor
    names: tuple[str, ...]
    choices: Mapping[str, Choice | Tuned]
    fitted_on: tuple[str, ...]
    metric: str
    split: str
    sizes: Index
    before: Losses
    after: Losses
    differences: tuple[Interval | None, ...]
    average: Interval | None

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per client."""
        columns = zip(self.predictor.clients, self.fitted_on, self.sizes, self.before, self.after,
                      self.differences, strict=True)  # fmt: skip
        return [
            {"client": name, "fitted_on": source, "test": int(m), "before": _number(b),
             "after": _number(a), "change": None if d is None else d.estimate,
             "lower": None if d is None else d.lower, "upper": None if d is None else d.upper}
            for name, source, m, b, a, d in columns
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return what came of it as plain values."""
        chosen = {k: c.to_dict() for k, c in self.choices.items()}
        limits = self.average
        told = None if limits is None else [limits.estimate, limits.lower, limits.upper]
        return {"own": list(self.names), "chosen": chosen, "metric": self.metric,
                "split": self.split, "average_change": told, "clients": self.rows()}  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write it beside the model of a run, for ``equifed predict --personalised``."""
        path = Path(folder)
        parts = save({name: part.contiguous() for name, part in self.predictor.own.items()})
        held = {"parts": digest(parts), "model": digest((path / MODEL).read_bytes())}
        write_file(path / PERSONAL_PARTS, parts)
        write_file(path / PERSONALISED, seal({**self.to_dict(), **held}))
        return path / PERSONALISED


def describe(found: Personalised) -> str:
    """Return in words what was fitted and how it was chosen."""
    chosen = "; ".join(f"on {k} samples: {c}" for k, c in found.choices.items())
    if any(isinstance(one, Tuned) for one in found.choices.values()):
        return f"all parameters fine-tuned after training ({chosen})"
    return f"own part {', '.join(found.names)} fitted after training ({chosen})"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def personalise(
    run: str | Path | History,
    data: Federation | None = None,
    own: str | Sequence[str] = "bias",
    *,
    temperature: float | None = None,
    penalty: float | None = None,
    lr: float | None = None,
    steps: int | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> Personalised:
    """Fit an own part to every client at the shared parameters of a finished model.

    The own part is the bias of the last layer, or weight and bias (``own="head"``, up to 2,000
    numbers): a convex problem, solved by Newton's method. A client with at least 20 validation
    samples is fitted to these, whose outputs the model was not trained on; others to their training
    samples. Temperature and penalty are chosen for both kinds by the loss on validation samples,
    averaged over clients (by five folds where the fit uses them, too); to change nothing is among
    the choices. Test samples are used to compare before and after, and for nothing else.

    With ``own="all"`` every client fine-tunes the whole model: local steps from the shared
    parameters, by minibatches of its training samples. Step size and number of steps are one choice
    for all clients, by the loss on validation samples, "no change" among them. An own bias repairs
    other shares of classes; fine-tuning also other looks of them, and needs more samples.

    Parameters
    ----------
    run : path or History
        Folder of a complete run, or what training returned.
    data : Federation, optional
        The data of the run; a folder's configuration loads them.
    own : {"bias", "head", "all"} or sequence of str
        What becomes the clients' own.
    temperature, penalty : float, optional
        Use these; both are needed where the data have no validation split.
    lr, steps : float and int, optional
        Of fine-tuning: use these; both are needed where the data have no validation split.
    device : str
        Where fine-tuning computes.
    trust : bool
        Load the code that the folder names; see :func:`equifed.load_predictor`.

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.load("heart-disease", validation=0.2)
    >>> clients = ef.simulate(data, "logistic", l2=0.01)
    >>> history = ef.train(ef.ScaffPD(ef.objectives.Average()), clients, rounds=5)
    >>> found = ef.personalise(history, data)
    >>> found.names, found.fitted_on[0]
    (('1.bias',), 'validation')
    """
    predictor, data = _open(run, data, trust)
    if own == "all":
        if (temperature, penalty) != (None, None):
            raise ValueError(
                "temperature and penalty are of own biases; own='all' has lr and steps."
            )
        choice, told = fine_tune(predictor, data, lr, steps, device)
        sources = tuple("train" if size else "nothing" for size in data.train.sizes)
        return _compare(predictor, told, data, tuple(told.own), {"train": choice}, sources)
    if (lr, steps) != (None, None):
        raise ValueError(f"lr and steps are of fine-tuning, own='all', got own={own!r}.")
    fit, choices = fit_parts(predictor, data, own, temperature, penalty)
    return _compare(predictor, fit.told(choices), data, fit.names, choices, fit.sources)


def _open(
    run: str | Path | History, data: Federation | None, trust: bool
) -> tuple[Predictor, Federation]:
    """Return what predicts, and the run's data; refuse others."""
    if isinstance(run, History):
        history, folder, predictor = run, run.folder, run.predictor(trust=trust)
    else:
        folder, predictor = Path(run), load_predictor(run, trust=trust)
        history = History.load(run, model=False)
    if data is None:
        if folder is None or not (folder / CONFIG).exists():
            raise ValueError("The run does not say how its data are loaded; give data=.")
        data = load_data(RunConfig.read(folder / CONFIG).data)
    known = history.provenance.get("data", {})
    if folder is not None and (folder / RUN).exists():
        known = read_json(folder / RUN).get("data", known)
    wanted = known.get("sha256") if isinstance(known, Mapping) else None
    if wanted is not None and wanted != data.checksum():
        raise ValueError("These are other data than the run was trained on; give the same.")
    if predictor.clients != data.names:
        raise ValueError(
            f"The run's clients are {', '.join(predictor.clients[:5])}, the data's "
            f"{', '.join(data.names[:5])}; give the data that it was trained on."
        )
    return predictor, data


# -- before and after -------------------------------------------------------------------------


def _compare(
    before: Predictor, after: Predictor, data: Federation, names: tuple[str, ...],
    choices: Mapping[str, Choice | Tuned], fitted_on: tuple[str, ...],
) -> Personalised:  # fmt: skip
    """Measure both on the same test samples."""
    n, classes, split = len(data.names), data.classes is not None, data.test
    values, told = np.full((2, n), np.nan), list[Interval | None]([None] * n)
    sizes = np.zeros(n, dtype=np.int64) if split is None else np.asarray(split.sizes)
    for i in map(int, np.flatnonzero(sizes)):
        assert split is not None
        given = data.names[i], *split.client(i), classes
        old, new = (_score_samples(p, *given) for p in (before, after))
        values[:, i] = old.mean(), new.mean()
        if classes:
            joint = count_pairs(new > 0, old > 0, [len(old)])
            told[i] = Interval(*(float(v[0]) for v in newcombe_interval(joint)))
        else:
            told[i] = mean_interval(new - old)
    metric = "" if split is None else "accuracy" if classes else "mse"
    return Personalised(
        after, names, dict(choices), fitted_on, metric, "" if split is None else "test", sizes,
        values[0], values[1], tuple(told), _average([d for d in told if d is not None]),
    )  # fmt: skip


def _average(told: Sequence[Interval]) -> Interval | None:
    """Return the mean of independent differences; squares of the distances to limits add up."""
    if not told:
        return None
    low, high = (
        math.sqrt(sum((getattr(d, end) - d.estimate) ** 2 for d in told)) / len(told)
        for end in ("lower", "upper")
    )
    estimate = sum(d.estimate for d in told) / len(told)
    return Interval(estimate, estimate - low, estimate + high)


def _score_samples(
    predictor: Predictor, client: str, inputs: Any, targets: Any, classes: bool
) -> Losses:
    """Return 1 for every correct answer, or squared errors."""
    outputs = predictor.run_module(module_for(predictor, client), inputs)
    if not classes:
        found: Losses = ((outputs - np.asarray(targets).reshape(outputs.shape)) ** 2).mean(1)
        return found
    chosen = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return np.asarray(chosen == np.asarray(targets), dtype=np.float64)


# -- a client that comes after training -------------------------------------------------------


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
    target, mean = _check_rows(predictor, columns, client, folder)

    def fit(rows: Columns) -> Predictor:
        return predictor.for_new_client(rows, rows[target], client, own_l2)

    found, truth = fit(columns), predictor.encode_targets(columns[target])
    before = after = np.full(1, np.nan)
    if len(truth) >= 2 * FOLDS:
        before, after = _errors(mean, columns, client, truth), np.empty(len(truth))
        for rest, fold in split_folds(client, len(truth)):
            told = fit(_take(columns, rest))
            after[fold] = _errors(told, _take(columns, fold), client, truth[fold])
    metric = "mse" if predictor.classes is None else "accuracy"
    return Newcomer(found, len(truth), metric, float(before.mean()), float(after.mean()))


def _check_rows(
    predictor: Predictor, columns: Columns, client: str, folder: str | Path
) -> tuple[str, Predictor]:
    """Return the target's column, and who predicts with the mean of the others' own parts."""
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
    target = prepared.target.name
    if target not in columns:
        raise DataError(
            f"The table has no column {target!r}, the target, which an own part is fitted to; it "
            f"has {', '.join(list(columns)[:20])}."
        )
    mean = predictor.for_new_client(client=client)  # refuses who took part, and models without
    owners = {str(name) for name in columns.get(prepared.client or "", [])} - {client}
    if owners:
        raise DataError(
            f"The table has rows of {', '.join(sorted(owners)[:5])}; give those of {client!r}."
        )
    return target, mean


def _take(columns: Columns, rows: Any) -> Columns:
    return {name: [values[k] for k in rows] for name, values in columns.items()}


def _errors(predictor: Predictor, columns: Columns, client: str, truth: Any) -> Any:
    """Return one number for each row: whether it is right, or the squared error."""
    told = predictor.predict(columns, client)
    if predictor.classes is None:
        return np.square(told - truth).reshape(len(truth), -1).sum(axis=1)
    return np.asarray(predictor.encode_targets(told) == truth, dtype=np.float64)
