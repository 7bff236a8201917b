"""Many runs, each in its own folder: only what is missing is run, on several processes if asked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.runs.config import RunConfig
from equifed.training.folder import RunFolderError
from equifed.training.history import History, RoundRecord
from equifed.training.loop import Callback, TrainingError
from equifed.training.tables import SUMMARY, is_complete

if TYPE_CHECKING:
    from rich.console import Console

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
        return (self.folder / "config.toml").exists()


def job(name: str, config: RunConfig, seed: int, folder: Path) -> Job:
    """Return the run of a method with a seed.

    It has one processor thread unless the configuration says otherwise, so that the results do not
    depend on how many processes share the machine.
    """
    return Job(name, replace(config, seed=seed, threads=config.threads or 1), folder)


def check(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Refuse folders that two runs share, or that hold runs of other configurations.

    With ``overwrite`` folders are emptied of their runs instead.
    """
    owners: dict[Path, Job] = {}
    for one in jobs:
        owner = owners.setdefault(one.folder, one)
        if owner is not one:
            raise RunFolderError(
                f"{owner.title!r} and {one.title!r} would share the folder {one.folder}; "
                "rename one of them."
            )
        if not one.started:
            continue
        if overwrite:
            (one.folder / SUMMARY).unlink(missing_ok=True)
            (one.folder / "config.toml").unlink()
        elif not _same(RunConfig.read(one.folder / "config.toml"), one.config):
            raise RunFolderError(
                f"{one.folder} holds a run of another configuration; choose another folder, or "
                "pass --overwrite to run everything again."
            )


def _same(stored: RunConfig, wanted: RunConfig) -> bool:
    """Compare configurations; ``auto`` was settled by the data when the run was stored."""
    if wanted.model["loss"] == "auto":
        stored = replace(stored, model={**stored.model, "loss": "auto"})
    return stored.to_dict() == wanted.to_dict()


def run_jobs(jobs: Sequence[Job], *, processes: int = 1, console: Console) -> list[str]:
    """Run what is not complete, going on with what was begun; return what failed and why."""
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}.")
    left = [one for one in jobs if not one.complete]
    with Overall(console, jobs) as overall:
        if processes == 1 or len(left) <= 1:
            return _in_turn(left, overall)
        return _side_by_side(left, min(processes, len(left)), overall)


def run_job(one: Job, callbacks: Sequence[Callback] = ()) -> str | None:
    """Run or go on with one run; return why it failed, or None."""
    from equifed.runs import run as runs

    try:
        if one.started:
            runs.resume(one.folder, callbacks)
        else:
            runs.run(one.config, one.folder, overwrite=True, callbacks=callbacks)
    except TrainingError as error:
        return f"{one.title}: {error}"
    return None


def _in_turn(jobs: Sequence[Job], overall: Overall) -> list[str]:
    failed = []
    for one in jobs:
        overall.running = [one]
        failed.append(run_job(one, [_Rounds(overall)]))
        overall.finish(one)
    return [reason for reason in failed if reason]


def _side_by_side(jobs: Sequence[Job], processes: int, overall: Overall) -> list[str]:
    # Spawned, not forked: a forked torch may hang in its thread pool.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _watch_parent, (os.getpid(),))
    failed = []
    try:
        futures: dict[Future[str | None], Job] = {pool.submit(run_job, one): one for one in jobs}
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
    return [reason for reason in failed if reason]


def _watch_parent(parent: int) -> None:
    """End with the parent, so that nobody writes into folders that a later call goes on with."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder that another process works in."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # pragma: no cover - no such lock on this system
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFolderError(f"Another process is working in {folder}; wait for it.") from error
        yield


class Overall:
    """Progress of all runs together: a bar on a terminal, else a line for each run that ends."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self._console, self._jobs = console, jobs
        self._done = {one.folder for one in jobs if one.complete}
        self.running: list[Job] = []
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Overall:
        if self._done:
            self._print(f"{len(self._done)} of {len(self._jobs)} runs are there already.")
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30),
                       TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=sum(one.config.rounds for one in self._jobs))
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def finish(self, one: Job) -> None:
        """Say that a run ended, well or not."""
        self._done.add(one.folder)
        word = "done" if one.complete else "failed"
        if self._bar is None:
            self._print(f"{one.title}: {word} ({len(self._done)} of {len(self._jobs)})")
        self.show()

    def show(self, current: int | None = None) -> None:
        """Move the bar; ``current`` is the round of the only run that is going on, if known."""
        if self._bar is None:
            return
        rounds = sum(one.config.rounds for one in self._jobs if one.folder in self._done)
        if current is None:
            rounds += sum(rounds_written(one.folder) for one in self.running)
        names = "; ".join(one.title for one in self.running)
        title = f"{len(self._done)} of {len(self._jobs)} runs"
        self._bar.update(
            self._task,
            completed=rounds + (current or 0),
            description=f"{title} ({names})" if names else title,
        )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def rounds_written(folder: Path) -> int:
    """Return how many rounds a run has written down."""
    path = folder / "rounds.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


class _Rounds(Callback):
    """Moves the overall bar for a run in this process."""

    def __init__(self, overall: Overall) -> None:
        self._overall, self._shown = overall, 0.0

    def start(self, history: History, rounds: int) -> None:
        """Show where a run begins."""
        self._overall.show(len(history.rounds))

    def round(self, record: RoundRecord, info: Info) -> None:
        """Show the round, but not more often than one can see."""
        if time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self._overall.show(record.round)
