"""Runs of objects in Python, each in its own folder if asked: finished ones are not run again."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import nn

from equifed.contract.algorithm import AnyAlgorithm
from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.runs.build import limit_threads, measure_step
from equifed.runs.config import build_algorithm
from equifed.runs.schema import Checker
from equifed.runs.with_alone import WithAlone, fit_alone, is_small_and_convex
from equifed.training.files import RunFolderError, digest, read_sealed
from equifed.training.folder import is_complete
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.missing import TrainingError
from equifed.training.tables import RUN, describe_value


@dataclass(frozen=True, eq=False)
class Task:
    """One run: the objects it is made of, its seed, and the folder it ends in."""

    data: Federation
    model: Any
    loss: Any
    engine: Mapping[str, Any]
    options: Mapping[str, Any]
    algorithm: Any
    seed: int
    with_alone: WithAlone
    folder: Path | None

    def describe(self) -> dict[str, Any]:
        """Return what the run's numbers depend on, in words that JSON has."""
        model: Any = self.model
        if isinstance(model, nn.Module):
            weights = b"".join(
                v.detach().cpu().numpy().tobytes() for v in model.state_dict().values()
            )
            model = {"module": " ".join(str(model).split()), "weights": digest(weights)}
        return {
            "data": self.data.checksum(),
            "model": model,
            "loss": describe_value(self.loss),
            "engine": {key: describe_value(value) for key, value in sorted(self.engine.items())},
            **{key: describe_value(value) for key, value in self.options.items()},
            "algorithm": describe_value(self.algorithm),
        }

    def run(self, progress: bool | None) -> History | str:
        """Train, save, and return the history, or why it failed."""
        with limit_threads(1):  # so that the results do not depend on who shares the machine
            clients = simulate(self.data, self.model, self.loss, **self.engine)
            algorithm = resolve_algorithm(self.algorithm, clients, self.seed)
            try:
                history = train(
                    algorithm, clients, seed=self.seed, progress=progress, **self.options
                )
            except TrainingError as error:
                return str(error)
            wanted = self.with_alone
            if wanted == "auto":
                wanted = is_small_and_convex(clients, self.data)
            if wanted:
                fit_alone(history, clients, self.data, algorithm, self.options["rounds"])
        history.provenance["task"] = self.describe()
        if self.folder is not None:
            history.save(self.folder, overwrite=True)
        return history

    def load(self) -> History | None:
        """Return the finished run in the folder, if it is of these settings; refuse another."""
        if self.folder is None or not is_complete(self.folder):
            return None
        told = read_sealed(self.folder / RUN).get("task") if (self.folder / RUN).exists() else None
        wanted = describe_value(self.describe())
        if told != wanted:
            known = told if isinstance(told, dict) else {}
            other = [key for key in wanted if known.get(key) != wanted[key]]
            raise RunFolderError(
                f"{self.folder} holds a run with other settings ({', '.join(other)}); choose "
                "another folder, or give overwrite=True to run everything again."
            )
        return History.load(self.folder)


def run_tasks(
    tasks: Sequence[Task], jobs: int, progress: bool | None, overwrite: bool
) -> list[History | str]:
    """Run what is not finished, and return the history of every run, or why it failed."""
    kept = [None if overwrite else task.load() for task in tasks]
    left = [task for task, found in zip(tasks, kept, strict=True) if found is None]
    if len(left) < len(tasks) and progress is not False:
        print(f"{len(tasks) - len(left)} of {len(tasks)} runs are there already.", file=sys.stderr)
    new = _run_left(left, jobs, progress)
    return [next(new) if found is None else found for found in kept]


def _run_left(
    tasks: Sequence[Task], jobs: int, progress: bool | None
) -> Iterator[History | str]:  # fmt: skip
    if jobs == 1 or len(tasks) <= 1:
        yield from (task.run(progress) for task in tasks)
        return
    # Spawned, not forked: a forked torch may hang in its thread pool.
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        yield from [future.result() for future in [pool.submit(t.run, False) for t in tasks]]


def resolve_algorithm(given: Any, clients: Any, seed: int) -> AnyAlgorithm:
    """Return an algorithm that is given as one, as a name or as a table."""
    if not isinstance(given, str | Mapping):
        algorithm: AnyAlgorithm = given
        return algorithm
    checker = Checker(measures=True)
    table = checker.choice("algorithms", given, "algorithm")
    checker.raise_problems()
    made = build_algorithm(table, clients.sizes.tolist())
    return measure_step(table, made, clients, seed)[1]
