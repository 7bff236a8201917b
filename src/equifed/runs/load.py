"""Build the model of a run folder, or of an export, again: for predictions."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from equifed.data.federation import Federation
from equifed.data.fields import Layout
from equifed.data.preparation import Preparation, Target, digest_json
from equifed.engines.own import settle_own
from equifed.models.adapted import ByRow, adapt
from equifed.models.architectures import MODELS, build
from equifed.models.checks import load_weights
from equifed.models.export import DESCRIPTION, FORMAT, PROGRAM
from equifed.models.losses import fitted_loss
from equifed.models.predictor import Predictor, link_of, name_classes
from equifed.runs.build import build_module, load_data
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.training.files import RunFolderError, StoredRun, digest, reading
from equifed.training.folder import open_run_folder
from equifed.training.history import History
from equifed.training.tables import CONFIG, MODEL, OWN, PREPARATION, RUN, read_model, read_names

PERSONALISED, PERSONAL_PARTS = "personalised.json", "personalised.safetensors"
"""What :func:`equifed.personalise` found: what came of it, and every client's own parameters."""


def load_predictor(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    personalised: bool = False,
    trust: bool = False,
) -> Predictor:
    """Load the model of a run folder, or what ``equifed export`` wrote, for predictions.

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
            raise RunFolderError(
                f"{run.path} is an export; personalised=True is for a run's folder."
            )
        return _read_exported(run)
    made = _read_made(run)
    told, weights = made["samples"], read_model(run) or {}
    if CONFIG in run:
        module, more = _open_config(run, made, model, weights)
    else:
        with reading(run / RUN):
            module, more = _open_python_run(run, made, model, weights)
    more["own"] = _read_personalised(run) if personalised else _read_own(run, more["own"])
    more["layout"] = layout = Layout.from_json(told.get("layout"))
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
    predictor, folder = cast(Predictor, history.predictor(trust=trust)), history.folder
    if data is None:
        if folder is None or not (folder / CONFIG).exists():
            raise ValueError("The run does not record how its data are loaded; pass data=.")
        data = load_data(RunConfig.of_run(StoredRun(folder)).data)
    known = history.provenance.get("data")
    wanted = known.get("sha256") if isinstance(known, Mapping) else None
    if wanted is not None and wanted != data.checksum():
        raise ValueError("These data differ from those the run was trained on; pass the same data.")
    if predictor.clients != data.names:
        raise ValueError(
            f"The run's clients are {', '.join(predictor.clients[:5])}, the data's "
            f"{', '.join(data.names[:5])}; give the data that it was trained on."
        )
    return predictor, data


def _read_made(run: StoredRun) -> dict[str, Any]:
    """Return what a run was made of, or say why its model cannot be built again."""
    made = run.sealed(RUN) if RUN in run else {}
    if "model" not in made:
        need_config(run)
    if MODEL not in run:
        raise RunFolderError(
            f"{run.path} has no {MODEL}: the run has not ended; resume it with: equifed resume "
            f"{run.path}"
        )
    if "samples" not in made:
        raise RunFolderError(
            f"{run / RUN} does not record the format of the samples: the engine of this run knew "
            "vectors alone, or another version wrote it. Load model.safetensors into your module, "
            "or train again."
        )
    with reading(run / RUN):
        _check_samples(**made["samples"])
    return made


def _check_samples(
    input_shape: Any, target_shape: Any, classes: Any, class_names: Any, tokens: Any,
    outputs: Any = 0, **more: Any,
) -> None:  # fmt: skip
    """Refuse samples that are described in other types than runs have, or classes left out."""
    numbers = [*input_shape, *target_shape, outputs, 0 if classes is None else classes]
    whole = isinstance(tokens, bool) and all(isinstance(n, int) and n >= 0 for n in numbers)
    if not whole or not all(isinstance(name, str) for name in class_names):
        raise ValueError("its samples have shapes, classes or names of other types than in a run")
    if class_names and len(class_names) != classes:
        raise ValueError(f"{classes} classes have {len(class_names)} names")


def need_config(run: StoredRun) -> RunConfig:
    """Return the configuration of a run, which a run in Python has not."""
    if CONFIG not in run:
        raise RunFolderError(
            f"{run.path} has no {CONFIG}: only runs of a configuration (equifed run, equifed.run) "
            "can be built again."
        )
    return RunConfig.of_run(run)


Opened = tuple[nn.Module, dict[str, Any]]
"""The module, and what else a predictor takes; ``own`` by name."""
Weights = Mapping[str, torch.Tensor]


def _open_python_run(
    run: StoredRun, made: dict[str, Any], model: nn.Module | None, weights: Weights
) -> Opened:
    """Open a run of ``equifed.train``: a named model, or one that is handed over."""
    told, name = made["samples"], str(made.get("model_name"))
    if model is None and name not in MODELS:  # no code is loaded from a folder
        raise RunFolderError(
            f"{run.path} was trained with a module of your own ({made['model']:.80}), which the "
            "folder does not hold; pass it: equifed.load_predictor(folder, model=module)."
        )
    if model is None:
        params = made.get("model_params") or {}
        make = partial(build, name, tuple(told["input_shape"]), told["outputs"], **params)
        model = _build_as_large(run, make, weights)
    more = {"link": told["link"], "own": made.get("own")}
    return copy.deepcopy(model).to(getattr(torch, made["dtype"])), more


def _open_config(
    run: StoredRun, made: dict[str, Any], model: nn.Module | None, weights: Weights
) -> Opened:
    """Open a run of a configuration."""
    config, told = RunConfig.of_run(run), made["samples"]
    shared, shape = config.model, tuple(told["input_shape"])
    if model is None:
        make = partial(build_module, config, shape, told["outputs"])
        module = _build_as_large(run, make, weights) if shared["name"] in MODELS else make()
    else:
        module = copy.deepcopy(model)
    loss = SECTIONS["losses"][shared["loss"]].load()
    part = settle_own(
        module, loss, len(shape), shared.get("own"), shared["own_steps"], shared.get("own_l2"),
        shared["l2"],
    )  # fmt: skip
    known = fitted_loss(loss) if shared.get("class_weights") is None else None
    more = {"link": link_of(loss), "loss": known, "own": shared.get("own")}
    more["own_l2"] = 0.0 if part is None else part.l2
    return module.to(getattr(torch, shared["dtype"])), more


def _build_as_large(run: StoredRun, make: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    """Return a module of the catalogue; refuse one larger than its weights before it is made."""
    with torch.device("meta"):
        asked = sum(value.numel() for value in make().state_dict().values())
    held = sum(value.numel() for value in weights.values())
    if asked > held:
        raise RunFolderError(
            f"{run.path} is damaged: it describes a model of {asked:,} numbers, and {MODEL} has "
            f"{held:,}."
        )
    return make()


def _read_personalised(run: StoredRun) -> dict[str, Any]:
    """Return the own parts that were fitted after training; they must belong to this model."""
    if PERSONALISED not in run:
        raise RunFolderError(
            f"{run.path} has no {PERSONALISED}: its model has no own parts yet; fit them with: "
            f"equifed personalise {run.path}"
        )
    told = run.sealed(PERSONALISED)
    run.sums[PERSONAL_PARTS] = told["parts"]
    parts = read_model(run, PERSONAL_PARTS)
    if parts is None or told["model"] != digest(run.read(MODEL)):
        raise RunFolderError(
            f"{run / PERSONALISED} is damaged or belongs to another model than {MODEL}; do it "
            f"again with: equifed personalise {run.path}"
        )
    if any(name.startswith("beside:") for name in parts):
        raise RunFolderError(
            f"{run / PERSONALISED} has own offsets of version 0.2, which are no longer part of "
            f"equifed; fit own parts again with: equifed personalise {run.path}"
        )
    return parts


def _read_own(run: StoredRun, named: Any) -> dict[str, Any]:
    """Return the own parts of a run's clients; none where the model has none."""
    found = None if named is None else read_model(run, OWN)
    if named is not None and found is None:
        raise RunFolderError(
            f"{run.path} has no {OWN}, and the model has own parts (model.own = "
            f"{named!r}); without them no client's model can be built again."
        )
    return found or {}


def read_preparation(run: StoredRun) -> Preparation | None:
    """Return how the data of a run were prepared; None for data that came as arrays."""
    try:
        told = run.json(RUN)["data"].get("preparation")
        if told is None and PREPARATION not in run:
            return None
        held = run.json(PREPARATION)
        found = Preparation.from_json(held)
    except (RunFolderError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{run / PREPARATION} cannot be read ({error}); start the run again."
        ) from None
    if digest_json(held) != told:
        raise RunFolderError(
            f"{run / PREPARATION} is not the preparation that the run was trained with; start the "
            "run again."
        )
    return found


def _read_exported(run: StoredRun) -> Predictor:
    """Return the predictor of an exported folder with a program of ``torch.export``."""
    told = run.json(DESCRIPTION)
    if told.get("format") != FORMAT:
        raise ValueError(
            f"{run / DESCRIPTION} has the format {told.get('format')}, this version reads "
            f"{FORMAT}; export the run again."
        )
    if told.get("thresholds"):
        raise ValueError(
            f"{run.path} has thresholds of clients, which equifed no longer supports; export the "
            "run again."
        )
    if PROGRAM not in run:
        raise ValueError(
            f"{run.path} holds no program ({PROGRAM}); export the run again with --torch, or give "
            "the run's own folder."
        )
    prepared = None
    if (wanted := told["preparation_sha256"]) is not None:
        if PREPARATION not in run:
            raise ValueError(
                f"{run.path} lacks {PREPARATION}, without which rows cannot be prepared."
            )
        prepared = Preparation.from_json(run.json(PREPARATION))
        if prepared.digest() != wanted:
            raise ValueError(
                f"{run / PREPARATION} is not the preparation that the model was exported with."
            )
        if prepared.target.is_scaled:  # the program answers in the unit itself
            prepared = replace(prepared, target=Target(prepared.target.name))
    program = torch.export.load(io.BytesIO(run.read(PROGRAM))).module()
    layout = Layout.from_json(told.get("layout"))
    return Predictor(
        program if layout is None else ByRow(program, layout),
        layout=layout,
        input_shape=tuple(told["input_shape"]),
        classes=None if told["classes"] is None else tuple(told["classes"]),
        link=told["link"],
        preparation=prepared,
        clients=tuple(told["clients"]),
        tokens=told["input_dtype"] == "int64",
        outputs_shape=tuple(told["target_shape"]),
        only=told.get("only"),
    )
