"""The examples: part of the wheel, and of the repository that it is built from."""

from __future__ import annotations

from pathlib import Path

import equifed

PACKAGE = Path(equifed.__file__).parent


def find_examples() -> Path:
    """Return the folder of the examples: inside an installed package, or of its clone."""
    for folder in (PACKAGE / "examples", PACKAGE.parents[1] / "examples"):
        if (folder / "three-clients.toml").exists():
            return folder
    raise FileNotFoundError(
        "The examples are not part of this installation; they are in the repository, "
        "https://github.com/equifed/equifed, in the folder examples."
    )


def copy(out: Path, overwrite: bool = False) -> list[Path]:
    """Copy all examples into a folder, and return the new files; none is replaced unasked."""
    source = find_examples()
    files = sorted(path for path in source.iterdir() if path.is_file())
    there = [out / path.name for path in files if (out / path.name).exists()]
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is where the examples come from; give another --out.")
    if there and not overwrite:
        raise ValueError(f"{there[0]} is there already; give --overwrite, or another --out.")
    out.mkdir(parents=True, exist_ok=True)
    for path in files:
        (out / path.name).write_bytes(path.read_bytes())
    return [out / path.name for path in files]
