"""Many runs, of configurations or of objects: only what is missing is run, side by side."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.runs import run as runs
from equifed.runs.alone import WithAlone, fit_alone, is_small_and_convex
from equifed.runs.build import limit_threads, resolve_algorithm
from equifed.runs.config import RunConfig
from equifed.runs.schema import AUTO, ConfigError, blame
from equifed.training import History, RunFolder, TrainingError, files, is_complete, tables, train
from equifed.training.folder import find_addresses, find_code
from equifed.training.show import print_line


@dataclass(frozen=True, eq=False)
class Planned:
    """One run of many: of what, with which seed, and the folder it ends in, if any."""

    name: str
    seed: int
    folder: Any

    @property
    def title(self) -> str:
        """What to call it."""
        return f"{self.name}, seed {self.seed}"

    @property
    def complete(self) -> bool:
        """Whether there is a folder with a run that has ended."""
        return self.folder is not None and is_complete(self.folder)


@dataclass(frozen=True, eq=False)
class Job(Planned):
    """A run of a configuration."""

    config: RunConfig

    @property
    def started(self) -> bool:
        """Whether the folder holds a run."""
        return bool((self.folder / tables.CONFIG).exists())

    def check(self) -> None:
        """Refuse the folder if its run is of another configuration."""
        # Code that the folder names and the given configuration does not is never loaded.
        wanted, stored = self.config.to_dict(), files.StoredRun(self.folder)
        foreign = set(find_code(stored)) - find_addresses(wanted)
        if foreign or not _agree(wanted, RunConfig.of_run(stored).to_dict()):
            raise files.RunFolderError(
                f"{self.folder} holds a run of another configuration; choose another folder, or "
                "pass --overwrite to run everything again."
            )

    def run(self, progress: bool | None = False) -> str | None:
        """Run or resume; return why it failed, or None."""
        try:
            with blame(f"{self.name}: ", ConfigError):
                if self.started:  # its configuration is the one that was handed over: see check
                    runs.resume(self.folder, trust=True)
                else:
                    runs.run(self.config, self.folder, overwrite=True, progress=progress)
        except TrainingError as error:
            return f"{self.title}: {error}"
        return None


def make_job(name: str, config: RunConfig, seed: int, folder: Path) -> Job:
    """Return the run of a method with a seed.

    It has one processor thread unless the configuration says otherwise, so that the results do not
    depend on how many runs share the machine.
    """
    return Job(name, seed, folder, replace(config, seed=seed, threads=config.threads or 1))


def _agree(wanted: Any, stored: Any) -> bool:
    """Tell whether a stored table is the wanted one, but for an ``auto`` that the data settled."""
    if not isinstance(wanted, Mapping) or not isinstance(stored, Mapping):
        return bool(wanted == stored)
    settled = {key for key in ("loss", "lr") if wanted.get(key) == AUTO}
    if wanted.get("name") == AUTO and stored.get("name") in ("stacked", "loop"):
        settled |= {"name", *wanted.keys() - stored.keys()}  # the engine, chosen by measuring
    keys = {*wanted, *stored} - settled
    return all(_agree(wanted.get(key), stored.get(key)) for key in keys)


@dataclass(frozen=True, eq=False)
class Task(Planned):
    """A run of objects in Python."""

    data: Federation
    model: Any
    loss: Any
    engine: Mapping[str, Any]
    options: Mapping[str, Any]
    algorithm: Any
    with_alone: WithAlone

    @property
    def started(self) -> bool:
        """Whether the folder holds a run; one that has not ended begins anew."""
        return self.complete

    def describe(self) -> dict[str, Any]:
        """Return what the run's numbers depend on, in words that JSON has."""
        model: Any = self.model
        if isinstance(model, nn.Module):
            values = (v.detach().cpu().numpy().tobytes() for v in model.state_dict().values())
            weights = files.digest(b"".join(values))
            model = {"module": " ".join(str(model).split()), "weights": weights}
        told = {"loss": self.loss, "engine": dict(sorted(self.engine.items())), **self.options}
        told["algorithm"] = self.algorithm
        return {"data": self.data.checksum(), "model": model, **tables.describe_value(told)}

    def run(self, progress: bool | None = False) -> History | str:
        """Train, save, and return the history, or why it failed."""
        with limit_threads(1):  # so that the results do not depend on who shares the machine
            clients = simulate(self.data, self.model, self.loss, **self.engine)
            algorithm = resolve_algorithm(self.algorithm, clients, self.seed)
            given = {**self.options, "seed": self.seed, "progress": progress}
            try:
                history = train(algorithm, clients, **given)
            except TrainingError as error:
                return f"{self.title}: {error}"
            wanted = self.with_alone
            if is_small_and_convex(clients, self.data) if wanted == "auto" else wanted:
                fit_alone(history, clients, self.data, algorithm, self.options["rounds"])
        history.provenance["task"] = self.describe()
        if self.folder is not None:
            history.save(self.folder, overwrite=True)
        return history

    def check(self) -> None:
        """Refuse the folder if its run is of other settings."""
        stored, wanted = files.StoredRun(self.folder), tables.describe_value(self.describe())
        told = stored.sealed(tables.RUN).get("task") if tables.RUN in stored else None
        known = told if isinstance(told, dict) else {}
        if other := [key for key in wanted if known.get(key) != wanted[key]]:
            raise files.RunFolderError(
                f"{self.folder} holds a run with other settings ({', '.join(other)}); choose "
                "another folder, or give overwrite=True to run everything again."
            )


# -- all of them ------------------------------------------------------------------------------


def check_folders(planned: Sequence[Job | Task], overwrite: bool = False) -> None:
    """Refuse folders that two runs share, or that hold other runs; ``overwrite``: empty those."""
    owners: dict[Path, Planned] = {}
    for job in planned:
        if job.folder is None:
            continue
        owner = owners.setdefault(job.folder, job)
        if owner is not job:
            raise files.RunFolderError(
                f"{owner.title!r} and {job.title!r} would share the folder {job.folder}; "
                "rename one of them."
            )
        if job.started:
            files.refuse_links(job.folder)
            if overwrite:
                RunFolder(job.folder, ()).create(overwrite=True)
            else:
                job.check()


def run_jobs(jobs: Sequence[Job], *, at_once: int = 1, console: Console) -> list[str]:
    """Run what is not complete, resuming what was begun; return what failed and why."""
    return [reason for reason in run_missing(jobs, at_once, console) if reason]


def run_missing(
    planned: Sequence[Job | Task], at_once: int, console: Console, progress: bool | None = None
) -> list[Any]:
    """Run what is not complete, in turn with bars if wanted, or side by side in processes.

    Returns a history, a reason of failure, or None for each.
    """
    if at_once < 1:
        raise ValueError(f"jobs must be at least 1, got {at_once}.")
    left = [job for job in planned if not job.complete]
    kept, found = len(planned) - len(left), dict[Planned, Any]()

    def tell(job: Planned, outcome: Any) -> None:
        found[job], word = outcome, "failed" if isinstance(outcome, str) else "done"
        if job.folder is not None:
            print_line(console, f"{job.title}: {word} ({kept + len(found)} of {len(planned)} runs)")

    if kept:
        print_line(console, f"{kept} of {len(planned)} runs are there already.")
    if at_once == 1 or len(left) <= 1:
        for job in left:
            tell(job, job.run(progress))
        return [found.get(job) for job in planned]
    # Spawned, not forked: a forked torch may hang in its thread pool.
    workers, context = min(at_once, len(left)), get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _watch_parent, (os.getpid(),))
    try:
        futures: dict[Future[Any], Planned] = {pool.submit(job.run): job for job in left}
        for future in as_completed(futures):
            tell(futures[future], future.result())  # raises what went wrong at once
    finally:
        pool.shutdown(cancel_futures=True)
    return [found.get(job) for job in planned]


def _watch_parent(parent: int) -> None:
    """End with the parent, so that nobody writes into folders that a later call resumes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
