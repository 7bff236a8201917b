"""A table of a configuration file is the arguments of a constructor.

A :class:`Checker` checks a table against a constructor's signature and fills in what is left out:
from the default value of the argument that the table stands for, else from the signature.
:func:`construct` calls the constructor with a resolved table. Every problem names the key, what was
seen and what is allowed, and all problems are reported together.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equifed.runs.catalogue import SECTIONS, Section, UnknownName, unknown
from equifed.runs.entries import CodeError, load_address, locate_address, source_file
from equifed.runs.signatures import NONE, Setting, Table, complete, mismatch, settings

__all__ = [
    "AUTO",
    "BY_SIZE",
    "Checker",
    "ConfigError",
    "Setting",
    "Table",
    "choose",
    "construct",
    "settings",
]

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


# -- checking ---------------------------------------------------------------------------------


Prepare = Callable[[Table, Mapping[str, Setting]], Table]
"""Changes a table, knowing the settings of what it names."""


class Checker:
    """Resolves tables and collects what is wrong with them.

    Parameters
    ----------
    folder : Path, optional
        Folder of the configuration file; code of one's own is looked for there first.
    prepare : mapping, optional
        What changes a table with a name before it is checked, by the title of its section.
    """

    def __init__(
        self, folder: Path | None = None, prepare: Mapping[str, Prepare] | None = None
    ) -> None:
        self.folder, self.prepare = folder, prepare or {}
        self.problems: list[str] = []
        self.code: dict[str, str] = {}
        """Code that is not of this package: addresses as they were given, and their files."""

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
                out[name] = copy.deepcopy(setting.default)
        return out

    def value(self, setting: Setting, value: Any, path: str) -> Any:
        """Check one value; a table is completed from the default of the argument."""
        if value == NONE and setting.takes_none:
            return value
        if setting.section is not None:
            return self.choice(SECTIONS[setting.section], value, path, default=setting.default)
        if setting.record is not None:
            if isinstance(value, Mapping):
                value = complete(value, setting.default)
            return self.table(settings(setting.record), value, path)
        if (setting.per_client and value == BY_SIZE) or (setting.name == "lr" and value == AUTO):
            return value
        return self._leaf(setting, value, path)

    def choice(
        self,
        section: Section,
        value: Any,
        path: str,
        shared: Mapping[str, Setting] | None = None,
        default: Any = None,
    ) -> Table:
        """Check a table that has a name in a section of the catalogue; a name alone will do."""
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            self.problem(path, f"must be a table with a name; got {shown(value)}")
            return {}
        table = complete(table, default)
        name = table.get("name")
        if not isinstance(name, str):
            choices = ", ".join(section.entries())
            seen = f"; got {shown(name)}" if "name" in table else ""
            self.problem(_join(path, "name"), f"is required: one of {choices}{seen}")
            return {}
        found = self.find(section, name, _join(path, "name"))
        if found is None:
            return {}
        table["name"], own = found
        wanted = {**(shared or {}), **own}
        if section.title in self.prepare:
            table = self.prepare[section.title](table, wanted)
        rest = {key: entry for key, entry in table.items() if key != "name"}
        return {"name": table["name"], **self.table(wanted, rest, path)}

    def find(
        self, section: Section, name: str, path: str
    ) -> tuple[str, Mapping[str, Setting]] | None:
        """Return a name as it is resolved (own code with its file), and what it takes."""
        given = name
        try:
            address = section[name].address
            if name not in section.entries():
                name = address = locate_address(name, self.folder)
            constructor = load_address(address, self.folder)
            if not callable(constructor):
                raise CodeError(f"{name} is no class or function, but {shown(constructor)}")
            wanted = settings(constructor, section.given)
        except (UnknownName, CodeError, TypeError, ValueError) as error:
            self.problem(path, str(error))
            return None
        if name not in section.entries():
            self.code[given] = source_file(name)
        return name, wanted

    def _leaf(self, setting: Setting, value: Any, path: str) -> Any:
        wrong = mismatch(value, setting.annotation)
        if wrong is not None:
            where, title = wrong
            self.problem(path + where, f"must be {title}; got {shown(value)}")
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
    made = construct(section[table["name"]].load(), table, path, sizes, **given)
    lack = section.lack(made)
    if lack is not None:
        raise ConfigError([_at(_join(path, "name"), f"{table['name']} {lack}")])
    return made


def _argument(setting: Setting, value: Any, path: str, sizes: Sequence[int] | None) -> Any:
    if value == NONE and setting.takes_none:
        return None
    if setting.section is not None:
        return choose(SECTIONS[setting.section], value, path, sizes)
    if setting.record is not None:
        return construct(setting.record, value, path, sizes)
    if setting.name == "lr" and value == AUTO:
        return 1.0  # until it is measured
    if setting.per_client and value == BY_SIZE:
        return None if sizes is None else tuple(float(size) for size in sizes)
    return tuple(value) if isinstance(value, list) else value
