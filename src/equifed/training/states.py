"""An algorithm's state as tensors by name and a tree that JSON can hold, and back.

Dataclasses are named ``module:qualname``. Reading never imports anything from outside equifed: a
class is one of equifed's own, or one that the program at hand has shown before, by registering it
or by the state that its algorithm begins with (then its whole module, which that has loaded, is
known).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from equifed.contract.vectors import ClientVectors

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

State = TypeVar("State", bound=type)

_REGISTERED: dict[str, type] = {}


class UnknownClass(TypeError):
    """A class in a checkpoint that nobody here knows, and what to do."""


def register_state(cls: State) -> State:
    """Let checkpoints hold this dataclass; also works as a decorator.

    An algorithm's own state needs no registration, nor does what its module defines: training sees
    it in the state that ``init`` returns. Only a class of yet another module does, if that state
    does not hold one from the beginning.

    >>> @register_state
    ... @dataclasses.dataclass(frozen=True)
    ... class Averages:
    ...     values: tuple[float, ...]
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"A state is made of dataclasses, and {cls!r} is none.")
    _REGISTERED[address_of(cls)] = cls
    return cls


def address_of(cls: type) -> str:
    """Return ``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def collect(value: Any) -> Any:
    """Return a state whose scattered memories are in this process; all of a group call it."""
    if isinstance(value, ClientVectors):
        return value.collect()
    if not _is_instance(value):
        return value
    old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
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
        fields = {
            f.name: pack(getattr(value, f.name), f"{key}.{f.name}", tensors)
            for f in dataclasses.fields(value)
        }
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
    return _unpack(tree, tensors, template.x.device, _REGISTERED | _classes_in(template))


def _unpack(tree: Any, tensors: Tensors, device: torch.device, known: dict[str, type]) -> Any:
    kind = tree["kind"]
    if kind == "tensor":
        return tensors[tree["key"]].to(device)
    if kind == "array":
        return tensors[tree["key"]].numpy()
    if kind == "tuple":
        return tuple(_unpack(item, tensors, device, known) for item in tree["items"])
    if kind == "value":
        return tree["value"]
    if kind == "float":
        return float.fromhex(tree["value"])
    cls = _class_at(tree["class"], known)
    return cls(**{n: _unpack(f, tensors, device, known) for n, f in tree["fields"].items()})


def _class_at(address: str, known: dict[str, type]) -> type:
    """Return the dataclass that an address names, if it may be used."""
    if address in known:
        return known[address]
    module, _, name = address.partition(":")
    found: Any = None
    if module in {cls.__module__ for cls in known.values()}:
        found = sys.modules[module]
    elif module.startswith("equifed."):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
    found = functools.reduce(lambda part, word: getattr(part, word, None), name.split("."), found)
    # What a module merely imports is not its own: "equifed.x:os.anything" leads nowhere.
    if not dataclasses.is_dataclass(found) or address_of(found) != address:  # type: ignore[arg-type]
        raise UnknownClass(
            f"it holds a {address}, which is not known here; import that class and pass it to "
            "equifed.training.register_state before you resume"
        )
    return found  # type: ignore[return-value]


def _classes_in(value: Any) -> dict[str, type]:
    """Return the dataclasses that a value is made of."""
    if isinstance(value, tuple | list):
        parts = list(value)
    elif _is_instance(value):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    else:
        return {}
    own = {address_of(type(value)): type(value)} if _is_instance(value) else {}
    return functools.reduce(lambda found, part: found | _classes_in(part), parts, own)


def _is_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
