"""A table of a configuration file is the arguments of a constructor.

:func:`settings` reads a signature; an argument that is itself an object is a table inside the
table. A :class:`Checker` checks a table and fills in what is left out, :func:`construct` calls the
constructor. All problems are reported together: the key, what was seen and what is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from equifed.runs import catalogue

Table = dict[str, Any]
Sizes = Sequence[int] | None

NONE = "none"  # no value, where the default is one: TOML has no word for it
AUTO = "auto"  # a local step size that is to be measured
BY_SIZE = "size"  # where numbers per client are wanted: the clients' training samples
# Settings of which one is given: it takes the place of a default of the other
INSTEAD = {"steps": "epochs", "epochs": "steps"}


class ConfigError(ValueError):
    """A configuration that cannot be used: one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Travel between processes as the list of problems."""
        return type(self), (self.problems,)


def refuse_settings(*checks: tuple[Any, str]) -> None:
    """Raise a :class:`ConfigError` with the message of the first check that found a fault."""
    if found := [why for wrong, why in checks if wrong]:
        raise ConfigError(found[:1])


@contextmanager
def blame(what: str, refused: Any = ValueError) -> Iterator[None]:
    """Say which key or variant is wrong, if a block refuses something by one of these errors."""
    try:
        yield
    except refused as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        raise ConfigError([f"{what}{problem}" for problem in problems]) from error


class Setting(NamedTuple):
    """One argument of a constructor: name, type, and default as a configuration has it."""

    name: str
    annotation: Any
    required: bool
    parts: tuple[Any, ...]  # members of the type, if it is a union, or the type alone
    section: str | None  # of the catalogue that it is chosen from, if it is
    record: Any  # dataclass that it is an instance of, if it is one
    takes_none: bool  # whether "none" stands for no value; where text is taken it is text
    default: Any = None


Settings = Mapping[str, Setting]


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


@functools.cache  # a configuration asks for the same signatures again and again
def settings(constructor: Callable[..., Any], given: tuple[str, ...] = ()) -> dict[str, Setting]:
    """Return the settings of a constructor, without the arguments that the program supplies."""
    fields = dataclasses.fields(constructor) if dataclasses.is_dataclass(constructor) else ()
    made = {field.name: field.default_factory for field in fields}
    out, hints = {}, dict[str, Any]()
    try:
        try:
            signature = inspect.signature(constructor, eval_str=True)
        except NameError:  # inherited types are read where they were written
            signature, hints = inspect.signature(constructor), typing.get_type_hints(constructor)
    except NameError as error:
        raise catalogue.CodeError(
            f"the type of an argument cannot be read ({error}); import it when the module is "
            "loaded, not only for type checkers"
        ) from None
    for name, parameter in signature.parameters.items():
        if name in given or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = hints.get(name, parameter.annotation)
        annotation = Any if annotation is parameter.empty else annotation
        parts, required = alternatives(annotation), parameter.default is parameter.empty
        kinds = (catalogue.KINDS.get(getattr(part, "__name__", "")) for part in parts)
        section, record = next(filter(None, kinds), None), filter(dataclasses.is_dataclass, parts)
        none = types.NoneType in parts and str not in parts
        setting = Setting(name, annotation, required, parts, section, next(record, None), none)
        if not required:
            factory = made.get(name, dataclasses.MISSING)
            usual = parameter.default if factory is dataclasses.MISSING else factory()
            setting = setting._replace(default=describe(usual, setting))
        out[name] = setting
    return out


def describe(value: Any, setting: Setting) -> Any:
    """Return an object as a configuration file would have it."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if setting.section is not None:
        name = catalogue.name_of(setting.section, value)
        same = isinstance(setting.default, Mapping) and setting.default.get("name") == name
        return {"name": name, **describe_fields(value, setting.default if same else None)}
    if dataclasses.is_dataclass(value):
        return describe_fields(value, setting.default)
    return list(value) if isinstance(value, tuple) else value


def describe_fields(value: Any, default: Mapping[str, Any] | None = None) -> Table:
    """Return a dataclass instance as a configuration file would have it; None is left out."""
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
    """Return a table with what it leaves out from a default; the names must be the same, if any."""
    if not isinstance(default, Mapping):
        return dict(given)
    if "name" in default and given.get("name", default["name"]) != default["name"]:
        return dict(given)
    out = {key: value for key, value in default.items() if INSTEAD.get(key) not in given}
    for key, value in given.items():
        nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = complete(value, out[key]) if nested else value
    return out


# Plain types: what TOML has for them, and what messages call them
PLAIN = {
    bool: ((bool,), "a boolean"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str,), "a path"),
    types.NoneType: ((types.NoneType,), "nothing"),
}


def mismatch(value: Any, annotation: Any) -> tuple[str, str] | None:
    """Say where a value of a TOML file is not of a type, and what it must be; None if it is."""
    if annotation in PLAIN:
        kinds, title = PLAIN[annotation]
        fits = isinstance(value, kinds) and (annotation is bool) == isinstance(value, bool)
        return None if fits else ("", title)
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return None if value in inside else ("", " or ".join(map(repr, inside)))
    if origin in (types.UnionType, typing.Union):
        wrong = [mismatch(value, part) for part in inside if part is not types.NoneType]
        found = [w for w in wrong if w is not None]
        if len(found) < len(wrong) or (value is None and types.NoneType in inside):
            return None
        return next((w for w in found if w[0]), ("", " or ".join(title for _, title in found)))
    if origin not in (tuple, list, Sequence):
        return None
    if not isinstance(value, list | tuple):
        return "", "an array"
    same = len(inside) == 1 or inside[-1] is Ellipsis
    if not same and len(value) != len(inside):
        return "", f"an array of {len(inside)}"
    for i, item in enumerate(value):
        if (bad := mismatch(item, inside[0] if same else inside[i])) is not None:
            return f"[{i}]{bad[0]}", bad[1]
    return None


def open_step(table: Table, wanted: Settings) -> Table:
    """Return an algorithm's table with ``"auto"`` where a local step size could be and is not."""
    if "steps" in wanted:
        return table
    if "local" in wanted:
        local, usual = table.get("local", {}), wanted["local"].default
        open_to_us = "local" in table or isinstance(usual, Mapping)
        if open_to_us and isinstance(local, Mapping) and "lr" not in local:
            return {**table, "local": complete({**local, "lr": AUTO}, usual)}
    elif "lr" in wanted and ":" not in table["name"]:  # in your code lr may be that of anything
        return {"lr": AUTO, **table}
    return table


class Checker:
    """Resolves tables and collects what is wrong with them.

    ``code`` is what is not of this package: addresses as they were given, and their files. Of a
    table whose name is among the keys that are ``overridden`` what it lacks is left out.
    """

    def __init__(
        self, folder: Path | None = None, measures: bool = False, overridden: Sequence[str] = ()
    ) -> None:
        self.folder, self.measures, self.overridden = folder, measures, overridden
        self.problems, self.code = list[str](), dict[str, str]()

    def table(self, wanted: Settings, table: Any, path: str) -> Table:
        """Check a table against settings and fill in the defaults."""
        if not isinstance(table, Mapping):
            self.problem(path, f"must be a table with {', '.join(wanted)}; got {shown(table)}")
            return {}
        for key in table:
            if key not in wanted:
                self.problem(_join(path, key), catalogue.unknown("setting", key, wanted))
        out = {}
        for name, setting in wanted.items():
            if name in table:
                out[name] = self.value(setting, table[name], _join(path, name))
            elif setting.required:
                what = inspect.formatannotation(setting.annotation).replace("typing.", "")
                if setting.section is not None:
                    entries = catalogue.SECTIONS[setting.section].entries()
                    what = f"one of the {setting.section} {', '.join(entries)}"
                elif setting.record is not None:
                    what = f"a table with {', '.join(settings(setting.record))}"
                self.problem(_join(path, name), f"is required: {what}")
            elif setting.default is not None:
                out[name] = copy.deepcopy(setting.default)
        return out

    def value(self, setting: Setting, value: Any, path: str) -> Any:
        """Check one value; a table is completed from the default of the argument."""
        if value == NONE and setting.takes_none:
            return value
        if setting.section is not None:
            return self.choice(setting.section, value, path, default=setting.default)
        if setting.record is not None:
            if isinstance(value, Mapping):
                value = complete(value, setting.default)
            return self.table(settings(setting.record), value, path)
        if (setting.name == "lr" and value == AUTO) or _is_by_size(setting, value):
            return value
        if (wrong := mismatch(value, setting.annotation)) is not None:
            self.problem(path + wrong[0], f"must be {wrong[1]}; got {shown(value)}")
        elif Path in setting.parts and isinstance(value, str) and self.folder is not None:
            return str((self.folder / value).absolute())  # wherever the program is started
        return value

    def choice(
        self, section: str, value: Any, path: str, shared: Settings | None = None,
        default: Any = None,
    ) -> Table:  # fmt: skip
        """Check a table that has a name in a section of the catalogue; a name alone will do."""
        if not isinstance(value, str | Mapping):
            self.problem(path, f"must be a table with a name; got {shown(value)}")
            return {}
        table = complete({"name": value} if isinstance(value, str) else value, default)
        name = table.get("name")
        if not isinstance(name, str):
            choices = ", ".join(catalogue.SECTIONS[section].entries())
            seen = f"; got {shown(name)}" if "name" in table else ""
            self.problem(_join(path, "name"), f"is required: one of {choices}{seen}")
            return {}
        if (found := self.find(section, name, _join(path, "name"))) is None:
            return {}
        table["name"], own = found
        wanted = {**(shared or {}), **own}
        if self.measures and section == "algorithms":
            table = open_step(table, wanted)
        rest = {key: entry for key, entry in table.items() if key != "name"}
        if (renamed := _join(path, "name")) in self.overridden:
            left = [k for k in rest if k not in wanted and _join(path, k) not in self.overridden]
            rest = {key: entry for key, entry in rest.items() if key not in left}
            if left:
                what = f"--set {renamed}={name}: left out {', '.join(left)}, which {name} lacks."
                warnings.warn(what, UserWarning, stacklevel=2)
        return {"name": table["name"], **self.table(wanted, rest, path)}

    def find(self, section: str, name: str, path: str) -> tuple[str, Settings] | None:
        """Return a name as it is resolved (your code with its file), and what it takes."""
        given, kind = name, catalogue.SECTIONS[section]
        try:
            address = kind[name].address
            if name not in kind.entries():
                name = address = catalogue.locate_address(name, self.folder)
            constructor = catalogue.load_address(address, self.folder)
            if not callable(constructor):
                raise catalogue.CodeError(
                    f"{name} is not a class or function, but {shown(constructor)}"
                )
            wanted = settings(constructor, kind.given)
        except (catalogue.UnknownName, catalogue.CodeError, TypeError, ValueError) as error:
            self.problem(path, str(error))
            return None
        if name not in kind.entries():
            self.code[given] = catalogue.source_file(name)
        return name, wanted

    def locate(self, section: str, name: Any, path: str) -> Any:
        """Return a name of a section, or the address of your code with its file."""
        found = self.find(section, name, path) if isinstance(name, str) else None
        return name if found is None else found[0]

    def problem(self, path: str, message: str) -> None:
        """Note what is wrong at a key."""
        self.problems.append(_at(path, message))

    def raise_problems(self) -> None:
        """Raise if anything is wrong."""
        if self.problems:
            raise ConfigError(self.problems)


def resolve_choice(
    section: str, value: Any, path: str, shared: Settings | None = None, measures: bool = False
) -> Table:
    """Return the complete table of what is named in a section, or refuse it."""
    checker = Checker(measures=measures)
    table = checker.choice(section, value, path, shared)
    checker.raise_problems()
    return table


def _is_by_size(setting: Setting, value: Any) -> bool:
    return value == BY_SIZE and tuple[float, ...] in setting.parts


def shown(value: Any) -> str:
    """Return a value as a message shows it, shortened."""
    return text if len(text := json.dumps(value, default=str)) <= 60 else text[:57] + "..."


def _at(path: str, message: str) -> str:
    return f"{path}: {message}" if path else message


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def construct(
    constructor: Callable[..., Any], table: Table, path: str, sizes: Sizes = None, **given: Any
) -> Any:
    """Call a constructor with a resolved table and what the program supplies."""
    arguments = {}
    for name, setting in settings(constructor, tuple(given)).items():
        if name not in table:
            continue
        value, place = table[name], _join(path, name)
        if value == NONE and setting.takes_none:
            value = None
        elif setting.section is not None:
            value = choose(setting.section, value, place, sizes)
        elif setting.record is not None:
            value = construct(setting.record, value, place, sizes)
        elif name == "lr" and value == AUTO:
            value = 1.0  # until it is measured
        elif _is_by_size(setting, value):
            value = None if sizes is None else tuple(float(size) for size in sizes)
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    try:
        return constructor(**given, **arguments)
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError([_at(path, str(error) or type(error).__name__)]) from error


def choose(section: str, table: Table, path: str, sizes: Sizes = None, **given: Any) -> Any:
    """Construct what a table names in a section of the catalogue."""
    made = construct(catalogue.SECTIONS[section][table["name"]].load(), table, path, sizes, **given)
    if (lack := catalogue.SECTIONS[section].lack(made)) is not None:
        raise ConfigError([_at(_join(path, "name"), f"{table['name']} {lack}")])
    return made
