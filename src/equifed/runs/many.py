"""Many runs, from configurations or from objects: only what is missing is run, side by side."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import nn
from typing_extensions import override

from equifed.contract.algorithm import Info
from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.runs import run as runs
from equifed.runs.alone import WithAlone, fit_alone, is_small_and_convex
from equifed.runs.build import limit_threads, resolve_algorithm
from equifed.runs.config import RunConfig, apply_override, read_table
from equifed.runs.schema import ConfigError, Table
from equifed.training.files import RunFolderError, digest, read_sealed, refuse_links
from equifed.training.folder import (
    RunFolder,
    find_addresses,
    find_code,
    is_complete,
)
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import TrainingError
from equifed.training.show import print_line
from equifed.training.tables import (
    CONFIG,
    RUN,
    RoundRecord,
    describe_value,
)
from equifed.training.trackers import Callback, draw_bar

POLL_SECONDS = 0.5
VARIANTS = "variants"


# -- configurations ---------------------------------------------------------------------------


def read_variants(
    paths: Sequence[str | Path], overrides: Iterable[str] = ()
) -> dict[str, RunConfig]:
    """Read configurations to compare: several files, named after them, or files with variants.

    A file with tables ``[variants.NAME]`` stands for one configuration per variant: the rest of the
    file with the variant's settings put in (see :func:`merge_tables`).
    """
    overrides, found = list(overrides), dict[str, RunConfig]()
    for path in map(Path, paths):
        table = read_table(path)
        variants = table.pop(VARIANTS, {path.stem: {}})
        if not isinstance(variants, dict) or not all(
            isinstance(v, dict) for v in variants.values()
        ):
            raise ConfigError([f"{path}: variants must be tables, as [variants.fedavg.algorithm]"])
        for name, variant in variants.items():
            if name in found:
                raise ConfigError([f"two configurations are called {name!r}; rename a file"])
            found[name] = configure(merge_tables(table, variant), overrides, path.parent, name)
    if not found:
        raise ConfigError(["there is nothing to compare; name configuration files"])
    first, base = next(iter(found.items()))
    if other := [name for name, config in found.items() if config.data != base.data]:
        why = f"its [data] is not that of {first}; compare methods on the same data"
        raise ConfigError([f"{name}: {why}" for name in other])
    return found


def configure(table: Table, overrides: Iterable[str], base: Path, name: str) -> RunConfig:
    """Check a table with overrides put in; what is wrong is said of ``name``."""
    table = merge_tables(table, {})
    for one in overrides:
        apply_override(table, one)
    try:
        return RunConfig.from_dict(table, base=base)
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from error


def merge_tables(table: Mapping[str, Any], variant: Mapping[str, Any]) -> Table:
    """Return a new table with the settings of a variant in the place of its own.

    Tables are merged key by key, but one that names something (``name``) replaces the other: the
    settings of one algorithm mean nothing to another.

    >>> merge_tables({"rounds": 5, "model": {"name": "mlp", "l2": 0.1}}, {"model": {"l2": 0.2}})
    {'rounds': 5, 'model': {'name': 'mlp', 'l2': 0.2}}
    >>> merge_tables({"algorithm": {"name": "fedavg", "local": {}}}, {"algorithm": {"name": "afl"}})
    {'algorithm': {'name': 'afl'}}
    """
    out = {k: merge_tables(v, {}) if isinstance(v, Mapping) else v for k, v in table.items()}
    for key, value in variant.items():
        old = out.get(key)
        if isinstance(value, Mapping):
            shared = old if isinstance(old, Mapping) and "name" not in value else {}
            out[key] = merge_tables(shared, value)
        else:
            out[key] = value
    return out


# -- one run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run of a named configuration with one seed, and its folder."""

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

    def run(self, callbacks: Sequence[Callback] = ()) -> str | None:
        """Run or resume; return why it failed, or None."""
        try:
            if self.started:
                # Its configuration is the one that was handed over here: see check_folders.
                runs.resume(self.folder, callbacks, trust=True)
            else:
                given: Any = {"overwrite": True, "callbacks": callbacks, "progress": False}
                runs.run(self.config, self.folder, **given)
        except TrainingError as error:
            return f"{self.title}: {error}"
        except ConfigError as error:
            raise ConfigError([f"{self.name}: {problem}" for problem in error.problems]) from error
        return None

    def is_same(self, stored: RunConfig) -> bool:
        """Compare with a stored configuration, whose ``auto`` was settled by the data."""
        wanted = self.config
        if wanted.model["loss"] == "auto":
            stored = replace(stored, model={**stored.model, "loss": "auto"})
        if wanted.engine["name"] == "auto" and stored.engine["name"] in ("stacked", "loop"):
            kept = {key: value for key, value in wanted.engine.items() if key in stored.engine}
            if kept | {"name": ""} == stored.engine | {"name": ""}:  # chosen by measuring
                stored = replace(stored, engine=wanted.engine)
        return stored.to_dict() == wanted.to_dict()


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
        if foreign or not job.is_same(RunConfig.read(job.folder / CONFIG)):
            raise RunFolderError(
                f"{job.folder} holds a run of another configuration; choose another folder, or "
                "pass --overwrite to run everything again."
            )


@dataclass(frozen=True, eq=False)
class Task:
    """One run of objects in Python: what it is made of, its seed, and the folder it ends in."""

    name: str
    data: Federation
    model: Any
    loss: Any
    engine: Mapping[str, Any]
    options: Mapping[str, Any]
    algorithm: Any
    seed: int
    with_alone: WithAlone
    folder: Path | None
    progress: bool | None = None

    @property
    def title(self) -> str:
        """What to call it."""
        return f"{self.name}, seed {self.seed}"

    @property
    def complete(self) -> bool:
        """Whether the folder, if there is one, holds a run that has ended."""
        return self.folder is not None and is_complete(self.folder)

    def describe(self) -> dict[str, Any]:
        """Return what the run's numbers depend on, in words that JSON has."""
        model: Any = self.model
        if isinstance(model, nn.Module):
            values = (v.detach().cpu().numpy().tobytes() for v in model.state_dict().values())
            weights = digest(b"".join(values))
            model = {"module": " ".join(str(model).split()), "weights": weights}
        told = {"loss": self.loss, "engine": dict(sorted(self.engine.items())), **self.options}
        told["algorithm"] = self.algorithm
        return {"data": self.data.checksum(), "model": model, **describe_value(told)}

    def run(self, callbacks: Sequence[Callback] = ()) -> History | str:
        """Train, save, and return the history, or why it failed."""
        with limit_threads(1):  # so that the results do not depend on who shares the machine
            clients = simulate(self.data, self.model, self.loss, **self.engine)
            algorithm = resolve_algorithm(self.algorithm, clients, self.seed)
            shown = self.progress if parent_process() is None else False
            given = {**self.options, "seed": self.seed, "callbacks": callbacks, "progress": shown}
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

    def load(self) -> History | None:
        """Return the finished run in the folder, if it is of these settings; refuse another."""
        if self.folder is None or not self.complete:
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


# -- all of them ------------------------------------------------------------------------------


def run_jobs(jobs: Sequence[Job], *, at_once: int = 1, console: Console) -> list[str]:
    """Run what is not complete, resuming what was begun; return what failed and why."""
    with Overall(console, jobs, sum(job.config.rounds for job in jobs)) as overall:
        failed = run_all([job for job in jobs if not job.complete], at_once, overall)
    return [reason for reason in failed if reason]


def run_all(jobs: Sequence[Job | Task], at_once: int, overall: Overall) -> list[Any]:
    """Run in turn, or side by side in processes; return what came of each, in order."""
    if at_once < 1:
        raise ValueError(f"jobs must be at least 1, got {at_once}.")
    if at_once == 1 or len(jobs) <= 1:
        found = []
        for job in jobs:
            overall.running = [job]
            found.append(job.run([_Rounds(overall)] if overall.shows else ()))
            overall.finish(job)
        return found
    # Spawned, not forked: a forked torch may hang in its thread pool.
    pool = ProcessPoolExecutor(
        min(at_once, len(jobs)), get_context("spawn"), _watch_parent, (os.getpid(),)
    )
    try:
        futures: dict[Future[Any], Job | Task] = {pool.submit(job.run): job for job in jobs}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
            overall.running = [futures[f] for f in waiting if f.running()]
            overall.show()
            for future in done:
                future.result()  # raises what went wrong at once
                overall.finish(futures[future])
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _watch_parent(parent: int) -> None:
    """End with the parent, so that nobody writes into folders that a later call resumes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Overall:
    """Progress of all runs together: a bar on a terminal, else a line for each run that ends."""

    def __init__(self, console: Console, jobs: Sequence[Job | Task], rounds: int = 0) -> None:
        self._console, self._jobs, self._rounds = console, jobs, rounds
        self._done = {job.title for job in jobs if job.complete}
        self.running: list[Any] = []
        self._bar: Progress | None = None

    def __enter__(self) -> Overall:
        if self._done:
            print_line(self._console, f"{self._count()} are there already.")
        if self._console.is_terminal and self._rounds:
            self._bar = draw_bar(self._console, "", self._rounds)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def shows(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def _count(self) -> str:
        return f"{len(self._done)} of {len(self._jobs)} runs"

    def finish(self, job: Job | Task) -> None:
        """Say that a run ended, well or not."""
        self._done.add(job.title)
        if self._bar is None and self._rounds:
            word = "done" if job.complete else "failed"
            print_line(self._console, f"{job.title}: {word} ({self._count()})")
        self.show()

    def show(self, current: int | None = None) -> None:
        """Move the bar; ``current`` is the round of the only run that is going on, if known."""
        if self._bar is None:
            return
        ended: list[Any] = [job for job in self._jobs if job.title in self._done]
        going = (
            sum(count_rounds(job.folder) for job in self.running) if current is None else current
        )
        names = "; ".join(job.title for job in self.running)
        title = f"{self._count()} ({names})" if names else self._count()
        rounds = sum(job.config.rounds for job in ended) + going
        self._bar.update(self._bar.task_ids[0], completed=rounds, description=title)


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
