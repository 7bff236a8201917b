"""Which module may import which, and what a bare import costs."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import networkx
import pytest

import equifed

ROOT = Path(equifed.__file__).parent
HEAVY = ("torch", "scipy", "pandas", "matplotlib", "flwr", "numpy", "pydantic")


PAPER = {"contract", "objectives", "steps", "algorithms"}
PLUMBING = {"data", "datasets", "models", "engines", "metrics", "training", "report"}
LAYOUT: dict[str, set[str]] = {
    "contract": set(),
    "objectives": {"contract"},
    "steps": {"contract", "objectives"},
    "algorithms": {"contract", "objectives", "steps"},
    "data": {"contract"},
    "datasets": {"contract", "data"},
    "models": {"contract", "data"},
    "engines": {"contract", "data", "models"},
    "metrics": {"contract"},
    "training": {"contract", "metrics", "objectives", "steps"},
    "report": {"contract", "metrics", "training"},
    "privacy": PAPER | {"data", "models", "engines", "training"},
    "runs": PAPER | PLUMBING | {"privacy"},
    "flower": PAPER | PLUMBING | {"privacy", "runs"},
    "cli": PAPER | PLUMBING | {"privacy", "runs", "flower"},
    "testing": PAPER | PLUMBING | {"runs"},
    "sklearn": PAPER | PLUMBING | {"runs"},
    "__main__": {"cli"},
    "__init__": PAPER | PLUMBING | {"privacy", "runs", "testing"},
}
"""The layout: what each part of equifed may import, besides itself. Lazy imports count."""

FOR_EDITORS = {"equifed.training.history": {"equifed.models.predictor"}}
"""Imports for type checkers alone, which never run."""

ADDRESS = re.compile(r"equifed(\.\w+)+(:\w+)?")
MODULES = {
    ".".join(("equifed", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p
    for p in sorted(ROOT.rglob("*.py"))
}


def imported(path: Path) -> set[str]:
    """Return the modules of equifed that a file imports, in function bodies and as strings, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Constant) and ADDRESS.fullmatch(str(node.value)):
            found.add(str(node.value).partition(":")[0])
    return {name for name in found if name in MODULES} - {"equifed"}


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {name: imported(path) - FOR_EDITORS.get(name, set()) for name, path in MODULES.items()}


def test_what_is_for_editors_never_runs() -> None:
    for name, others in FOR_EDITORS.items():
        tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
        (block,) = (n for n in tree.body if isinstance(n, ast.If))
        inside = {n.module for n in block.body if isinstance(n, ast.ImportFrom)}
        assert ast.unparse(block.test) == "TYPE_CHECKING" and others <= inside


def part(module: str) -> str:
    """Return the part of equifed that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def test_the_layout_names_every_part() -> None:
    assert {part(module) for module in MODULES} <= set(LAYOUT)


@pytest.mark.parametrize("name", sorted(LAYOUT))
def test_imports_point_one_way(name: str) -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in all_imports().items()
        if part(module) == name
        for other in sorted(others)
        if part(other) not in LAYOUT[name] | {name}
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_cycle() -> None:
    # A package's __init__ that gathers names counts as its modules do.
    graph = networkx.DiGraph((a, b) for a, others in all_imports().items() for b in others)
    cycles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert not cycles, cycles


def loaded_after(code: str) -> set[str]:
    report = f"import sys; {code}; print('loaded', *[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_import_and_help_load_nothing_heavy() -> None:
    assert loaded_after("import equifed") == set()
    command = "from equifed.cli.main import app; app(['--help'], standalone_mode=False)"
    assert loaded_after(command) == set()


def test_the_first_process_of_a_node_does_without_torch() -> None:
    """It passes messages on; torch would cost 120 MB at every site."""
    assert "torch" not in loaded_after("import equifed.flower.node")


@pytest.mark.parametrize("name", equifed.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(equifed, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = equifed.nothing


@pytest.mark.long
def test_imported_is_declared() -> None:
    """Every package that the source imports is the library's own, Python's, or declared."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(t for e in extras.values() for t in e)]
    declared = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in texts}
    packages = importlib.metadata.packages_distributions()
    undeclared = {}
    for path in MODULES.values():
        for name in sorted(top_level_imports(path) - set(sys.stdlib_module_names) - {"equifed"}):
            known = {d.lower().replace("_", "-") for d in packages.get(name, [name])}
            if not known & declared:
                undeclared[str(path.relative_to(ROOT))] = name
    assert not undeclared


def top_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_every_pinned_version_has_hashes() -> None:
    """``make hashes`` was run after the last change of a version."""

    def pinned(name: str) -> set[tuple[str, str]]:
        text = (ROOT.parents[1] / name).read_text("utf-8")
        pairs = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
        return {(re.sub(r"[-_.]+", "-", n).lower(), version) for n, version in pairs}

    assert pinned("constraints.txt") == pinned("constraints-hashes.txt")
    text = (ROOT.parents[1] / "constraints-hashes.txt").read_text("utf-8")
    for entry in re.split(r"\n(?=[\w])", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]
