"""What a site decides for itself: which app it runs, under which name, with which settings."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from equifed.flower.memory import find_root


class SiteError(ValueError):
    """What the site was given cannot be used, and what to do."""


@dataclass(frozen=True)
class Site:
    """The app that a site installed, and the settings of its node.

    Parameters
    ----------
    app : str
        Folder of a Flower app (its ``pyproject.toml`` names the client), or ``module:name`` of a
        ``ClientApp`` that can be imported.
    settings : dict
        The node's settings: ``name``, ``data``, ``memory``, ``privacy``, ``policy``, ``results``,
        ``site`` (a file with such settings) and what the app reads.
    """

    app: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def memory(self) -> Path:
        """Folder for what this site keeps between requests."""
        return find_memory(self.settings)

    def load(self) -> tuple[ClientApp, dict[str, Any]]:
        """Import the app; return it with the run settings that the site's own copy states."""
        address = self.app
        settings: dict[str, Any] = {}
        if Path(self.app).is_dir():
            address, settings = _read_app(Path(self.app))
            sys.path.insert(0, str(Path(self.app).absolute()))
        module, _, name = address.partition(":")
        if not module or not name:
            raise SiteError(
                f"{self.app!r} is neither the folder of an app nor the address of a ClientApp; "
                "write package.module:app."
            )
        try:
            app = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise SiteError(f"{address} cannot be imported: {error}") from error
        if not isinstance(app, ClientApp):
            raise SiteError(f"{address} is a {type(app).__name__}, not a ClientApp.")
        return app, settings


def _read_app(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return where an app has its client, and its own run settings."""
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        told = table["tool"]["flwr"]["app"]
        return str(told["components"]["clientapp"]), dict(told.get("config", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SiteError(
            f"{folder / 'pyproject.toml'} names no client in [tool.flwr.app.components] "
            f"({type(error).__name__}); write one with: equifed flower new"
        ) from error


PLAIN = ("name", "data", "memory", "privacy", "policy", "results")
TABLES = ("columns", "units")
"""Settings that a site's file may hold: plain ones, and tables of text."""


def read_site(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's settings, completed from the file that its setting ``site`` names.

    The file is TOML: ``name``, ``data`` (a CSV or Parquet file), ``memory``, ``privacy``,
    ``policy`` and ``results`` (a folder for the models of runs that ended); ``[columns]`` with
    agreed column names and the titles that they have in the file, and ``[units]`` with the units of
    columns. What the node was started with counts more.
    """
    if "site" not in settings:
        return dict(settings)
    path = Path(str(settings["site"]))
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SiteError(f"The site's file {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise SiteError(f"The site's file {path} is not a TOML file: {error}") from error
    for key, value in told.items():
        if key not in (*PLAIN, *TABLES):
            known = ", ".join((*PLAIN, *TABLES))
            raise SiteError(f"{path}: {key!r} is no setting of a site; there are {known}.")
        texts = value.values() if key in TABLES and isinstance(value, dict) else [value]
        if (key in TABLES) != isinstance(value, dict) or not all(isinstance(t, str) for t in texts):
            kind = "a table of text" if key in TABLES else "text"
            raise SiteError(f"{path}: {key} must be {kind}, got {value!r:.60}.")
    for key in ("data", "memory", "policy", "results"):  # as seen from the file
        if key in told:
            told[key] = str(path.parent / told[key])
    return {**told, **settings}


def find_memory(settings: Mapping[str, Any]) -> Path:
    """Return the folder for what a site keeps between requests."""
    return Path(str(read_site(settings).get("memory", find_root())))


def name_site(settings: Mapping[str, Any], node_id: int) -> str:
    """Return a site's name: its setting ``name``, or one made of its partition or node.

    >>> name_site({"name": "north"}, 7), name_site({"partition-id": 2}, 7), name_site({}, 7)
    ('north', 'client-2', 'node-7')
    """
    settings, partition = read_site(settings), read_partition(settings)
    default = f"node-{node_id}" if partition is None else f"client-{partition}"
    return str(settings.get("name", default))


def read_partition(settings: Mapping[str, Any]) -> int | None:
    """Return which part of a data set a node has, where it says so."""
    value = settings.get("partition-id")
    return None if value is None else int(value)
