"""What the catalogue is made of: entries, sections, and the address of a constructor.

An address is ``package.module:Name``. In a configuration it may also stand for code of your own:
``module.py`` (or ``package/module.py``) beside the configuration file comes first, an installed
module second. Code beside the file is loaded by its path under a name of its own; nothing is put on
``sys.path``, so inside it a neighbour is imported relatively (``from . import neighbour``).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

OWN = "equifed_own_"
"""How the names of modules begin that were loaded by their path."""


class UnknownName(ValueError):
    """A name that is not in the catalogue; the message lists those that are."""


class CodeError(ValueError):
    """Code of one's own that cannot be used: what was tried, and what to do."""


@dataclass(frozen=True)
class Entry:
    """A constructor by address, what it is in one line, and where it comes from."""

    address: str
    summary: str
    paper: str = ""

    def load(self) -> Callable[..., Any]:
        """Import the constructor.

        >>> Entry("equifed.contract.local:LocalSGD", "local work").load()
        <class 'equifed.contract.local.LocalSGD'>
        """
        constructor: Callable[..., Any] = load_address(self.address)
        return constructor


@dataclass(frozen=True)
class Section:
    """One kind of thing that a configuration names.

    Parameters
    ----------
    title : str
        What one entry is called, for messages.
    entries : callable
        Returns the entries by name; called when needed.
    given : tuple of str
        Constructor arguments that the program supplies, so that they are no settings.
    code : bool
        Whether the address of your code is accepted beside the names.
    provides : tuple of str
        Attributes that everything of this kind has.
    """

    title: str
    entries: Callable[[], Mapping[str, Entry]]
    given: tuple[str, ...] = ()
    code: bool = True
    provides: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Entry:
        entries = self.entries()
        if name in entries:
            return entries[name]
        if self.code and ":" in name:
            return Entry(name, "")
        more = ", or your own code as package.module:Name" if self.code else ""
        raise UnknownName(unknown(self.title, name, entries) + more)

    def lack(self, made: object) -> str | None:
        """Say what an object lacks to be of this kind, if anything."""
        missing = [name for name in self.provides if not hasattr(made, name)]
        if not missing:
            return None
        article = "an" if self.title[0] in "aeiou" else "a"
        return (
            f"gives a {type(made).__name__}, which has no {', '.join(missing)}; {article} "
            f"{self.title} has {', '.join(self.provides)}"
        )


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """Return the message about a name that does not exist.

    >>> unknown("objective", "cvra", ["average", "cvar"])
    "there is no objective 'cvra' (did you mean 'cvar'?); choose from average, cvar"
    """
    allowed = list(allowed)
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    choice = f"choose from {', '.join(allowed)}" if allowed else "there are none here"
    return f"there is no {what} {name!r}{hint}; {choice}"


def describe_constructor(function: Callable[..., Any]) -> Entry:
    """Return an entry for a constructor, described by the first line of its docstring."""
    summary = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
    return Entry(address_of(function), summary)


# -- addresses --------------------------------------------------------------------------------


def address_of(function: Callable[..., Any]) -> str:
    """Return the address of a class or function; with its file if it was loaded by path.

    >>> from equifed.objectives import CVaR
    >>> address_of(CVaR).endswith(":CVaR")
    True
    """
    module = function.__module__
    home = str(sys.modules[module].__file__) if module.startswith(OWN) else module
    return f"{home}:{function.__qualname__}"


def locate_address(address: str, folder: Path | None) -> str:
    """Return the address with the path of its file, if that lies beside the configuration.

    ``folder`` is that of the configuration file; without one there is nothing to lie beside.
    """
    home, _, name = address.rpartition(":")
    if home.endswith(".py"):
        return f"{os.path.abspath((folder or Path()) / Path(home).expanduser())}:{name}"
    for file in _candidates(home, folder):
        if file.is_file():
            return f"{os.path.abspath(file)}:{name}"
    return address


def _candidates(module: str, folder: Path | None) -> tuple[Path, ...]:
    if folder is None or not module:
        return ()
    path = folder.joinpath(*module.split("."))
    return path.with_name(path.name + ".py"), path / "__init__.py"


def load_address(address: str, folder: Path | None = None) -> Any:
    """Import what an address names; ``folder`` only tells the message where it was looked for."""
    home, _, name = address.rpartition(":")
    try:
        module = _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except Exception as error:  # whatever the code does when it is loaded
        raise CodeError(_not_loaded(address, home, folder, error)) from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise CodeError(f"in {home} {unknown('name', name, names)}") from None


def source_file(address: str) -> str:
    """Return the file that an address was loaded from, once it is."""
    home = address.rpartition(":")[0]
    return home if home.endswith(".py") else str(sys.modules[home].__file__)


def _load_file(path: Path) -> ModuleType:
    """Load a module by its path, under a name by which a checkpoint's classes are found again."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    inside = path.name == "__init__.py"
    root, parts = path.parent, [] if inside else [path.stem]  # in a package, as part of it
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    space = OWN + hashlib.sha256(str(root).encode()).hexdigest()[:12]
    if space not in sys.modules:
        package = ModuleType(space, f"Code in {root}.")
        package.__path__ = [str(root)]
        sys.modules[space] = package
    importlib.invalidate_caches()  # the file may be newer than the last look into its folder
    return importlib.import_module(".".join((space, *parts)))


def _not_loaded(address: str, home: str, folder: Path | None, error: Exception) -> str:
    """Say why an address could not be loaded, where it was looked for, and what to do."""
    reason = f"{type(error).__name__}: {error}"
    if home.endswith(".py"):
        cure = "say where it is now" if isinstance(error, FileNotFoundError) else "correct the file"
        return f"{address} cannot be loaded ({reason}); {cure}"
    absent = isinstance(error, ModuleNotFoundError) and error.name in _parents(home)
    if not absent:
        return f"{address} cannot be loaded from the installed module ({reason}); correct it"
    beside = " or ".join(map(str, _candidates(home, folder)))
    tried = f"no file {beside} and no installed module" if beside else "no installed module"
    return (
        f"{address} is not found: there is {tried} {home}; put the file beside the configuration "
        "file, or install its package"
    )


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
