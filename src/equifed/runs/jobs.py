"""Many runs, each in its own folder: only what is missing is run, several side by side if asked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.runs.schema import ConfigError
from equifed.training.files import RunFolderError, refuse_links
from equifed.training.folder import (
    RunFolder,
    find_addresses,
    find_code,
    is_complete,
)
from equifed.training.history import History, RoundRecord
from equifed.training.missing import TrainingError
from equifed.training.show import print_line
from equifed.training.tables import CONFIG
from equifed.training.trackers import Callback, draw_bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from equifed.contract.algorithm import Info

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One run of a named method with one seed, and its folder."""

    name: str
    config: RunConfig
    folder: Path

    @property
    def title(self) -> str:
        """What to call it."""
        return f"{self.name}, seed {self.config.seed}"

    @property
    def complete(self) -> bool:
        """Whether the run has ended."""
        return is_complete(self.folder)

    @property
    def started(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / CONFIG).exists()


def make_job(name: str, config: RunConfig, seed: int, folder: Path) -> Job:
    """Return the run of a method with a seed.

    It has one processor thread unless the configuration says otherwise, so that the results do not
    depend on how many runs share the machine.
    """
    return Job(name, replace(config, seed=seed, threads=config.threads or 1), folder)


def check_folders(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Refuse folders that two runs share, or that hold runs of other configurations.

    With ``overwrite`` folders are emptied of their runs instead.
    """
    owners: dict[Path, Job] = {}
    for job in jobs:
        owner = owners.setdefault(job.folder, job)
        if owner is not job:
            raise RunFolderError(
                f"{owner.title!r} and {job.title!r} would share the folder {job.folder}; "
                "rename one of them."
            )
        if not job.started:
            continue
        refuse_links(job.folder)
        if overwrite:
            RunFolder(job.folder, ()).create(overwrite=True)
            (job.folder / CONFIG).unlink()
            continue
        # Code that the folder names and the given configuration does not is never loaded.
        foreign = set(find_code(job.folder)) - find_addresses(job.config.to_dict())
        if foreign or not _same(RunConfig.read(job.folder / CONFIG), job.config):
            raise RunFolderError(
                f"{job.folder} holds a run of another configuration; choose another folder, or "
                "pass --overwrite to run everything again."
            )


def _same(stored: RunConfig, wanted: RunConfig) -> bool:
    """Compare configurations; ``auto`` was settled by the data when the run was stored."""
    if wanted.model["loss"] == "auto":
        stored = replace(stored, model={**stored.model, "loss": "auto"})
    if wanted.engine["name"] == "auto" and stored.engine["name"] in ("stacked", "loop"):
        kept = {key: value for key, value in wanted.engine.items() if key in stored.engine}
        if kept | {"name": ""} == stored.engine | {"name": ""}:  # chosen by measuring
            stored = replace(stored, engine=wanted.engine)
    return stored.to_dict() == wanted.to_dict()


def run_jobs(jobs: Sequence[Job], *, at_once: int = 1, console: Console) -> list[str]:
    """Run what is not complete, resuming what was begun; return what failed and why."""
    if at_once < 1:
        raise ValueError(f"jobs must be at least 1, got {at_once}.")
    left = [job for job in jobs if not job.complete]
    with Overall(console, jobs) as overall:
        if at_once == 1 or len(left) <= 1:
            failed = _run_in_turn(left, overall)
        else:
            failed = _run_side_by_side(left, min(at_once, len(left)), overall)
    return [reason for reason in failed if reason]


def run_job(job: Job, callbacks: Sequence[Callback] = ()) -> str | None:
    """Run or resume one run; return why it failed, or None."""
    try:
        if job.started:
            # Its configuration is the one that was handed over here: see check_folders.
            runs.resume(job.folder, callbacks, trust=True)
        else:
            runs.run(job.config, job.folder, overwrite=True, callbacks=callbacks, progress=False)
    except TrainingError as error:
        return f"{job.title}: {error}"
    except ConfigError as error:
        raise ConfigError([f"{job.name}: {problem}" for problem in error.problems]) from error
    return None


def _run_in_turn(jobs: Sequence[Job], overall: Overall) -> list[str | None]:
    failed = []
    for job in jobs:
        overall.running = [job]
        failed.append(run_job(job, [_Rounds(overall)]))
        overall.finish(job)
    return failed


def _run_side_by_side(jobs: Sequence[Job], at_once: int, overall: Overall) -> list[str | None]:
    # Spawned, not forked: a forked torch may hang in its thread pool.
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), _watch_parent, (os.getpid(),))
    failed = []
    try:
        futures: dict[Future[str | None], Job] = {pool.submit(run_job, job): job for job in jobs}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
            overall.running = [futures[f] for f in waiting if f.running()]
            overall.show()
            for future in done:
                failed.append(future.result())
                overall.finish(futures[future])
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _watch_parent(parent: int) -> None:
    """End with the parent, so that nobody writes into folders that a later call resumes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Overall:
    """Progress of all runs together: a bar on a terminal, else a line for each run that ends."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self._console, self._jobs = console, jobs
        self._done = {job.folder for job in jobs if job.complete}
        self.running: list[Job] = []
        self._bar: Progress | None = None

    def __enter__(self) -> Overall:
        if self._done:
            print_line(self._console, f"{self._count()} are there already.")
        if self._console.is_terminal:
            self._bar = draw_bar(self._console, "", sum(job.config.rounds for job in self._jobs))
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _count(self) -> str:
        return f"{len(self._done)} of {len(self._jobs)} runs"

    def finish(self, job: Job) -> None:
        """Say that a run ended, well or not."""
        self._done.add(job.folder)
        if self._bar is None:
            word = "done" if job.complete else "failed"
            print_line(self._console, f"{job.title}: {word} ({self._count()})")
        self.show()

    def show(self, current: int | None = None) -> None:
        """Move the bar; ``current`` is the round of the only run that is going on, if known."""
        if self._bar is None:
            return
        rounds = sum(job.config.rounds for job in self._jobs if job.folder in self._done)
        going = (
            sum(count_rounds(job.folder) for job in self.running) if current is None else current
        )
        names = "; ".join(job.title for job in self.running)
        title = f"{self._count()} ({names})" if names else self._count()
        self._bar.update(self._bar.task_ids[0], completed=rounds + going, description=title)


def count_rounds(folder: Path) -> int:
    """Return how many rounds a run has written down."""
    path = folder / "rounds.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


class _Rounds(Callback):
    """Moves the overall bar for a run in this process."""

    def __init__(self, overall: Overall) -> None:
        self._overall, self._shown = overall, 0.0

    @override
    def start(self, history: History, rounds: int) -> None:
        self._overall.show(len(history.rounds))

    @override
    def round(self, record: RoundRecord, info: Info) -> None:
        if time.monotonic() - self._shown > 0.1:  # not more often than one can see
            self._shown = time.monotonic()
            self._overall.show(record.round)
