"""Many runs, from configurations or from objects: only what is missing is run, side by side."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.report import slug
from equifed.runs import run as runs
from equifed.runs.alone import WithAlone, fit_alone, is_small_and_convex
from equifed.runs.build import limit_threads, resolve_algorithm
from equifed.runs.config import RunConfig, apply_override, read_table
from equifed.runs.schema import AUTO, ConfigError, Table, blame
from equifed.training.files import RunFolderError, digest, read_sealed, refuse_links
from equifed.training.folder import RunFolder, find_addresses, find_code, is_complete
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import TrainingError
from equifed.training.show import print_line
from equifed.training.tables import CONFIG, RUN, describe_value

VARIANTS = "variants"
MOST_SETTINGS = 2
Grid = Mapping[str, Sequence[str]]  # settings of a sweep by their keys, and the values to try


# -- configurations ---------------------------------------------------------------------------


def read_variants(
    paths: Sequence[str | Path], overrides: Iterable[str] = ()
) -> dict[str, RunConfig]:
    """Read configurations to compare: several files, named after them, or files with variants."""
    overrides, found = list(overrides), dict[str, RunConfig]()
    for path in map(Path, paths):
        table = read_table(path)
        variants = table.pop(VARIANTS, {path.stem: {}})
        tables = variants.values() if isinstance(variants, dict) else [None]
        if not all(isinstance(variant, dict) for variant in tables):
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


def read_grid(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read the settings of a sweep, ``key.path=value,value,...`` each."""
    grid: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, _, rest = (part.strip() for part in text.partition("="))
        values = tuple(value.strip() for value in rest.split(","))
        if not key or not all(values):
            raise ConfigError([f"--over takes key.path=value,value,...; got {text!r}"])
        if key in grid or len(set(values)) < len(values):
            raise ConfigError([f"--over {text}: the key or a value is there twice"])
        grid[key] = values
    if not 1 <= len(grid) <= MOST_SETTINGS:
        raise ConfigError([f"a sweep goes over one or two settings, got {len(grid)}"])
    if "seed" in grid:
        raise ConfigError(["--over seed: seeds are no setting to choose; use --seeds"])
    return grid


def name_points(grid: Grid) -> dict[str, tuple[str, ...]]:
    """Return every combination of values; settings are named by their last word, if they differ."""
    short = [key.rpartition(".")[2] for key in grid]
    names = short if len(set(short)) == len(grid) else list(grid)
    return {
        ", ".join(f"{name} = {value}" for name, value in zip(names, values, strict=True)): values
        for values in itertools.product(*grid.values())
    }


def read_points(path: Path, grid: Grid, overrides: Iterable[str] = ()) -> dict[str, RunConfig]:
    """Return a configuration for every combination of values, by the combination's name."""
    table, found = read_table(path), {}
    for name, values in name_points(grid).items():
        chosen = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        found[name] = configure(table, [*overrides, *chosen], path.parent, name)
    return found


def configure(table: Table, overrides: Iterable[str], base: Path, name: str) -> RunConfig:
    """Check a table with overrides put in; what is wrong is said of ``name``."""
    table = merge_tables(table, {})
    for one in overrides:
        apply_override(table, one)
    with blame(f"{name}: "):
        return RunConfig.from_dict(table, base=base)


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
        return bool((self.folder / CONFIG).exists())

    def run(self, progress: bool | None = False) -> str | None:
        """Run or resume; return why it failed, or None."""
        try:
            with blame(f"{self.name}: ", ConfigError):
                if self.started:
                    # Its configuration is the one that was handed over here: see check_folders.
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
        wanted = job.config.to_dict()
        foreign = set(find_code(job.folder)) - find_addresses(wanted)
        if foreign or not agree(wanted, RunConfig.read(job.folder / CONFIG).to_dict()):
            raise RunFolderError(
                f"{job.folder} holds a run of another configuration; choose another folder, or "
                "pass --overwrite to run everything again."
            )


def agree(wanted: Any, stored: Any) -> bool:
    """Tell whether a stored table is the wanted one, but for an ``auto`` that the data settled."""
    if not isinstance(wanted, Mapping) or not isinstance(stored, Mapping):
        return bool(wanted == stored)
    settled = {key for key in ("loss", "lr") if wanted.get(key) == AUTO}
    if wanted.get("name") == AUTO and stored.get("name") in ("stacked", "loop"):
        settled |= {"name", *wanted.keys() - stored.keys()}  # the engine, chosen by measuring
    keys = {*wanted, *stored} - settled
    return all(agree(wanted.get(key), stored.get(key)) for key in keys)


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

    def load(self) -> History | None:
        """Return the finished run in the folder, if it is of these settings; refuse another."""
        if not self.complete:
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


def name_folders(names: Iterable[str], seeds: Sequence[int]) -> dict[tuple[str, int], str]:
    """Return the folder of every run in that of a comparison, seed by seed."""
    short: dict[str, str] = {}
    for name in names:
        own = slug(name)
        short[name] = own if own not in short.values() else f"{own}-{len(short)}"
    pairs = itertools.product(seeds, short)
    return {(name, seed): f"runs/{short[name]}/seed-{seed}" for seed, name in pairs}


def run_jobs(jobs: Sequence[Job], *, at_once: int = 1, console: Console) -> list[str]:
    """Run what is not complete, resuming what was begun; return what failed and why."""
    left = [job for job in jobs if not job.complete]
    done = itertools.count(len(jobs) - len(left) + 1)

    def tell(job: Planned) -> None:
        word = "done" if job.complete else "failed"
        print_line(console, f"{job.title}: {word} ({next(done)} of {len(jobs)} runs)")

    tell_kept(len(jobs) - len(left), len(jobs), console)
    shown = None if console.is_terminal and not console.quiet else False
    return [reason for reason in run_all(left, at_once, shown, tell) if reason]


def tell_kept(kept: int, count: int, console: Console) -> None:
    """Say how many runs need not be run."""
    if kept:
        print_line(console, f"{kept} of {count} runs are there already.")


def run_all(
    jobs: Sequence[Job | Task],
    at_once: int,
    progress: bool | None = False,
    tell: Callable[[Planned], None] = lambda job: None,
) -> list[Any]:
    """Run in turn, with bars if wanted, or side by side in processes; return what came of each."""
    if at_once < 1:
        raise ValueError(f"jobs must be at least 1, got {at_once}.")
    if at_once == 1 or len(jobs) <= 1:
        found = []
        for job in jobs:
            found.append(job.run(progress))
            tell(job)
        return found
    # Spawned, not forked: a forked torch may hang in its thread pool.
    pool = ProcessPoolExecutor(
        min(at_once, len(jobs)), get_context("spawn"), _watch_parent, (os.getpid(),)
    )
    try:
        futures: dict[Future[Any], Planned] = {pool.submit(job.run): job for job in jobs}
        for future in as_completed(futures):
            future.result()  # raises what went wrong at once
            tell(futures[future])
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
