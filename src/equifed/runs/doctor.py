"""What ``equifed doctor`` says: what is installed, what is found, what can be written."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("equifed", "torch", "numpy", "scipy", "pydantic", "safetensors", "rich", "typer")
OPTIONAL = ("pandas", "pyarrow", "matplotlib", "flwr", "tensorboard", "mlflow-skinny")


def report() -> Iterator[str]:
    """Return the findings, one line each."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in PACKAGES:
        yield f"{name} {_version(name)}"
    yield "optional: " + ", ".join(f"{name} {_version(name)}" for name in OPTIONAL)
    yield from _torch()
    yield from _data()
    for label, folder in (("this folder", Path.cwd()), ("temporary", Path(tempfile.gettempdir()))):
        yield f"{label}: {folder} is {'' if os.access(folder, os.W_OK) else 'NOT '}writable"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _torch() -> Iterator[str]:
    import torch

    yield f"threads: {torch.get_num_threads()} of {os.cpu_count()} processors"
    if not torch.cuda.is_available():
        yield "CUDA: none; use --device cpu"
    for i in range(torch.cuda.device_count()):
        yield f"CUDA: cuda:{i} is {torch.cuda.get_device_name(i)}"


def _data() -> Iterator[str]:
    from equifed.datasets.files import cache_folder
    from equifed.datasets.registry import DATASETS

    given = os.environ.get("EQUIFED_DATA")
    exists = "" if given and Path(given).is_dir() else " (no such folder)"
    yield f"EQUIFED_DATA: {given + exists if given else 'not set'}"
    yield f"cache for fetched data: {cache_folder()}"
    for name, entry in DATASETS.items():
        if entry.embedded:
            state = "part of the package"
        elif entry.files:
            missing = [file.name for file in entry.files if file.find() is None]
            state = (
                f"missing {', '.join(missing)}; equifed data fetch {name}" if missing else "found"
            )
        else:
            state = "read from EQUIFED_DATA when loaded"
        yield f"data set {name}: {state}"
