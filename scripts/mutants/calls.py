"""A pytest plugin that writes down which functions of the package each test calls.

    MUTANTS_CALLS=calls.jsonl pytest -p scripts.mutants.calls

One line per test that passed: its name, its seconds, and its functions as ``path::name``. Only
calls are traced, not lines, so that a suite takes about half as long again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path.cwd()  # tests may go elsewhere
PACKAGE = str(ROOT / "src" / "equifed") + os.sep
OUTPUT = ROOT / os.environ.get("MUTANTS_CALLS", "calls.jsonl")

_seen: set[CodeType] = set()


def _trace(frame: FrameType, event: str, argument: Any) -> None:
    _seen.add(frame.f_code)  # no trace of lines: nothing is returned


def name_function(code: CodeType) -> str | None:
    """Return ``path::name`` of a function of the package, without functions inside it."""
    if not code.co_filename.startswith(PACKAGE):
        return None
    path = Path(code.co_filename).relative_to(ROOT).as_posix()
    return f"{path}::{code.co_qualname.split('.<locals>')[0].replace('<module>', '')}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Listen while a test is set up and run."""
    _seen.clear()
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
        names = sorted({name for code in set(_seen) if (name := name_function(code))})
        row = {"test": report.nodeid, "seconds": round(report.duration, 3), "functions": names}
        with OUTPUT.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
