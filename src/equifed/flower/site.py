"""What a site decides for itself: which app it runs, with which settings, by which rules.

Its rules (``policy.toml``) say what it takes part in, and how much of it may leave.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from equifed.contract.local import LocalSGD, LocalWork
from equifed.data.site_table import SiteTable, TableSettings
from equifed.data.split import DataError
from equifed.flower.budget import Budget, Refused
from equifed.flower.memory import find_root
from equifed.runs.schema import Checker, ConfigError, construct, settings
from equifed.training.keys import KeyProblem, PublicKey, read_keys


class SiteError(ValueError):
    """What the site was given cannot be used, and what to do."""


@dataclass(frozen=True)
class Site:
    """The app that a site installed, and the settings of its node (see :func:`read_site`).

    ``app`` is the folder of a Flower app (its ``pyproject.toml`` names the client), or
    ``module:name`` of a ``ClientApp`` that can be imported.
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
            import_from(Path(self.app))
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


def import_from(folder: Path) -> None:
    """Let the code of an app be imported, a model of its own for instance."""
    sys.path.insert(0, str(folder.absolute()))


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


PLAIN = ("name", "data", "memory", "privacy", "policy", "results", "peers")
TABLES = ("columns", "units")
"""Settings that a site's file may hold: plain ones, and tables of text."""


def read_site(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's settings, completed from the file that its setting ``site`` names.

    The file is TOML: ``name``, ``data`` (a CSV or Parquet file), ``memory``, ``privacy``,
    ``policy``, ``results`` (a folder for the models of runs that ended) and ``peers`` (the public
    keys of all sites, one on a line with the site's name at its end); ``[columns]`` with agreed
    column names and the titles that they have in the file, and ``[units]`` with the units of
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
            raise SiteError(f"{path}: {key!r} is not a setting of a site; there are {known}.")
        texts = value.values() if key in TABLES and isinstance(value, dict) else [value]
        if (key in TABLES) != isinstance(value, dict) or not all(isinstance(t, str) for t in texts):
            kind = "a table of text" if key in TABLES else "text"
            raise SiteError(f"{path}: {key} must be {kind}, got {value!r:.60}.")
    for key in ("data", "memory", "policy", "results", "peers"):  # as seen from the file
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


# -- its data --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteData:
    """One site's table with what was agreed, and the units that its file is said to have."""

    table: SiteTable
    settings: TableSettings
    units: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, settings: TableSettings, node: Mapping[str, Any]) -> SiteData:
        """Read the file that a node's settings name, see :func:`read_site`."""
        told = read_site(node)
        if "data" not in told:
            raise DataError(
                "This site names no file; start its node with --node-config 'data=\"FILE.csv\"', "
                "or 'site=\"SITE.toml\"', a file that names it."
            )
        name, titles = name_site(told, 0), told.get("columns", {})
        table = SiteTable.read(str(told["data"]), name, settings, titles)
        units = told.get("units", {})
        strange = [c for c in units if c not in (*table.features, settings.target)]
        if strange:
            raise DataError(
                f"Client {name!r}: [units] names {strange[0]!r}, which is not a column that is "
                "used; use the agreed names."
            )
        return cls(table, settings, units)

    def describe(self) -> dict[str, Any]:
        """Return what a hello says of a table that is not prepared yet."""
        from equifed.flower.task import Schema, shorten_names  # which loads torch

        table, names = self.table, self.table.features
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        kind = (len(names),), self.settings.dtype, (), "float64", None
        told = {
            "columns": table.describe_kinds(),
            "target": table.describe_target(),
            "rest": table.rest,
            "units": dict(self.units),
        }
        schema = Schema(*kind, digest, shorten_names(names))
        return {"schema": schema.to_dict(), "model": "", "table": told}


def read_arrays(path: str | Path) -> dict[str, Any]:
    """Return the splits of an ``.npz`` file with ``X_train``, ``y_train`` and perhaps others.

    Of samples of several arrays every one has its name: ``X_train.tokens``, ``X_train.mask``.
    """
    parts = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for split in ("train", "validation", "test"):
                named = {
                    key.partition(".")[2]: key for key in arrays if key.startswith(f"X_{split}.")
                }
                x = {name: arrays[key] for name, key in named.items()}
                if x or f"X_{split}" in arrays:
                    parts[split] = (x or arrays[f"X_{split}"], arrays[f"y_{split}"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"Cannot read {path} as arrays: {error}.") from None
    if "train" not in parts:
        raise DataError(f"{path} has no arrays X_train and y_train.")
    return parts


# -- its rules -------------------------------------------------------------------------------------

Privacy = Literal["none", "secure"]
"""How much of its vectors a client shows: all, or nothing but sums."""


def check_privacy(level: object) -> None:
    """Refuse what is no level of privacy; "sums" was one until version 0.2."""
    if level == "sums":
        cure = "use 'secure'. A run that was started with 'sums' cannot be resumed; start a new one"
        raise ConfigError([f"privacy = 'sums' (masks of pairs alone) was removed: {cure}"])
    if level not in get_args(Privacy):
        raise ConfigError([f"privacy must be 'none' or 'secure', got {level!r}"])


@dataclass(frozen=True)
class Policy:
    """What a site agrees to, whatever a run asks for: its ``policy.toml``.

    >>> Policy(max_steps=10).check_work(LocalSGD(lr=0.1, steps=20), 100)
    Traceback (most recent call last):
    equifed.flower.budget.Refused: 20 local steps are asked for, this site takes at most 10
    """

    privacy: str = "none"  # the least that it takes part in: "none" or "secure"
    min_samples: int = 1  # training samples below which it takes no part
    max_steps: int | None = None  # local steps of one request
    max_seconds: float | None = None  # of work on a request (by ``equifed flower node``)
    clip: float | None = None  # length to which gradients and updates are shortened
    show_by_name: bool = True  # whether means, gaps and label shares are shown under its name
    operators: tuple[str, ...] = ()  # public keys of those whose runs it answers; none: anybody's
    approve: Literal["listed", "ask"] = "listed"  # "ask": each plan waits for the site's people
    budget: Budget | None = None  # what its rows may tell over all runs

    def __post_init__(self) -> None:
        check_privacy(self.privacy)
        for name in ("min_samples", "max_steps", "max_seconds", "clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError([f"{name} must be above 0 and finite, got {value!r}"])
        if self.approve not in ("listed", "ask"):
            raise ConfigError([f"approve must be 'listed' or 'ask', got {self.approve!r}"])
        if self.approve == "ask" and not self.operators:
            raise ConfigError(["approve = 'ask' needs operators, whose plans are to be approved"])
        if self.budget is not None and not self.operators:
            raise ConfigError(["[budget] needs operators, whose plans say what is asked how often"])
        try:
            _ = self.operator_keys
        except KeyProblem as error:
            raise ConfigError([f"operators: {error}"]) from None

    @cached_property
    def operator_keys(self) -> dict[str, PublicKey]:
        """Return the operators' keys by name."""
        return read_keys(self.operators, "operators")

    @classmethod
    def read(cls, path: str | Path) -> Policy:
        """Read ``policy.toml``, or raise :class:`SiteError`."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            checker = Checker()
            values = checker.table(settings(Policy), table, "")
            checker.raise_problems()
            policy: Policy = construct(cls, values, "")
            return replace(policy, operators=tuple(policy.operators))
        except OSError as error:
            raise SiteError(f"The policy {path} cannot be read ({error.strerror}).") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ConfigError) as error:
            told = " ".join(str(error).split())
            raise SiteError(f"The policy {path} cannot be used: {told}") from error

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Policy:
        """Return the policy that a node's settings name; its ``privacy`` can only add to it."""
        policy = cls.read(str(node["policy"])) if "policy" in node else cls()
        level = node.get("privacy", "none")
        try:
            check_privacy(level)
        except ConfigError as error:
            raise SiteError(str(error)) from None
        return replace(policy, privacy=level) if level == "secure" else policy

    def allow_clear(self) -> None:
        """Refuse to show a vector, if the site takes part in hidden sums alone."""
        if self.privacy != "none":
            raise Refused(f"this node takes part with privacy {self.privacy!r} only")

    def check_work(self, work: LocalSGD, samples: int) -> None:
        """Refuse more local steps than the site does."""
        steps = int(work.steps_for([samples])[0])
        if self.max_steps is not None and steps > self.max_steps:
            raise Refused(
                f"{steps} local steps are asked for, this site takes at most {self.max_steps}"
            )

    def check_plan(self, plan: Mapping[str, Any], samples: int) -> None:
        """Refuse a run that would ask for what the site does not do, before anything is told."""
        if samples < self.min_samples:
            raise Refused(
                f"this site takes part with at least {self.min_samples} training samples, and has "
                "fewer"
            )
        if plan.get("privacy", "secure") != "secure":
            self.allow_clear()
        if plan.get("work") is not None:
            self.check_work(LocalWork.from_dict(plan["work"]), samples)

    def shorten(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Return a vector that is not longer than the site's limit.

        >>> Policy(clip=2.5).shorten(np.array([3.0, 4.0])).tolist()
        [1.5, 2.0]
        """
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if self.clip is None or length <= self.clip:
            return vector
        return (vector * (self.clip / length)).astype(vector.dtype)

    def describe(self) -> list[str]:
        """Return what the others should know of it, in sentences."""
        told = [] if self.budget is None else [self.budget.describe()]
        if self.clip is not None:
            told.append(f"shortens gradients and updates to length {self.clip:g}")
        if self.max_seconds is not None:
            told.append(f"works at most {self.max_seconds:g} s on a request")
        return told
