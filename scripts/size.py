"""Count lines, files and logical statements per folder, at a revision and now.

    python -m scripts.size                   # since version 0.2
    python -m scripts.size --base main~5

Statements are those of Python's syntax tree, docstrings left out: a line that is wrapped
and a docstring that grows count nothing.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASE = "c8e8bd3a2133be5420cb8c56917312d733258095"
"""Version 0.2 after its repairs."""
OUTSIDE = ("tests", "experiments", "benchmarks", "scripts")


class Size(NamedTuple):
    """How large some files are."""

    lines: int = 0
    files: int = 0
    statements: int = 0

    def plus(self, other: Size) -> Size:
        """Add up."""
        return Size(*(mine + more for mine, more in zip(self, other, strict=True)))


def count_statements(source: str) -> int:
    """Count the statements of a module, without its docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    homes = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = sum(isinstance(node, homes) and bool(ast.get_docstring(node)) for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def find_folder(path: str) -> str | None:
    """Return the row that a file counts in: a folder of the package, or one beside it."""
    top, *rest = path.split("/")
    if top in OUTSIDE:
        return top
    if [top, *rest[:1]] != ["src", "equifed"]:
        return None
    return f"equifed/{rest[1]}" if len(rest) > 2 else "equifed"


def measure(files: Mapping[str, str]) -> dict[str, Size]:
    """Return the size of each folder, and of the whole package, from sources by path."""
    sizes: dict[str, Size] = defaultdict(Size)
    for path, source in files.items():
        if folder := find_folder(path):
            size = Size(source.count("\n"), 1, count_statements(source))
            sizes[folder] = sizes[folder].plus(size)
            if folder.startswith("equifed"):
                sizes["src"] = sizes["src"].plus(size)
    return dict(sizes)


def read_files(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield path and text of the Python files of a revision, or of the working tree."""
    if revision is None:
        command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        paths = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
        yield from ((path, (ROOT / path).read_text(encoding="utf-8")) for path in paths)
        return
    command = ["git", "archive", revision, "src", *OUTSIDE]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (content := archive.extractfile(member)):
                yield member.name, content.read().decode()


def write_table(before: Mapping[str, Size], after: Mapping[str, Size]) -> str:
    """Return a table with one row per folder."""
    folders = sorted({*before, *after} - {"src", *OUTSIDE})
    rows = [f"{'folder':20}" + "".join(f"{name:>23}" for name in Size._fields)]
    for folder in (*folders, "src", *OUTSIDE):
        old, new = before.get(folder, Size()), after.get(folder, Size())
        cells = "".join(f"{a:>12,} -> {b:>7,}" for a, b in zip(old, new, strict=True))
        rows.append(f"{folder:20}{cells}")
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=BASE, help="the revision to compare with")
    base = parser.parse_args().base
    print(write_table(measure(dict(read_files(base))), measure(dict(read_files(None)))))


if __name__ == "__main__":
    main()
