"""What a run folder is good for after training: predictions, and numbers on new labelled rows."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.arrays import Index, Losses
from equifed.data.columns import group_rows, read_columns
from equifed.data.federation import Federation
from equifed.data.prepared_columns import CategoryColumn, name_categories
from equifed.data.split import DataError, DataWarning, Split
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.runs.modules import build_module
from equifed.runs.run import load_preparation
from equifed.training.files import RunFolderError, digest, read_sealed
from equifed.training.history import History
from equifed.training.provenance import CONFIG, RUN
from equifed.training.tables import CLIENTS, MODEL, OWN, check_folder

if TYPE_CHECKING:
    from torch import nn

    from equifed.models.fit_own import FittedLoss
    from equifed.models.flat import FlatModel
    from equifed.models.predictor import Predictor

__all__ = ["Drift", "evaluate", "load_predictor", "write_model_card"]

CARD = "MODEL_CARD.md"
PERSONALISED, PERSONAL_PARTS = "personalised.json", "personalised.safetensors"
"""What :func:`equifed.personalise` found: what came of it, and every client's own parameters."""


def load_predictor(
    folder: str | Path, model: nn.Module | None = None, *, personalised: bool = False
) -> Predictor:
    """Return what predicts with the model of a run folder, or of what ``equifed export`` wrote.

    The module is built again from the run's configuration (own code by its address), or by the
    model's name if the run was one of :func:`equifed.train`, and given the weights of
    ``model.safetensors``; the data need not be there.

    Parameters
    ----------
    folder : path
        The run folder.
    model : torch.nn.Module, optional
        The module, where a run in Python was given one of its own; its weights are replaced.
    personalised : bool
        With the own parts that ``equifed personalise`` has fitted after training.
    """
    import torch
    from safetensors.torch import load_file

    from equifed.models.checks import load_weights
    from equifed.models.export import DESCRIPTION, load_exported
    from equifed.models.predictor import Predictor, link_of, name_classes

    path = Path(folder)
    if (path / DESCRIPTION).exists():
        if personalised:
            raise RunFolderError(f"{path} is an export; personalised=True is for a run's folder.")
        return load_exported(path)
    if not (path / CONFIG).exists() and (path / RUN).exists():
        made, told = _read_python_run(path)
        module = _rebuild(path, made, told) if model is None else copy.deepcopy(model)
        link, dtype = told["link"], getattr(torch, made["dtype"])
        own, loss, own_l2 = _read_own(path, made.get("own")), None, 0.0
    else:
        config, told = _read_run(path)
        if config.model.get("features") is not None and model is None:
            raise RunFolderError(
                f"{path} holds the head on frozen features of {config.model['features']['of']}, "
                "which takes features and no samples. Make them (equifed.features) and hand over "
                "the head: equifed.load_predictor(folder, model=head)."
            )
        shape = tuple(told["input_shape"])
        module = build_module(config, shape, told["outputs"]) if model is None else (
            copy.deepcopy(model)
        )  # fmt: skip
        link = link_of(SECTIONS["losses"][config.model["loss"]].load())
        dtype, (loss, own_l2) = _dtype(config), _read_loss(config, module, told)
        own = {} if personalised else _read_own(path, config.model.get("own"))
    if personalised:
        own = _read_personalised(path)
    check_folder(path)
    try:
        loaded = load_weights(module.to(dtype), load_file(path / MODEL))
    except RuntimeError as error:
        raise ValueError(
            f"The module does not fit the weights in {path / MODEL} ({' '.join(str(error).split())}"
            "); hand over the module that was trained."
        ) from None
    return Predictor(
        loaded,
        input_shape=tuple(told["input_shape"]),
        classes=name_classes(told["classes"], told["class_names"]),
        link=link,
        preparation=load_preparation(path),
        clients=tuple(json.loads((path / CLIENTS).read_text(encoding="utf-8"))),
        tokens=told["tokens"],
        outputs_shape=tuple(told["target_shape"]),
        own=own,
        loss=loss,
        own_l2=own_l2,
    )


def _read_python_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a run of ``equifed.train`` was made of, and what its samples are like."""
    if not (path / MODEL).exists():
        raise RunFolderError(f"{path} has no {MODEL}: the run has not ended.")
    made = read_sealed(path / RUN)
    if "model" not in made:
        raise RunFolderError(
            f"{path} has no {CONFIG}: only runs of a configuration (equifed run, equifed.run) can "
            "be built again without it."
        )
    if "samples" not in made:
        raise RunFolderError(
            f"{path / RUN} does not say what the samples were like: the engine of this run knew "
            "vectors alone, or another version wrote it. Load model.safetensors into your module."
        )
    return made, made["samples"]


def _rebuild(path: Path, made: dict[str, Any], told: dict[str, Any]) -> nn.Module:
    """Return a named model as it was built; say what to do about one's own module."""
    from equifed.models.architectures import MODELS, build

    if made.get("model_name") not in MODELS:  # code of one's own is not loaded from a folder
        raise RunFolderError(
            f"{path} was trained with a module of your own ({made['model']:.80}), which the folder "
            "does not hold; hand it over: equifed.load_predictor(folder, model=module)."
        )
    return build(made["model_name"], tuple(told["input_shape"]), told["outputs"])


def _read_loss(
    config: RunConfig, module: Any, told: dict[str, Any]
) -> tuple[FittedLoss | None, float]:
    """Return the loss that own parts can be fitted to, and their penalty in training."""
    from equifed.engines.own_parts import settle_own
    from equifed.models.fit_own import fitted_loss

    model = config.model
    loss = SECTIONS["losses"][model["loss"]].load()
    if model.get("own") is None:
        return fitted_loss(loss) if model.get("class_weights") is None else None, 0.0
    part = settle_own(
        module, loss, len(told["input_shape"]), model["own"], model["own_steps"],
        model.get("own_l2"), model["l2"],
    )  # fmt: skip
    assert part is not None
    return fitted_loss(loss) if model.get("class_weights") is None else None, part.l2


def _read_personalised(path: Path) -> dict[str, Any]:
    """Return the own parts that were fitted after training; they must belong to this model."""
    from safetensors.torch import load

    if not (path / PERSONALISED).exists():
        raise RunFolderError(
            f"{path} has no {PERSONALISED}: nobody has fitted own parts to its model; do it with: "
            f"equifed personalise {path}"
        )
    told, content = read_sealed(path / PERSONALISED), (path / PERSONAL_PARTS).read_bytes()
    if told["parts"] != digest(content) or told["model"] != digest((path / MODEL).read_bytes()):
        raise RunFolderError(
            f"{path / PERSONALISED} is damaged or belongs to another model than {MODEL}; do it "
            f"again with: equifed personalise {path}"
        )
    return load(content)


def _read_own(path: Path, named: Any) -> dict[str, Any]:
    """Return the own parts of a run's clients; none where the model has none."""
    from safetensors.torch import load_file

    if named is None:
        return {}
    if not (path / OWN).exists():
        raise RunFolderError(
            f"{path} has no {OWN}, and the model has own parts (model.own = "
            f"{named!r}); without them no client's model can be built again."
        )
    return load_file(path / OWN)


def _dtype(config: RunConfig) -> Any:
    import torch

    return getattr(torch, config.model["dtype"])


def _read_run(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of a run and what its samples are like, or say what is missing."""
    if not path.is_dir():
        raise RunFolderError(f"{path} is no folder; give the folder of a run.")
    for name, cure in (
        (CONFIG, "only runs of a configuration (equifed run, equifed.run) can be built again"),
        (MODEL, f"the run has not ended; go on with: equifed resume {path}"),
    ):
        if not (path / name).exists():
            raise RunFolderError(f"{path} has no {name}: {cure}.")
    told = json.loads((path / RUN).read_text(encoding="utf-8"))
    if "samples" not in told:
        raise RunFolderError(
            f"{path / RUN} does not say what the samples were like, because another version wrote "
            "it; run the configuration again."
        )
    return RunConfig.read(path / CONFIG), told["samples"]


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


def evaluate(folder: str | Path, table: Any, client: str | None = None) -> list[Drift]:
    """Measure the model of a run on new labelled rows, client by client.

    Parameters
    ----------
    folder : path
        Folder of a complete run on a table.
    table : path, DataFrame or mapping of columns
        New rows with the target's column and, unless ``client`` names the owner of all of them, the
        client's column.
    """
    from equifed.engines.evaluator import FederationEvaluator
    from equifed.models.flat import FlatModel, as_data
    from equifed.models.own_part import OwnPart

    path, predictor = Path(folder), load_predictor(folder)
    config, told = _read_run(path)
    federation = _gather(predictor, table, client, told["classes"])
    inputs = as_data(federation.train.inputs, _dtype(config), "cpu")
    loss = SECTIONS["losses"][config.model["loss"]].load()
    part = OwnPart(tuple(predictor.own), "joint", 0.0) if predictor.own else None
    model = FlatModel(predictor.module, loss, inputs[:3], dtype=_dtype(config), own=part)
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

    from equifed.models.own_prediction import warn_of_strangers

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


def write_model_card(folder: str | Path, out: str | Path) -> Path:
    """Write the model card of a complete run into a folder, and return the file."""
    from equifed.models.export import describe
    from equifed.report.card import write_card

    path, predictor = Path(folder), load_predictor(folder)
    config, _ = _read_run(path)
    told, prepared = json.loads((path / RUN).read_text(encoding="utf-8")), predictor.preparation
    text = write_card(
        History.load(path, model=False),
        config.to_dict(),
        told,
        describe(predictor),
        None if prepared is None else prepared.describe(),
        () if prepared is None else prepared.left_out,
    )
    card = Path(out) / CARD
    card.parent.mkdir(parents=True, exist_ok=True)
    card.write_text(text, encoding="utf-8")
    return card
