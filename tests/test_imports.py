"""Which module may import which, and what a bare import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import equifed
from equifed.catalogue import SECTIONS

ROOT = Path(equifed.__file__).parent
HEAVY = ("torch", "scipy", "pandas", "matplotlib", "flwr", "numpy", "pydantic")


def imported(path: Path) -> set[str]:
    """Return the modules of equifed that a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("equifed.")}


def parts(folder: str) -> dict[Path, set[str]]:
    """Return which parts of equifed (first name below it) the files of a folder import."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {f: {name.split(".")[1] for name in imported(f)} for f in files}


def test_algorithms_see_the_contract_and_objectives_only() -> None:
    contract = {"algorithms", "arrays", "clients", "local", "objectives", "streams"}
    steps = {"auto_steps", "certificate", "choose_phi", "curvature", "schedule", "steps"}
    allowed = contract | steps
    for file, found in parts("algorithms").items():
        assert found <= allowed, f"{file} imports {found - allowed}"


def test_engines_never_see_algorithms() -> None:
    # The apps of the Flower engine put an algorithm and clients together, as equifed.runs does.
    apps = ("app.py", "app_config.py")
    for file, found in parts("engines").items():
        if file.parent.name == "flower" and file.name in apps:
            continue
        assert not found & {"algorithms", "cli"}, f"{file} imports {found}"


def test_objectives_see_arrays_only() -> None:
    for file, found in parts("objectives").items():
        assert found <= {"arrays", "objectives"}, f"{file} imports {found}"


def test_the_report_reads_histories_only() -> None:
    for file, found in parts("report").items():
        assert found <= {"arrays", "history", "metrics", "report", "run_folder"}, f"{file}: {found}"


def test_nothing_imports_the_command_line() -> None:
    for file, found in parts(".").items():
        assert "cli" not in found or file == ROOT / "__main__.py", file


def loaded_after(code: str) -> set[str]:
    report = f"import sys; {code}; print('loaded', *[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_import_and_help_load_nothing_heavy() -> None:
    assert loaded_after("import equifed") == set()
    command = "from equifed.cli import app; app(['--help'], standalone_mode=False)"
    assert loaded_after(command) == set()


@pytest.mark.parametrize("name", equifed.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(equifed, name) is not None


def test_the_lazy_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {**seen, "__version__": None}.keys() == set(equifed.__all__)
    for name, module in seen.items():
        assert getattr(sys.modules[str(module)], name) is getattr(equifed, name)


@pytest.mark.parametrize("section", ["algorithms", "objectives", "schedules", "dual_steps"])
def test_what_a_configuration_can_name_is_public(section: str) -> None:
    for entry in SECTIONS[section].entries().values():
        name = entry.address.partition(":")[2]
        assert getattr(equifed, name) is entry.load()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = equifed.nothing
