"""A table of a configuration file is the arguments of a constructor.

:func:`resolve` checks a table against a constructor's signature and fills in the defaults;
:func:`construct` calls the constructor with a resolved table. An argument that is itself an object
is a table inside the table: a dataclass by its fields, an objective or a schedule by its name in
the catalogue and its own settings. Every problem names the key, what was seen and what is allowed,
and all problems are reported together.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from equifed.runs.catalogue import KINDS, SECTIONS, Section, UnknownName, name_of, unknown

Table = dict[str, Any]
AUTO = "auto"
"""What a configuration says for a local step size that is to be measured."""

BY_SIZE = "size"
"""What a configuration says where numbers per client are wanted: the clients' training samples."""


class ConfigError(ValueError):
    """A configuration that cannot be used: one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Travel between processes as the list: the joined text would be read as letters."""
        return type(self), (self.problems,)


@dataclass(frozen=True)
class Setting:
    """One argument of a constructor: name, type, and default as a configuration has it."""

    name: str
    annotation: Any
    required: bool
    default: Any = None

    @property
    def section(self) -> str | None:
        """Section of the catalogue that the argument is chosen from, if it is."""
        for part in alternatives(self.annotation):
            if getattr(part, "__name__", "") in KINDS:
                return KINDS[part.__name__]
        return None

    @property
    def record(self) -> Callable[..., Any] | None:
        """Dataclass that the argument is an instance of, if it is one."""
        for part in alternatives(self.annotation):
            if dataclasses.is_dataclass(part):
                return typing.cast(Callable[..., Any], part)
        return None

    @property
    def per_client(self) -> bool:
        """Whether the argument is a sequence of numbers, one per client."""
        return any(part == tuple[float, ...] for part in alternatives(self.annotation))

    @property
    def is_path(self) -> bool:
        """Whether the argument is a path."""
        return Path in alternatives(self.annotation)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone.

    >>> alternatives(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


def settings(constructor: Callable[..., Any], given: Sequence[str] = ()) -> dict[str, Setting]:
    """Return the settings of a constructor, without the arguments that the program supplies."""
    out = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = _evaluated(parameter.annotation, constructor)
        required = parameter.default is parameter.empty
        setting = Setting(name, annotation, required)
        default = None if required else described(_default(constructor, parameter), setting)
        out[name] = dataclasses.replace(setting, default=default)
    return out


def _evaluated(annotation: Any, constructor: Callable[..., Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    if inspect.isclass(constructor) and not dataclasses.is_dataclass(constructor):
        constructor = constructor.__init__  # the one that was inherited
    scope = getattr(constructor, "__globals__", None) or vars(sys.modules[constructor.__module__])
    if dataclasses.is_dataclass(constructor):
        scope = vars(sys.modules[constructor.__module__])
    return eval(annotation, dict(scope))  # annotations of our own and the user's code, not input


def _default(constructor: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if dataclasses.is_dataclass(constructor):
        field = {f.name: f for f in dataclasses.fields(constructor)}[parameter.name]
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return parameter.default


def described(value: Any, setting: Setting) -> Any:
    """Return an object as a configuration file would have it."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if setting.section is not None:
        return {"name": name_of(setting.section, value), **fields(value)}
    if dataclasses.is_dataclass(value):
        return fields(value)
    return list(value) if isinstance(value, tuple) else value


def fields(value: Any) -> Table:
    """Return a dataclass instance as a configuration file would have it; None is left out."""
    wanted = settings(type(value))
    out = {name: described(getattr(value, name), wanted[name]) for name in wanted}
    return {name: field for name, field in out.items() if field is not None}


# -- checking ---------------------------------------------------------------------------------


class Checker:
    """Resolves tables and collects what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def table(self, wanted: Mapping[str, Setting], table: Any, path: str) -> Table:
        """Check a table against settings and fill in the defaults."""
        if not isinstance(table, Mapping):
            self.problem(path, f"must be a table with {', '.join(wanted)}; got {shown(table)}")
            return {}
        for key in table:
            if key not in wanted:
                self.problem(_join(path, key), unknown("setting", key, wanted))
        out = {}
        for name, setting in wanted.items():
            if name in table:
                out[name] = self.value(setting, table[name], _join(path, name))
            elif setting.required:
                self.problem(_join(path, name), f"is required: {expected(setting)}")
            elif setting.default is not None:
                out[name] = setting.default
        return out

    def value(self, setting: Setting, value: Any, path: str) -> Any:
        """Check one value."""
        if setting.section is not None:
            return self.choice(SECTIONS[setting.section], value, path)
        if setting.record is not None:
            return self.table(settings(setting.record), value, path)
        if (setting.per_client and value == BY_SIZE) or (setting.name == "lr" and value == AUTO):
            return value
        return self._leaf(setting, value, path)

    def choice(
        self, section: Section, value: Any, path: str, shared: Mapping[str, Setting] | None = None
    ) -> Table:
        """Check a table that has a name in a section of the catalogue; a name alone will do."""
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            self.problem(path, f"must be a table with a name; got {shown(value)}")
            return {}
        name = table.get("name")
        if not isinstance(name, str):
            choices = ", ".join(section.entries())
            seen = f"; got {shown(name)}" if "name" in table else ""
            self.problem(_join(path, "name"), f"is required: one of {choices}{seen}")
            return {}
        try:
            constructor = section[name].load()
        except (UnknownName, ImportError, AttributeError, ValueError) as error:
            self.problem(_join(path, "name"), str(error))
            return {}
        wanted = {**(shared or {}), **settings(constructor, section.given)}
        rest = {key: entry for key, entry in table.items() if key != "name"}
        return {"name": name, **self.table(wanted, rest, path)}

    def _leaf(self, setting: Setting, value: Any, path: str) -> Any:
        # JSON mode, strictly: no text for numbers, no numbers for booleans, but lists for tuples.
        adapter: TypeAdapter[Any] = TypeAdapter(
            setting.annotation, config=ConfigDict(arbitrary_types_allowed=True)
        )
        try:
            adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
            message = first["msg"].replace("Input should be", "must be")
            self.problem(path + where, f"{message}; got {shown(value)}")
        return value

    def problem(self, path: str, message: str) -> None:
        """Note what is wrong at a key."""
        self.problems.append(_at(path, message))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note the problems of a block and go on after it."""
        try:
            yield
        except ConfigError as error:
            self.problems += error.problems

    def raise_problems(self) -> None:
        """Raise if anything is wrong."""
        if self.problems:
            raise ConfigError(self.problems)


def expected(setting: Setting) -> str:
    """Say what a setting takes."""
    if setting.section is not None:
        section = SECTIONS[setting.section]
        return f"one of the {setting.section} {', '.join(section.entries())}"
    if setting.record is not None:
        return f"a table with {', '.join(settings(setting.record))}"
    return inspect.formatannotation(setting.annotation).replace("typing.", "")


def shown(value: Any) -> str:
    """Return a value as a message shows it, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _at(path: str, message: str) -> str:
    return f"{path}: {message}" if path else message


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# -- building ---------------------------------------------------------------------------------


def construct(
    constructor: Callable[..., Any],
    table: Table,
    path: str,
    sizes: Sequence[int] | None = None,
    **given: Any,
) -> Any:
    """Call a constructor with a resolved table and what the program supplies.

    ``sizes`` stands for ``"size"`` in settings that are numbers per client; where it is not known
    yet they are left out, which is enough to check the others.
    """
    arguments = {}
    for name, setting in settings(constructor, tuple(given)).items():
        if name in table:
            arguments[name] = _argument(setting, table[name], _join(path, name), sizes)
    try:
        return constructor(**given, **arguments)
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError([_at(path, str(error))]) from error


def choose(
    section: Section, table: Table, path: str, sizes: Sequence[int] | None = None, **given: Any
) -> Any:
    """Construct what a table names."""
    return construct(section[table["name"]].load(), table, path, sizes, **given)


def _argument(setting: Setting, value: Any, path: str, sizes: Sequence[int] | None) -> Any:
    if setting.section is not None:
        return choose(SECTIONS[setting.section], value, path, sizes)
    if setting.record is not None:
        return construct(setting.record, value, path, sizes)
    if setting.name == "lr" and value == AUTO:
        return 1.0  # until it is measured
    if setting.per_client and value == BY_SIZE:
        return None if sizes is None else tuple(float(size) for size in sizes)
    return tuple(value) if isinstance(value, list) else value
