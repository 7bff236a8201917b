"""The model of a run folder, or of an export, built again: for predictions and new rows."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equifed.data import DataError, DataWarning, Federation
from equifed.data.columns import group_rows, name_categories, read_columns
from equifed.data.fields import Layout
from equifed.data.preparation import CategoryColumn, Preparation, Target, digest_json
from equifed.data.split import refuse_any
from equifed.engines.evaluate import FederationEvaluator
from equifed.engines.own import settle_own
from equifed.metrics.metric import as_metrics, find_metric
from equifed.models.adapted import ByRow, adapt
from equifed.models.architectures import MODELS, build
from equifed.models.checks import load_weights
from equifed.models.export import DESCRIPTION, FORMAT, PROGRAM
from equifed.models.flat import EXAMPLES, FlatModel, as_data
from equifed.models.losses import DERIVATIVES, fitted_loss
from equifed.models.own_part import OwnPart
from equifed.models.predictor import Predictor, link_of, name_classes, warn_of_strangers
from equifed.runs.build import build_module, load_data
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.training.files import RunFolderError, StoredRun, digest, reading, refuse_folder
from equifed.training.folder import open_run_folder
from equifed.training.history import HELD, History
from equifed.training.tables import CONFIG, MODEL, OWN, PREPARATION, RUN, read_names, read_part

# What equifed.personalise found: what came of it, and every client's own parameters
PERSONALISED, PERSONAL_PARTS = "personalised.json", "personalised.safetensors"
AGAIN = "fit own parts with: equifed personalise"


def load_predictor(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    personalised: bool = False,
    trust: bool = False,
) -> Predictor:
    """Load the model of a run folder, or what ``equifed export`` wrote, for predictions.

    The module is built again from the run's configuration (own code by its address), or by the
    model's name if the run was one of :func:`equifed.train`; the data need not be there.

    Parameters
    ----------
    folder : path
        The run folder.
    model : torch.nn.Module, optional
        The module, where a run in Python was given one of its own; its weights are replaced.
    personalised : bool
        With the own parts that ``equifed personalise`` has fitted after training.
    trust : bool
        Load the code that the folder names (own code of its configuration, an exported program).
        A folder may come from somebody else, and its code would run with your rights.

    Examples
    --------
    >>> import equifed as ef
    >>> import tempfile
    >>> table = {"site": ["n", "n", "s", "s"], "dose": [0, 1, 0, 1], "ill": ["no", "yes"] * 2}
    >>> data = ef.Federation.from_table(table, client="site", target="ill")
    >>> history = ef.train(ef.FedAvg(), ef.simulate(data, "logistic"), rounds=20)
    >>> folder = history.save(tempfile.mkdtemp() + "/run")
    >>> ef.load_predictor(folder).predict({"dose": [0, 1]}).tolist()
    ['no', 'yes']
    """
    return read_predictor(open_run_folder(folder, trust=trust), model, personalised)


def read_predictor(
    run: StoredRun, model: nn.Module | None = None, personalised: bool = False
) -> Predictor:
    """Return what predicts with the model of an opened folder."""
    if DESCRIPTION in run:
        if personalised:
            raise RunFolderError(f"{run.path} is an export; personalised=True is for a run.")
        return _read_exported(run)
    made = _read_made(run)
    told, weights = made["samples"], read_part(run, MODEL) or {}
    with nullcontext() if CONFIG in run else reading(run / RUN):
        module, more = _open(run, made, model, weights)
    named = more["own"]
    own = None if named is None else read_part(run, OWN)
    if personalised:
        own = _read_personalised(run)
    elif named is not None and own is None:
        raise RunFolderError(
            f"{run.path} has no {OWN}, and the model has own parts (model.own = {named!r}); "
            "without them no client's model can be built again."
        )
    more |= {"own": own or {}, "layout": (layout := Layout.from_json(told.get("layout")))}
    try:
        loaded = load_weights(adapt(module, layout), weights)
    except RuntimeError as error:
        raise ValueError(
            f"The module does not fit the weights in {run / MODEL} ({' '.join(str(error).split())}"
            "); pass the module that was trained."
        ) from None
    return Predictor(
        loaded, tuple(told["input_shape"]), name_classes(told["classes"], told["class_names"]),
        preparation=read_preparation(run), clients=read_names(run),
        tokens=told["tokens"], outputs_shape=tuple(told["target_shape"]), **more,
    )  # fmt: skip


def load_with_data(
    run: str | Path | History, data: Federation | None, trust: bool
) -> tuple[Predictor, Federation]:
    """Return what predicts, and the run's data; refuse others."""
    history = run if isinstance(run, History) else History.load(run, model=False)
    predictor, folder = history.predictor(trust=trust), history.folder
    if data is None:
        if folder is None or not (folder / CONFIG).exists():
            raise ValueError("The run does not record how its data are loaded; pass data=.")
        data = load_data(RunConfig.of_run(StoredRun(folder)).data)
    known = history.provenance.get("data")
    wanted = known.get("sha256") if isinstance(known, Mapping) else None
    other = wanted is not None and wanted != data.checksum()
    told, mine = (", ".join(names[:5]) for names in (predictor.clients, data.names))
    refuse_any(
        (other, "These data differ from those the run was trained on; pass the same data."),
        (
            predictor.clients != data.names,
            f"The run's clients are {told}, those of the data {mine}.",
        ),
    )
    return predictor, data


def _read_made(run: StoredRun) -> dict[str, Any]:
    """Return what a run was made of, or say why its model cannot be built again."""
    made = run.sealed(RUN) if RUN in run else {}
    if "model" not in made:
        need_config(run)
    unended = f"the run has not ended; resume it with: equifed resume {run.path}"
    foreign = "its engine knew vectors alone, or another version wrote it; train again"
    refuse_folder(
        (MODEL not in run, f"{run.path} has no {MODEL}: {unended}"),
        ("samples" not in made, f"{run / RUN} does not record the samples: {foreign}."),
    )
    with reading(run / RUN):
        told = made["samples"]
        classes, names = told["classes"], told["class_names"]
        numbers = [*told["input_shape"], *told["target_shape"], told.get("outputs", 0)]
        numbers += [] if classes is None else [classes]
        whole = all(isinstance(n, int) and n >= 0 for n in numbers)
        texts = all(isinstance(name, str) for name in names)
        if not (whole and texts and isinstance(told["tokens"], bool)):
            raise ValueError("its samples have shapes, classes or names of other types than a run")
        if names and len(names) != classes:
            raise ValueError(f"{classes} classes have {len(names)} names")
    return made


def need_config(run: StoredRun) -> RunConfig:
    """Return the configuration of a run, which a run in Python has not."""
    if CONFIG not in run:
        raise RunFolderError(
            f"{run.path} has no {CONFIG}: only runs of a configuration (equifed run, equifed.run) "
            "can be built again."
        )
    return RunConfig.of_run(run)


def _open(
    run: StoredRun, made: dict[str, Any], model: nn.Module | None, weights: dict[str, torch.Tensor]
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module, and what else a predictor takes; ``own`` by name."""
    told, shape = made["samples"], tuple(made["samples"]["input_shape"])
    config = RunConfig.of_run(run) if CONFIG in run else None
    name = str(made.get("model_name")) if config is None else config.model["name"]
    if model is not None:
        model = copy.deepcopy(model)
    elif config is None and name not in MODELS:  # no code is loaded from a folder
        raise RunFolderError(
            f"{run.path} was trained with a module of your own ({made['model']:.80}), which the "
            "folder does not hold; pass it: equifed.load_predictor(folder, model=module)."
        )
    else:
        params, outputs = made.get("model_params") or {}, told["outputs"]
        make = partial(build, name, shape, outputs, **params)
        if config is not None:
            make = partial(build_module, config, shape, outputs)
        if name in MODELS:  # none larger than its weights is made
            with torch.device("meta"):
                asked = sum(value.numel() for value in make().state_dict().values())
            held = sum(value.numel() for value in weights.values())
            if asked > held:
                raise RunFolderError(
                    f"{run.path} is damaged: it describes a model of {asked:,} numbers, and "
                    f"{MODEL} has {held:,}."
                )
        model = make()
    if config is None:
        more = {"link": told["link"], "own": made.get("own")}
        return model.to(getattr(torch, made["dtype"])), more
    shared = config.model
    loss, own = SECTIONS["losses"][shared["loss"]].load(), shared.get("own")
    strengths = shared.get("own_l2"), shared["l2"]
    part = settle_own(model, loss, len(shape), own, shared["own_steps"], *strengths)
    known = fitted_loss(loss) if shared.get("class_weights") is None else None
    more = {"link": link_of(loss), "loss": known, "own": own}
    more["own_l2"] = 0.0 if part is None else part.l2
    return model.to(getattr(torch, shared["dtype"])), more


def _read_personalised(run: StoredRun) -> dict[str, Any]:
    """Return the own parts that were fitted after training; they must belong to this model."""
    refuse_folder(
        (PERSONALISED not in run, f"{run.path} has no {PERSONALISED}: {AGAIN} {run.path}")
    )
    told, file = run.sealed(PERSONALISED), run / PERSONALISED
    run.sums[PERSONAL_PARTS] = told["parts"]
    parts: dict[str, Any] = read_part(run, PERSONAL_PARTS) or {}
    other = not parts or told["model"] != digest(run.read(MODEL))
    old = any(name.startswith("beside:") for name in parts)
    refuse_folder(
        (other, f"{file} is damaged or belongs to another model than {MODEL}; {AGAIN} {run.path}"),
        (old, f"{file} has own offsets of version 0.2, which were removed; {AGAIN} {run.path}"),
    )
    return parts


def read_preparation(run: StoredRun) -> Preparation | None:
    """Return how the data of a run were prepared; None for data that came as arrays."""
    with reading(run / RUN):
        told = run.json(RUN)["data"].get("preparation")
    if told is None and PREPARATION not in run:
        return None
    return _match_preparation(run, told, "start the run again")


def _match_preparation(run: StoredRun, wanted: str, cure: str) -> Preparation:
    """Return the preparation that a folder holds, if its checksum is the one wanted."""
    with reading(run / PREPARATION):
        held = run.json(PREPARATION)
        found = Preparation.from_json(held)
    other = f"{run / PREPARATION} is not the preparation that the run was trained with; {cure}."
    refuse_folder((digest_json(held) != wanted, other))
    return found


def _read_exported(run: StoredRun) -> Predictor:
    """Return the predictor of an exported folder with a program of ``torch.export``."""
    told, prepared = run.json(DESCRIPTION), None
    wanted, given, again = (
        told.get("preparation_sha256"),
        told.get("format"),
        "export the run again",
    )
    refuse_folder(
        (given != FORMAT, f"{run / DESCRIPTION} has the format {given}, not {FORMAT}; {again}."),
        (told.get("thresholds"), f"{run.path} has thresholds of clients, now gone; {again}."),
        (PROGRAM not in run, f"{run.path} holds no program ({PROGRAM}); {again} with --torch."),
    )
    if wanted is not None:
        prepared = _match_preparation(run, wanted, again)
        if prepared.target.is_scaled:  # the program answers in the unit itself
            prepared = replace(prepared, target=Target(prepared.target.name))
    program = torch.export.load(io.BytesIO(run.read(PROGRAM))).module()
    layout = Layout.from_json(told.get("layout"))
    return Predictor(
        program if layout is None else ByRow(program, layout), tuple(told["input_shape"]),
        None if told["classes"] is None else tuple(told["classes"]), told["link"],
        preparation=prepared, clients=tuple(told["clients"]),
        tokens=told["input_dtype"] == "int64", outputs_shape=tuple(told["target_shape"]),
        only=told.get("only"), layout=layout,
    )  # fmt: skip


# -- new labelled rows: what the model does with them, client by client ------------------------


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
    federation = _group(predictor, table, client, made["samples"]["classes"])
    told = RunConfig.of_run(run).model if CONFIG in run else made  # of equifed.train, or of fit
    losses = SECTIONS["losses"]
    named = {e.load().__name__: e.load() for e in losses.entries().values()}
    if CONFIG not in run and str(told.get("loss")) not in named:
        raise RunFolderError(f"{run.path} has a loss of your own; use equifed.load_predictor.")
    loss = losses[told["loss"]].load() if CONFIG in run else named[told["loss"]]
    evaluator, x, own = open_evaluator(predictor, federation, loss)
    (measured,) = evaluator(x, ("train",), own=own)
    history, found = History.load(run.path, model=False), list[Drift]()
    for metric, values in measured.metrics.items():
        records = (history.last(metric, split) for split in HELD)
        record = next((one for one in records if one is not None), None)
        then = {} if record is None else dict(zip(history.names, record.values, strict=True))
        rows = []
        for name, count, now in zip(federation.names, federation.train.sizes, values, strict=True):
            before = float(then.get(name, math.nan))
            row = {"client": name, "rows": int(count), "now": float(now), "at_training": before}
            rows.append(row | {"change": float(now) - before})
        found.append(Drift(metric, None if record is None else record.split, rows))
    return found


def open_evaluator(
    predictor: Predictor, data: Federation, loss: Any
) -> tuple[FederationEvaluator, torch.Tensor, torch.Tensor | None]:
    """Return what measures a model on data, its shared vector, and every client's own part.

    Of clients that took no part in training that is the mean.
    """
    part = OwnPart(tuple(predictor.own), "joint", 0.0) if predictor.own else None
    dtype, rows = next(predictor.module.parameters()).dtype, None
    few = as_data(data.train.inputs[:EXAMPLES], dtype, "cpu")
    model = FlatModel(predictor.module, loss, few, dtype=dtype, own=part)
    if part is not None:
        parts = [predictor.own[name].flatten(1) for name in model.own_shapes]
        known = torch.cat(parts, dim=1).to(dtype)
        place = {name: k for k, name in enumerate(predictor.clients)}
        warn_of_strangers(predictor.own, [name for name in data.names if name not in place])
        found = [known[place[n]] if n in place else known.mean(0) for n in data.names]
        rows = torch.stack(found)
    return FederationEvaluator(data, model), model.flatten(predictor.module), rows


def measure_again(run: History, data: Federation, split: str, metrics: Sequence[str] = ()) -> None:
    """Measure what a run's predictor answers now, in the place of the last evaluation."""
    predictor, last, asked = run.predictor(), run.rounds[-1].round, as_metrics(metrics)
    assert predictor.loss is not None  # a fit knows its loss
    evaluator, x, own = open_evaluator(predictor, data, DERIVATIVES[predictor.loss].loss)
    run.metrics = [r for r in run.metrics if (r.round, r.split) != (last, split)]
    found = run.add_evaluation(last, evaluator(x, [split], asked, own))
    run.details = evaluator.describe(split, x, [find_metric(r.metric) for r in found], own)


def _group(predictor: Predictor, table: Any, client: str | None, classes: int | None) -> Federation:
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


def find_strangers(predictor: Predictor, table: Mapping[str, Any], client: str | None) -> list[str]:
    """Say which categories and clients of new rows no training row had: predictions are guesses."""
    prepared, told = predictor.preparation, []
    if prepared is None:
        return []
    for column in prepared.columns:
        if not isinstance(column, CategoryColumn) or column.name not in table:
            continue
        texts = [t for t in name_categories(table[column.name]) if t is not None]
        new = [t for t in texts if t not in column.categories]
        if new:
            kinds = ", ".join(map(repr, list(dict.fromkeys(new))[:5]))
            told.append(
                f"Column {column.name!r}: {len(new)} row(s) hold {kinds}, which training rows had "
                f"not, or too rarely; they count as {'other' if column.other else 'no category'}."
            )
    held = [client] if client is not None else table.get(prepared.client or "", [])
    owners = [name for name in held if name is not None]
    names = [n for n in (() if not owners else group_rows(owners)) if n not in predictor.clients]
    if names and predictor.clients and not predictor.own:  # own parts say it themselves
        told.append(
            f"Client(s) {', '.join(names[:5])} took no part in training ({len(predictor.clients)} "
            "did): nothing is known about how well the model serves them."
        )
    return told
