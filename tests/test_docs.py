"""The documents are true: what they name exists, and their constants are the code's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.problems import PROBLEMS

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.cli.main import app
from equifed.contract.streams import Stream
from equifed.objectives import WorstCase

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.toml"))
    if path.name not in ("CHANGELOG.md", "reproductions.md")  # which tell of older versions
    and path.parent.name != "made"  # from the code itself
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def code_of(path: Path) -> list[str]:
    """Return the lines of code blocks, and inline code; of a configuration, its comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return [line.partition("#")[2].strip() for line in text.splitlines()]
    blocks = [body.replace("\\\n", " ") for _, body in FENCE.findall(text)]
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [line for body in blocks for line in body.splitlines()] + inline


# -- commands, names, files ------------------------------------------------------------------------


def resolve_command(words: list[str]) -> Any:
    """Return the command that the first words name."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{words[0]!r} is none of {sorted(command.commands)}"
        command = command.commands[words.pop(0)]
    return command


@pytest.mark.long
@documents
def test_commands_and_their_options_exist(path: Path) -> None:
    for line in code_of(path):
        if "import " in line:
            continue
        for typed in re.findall(r"(?:^|[ (])equifed ((?:[a-z]|--)[^#|;]*)", line):
            words = re.sub(r"[\[\]()]", " ", typed).split()
            command = resolve_command(words)
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= known, f"{line!r}: {sorted(given - known)}"


def test_no_two_pages_have_one_title() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "notebooks" not in path.parts]
    found = [
        re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) for path in pages
    ]
    titles = [title[1] for title in found if title is not None]
    assert len(titles) > 40 and sorted(titles) == sorted(set(titles))


@documents
def test_programs_and_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in code_of(path):
        for module in re.findall(r"python -m ([a-z_.]+)", line):
            assert importlib.util.find_spec(module) is not None, line
        for target in re.findall(r"(?:^|\$ )make ([a-z-]+)", line):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), line


WRITTEN = {"hospitals", "report-clients", "runs", "run", "checkpoint", "build"}
"""Folders that a command of the documents would write."""


@documents
def test_files_exist(path: Path) -> None:
    sources = {file.name for file in (ROOT / "src").rglob("*.py*")}
    for text in code_of(path):
        if not re.fullmatch(r"[\w.-]+/[\w./-]*|\w+\.py", text) or re.search("NAME|^/", text):
            continue
        beside = (ROOT, path.parent, ROOT / "src" / "equifed")
        there = text in sources or any((folder / text).exists() for folder in beside)
        assert there or text.partition("/")[0] in WRITTEN, f"{path.name}: {text}"


def resolve_name(name: str) -> Any:
    """Return what a dotted name under equifed means: modules first, then attributes."""
    found: Any = importlib.import_module("equifed")
    for depth, part in enumerate(name.split("."), start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(["equifed", *name.split(".")[:depth]]))
    return found


@documents
def test_names_exist(path: Path) -> None:
    for line in code_of(path):
        for name in re.findall(r"(?<![\w/.\"])(?:ef|equifed)\.([A-Za-z_][\w.]*\w)", line):
            if not name.endswith("toml"):
                resolve_name(name)


@documents
def test_imports_of_python_blocks_work(path: Path) -> None:
    for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(body if language == "python" else "")):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    assert hasattr(importlib.import_module(node.module), alias.name), alias.name


@documents
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", path.read_text(encoding="utf-8")))
    # Pages that are made from the code are there once the site is built, which looks at links, too.
    kept = [t for t in targets if "://" not in t and "made" not in Path(t).parts]
    wrong = [t for t in kept if not (path.parent / t).exists()]
    assert wrong == []


@pytest.mark.long
def test_the_guide_to_own_parts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "own-part.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for language, body in FENCE.findall(text):
        if language == "python":
            exec(compile(body, "own-part.md", "exec"), names)
    own, plain = (names["runs"][kind].per_client() for kind in ("own intercept", "shared"))
    assert sum(own.values()) > sum(plain.values())  # what the guide says of these hospitals
    assert names["newcomer"].only == "new hospital"
    assert "proved to be within" in capsys.readouterr().out


# -- docs/theory/step-sizes.md: the rule of automatic step sizes -----------------------------------

SECTION = (ROOT / "docs" / "theory" / "step-sizes.md").read_text(encoding="utf-8")
CONSTANTS = {
    name: float(value) for name, value in re.findall(r"\| `(\w+)` \| ([\d.]+) \|", SECTION)
}
MODULES = [
    importlib.import_module(name)
    for name in (
        "equifed.steps.automatic",
        "equifed.algorithms.safeguarded",
    )
    if importlib.util.find_spec(name) is not None
]


def in_code(name: str) -> set[float]:
    """Return the values that a constant, or the default of a parameter, has in the code."""
    found = {getattr(module, name) for module in MODULES if hasattr(module, name)}
    for module in MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                fields = {field.name: field.default for field in dataclasses.fields(value)}
                if name in fields and value.__module__ == module.__name__:
                    found.add(fields[name])
    return found


def test_the_page_of_step_sizes_has_its_table() -> None:
    wanted = {"horizon", "coupling", "patience", "DECAY", "GRACE", "MUCH_WORSE"}
    assert wanted <= set(CONSTANTS)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_of_the_page_is_the_codes(name: str) -> None:
    assert in_code(name) == {CONSTANTS[name]}


def test_numbers_in_the_text_of_the_page_are_in_the_code() -> None:
    numbers = {
        node.value
        for module in MODULES
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, float)
    }
    keep, take = re.findall(r"m \\leftarrow ([\d.]+)\\,m \+ ([\d.]+)\\,\\Phi", SECTION)[0]
    (power,) = re.findall(r"below \$10\^\{(-\d+)\}\$", SECTION)
    assert {float(keep), float(take), float(f"1e{power}")} <= numbers


@pytest.mark.long
@pytest.mark.parametrize("name", PROBLEMS)
def test_step_sizes_are_those_of_section_5(name: str) -> None:
    """The rule as the document states it, from its own constants and plain NumPy gradients."""
    problem, algorithm = PROBLEMS[name], ScaffPD(WorstCase())
    clients = problem.clients()
    state = algorithm.init(clients, problem.start())
    steps = int(algorithm.local.steps_for(clients.sizes).max())
    factor = 0.25 if problem.loss == "logistic" else 2.0
    largest = max(np.linalg.norm(a, 2) ** 2 / len(a) for a in problem.inputs)
    smoothness = factor * largest + problem.l2
    time = min(CONSTANTS["horizon"], steps) / smoothness
    squares = float(np.sum(problem.gradients(state.x.numpy()) ** 2))
    sigma, steepest = CONSTANTS["coupling"] / (time * squares), 0.0
    changes = []
    for r in range(12):
        x, weights = state.x.numpy(), state.weights
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        expected = {"smoothness": smoothness, "primal_step": time, "local_step": time / steps}
        expected |= {"extrapolation": 1.0, "dual_step": sigma, "halvings": 0}
        for key, value in expected.items():
            np.testing.assert_allclose(info.numbers[key], value, rtol=1e-9, err_msg=f"{key} {r}")
        turn = info.weights - weights
        if turn @ turn > 0:
            coupling = np.sum((turn @ problem.gradients(x)) ** 2) / (turn @ turn)
            steepest = max(coupling, CONSTANTS["DECAY"] * steepest)
            wanted = CONSTANTS["coupling"] / (time * steepest)
            changes.append(wanted / sigma)
            sigma = float(np.clip(wanted, sigma / 2, 2 * sigma))
    assert min(changes) < 1 or max(changes) > 2  # the rule had something to do
