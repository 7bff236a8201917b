"""Where numbers come from: seed, algorithm, model, loss, data, preparation and versions."""

from __future__ import annotations

import dataclasses
import json
import platform
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from equifed.contract.clients import Clients
from equifed.training.files import Damaged, digest, read_json, seal, write_file

CONFIG, RUN, PREPARATION = "config.toml", "run.json", "preparation.json"
FORMAT = 2
"""Of run folders and checkpoints; those of version 0.1 carry no number."""

PACKAGES = ("equifed", "torch", "numpy", "scipy")
"""What numbers depend on."""


def describe_value(value: Any) -> Any:
    """Return a value in words that JSON has; an object by its class and its fields.

    >>> from equifed.contract.local import LocalSGD
    >>> describe_value(LocalSGD(steps=3, lr=0.1))["lr"]
    0.1
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe_value(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [describe_value(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"name": type(value).__name__, **describe_value(fields)}
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return str(name)  # not repr: it may hold an address in memory


def describe_run(algorithm: Any, clients: Clients, seed: int, settings: Any) -> dict[str, Any]:
    """Return what a run was made of, as far as it is known here."""
    return {
        "format": FORMAT,
        "versions": package_versions(),
        "seed": seed,
        "algorithm": describe_value(algorithm),
        **describe_value(settings),
        **clients.origin(),
    }


def tell_choice(clients: Clients) -> list[dict[str, Any]]:
    """Return the event that says which engine was chosen by measuring."""
    told = clients.choice
    return [{"event": "note", "round": 0, "reason": told}] if told else []


def write_provenance(folder: Path, told: Mapping[str, Any], preparation: bytes | None) -> None:
    """Write ``run.json``, the configuration if there was one, and how the data were prepared."""
    import tomli_w

    for name in (CONFIG, RUN, PREPARATION):  # of a run that was replaced
        (folder / name).unlink(missing_ok=True)
    if preparation is not None:
        write_file(folder / PREPARATION, preparation)
    if not told:
        return
    plain = {key: value for key, value in told.items() if key not in ("config", "sha256")}
    if told.get("config"):
        text = tomli_w.dumps(told["config"])
        plain[CONFIG] = digest(text.encode())
        write_file(folder / CONFIG, text.encode())
    write_file(folder / RUN, seal(plain))


def format_preparation(trained: Any, folder: Path | None) -> bytes | None:
    """Return how the data of a run were prepared: from what predicts, or from the run's folder."""
    prepared = getattr(trained, "preparation", None)
    if prepared is not None:
        return json.dumps(prepared.to_json(), indent=1).encode() + b"\n"
    path = None if folder is None else folder / PREPARATION
    return path.read_bytes() if path is not None and path.exists() else None


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return what a folder tells of its run; nothing if it has no ``run.json``."""
    path, config = folder / RUN, folder / CONFIG
    told = dict(read_json(path)) if path.exists() else {}
    if not config.exists():
        return told
    try:
        table = tomllib.loads(config.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{config} is damaged: it cannot be read ({error}).") from None
    known = {key: table[key] for key in ("seed", "algorithm") if key in table}
    return {**told, **known, "config": table}


def share_of_method(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the runs of one method have in common: all but seed and checksums of files."""
    apart = ("seed", "sha256", CONFIG, "replaced")
    config = {key: value for key, value in told.get("config", {}).items() if key != "seed"}
    return {**{k: v for k, v in told.items() if k not in (*apart, "config")}, "config": config}


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of packages, and Python's; "not installed" for one that is missing.

    >>> package_versions(["numpy", "no-such-package"])["no-such-package"]
    'not installed'
    """
    return {**{name: _version(name) for name in packages}, "python": platform.python_version()}


@cache  # reading what is installed takes as long as a round of a small problem
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
