"""Modules of a configuration: built, and frozen as the features of another one's samples."""

from __future__ import annotations

import hashlib
import inspect
import io
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from equifed.data.federation import Federation
from equifed.data.mapped import cache_folder
from equifed.models.checks import load_weights
from equifed.models.features import features
from equifed.runs.catalogue import load_address
from equifed.runs.config import FrozenFeatures, RunConfig, is_address
from equifed.runs.schema import ConfigError, choose
from equifed.training.files import read_sealed, write_file
from equifed.training.folder import find_code, open_run_folder
from equifed.training.tables import CONFIG, MODEL, RUN

PROBED = 8
"""Samples whose features are part of a name in the cache."""


def build_module(config: RunConfig, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return the module of a configuration; your code may draw: by the seed, for nobody else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        given: dict[str, Any] = {"input_shape": input_shape, "outputs": outputs}
        module: nn.Module = choose("models", config.model, "model", **given)
    return module


def freeze_features(
    config: RunConfig, wanted: FrozenFeatures | None, federation: Federation
) -> Federation:
    """Return the federation as the model sees it: as it is, or what a frozen module makes of it."""
    if wanted is None:
        return federation
    try:
        module = _frozen_module(wanted, federation)
        return _features(module, federation, wanted, config.engine.get("device", "cpu"))
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise ConfigError([f"model.features: {error}"]) from error


def _frozen_module(wanted: FrozenFeatures, federation: Federation) -> nn.Module:
    """Return the trained module of a run folder, or the one that an address makes."""
    if not is_address(wanted.of):
        return _trained_module(Path(wanted.of), federation)
    make = load_address(wanted.of)
    known = {"input_shape": federation.input_shape, "outputs": federation.classes or 1}
    taken = inspect.signature(make).parameters
    module = make(**{key: value for key, value in known.items() if key in taken})
    if not isinstance(module, nn.Module):
        raise ConfigError([f"model.features.of: {wanted.of} gives no torch module: {module!r:.60}"])
    return module


def _trained_module(folder: Path, federation: Federation) -> nn.Module:

    if not (folder / CONFIG).exists() or not (folder / MODEL).exists():
        raise ConfigError(
            [
                f"model.features.of: {folder} holds no trained run of a configuration ({CONFIG} "
                f"and {MODEL}); name one, or a module of your own as package.module:Name"
            ]
        )
    open_run_folder(folder, data_only=True)
    code = find_code(folder)
    if code:
        raise ConfigError(
            [
                f"model.features.of: {folder} would load code ({', '.join(code)}); if it is yours, "
                "name a function of your own that loads it, as package.module:Name"
            ]
        )
    config, told = RunConfig.read(folder / CONFIG), read_sealed(folder / RUN)["samples"]
    shape = tuple(told["input_shape"])
    if shape != federation.input_shape:
        raise ConfigError(
            [
                f"model.features.of: the module in {folder} takes samples of shape {shape}, these "
                f"data have {federation.input_shape}; use the data it was trained on"
            ]
        )
    for key, why in (("own", "its clients keep parts of their own"), ("features", "it is a head")):
        if config.model.get(key) is not None:
            raise ConfigError([f"model.features.of: {folder} cannot be frozen: {why}"])
    module = build_module(config, shape, told["outputs"])
    return load_weights(module, load_file(folder / MODEL))


def _features(
    module: nn.Module, federation: Federation, wanted: FrozenFeatures, device: str
) -> Federation:
    """Return the features, from the cache if they were made before."""
    path = cache_folder() / "features" / f"{_digest(module, federation, wanted, device)}.npz"
    kept = _read_kept(path) if wanted.cache else None
    if kept is not None:
        about = f"{type(module).__name__}, {f'layer {wanted.layer}' if wanted.layer else 'output'}"
        source = {**federation.source, "features": about}
        made = federation.with_inputs(kept)
        return replace(made, name=f"{federation.name}, features", source=source)
    found = features(module, federation, wanted.layer, device=device, chunk=wanted.chunk)
    if wanted.cache:
        packed = io.BytesIO()
        inputs: dict[str, Any] = {k: split.inputs for k, split in found.splits().items()}
        np.savez(packed, **inputs)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, packed.getvalue())
    return found


def _read_kept(path: Path) -> dict[str, Any] | None:
    """Return what a file of the cache holds; None: it is not there, or damaged and made again."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return {label: stored[label] for label in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _digest(module: nn.Module, federation: Federation, wanted: FrozenFeatures, device: str) -> str:
    """Return a text that changes with samples, module, weights, layer, and what comes of a few."""
    inputs = federation.train.client(0)[0][:PROBED]
    probe = Federation.from_clients({"probe": (inputs, np.zeros(len(inputs)))})
    seen = features(module, probe, wanted.layer, device=device, chunk=wanted.chunk)
    told = hashlib.sha256(f"{federation.checksum()}|{wanted.layer}|{module}".encode())
    told.update(np.ascontiguousarray(seen.train.inputs).tobytes())
    for name, value in module.state_dict().items():
        told.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        told.update(value.detach().cpu().contiguous().numpy().tobytes())
    return told.hexdigest()
