"""The experiments stand on the public interface alone, as a user outside the repository does."""

from __future__ import annotations

import ast
import pkgutil
from pathlib import Path

import pytest
from experiments.harness.experiment import EXPERIMENTS, ROOT

import equifed

PUBLIC = {
    "equifed",
    *(f"equifed.{one.name}" for one in pkgutil.iter_modules(equifed.__path__) if one.ispkg),
} - {"equifed.cli", "equifed.flower"}


def violations(source: str) -> list[str]:
    """Return what a file takes from inside equifed: deeper modules, underscore names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            taken = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            taken = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.partition(":")  # importlib, and addresses in TOML
            whole = all(part.isidentifier() for part in module.split("."))
            taken = [(module, name)] if whole else []
        else:
            continue
        for module, name in taken:
            inside = f"{module}.{name}" if name and _is_module(module, name) else module
            if module.partition(".")[0] == "equifed" and (
                inside not in PUBLIC or name.startswith("_")
            ):
                found.append(f"{module} {name}".strip())
    return found


def _is_module(package: str, name: str) -> bool:
    folder = Path(equifed.__path__[0]).joinpath(*package.split(".")[1:])
    return package in PUBLIC and any((folder / end).exists() for end in (f"{name}.py", name))


FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "runs" not in p.parts)


@pytest.mark.parametrize("file", FILES)
def test_an_experiment_imports_the_public_interface_only(file: str) -> None:
    assert violations((ROOT / file).read_text(encoding="utf-8")) == []


def test_every_experiment_is_among_the_files() -> None:
    assert {f"{name}/run.py" for name in EXPERIMENTS} < set(FILES)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("from equifed.runs import merge_tables", False),
        ("import equifed as ef", False),
        ("from equifed import objectives", False),
        ("from equifed.report import svg", True),
        ("from equifed.report import _cell", True),
        ("from equifed.training.history import History", True),
        ("import equifed.steps.phi", True),
        ("def f():\n    from equifed.runs.many import make_job", True),
        ("importlib.import_module('equifed.runs.many')", True),
        ("from equifed.cli import main", True),
    ],
)
def test_the_rule_tells_inside_from_outside(line: str, wrong: bool) -> None:
    assert bool(violations(line)) is wrong
