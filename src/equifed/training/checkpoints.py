"""Saving an algorithm's state so that a kill at any moment loses nothing.

A checkpoint is two files: tensors (safetensors) and a manifest (JSON) with the SHA-256 of the
tensors, the rest of the state and whatever the run folder adds. Both are written under a temporary
name, flushed to the disk and renamed, the manifest last: a checkpoint exists when its manifest
does. The previous one is kept. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from equifed.contract.memory import KeyedMemory
from equifed.engines.in_process import DenseVectors

KEEP = 2


class CheckpointError(RuntimeError):
    """No usable checkpoint, and why."""


def save(folder: Path, round: int, state: Any, extra: dict[str, Any]) -> None:
    """Write the checkpoint of a round, then drop all but the newest two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    tree = _pack(state, "state", tensors)
    payload = save_tensors(tensors)
    write_file(folder / f"{round:08d}.safetensors", payload)
    digest = hashlib.sha256(payload).hexdigest()
    manifest = {"round": round, "sha256": digest, "state": tree, "extra": extra}
    write_file(folder / f"{round:08d}.json", json.dumps(manifest).encode())
    for old in _rounds(folder)[:-KEEP]:
        for suffix in (".json", ".safetensors"):
            (folder / f"{old:08d}{suffix}").unlink(missing_ok=True)


def load(folder: Path, template: Any, owner: object) -> tuple[int, Any, dict[str, Any]]:
    """Return round, state and extra of the newest checkpoint that is whole.

    ``template`` is a state whose tensors say where to put the new ones; dataclasses inside a state
    are looked up by name in the module of ``owner``, the algorithm.
    """
    problems = []
    for round in reversed(_rounds(folder)):
        try:
            return _load_one(folder, round, template, owner)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            problems.append(f"round {round}: {error}")
    reason = "; ".join(problems) if problems else "there is none"
    raise CheckpointError(f"No usable checkpoint in {folder} ({reason}); start the run again.")


def _load_one(
    folder: Path, round: int, template: Any, owner: object
) -> tuple[int, Any, dict[str, Any]]:
    manifest = json.loads((folder / f"{round:08d}.json").read_bytes())
    payload = (folder / f"{round:08d}.safetensors").read_bytes()
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"]:
        raise CheckpointError("the tensors do not match their checksum")
    try:
        tensors = load_tensors(payload)
    except Exception as error:  # safetensors raises its own kind
        raise CheckpointError(f"the tensors cannot be read: {error}") from error
    state = _unpack(
        manifest["state"], tensors, template.x.device, vars(sys.modules[type(owner).__module__])
    )
    if type(state) is not type(template) or state.x.shape != template.x.shape:
        raise CheckpointError("it belongs to another algorithm or model")
    return int(manifest["round"]), state, dict(manifest["extra"])


def _rounds(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit())


def write_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: temporary name, flush to the disk, rename, flush the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pack(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a JSON tree for a value; tensors go into ``tensors`` under the path to them."""
    if isinstance(value, torch.Tensor):
        tensors[key] = value.detach().to("cpu").contiguous().clone()
        return {"kind": "tensor", "key": key}
    if isinstance(value, np.ndarray):
        tensors[key] = torch.as_tensor(np.ascontiguousarray(value)).clone()
        return {"kind": "array", "key": key}
    if isinstance(value, DenseVectors):
        tensors[key] = value.matrix.detach().to("cpu").contiguous().clone()
        return {"kind": "vectors", "key": key}
    if isinstance(value, KeyedMemory):  # the vectors are with the clients
        return {"kind": "keys", "keys": list(value.keys)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: _pack(getattr(value, f.name), f"{key}.{f.name}", tensors)
            for f in dataclasses.fields(value)
        }
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, tuple | list):
        items = [_pack(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
        return {"kind": "tuple", "items": items}
    if value is None or isinstance(value, bool | int | str):
        return {"kind": "value", "value": value}
    if isinstance(value, float):
        return {"kind": "float", "value": value.hex()}  # exact, infinities and NaN included
    raise TypeError(f"A state cannot hold a {type(value).__name__} (at {key}).")


def _unpack(
    tree: Any, tensors: dict[str, torch.Tensor], device: torch.device, classes: dict[str, Any]
) -> Any:
    kind = tree["kind"]
    if kind == "tensor":
        return tensors[tree["key"]].to(device)
    if kind == "array":
        return tensors[tree["key"]].numpy()
    if kind == "vectors":
        return DenseVectors(tensors[tree["key"]].to(device))
    if kind == "keys":
        return KeyedMemory(tuple(str(k) for k in tree["keys"]))
    if kind == "tuple":
        return tuple(_unpack(item, tensors, device, classes) for item in tree["items"])
    if kind == "value":
        return tree["value"]
    if kind == "float":
        return float.fromhex(tree["value"])
    cls = classes.get(kind)
    if not dataclasses.is_dataclass(cls):
        raise CheckpointError(f"it holds an unknown {kind!r}")
    fields = {n: _unpack(f, tensors, device, classes) for n, f in tree["fields"].items()}
    return cls(**fields)  # type: ignore[operator]
