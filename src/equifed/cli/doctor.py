"""What ``equifed doctor`` finds: what is installed, what is found, what can be written."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("equifed", "torch", "numpy", "scipy", "safetensors", "rich", "typer")
OPTIONAL = ("pandas", "pyarrow", "matplotlib", "flwr", "tensorboard", "mlflow-skinny")


def examine() -> dict[str, Any]:
    """Return the findings; None stands for what is not there."""
    import torch

    from equifed.data.mapped import cache_folder

    given = os.environ.get("EQUIFED_DATA")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": _find_versions(PACKAGES),
        "optional": _find_versions(OPTIONAL),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "EQUIFED_DATA": given and {"folder": given, "exists": Path(given).is_dir()},
        "cache": str(cache_folder()),
        "data": dict(_find_data()),
        "writable": {
            str(folder): os.access(folder, os.W_OK)
            for folder in (Path.cwd(), Path(tempfile.gettempdir()))
        },
    }


def _find_versions(packages: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in found:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _find_data() -> Iterator[tuple[str, str]]:
    from equifed.datasets.registry import DATASETS

    for name, entry in DATASETS.items():
        missing = ", ".join(file.name for file in entry.files if file.find() is None)
        if entry.embedded:
            yield name, "part of the package"
        elif not entry.files:
            yield name, "read from EQUIFED_DATA when loaded"
        else:
            yield name, f"missing {missing}; equifed data fetch {name}" if missing else "found"


def describe(found: dict[str, Any]) -> Iterator[str]:
    """Return the findings, one line each."""
    yield f"python {found['python']} on {found['system']}"
    optional = [
        f"{name} {number or 'is not installed'}" for name, number in found["optional"].items()
    ]
    yield from (
        f"{name} {number or 'is not installed'}" for name, number in found["packages"].items()
    )
    yield f"optional: {', '.join(optional)}"
    yield f"threads: {found['threads']} of {found['processors']} processors"
    yield from (f"CUDA: cuda:{i} is {name}" for i, name in enumerate(found["cuda"]))
    if not found["cuda"]:
        yield "CUDA: none; use --device cpu"
    given = found["EQUIFED_DATA"] or {"folder": "not set", "exists": True}
    yield f"EQUIFED_DATA: {given['folder']}{'' if given['exists'] else ' (no such folder)'}"
    yield f"cache for fetched data: {found['cache']}"
    yield from (f"data set {name}: {state}" for name, state in found["data"].items())
    for folder, writable in found["writable"].items():
        yield f"{folder} is {'' if writable else 'NOT '}writable"
