"""A pytest plugin that writes down which lines of the package each test executes.

    MUTANTS_CALLS=calls.jsonl pytest -p scripts.mutants.calls

One line per test that passed: its name, its seconds of processor time (other programs on the
machine do not matter), and for each function ``path::name`` the lines
it executed, counted from ``def``: a number in base 16 whose bit k stands for line k. So what was
learnt holds as long as the function is the same, wherever it moves in its file. A function is
watched until its calls show nothing new, so that a suite takes about half as long again.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path.cwd()  # tests may go elsewhere
PACKAGE = str(ROOT / "src" / "equifed") + os.sep
OUTPUT = ROOT / os.environ.get("MUTANTS_CALLS", "calls.jsonl")
QUIET_CALLS, QUIET_LINES = 20, 2000
"""Calls, and lines of one call, without a new line, after which a function is watched no more."""

_foreign: set[CodeType] = set()
_seen: defaultdict[CodeType, set[int]] = defaultdict(set)
_quiet: defaultdict[CodeType, int] = defaultdict(int)
_began = 0.0


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    code = frame.f_code
    if code in _foreign:
        return None
    if not (code.co_filename.startswith(PACKAGE) and code.co_filename.endswith(".py")):
        _foreign.add(code)
        return None
    seen, left = _seen[code], QUIET_LINES
    if _quiet[code] > QUIET_CALLS:
        return None
    _quiet[code] += 1

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            _quiet[code], left = 0, QUIET_LINES
        left -= 1
        return watch if left > 0 else None

    return watch


def find_functions(source: str) -> list[tuple[int, int, str]]:
    r"""Return first line, last line and name of the functions that are in no other function.

    >>> find_functions("class A:\n    def f(self):\n        return 1")
    [(2, 3, 'A.f')]
    """

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child.lineno, child.end_lineno or child.lineno, name
            else:
                yield from walk(child, f"{name}." if isinstance(child, ast.ClassDef) else prefix)

    return sorted(walk(ast.parse(source), ""))


@cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    return find_functions(Path(path).read_text(encoding="utf-8"))


def lines_by_function() -> dict[str, str]:
    """Return what was seen, by function."""
    found: defaultdict[str, int] = defaultdict(int)
    for code, lines in list(_seen.items()):
        path = Path(code.co_filename).relative_to(ROOT).as_posix()
        functions = _functions(code.co_filename)
        for line in {code.co_firstlineno, *lines}:
            at = bisect_right(functions, (line, sys.maxsize, "")) - 1
            if at >= 0 and line <= functions[at][1]:
                found[f"{path}::{functions[at][2]}"] |= 1 << line - functions[at][0]
    return {name: f"{bits:x}" for name, bits in sorted(found.items())}


def processor_time() -> float:
    """Return the seconds that this process and those that it waited for have computed."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Listen while a test is set up and run."""
    global _began
    _began = processor_time()
    _seen.clear()
    _quiet.clear()
    threading.settrace(_trace)
    sys.settrace(_trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the line of a test that passed, in the process that ran it."""
    if report.when == "call" and report.passed and sys.gettrace() is _trace:
        seconds, functions = round(processor_time() - _began, 3), lines_by_function()
        row = {"test": report.nodeid, "seconds": seconds, "functions": functions}
        with OUTPUT.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
