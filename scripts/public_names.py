"""Write what follows from the catalogue: public names, and the tables of names.

    python -m scripts.public_names            # or: make names
    python -m scripts.public_names --check    # say what is stale, and leave it

* ``src/equifed/__init__.pyi`` tells type checkers what ``equifed.__getattr__`` finds.
* ``__init__.py`` of algorithms, objectives, steps and data import what the catalogue has of theirs;
  what else they import is left as it is.
* The tables of ``docs/reference/catalogue.md`` stand between ``<!-- catalogue: SECTION -->`` and
  ``<!-- end -->``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import equifed
from equifed.runs.catalogue import SECTIONS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "equifed"
PAGE = ROOT / "docs" / "reference" / "catalogue.md"
GATHERED = {
    "algorithms": ("algorithms",),
    "objectives": ("objectives", "dual_steps"),
    "steps": ("schedules",),
    "data": ("partitions",),
}
"""Packages that gather names, and the sections of the catalogue that these come from."""

COLUMNS = {"algorithms": "what it does", "objectives": "what is minimised"}


def write_stub() -> str:
    """Return the text of the stub of the package."""
    homes = {**equifed._HOMES, **equifed._algorithms()}
    pairs = [("equifed", folder) for folder in equifed._FOLDERS]
    pairs += [(f"equifed.{home}", name) for name, home in homes.items()]
    imports = [f"from {home} import {name} as {name}" for home, name in sorted(pairs)]
    head = "# Written by `make names` from the catalogue and equifed/__init__.py."
    return "\n".join([head, "", *imports, "", "__version__: str", ""])


def write_tables(text: str) -> str:
    """Return a page with its tables as the catalogue has them."""
    for section, title in COLUMNS.items():
        entries = SECTIONS[section].entries().items()
        rows = [f"| `{name}` | {entry.summary} | {entry.paper} |" for name, entry in entries]
        table = "\n".join([f"| name | {title} | from |", "|---|---|---|", *rows])
        begin = f"<!-- catalogue: {section} -->"
        pattern = rf"{begin}\n.*?<!-- end -->"
        if not re.search(pattern, text, re.DOTALL):
            raise SystemExit(f"{PAGE} has no lines {begin} and <!-- end -->.")
        block = f"{begin}\n{table}\n<!-- end -->"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def find_missing(package: str) -> dict[str, str]:
    """Return the names that a package should gather and does not, and their modules."""
    there = {name for name, _ in _definitions(PACKAGE / package / "__init__.py")}
    out = {}
    for section in GATHERED[package]:
        for entry in SECTIONS[section].entries().values():
            module, _, name = entry.address.partition(":")
            if name not in there and not module.startswith("equifed.privacy"):
                out[name] = _home(package, module, name)
    return out


def _home(package: str, module: str, name: str) -> str:
    """Return the module of a name whose address may be that of the package."""
    if module != f"equifed.{package}":
        return module
    for path in sorted((PACKAGE / package).glob("*.py")):
        if (name, True) in _definitions(path):
            return f"{module}.{path.stem}"
    raise SystemExit(f"No module of {module} defines {name}.")


def _definitions(path: Path) -> set[tuple[str, bool]]:
    """Return the names at the top of a module, and whether it defines them itself."""
    out = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            out.add((node.name, True))
        elif isinstance(node, ast.ImportFrom):
            out |= {(alias.asname or alias.name, False) for alias in node.names}
    return out


def complete_package(package: str, missing: dict[str, str]) -> None:
    """Import missing names in a package's ``__init__.py``; ruff puts them in their places."""
    path = PACKAGE / package / "__init__.py"
    text = path.read_text(encoding="utf-8")
    if "__all__" not in text:
        text += "\n__all__ = []\n"
    imports = "".join(f"from {module} import {name}\n" for name, module in missing.items())
    first = text.index("\n", text.index('"""', 3)) + 1
    text = f"{text[:first]}\n{imports}{text[first:].lstrip()}"
    names = "".join(f'"{name}", ' for name in missing)
    path.write_text(text.replace("__all__ = [", f"__all__ = [{names}", 1), encoding="utf-8")
    for command in (["check", "--fix-only", "--select=I,RUF022"], ["format"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--quiet", str(path)], check=True)


def find_stale() -> list[str]:
    """Return what does not follow from the catalogue, file by file."""
    stale = [
        f"{package}/__init__.py lacks {', '.join(missing)}"
        for package in GATHERED
        if (missing := find_missing(package))
    ]
    stub = PACKAGE / "__init__.pyi"
    if not stub.exists() or stub.read_text(encoding="utf-8") != write_stub():
        stale.append("__init__.pyi")
    text = PAGE.read_text(encoding="utf-8")
    return [*stale, PAGE.name] if text != write_tables(text) else stale


def main() -> None:
    """Write, or check."""
    stale = find_stale()
    if "--check" in sys.argv:
        raise SystemExit("\n".join([*stale, "Run: make names"]) if stale else 0)
    for package in GATHERED:
        if missing := find_missing(package):
            complete_package(package, missing)
    (PACKAGE / "__init__.pyi").write_text(write_stub(), encoding="utf-8")
    PAGE.write_text(write_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print("\n".join(f"written: {name}" for name in stale) or "Everything follows already.")


if __name__ == "__main__":
    main()
