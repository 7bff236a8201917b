"""Saving an algorithm's state so that a kill at any moment loses nothing.

A checkpoint is tensors (safetensors) and a sealed manifest (JSON), written last. Nothing is ever
unpickled; dataclasses are named ``module:qualname``, and reading imports nothing outside equifed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import ClientVectors
from equifed.training import files
from equifed.training.files import Damaged
from equifed.training.tables import FORMAT, check_format

Tensors = dict[str, Any]  # torch's, by the path to them
KEEP = 2


class CheckpointError(RuntimeError):
    """No usable checkpoint, and why."""


UNUSABLE: tuple[type[Exception], ...] = (*files.UNREADABLE, CheckpointError, Damaged)


def save(folder: Path, round: int, state: Any, extra: dict[str, Any], kept: Any = None) -> None:
    """Write the checkpoint of a round, then drop all but the newest two; ``extra`` is for JSON."""
    from safetensors.torch import save as save_tensors

    folder.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    trees = {"state": pack(state, "state", tensors), "kept": pack(kept, "kept", tensors)}
    payload = save_tensors(tensors)
    files.write_file(folder / f"{round:08d}.safetensors", payload)
    manifest = {"format": FORMAT, "round": round, "tensors": files.digest(payload), **trees}
    files.write_file(folder / f"{round:08d}.json", files.seal({**manifest, "extra": extra}))
    for old in _rounds(folder)[:-KEEP]:
        for suffix in (".json", ".safetensors"):
            (folder / f"{old:08d}{suffix}").unlink(missing_ok=True)


def load(
    folder: Path, template: Any, check: Callable[[dict[str, Any]], None] | None = None
) -> tuple[int, Any, dict[str, Any]]:
    """Return round, state and extra (with ``kept``) of the newest checkpoint that is whole.

    ``check`` refuses an ``extra`` that does not fit; ``template`` is a state of the same algorithm.
    """
    from safetensors.torch import load as load_tensors

    problems = []
    for number in reversed(_rounds(folder)):
        try:
            run, name = files.StoredRun(folder), f"{number:08d}"
            check_format(run.json(f"{name}.json"), folder.parent)
            manifest, payload = run.sealed(f"{name}.json"), run.read(f"{name}.safetensors")
            if files.digest(payload) != manifest["tensors"]:
                raise CheckpointError(f"{run / name}.safetensors does not match its checksum")
            tensors = load_tensors(payload)
            state, kept = (unpack(manifest[key], tensors, template) for key in ("state", "kept"))
            if type(state) is not type(template) or state.x.shape != template.x.shape:
                raise CheckpointError("it belongs to another algorithm or model")
            extra = {**manifest["extra"], "kept": kept}
            if check is not None:
                check(extra)
            return int(manifest["round"]), state, extra
        except UNUSABLE as error:
            problems.append(f"round {number}: {error}")
    reason = "; ".join(problems) if problems else "there is none"
    raise CheckpointError(f"No usable checkpoint in {folder} ({reason}); start the run again.")


def _rounds(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.json") if p.stem.isdecimal())


def collect(value: Any) -> Any:
    """Return a state whose scattered memories are in this process; all of a group call it."""
    if isinstance(value, ClientVectors):
        return value.collect()
    if not _is_instance(value):
        return value
    old = _fields(value)
    new = {name: collect(part) for name, part in old.items()}
    changed = {name: part for name, part in new.items() if part is not old[name]}
    return dataclasses.replace(value, **changed) if changed else value


def pack(value: Any, key: str, tensors: Tensors) -> Any:
    """Return a JSON tree for a value; tensors go into ``tensors`` under the path to them."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[key] = value.detach().to("cpu").contiguous().clone()
        return {"kind": "tensor", "key": key}
    if isinstance(value, np.ndarray):
        tensors[key] = torch.as_tensor(np.ascontiguousarray(value)).clone()
        return {"kind": "array", "key": key}
    if _is_instance(value):
        fields = {n: pack(part, f"{key}.{n}", tensors) for n, part in _fields(value).items()}
        return {"kind": "dataclass", "class": address_of(type(value)), "fields": fields}
    if isinstance(value, tuple | list):
        items = [pack(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
        return {"kind": "tuple", "items": items}
    if value is None or isinstance(value, bool | int | str):
        return {"kind": "value", "value": value}
    if isinstance(value, float):
        return {"kind": "float", "value": value.hex()}  # exact, infinities and NaN included
    raise TypeError(f"A state cannot hold a {type(value).__name__} (at {key}).")


def unpack(tree: Any, tensors: Tensors, template: Any) -> Any:
    """Return the value of a tree, its tensors on the device of the template's model ``x``."""
    known, device = _classes_in(template), template.x.device

    def read(tree: Any) -> Any:
        kind = tree["kind"]
        if kind == "tensor":
            return tensors[tree["key"]].to(device)
        if kind == "array":
            return tensors[tree["key"]].numpy()
        if kind == "tuple":
            return tuple(read(item) for item in tree["items"])
        if kind == "value":
            return tree["value"]
        if kind == "float":
            return float.fromhex(tree["value"])
        cls = _class_at(tree["class"], known)
        return cls(**{name: read(part) for name, part in tree["fields"].items()})

    return read(tree)


def address_of(cls: type) -> str:
    """Return ``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_at(address: str, known: dict[str, type]) -> type:
    """Return the dataclass that an address names, if it may be used."""
    if address in known:
        return known[address]
    module, _, name = address.partition(":")
    found: Any = None
    if module.startswith("equifed.") or module in {cls.__module__ for cls in known.values()}:
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
    found = functools.reduce(lambda part, word: getattr(part, word, None), name.split("."), found)
    # What a module merely imports is not its own: "equifed.x:os.anything" leads nowhere.
    if not dataclasses.is_dataclass(found) or address_of(found) != address:  # type: ignore[arg-type]
        cure = "define it in the module of the algorithm's state, or let init's state hold one"
        if module.startswith("equifed."):
            cure = "another version of equifed wrote it: resume it with that version"
        raise TypeError(f"it holds a {address}, which is not known here; {cure}")
    return found  # type: ignore[return-value]


def _classes_in(value: Any) -> dict[str, type]:
    """Return the dataclasses that a value is made of."""
    if isinstance(value, tuple | list):
        return functools.reduce(lambda found, part: found | _classes_in(part), value, {})
    if not _is_instance(value):
        return {}
    return {address_of(type(value)): type(value)} | _classes_in([*_fields(value).values()])


def _is_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


# -- signals ---------------------------------------------------------------------------------------


SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def interrupt(*_: Any) -> None:
    """Interrupt at once."""
    raise KeyboardInterrupt


@contextmanager
def handle_signals(handler: Callable[..., None] = interrupt) -> Iterator[None]:
    """Let a function take the signals, unless the caller handles or ignores them.

    Processes of a group are ended by the one that started them, and other threads take no signals.
    """
    alone = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    free = [s for s in SIGNALS if signal.getsignal(s) in (signal.SIG_DFL, interrupt)]
    before = {s: signal.signal(s, handler) for s in (free if alone else ())}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def wait_for_round() -> Iterator[Callable[[], bool]]:
    """Let a signal wait for the end of a round, and say whether one came; a second one does not."""
    came: list[int] = []

    def take(number: int, *_: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        name = signal.Signals(number).name
        os.write(2, f"equifed: {name}: the run ends after this round, and saves.\n".encode())

    with handle_signals(take):
        yield lambda: bool(came)
