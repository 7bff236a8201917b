"""The parts of an experiment that are no runs of one configuration: computed once, side by side.

A part is a call of a function in the experiment's ``run.py`` with everything that its answer
depends on. Its answer is kept in ``runs/PART.json`` beside what was given, so that a later call in
the same folder computes what is missing, and refuses answers that were given to another question.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from experiments.harness.experiment import EXPERIMENTS, Context, Settings

Call = tuple[Path, str, str, Settings]
"""File, experiment, function and arguments of a part."""


@dataclass(frozen=True)
class Part:
    """A function of an experiment's ``run.py`` and its arguments, of the types that JSON has."""

    function: Callable[..., Any]
    given: Settings


def compute_parts(context: Context, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the answer of every part, by name: read from its file, or computed now.

    Missing parts are started in the order given, ``context.jobs`` at a time. Each has one processor
    thread, so that answers do not depend on how many there are.
    """
    if context.jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {context.jobs}.")
    files = {name: context.out / "runs" / f"{name}.json" for name in parts}
    left = [name for name, path in files.items() if not path.exists()]
    for name in parts.keys() - set(left):
        if _read(files[name])["given"] != parts[name].given:
            raise ValueError(
                f"{files[name]} was computed with other settings; choose another folder, or "
                "delete that file."
            )
    if left:
        (context.out / "runs").mkdir(parents=True, exist_ok=True)
    calls = [(files[n], _experiment(parts[n]), parts[n].function.__name__, parts[n].given)
             for n in left]  # fmt: skip
    done: Iterator[str]
    if context.jobs == 1 or len(left) <= 1:
        done = (_compute(*call) for call in calls)
    else:
        done = _side_by_side(calls, min(context.jobs, len(left)))
    for count, told in enumerate(done, 1):
        context.console.print(f"{told} ({count} of {len(left)})", highlight=False)
    return {name: _read(path)["answer"] for name, path in files.items()}


def _side_by_side(calls: Sequence[Call], at_once: int) -> Iterator[str]:
    # Spawned, not forked: a forked torch may hang in its thread pool.
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), _watch_parent, (os.getpid(),))
    try:
        for future in as_completed([pool.submit(_compute, *call) for call in calls]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _watch_parent(parent: int) -> None:
    """End with the parent, so that nobody works on for a command that was stopped."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _experiment(part: Part) -> str:
    """Return the experiment of a part, whose module is loaded by path: nobody can import it."""
    return Path(part.function.__code__.co_filename).parent.name


def _compute(path: Path, experiment: str, function: str, given: Settings) -> str:
    """Compute one part and keep it; return a line about it."""
    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            answer = getattr(EXPERIMENTS[experiment].module, function)(**given)
    finally:
        torch.set_num_threads(threads)
    seconds = round(time.perf_counter() - started, 1)
    beside = path.with_suffix(".part")
    kept = {"given": given, "seconds": seconds, "answer": answer}
    beside.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    beside.replace(path)
    return f"{path.stem}: {seconds} s"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
