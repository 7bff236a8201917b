"""Saving an algorithm's state so that a kill at any moment loses nothing.

A checkpoint is two files: tensors (safetensors) and a manifest (JSON) with the format's number, the
SHA-256 of the tensors and of itself, the rest of the state and whatever the run folder adds. Both
are written under a temporary name, flushed to the disk and renamed, the manifest last: a checkpoint
exists when its manifest does. The previous one is kept. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from equifed.training.files import (
    Damaged,
    digest,
    read_json,
    read_sealed,
    seal,
    write_file,
)
from equifed.training.provenance import FORMAT
from equifed.training.states import pack, unpack
from equifed.training.tables import check_format

KEEP = 2
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a hostile checkpoint may raise."""


class CheckpointError(RuntimeError):
    """No usable checkpoint, and why."""


def save(folder: Path, round: int, state: Any, extra: dict[str, Any], kept: Any = None) -> None:
    """Write the checkpoint of a round, then drop all but the newest two.

    ``extra`` is for JSON; ``kept`` is what training remembers beside the algorithm's state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    trees = {"state": pack(state, "state", tensors), "kept": pack(kept, "kept", tensors)}
    payload = save_tensors(tensors)
    write_file(folder / f"{round:08d}.safetensors", payload)
    manifest = {"format": FORMAT, "round": round, "tensors": digest(payload), **trees}
    write_file(folder / f"{round:08d}.json", seal({**manifest, "extra": extra}))
    for old in _rounds(folder)[:-KEEP]:
        for suffix in (".json", ".safetensors"):
            (folder / f"{old:08d}{suffix}").unlink(missing_ok=True)


def load(
    folder: Path, template: Any, check: Callable[[dict[str, Any]], None] | None = None
) -> tuple[int, Any, dict[str, Any]]:
    """Return round, state and extra of the newest checkpoint that is whole; ``kept`` is in extra.

    ``check`` looks at a checkpoint's ``extra`` and raises if it does not fit what is there.

    ``template`` is a state of the same algorithm: its tensors say where to put the new ones, and
    the classes in it are known (see :mod:`equifed.training.states`).
    """
    problems = []
    for round in reversed(_rounds(folder)):
        try:
            found = _load_one(folder, round, template)
            if check is not None:
                check(found[2])
            return found
        except (*UNREADABLE, CheckpointError, Damaged) as error:
            problems.append(f"round {round}: {error}")
    reason = "; ".join(problems) if problems else "there is none"
    raise CheckpointError(f"No usable checkpoint in {folder} ({reason}); start the run again.")


def _load_one(folder: Path, round: int, template: Any) -> tuple[int, Any, dict[str, Any]]:
    path = folder / f"{round:08d}.json"
    check_format(read_json(path), folder.parent)
    manifest = read_sealed(path)
    payload = path.with_suffix(".safetensors").read_bytes()
    if digest(payload) != manifest["tensors"]:
        raise CheckpointError(f"{path.with_suffix('.safetensors')} does not match its checksum")
    try:
        tensors = load_tensors(payload)
    except Exception as error:  # safetensors raises its own kind
        raise CheckpointError(f"the tensors cannot be read: {error}") from error
    state = unpack(manifest["state"], tensors, template)
    if type(state) is not type(template) or state.x.shape != template.x.shape:
        raise CheckpointError("it belongs to another algorithm or model")
    kept = unpack(manifest["kept"], tensors, template)
    more = {} if kept is None else {"kept": kept}
    return int(manifest["round"]), state, {**manifest["extra"], **more}


def _rounds(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit())
