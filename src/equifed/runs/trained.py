"""What a run folder is good for after training: predictions, and a model card."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.runs.modules import build_module
from equifed.runs.run import load_preparation
from equifed.training.files import RunFolderError, digest, read_sealed
from equifed.training.folder import open_run_folder
from equifed.training.history import History
from equifed.training.tables import CLIENTS, CONFIG, MODEL, OWN, RUN

if TYPE_CHECKING:
    from torch import nn

    from equifed.contract.local import OwnL2
    from equifed.models.own_part import FittedLoss
    from equifed.models.predictor import Predictor

CARD = "MODEL_CARD.md"
PERSONALISED, PERSONAL_PARTS = "personalised.json", "personalised.safetensors"
"""What :func:`equifed.personalise` found: what came of it, and every client's own parameters."""


def load_predictor(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    personalised: bool = False,
    trust: bool = False,
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
    trust : bool
        Load the code that the folder names (own code of its configuration, an exported program).
        A folder may come from somebody else, and its code would run with your rights.
    """
    import torch
    from safetensors.torch import load_file

    from equifed.models.checks import load_weights
    from equifed.models.export import DESCRIPTION, load_exported
    from equifed.models.predictor import Predictor, link_of, name_classes

    path = open_run_folder(folder, trust=trust)
    own_l2: OwnL2
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
        config, told = read_run(path)
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
        dtype, (loss, own_l2) = dtype_of(config), _read_loss(config, module, told)
        own = {} if personalised else _read_own(path, config.model.get("own"))
    if personalised:
        own = _read_personalised(path)
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
) -> tuple[FittedLoss | None, OwnL2]:
    """Return the loss that own parts can be fitted to, and their penalty in training."""
    from equifed.engines.own import settle_own
    from equifed.models.own_part import fitted_loss

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
    parts = load(content)
    if any(name.startswith("beside:") for name in parts):
        raise RunFolderError(
            f"{path / PERSONALISED} has own offsets of version 0.2, which are no longer part of "
            f"equifed; fit own parts again with: equifed personalise {path}"
        )
    return parts


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


def dtype_of(config: RunConfig) -> Any:
    """Return the precision of a run's model."""
    import torch

    return getattr(torch, config.model["dtype"])


def read_run(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of a run and what its samples are like, or say what is missing."""
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


def write_model_card(folder: str | Path, out: str | Path, *, trust: bool = False) -> Path:
    """Write the model card of a complete run into a folder, and return the file.

    ``trust`` is as for :func:`load_predictor`.
    """
    from equifed.models.export import describe
    from equifed.report import write_card

    path, predictor = Path(folder), load_predictor(folder, trust=trust)
    config, _ = read_run(path)
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
