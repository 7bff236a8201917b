"""The signature of a constructor is the list of its settings.

:func:`settings` reads it: names, types, and defaults as a configuration file would have them. An
argument that is itself an object is a table inside the table: a dataclass by its fields, an
objective or a schedule by its name in the catalogue and its own settings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equifed.runs.catalogue import KINDS, name_of
from equifed.runs.entries import CodeError

Table = dict[str, Any]

NONE = "none"
"""What a configuration says for no value, where the default is one: TOML has no word for it."""

INSTEAD = {"steps": "epochs", "epochs": "steps"}
"""Settings of which one is given: it takes the place of a default of the other."""


@dataclass(frozen=True)
class Setting:
    """One argument of a constructor: name, type, and default as a configuration has it."""

    name: str
    annotation: Any
    required: bool
    default: Any = None

    @cached_property
    def section(self) -> str | None:
        """Section of the catalogue that the argument is chosen from, if it is."""
        for part in alternatives(self.annotation):
            if getattr(part, "__name__", "") in KINDS:
                return KINDS[part.__name__]
        return None

    @cached_property
    def record(self) -> Callable[..., Any] | None:
        """Dataclass that the argument is an instance of, if it is one."""
        for part in alternatives(self.annotation):
            if dataclasses.is_dataclass(part):
                return typing.cast(Callable[..., Any], part)
        return None

    @cached_property
    def per_client(self) -> bool:
        """Whether the argument is a sequence of numbers, one per client."""
        return any(part == tuple[float, ...] for part in alternatives(self.annotation))

    @cached_property
    def is_path(self) -> bool:
        """Whether the argument is a path."""
        return Path in alternatives(self.annotation)

    @cached_property
    def takes_none(self) -> bool:
        """Whether ``"none"`` stands for no value; where text is taken it is text."""
        parts = alternatives(self.annotation)
        return types.NoneType in parts and str not in parts


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone.

    >>> alternatives(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


PLAIN = {
    bool: ((bool,), "a boolean"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str,), "a path"),
    types.NoneType: ((types.NoneType,), "nothing"),
}
"""Plain types: what TOML has for them, and what messages call them."""


def mismatch(value: Any, annotation: Any) -> tuple[str, str] | None:
    """Say where a value of a TOML file is not of a type, and what it must be; None if it is.

    Strictly: text is no number and a number no boolean. Lists stand for tuples. Of types that TOML
    does not know everything is accepted; their constructors say what is wrong.

    >>> mismatch([1, "x"], tuple[int, ...])
    ('[1]', 'a whole number')
    >>> mismatch(2, int | None)
    """
    if annotation in PLAIN:
        kinds, title = PLAIN[annotation]
        fits = isinstance(value, kinds) and (annotation is bool) == isinstance(value, bool)
        return None if fits else ("", title)
    if typing.get_origin(annotation) is typing.Literal:
        allowed = typing.get_args(annotation)
        return None if value in allowed else ("", " or ".join(map(repr, allowed)))
    parts = alternatives(annotation)
    if len(parts) > 1:
        wrong = [mismatch(value, part) for part in parts if part is not types.NoneType]
        if None in wrong or (value is None and types.NoneType in parts):
            return None
        found = [w for w in wrong if w is not None]
        inside = [w for w in found if w[0]]
        return inside[0] if inside else ("", " or ".join(title for _, title in found))
    if typing.get_origin(annotation) in (tuple, list, Sequence):
        return _mismatch_inside(value, typing.get_args(annotation))
    return None


def _mismatch_inside(value: Any, of: tuple[Any, ...]) -> tuple[str, str] | None:
    if not isinstance(value, list | tuple):
        return "", "an array"
    same = len(of) == 1 or of[-1] is Ellipsis
    if not same and len(value) != len(of):
        return "", f"an array of {len(of)}"
    for i, item in enumerate(value):
        wrong = mismatch(item, of[0] if same else of[i])
        if wrong is not None:
            return f"[{i}]{wrong[0]}", wrong[1]
    return None


@functools.cache  # a configuration asks for the same signatures again and again
def settings(constructor: Callable[..., Any], given: tuple[str, ...] = ()) -> dict[str, Setting]:
    """Return the settings of a constructor, without the arguments that the program supplies."""
    out = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = _evaluate(parameter, constructor)
        required = parameter.default is parameter.empty
        setting = Setting(name, annotation, required)
        default = None if required else describe(_default(constructor, parameter), setting)
        out[name] = dataclasses.replace(setting, default=default)
    return out


def _evaluate(parameter: inspect.Parameter, constructor: Callable[..., Any]) -> Any:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    if inspect.isclass(constructor) and not dataclasses.is_dataclass(constructor):
        constructor = constructor.__init__  # the one that was inherited
    scope = getattr(constructor, "__globals__", None) or vars(sys.modules[constructor.__module__])
    if dataclasses.is_dataclass(constructor):
        scope = vars(sys.modules[constructor.__module__])
    try:
        return eval(annotation, dict(scope))  # annotations of our own and the user's code
    except NameError as error:
        raise CodeError(
            f"the type {annotation} of the argument {parameter.name} cannot be read ({error}); "
            "import it when the module is loaded, not only for type checkers"
        ) from None


def _default(constructor: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if dataclasses.is_dataclass(constructor):
        field = {f.name: f for f in dataclasses.fields(constructor)}[parameter.name]
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return parameter.default


def describe(value: Any, setting: Setting) -> Any:
    """Return an object as a configuration file would have it."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if setting.section is not None:
        name = name_of(setting.section, value)
        same = isinstance(setting.default, Mapping) and setting.default.get("name") == name
        return {"name": name, **describe_fields(value, setting.default if same else None)}
    if dataclasses.is_dataclass(value):
        return describe_fields(value, setting.default)
    return list(value) if isinstance(value, tuple) else value


def describe_fields(value: Any, default: Mapping[str, Any] | None = None) -> Table:
    """Return a dataclass instance as a configuration file would have it.

    None is left out, but where leaving it out would mean the default it is ``"none"``. ``default``
    is the table that an incomplete one is completed from; the class's own defaults if not given.
    """
    out = {}
    kind: Callable[..., Any] = type(value)
    for name, setting in settings(kind).items():
        field = describe(getattr(value, name), setting)
        usual = setting.default if default is None else default.get(name)
        if field is None and usual is not None and setting.takes_none:
            field = NONE
        if field is not None:
            out[name] = field
    return out


def complete(given: Mapping[str, Any], default: Any) -> Table:
    """Return a table with what it leaves out from a default; the names must be the same, if any.

    >>> complete({"lr": 0.1}, {"lr": 0.02, "steps": 10, "batch_size": 50})
    {'lr': 0.1, 'steps': 10, 'batch_size': 50}
    >>> complete({"epochs": 1}, {"lr": 0.02, "steps": 10})
    {'lr': 0.02, 'epochs': 1}
    >>> complete({"name": "cvar"}, {"name": "chi-square", "rho": 0.1})
    {'name': 'cvar'}
    """
    if not isinstance(default, Mapping):
        return dict(given)
    if "name" in default and given.get("name", default["name"]) != default["name"]:
        return dict(given)
    out = {key: value for key, value in default.items() if INSTEAD.get(key) not in given}
    for key, value in given.items():
        nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = complete(value, out[key]) if nested else value
    return out
