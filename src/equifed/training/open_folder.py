"""Opening a run folder that may come from somebody else.

Everything that reads a run folder calls :func:`open_run_folder` first. It refuses, in this order:
symbolic links, files that do not match their checksums, and code of one's own that the folder would
load, unless that is trusted. Nothing of the folder is imported before.

A checksum shows damage, not forgery: whoever changes a folder can write new checksums.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from equifed.training.files import Damaged, RunFolderError, refuse_links
from equifed.training.provenance import CONFIG
from equifed.training.tables import check_folder

EXPORTED, PROGRAM = "predictor.json", "model.pt2"
"""Of a model that ``equifed export`` wrote: its description, and the program, which is code."""
CHOSEN_BY_DATA = ("name", "partition")
"""Settings of ``[data]`` that may name code; in the others a colon means nothing."""


def open_run_folder(
    folder: str | Path,
    *,
    trust: bool = False,
    data_only: bool = False,
    check: Callable[[Path], object] = check_folder,
) -> Path:
    """Return the path of a run folder, or of an exported one, once it may be read.

    Parameters
    ----------
    folder : path
        The folder. It may be a link itself, because the user has named it; nothing in it may be.
    trust : bool
        Accept that the folder's code is loaded. It runs with the user's rights.
    data_only : bool
        The caller reads tables and weights, and loads nothing that the configuration names.
    check : callable
        What compares the files with their checksums.

    Raises
    ------
    RunFolderError
        With the file or the code that is refused, and what to do.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunFolderError(f"{path} is no folder; give the folder of a run.")
    refuse_links(path)
    check(path)
    code = [] if data_only or trust else find_code(path)
    if code:
        raise RunFolderError(
            f"{path} would run code: {', '.join(code)}. If you know what this code does and trust "
            "it, repeat with --trust (in Python trust=True)."
        )
    return path


def find_code(folder: Path) -> list[str]:
    """Return the code that a folder would load, without loading it.

    That is what its configuration names as ``package.module:Name``, and an exported program.
    """
    exported = (folder / EXPORTED).exists() and (folder / PROGRAM).exists()
    programs = [str(folder / PROGRAM)] if exported else []
    if not (folder / CONFIG).exists():
        return programs
    try:
        table = tomllib.loads((folder / CONFIG).read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{folder / CONFIG} is damaged: it cannot be read ({error}).") from None
    return sorted(find_addresses(table)) + programs


def find_addresses(config: Mapping[str, Any]) -> set[str]:
    """Return what a configuration names as ``package.module:Name``.

    >>> find_addresses({"model": "mine:Net", "data": {"name": "table", "target": "a:b"}})
    {'mine:Net'}
    """
    data = config.get("data")
    if isinstance(data, Mapping):
        data = {key: data[key] for key in CHOSEN_BY_DATA if key in data}
    return set(_addresses({**config, "data": data}))


def _addresses(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        if ":" in value:
            yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _addresses(inner)
