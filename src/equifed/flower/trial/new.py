"""Writing a ready Flower app."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

PACKAGE = ("__init__.py", "server.py", "client.py", "task.py", "equifed.toml")
TOP = ("pyproject.toml", "README.md")


class NewAppError(ValueError):
    """The app cannot be written there, and what to do."""


def write_app(folder: Path, *, data: str = "heart-disease", publisher: str = "local") -> Path:
    """Write a Flower app into a new folder and return the path of its package.

    Parameters
    ----------
    folder : Path
        Where; must not exist, or be empty. Its name becomes the app's name.
    data : str
        Embedded data set for trying out; it says how many clients there are.
    publisher : str
        The app's publisher, as Flower wants one.
    """
    from equifed.runs.build import load_data
    from equifed.runs.config import read_data

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NewAppError(f"{folder} exists and is not empty; choose another folder.")
    name = folder.absolute().name
    package = re.sub(r"\W+", "_", name).strip("_").lower()
    if not package.isidentifier():
        raise NewAppError(f"{name!r} cannot be the name of an app; begin it with a letter.")
    words = {
        "{name}": re.sub(r"[^A-Za-z0-9._-]+", "-", name),
        "{package}": package,
        "{publisher}": publisher,
        "{data}": data,
        "{clients}": str(len(load_data(read_data(data, [])))),
    }
    (folder / package).mkdir(parents=True)
    for target in TOP:
        (folder / target).write_text(_fill(target, words), encoding="utf-8")
    for target in PACKAGE:
        (folder / package / target).write_text(_fill(target, words), encoding="utf-8")
    return folder / package


def _fill(name: str, words: dict[str, str]) -> str:
    source = files("equifed.flower") / "template" / f"{name}.in"
    text = source.read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, value)
    return text
