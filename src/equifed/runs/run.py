"""Run a configuration into a folder, resume one, or start the processes that share one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from equifed.runs.alone import add_beside, list_beside
from equifed.runs.build import Run, build_run
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.training import Callback, History, RunFolder, RunFolderError, files, is_complete
from equifed.training.folder import open_run_folder, write_provenance
from equifed.training.folder import refuse_existing as refuse_run
from equifed.training.tables import CONFIG, RUN, SUMMARY, check_format

POLL_SECONDS, GRACE_SECONDS = 0.1, 10.0  # of processes: between looks, and to end by itself


def run(
    config: RunConfig | Mapping[str, Any] | str | Path, out: str | Path | None = None, *,
    overwrite: bool = False, callbacks: Sequence[Callback] = (), progress: bool | None = None,
    with_alone: Literal["auto"] | bool | None = None, track: Sequence[str] = (),
) -> History:  # fmt: skip
    """Run a configuration; ``out`` names the run folder.

    Parameters
    ----------
    config : RunConfig, path or mapping
        A configuration, a TOML file, or what such a file would hold.
    out : path, optional
        Folder for the run.
    overwrite : bool
        Replace the run that the folder holds.
    callbacks : sequence of Callback
        Who wants to be told.
    progress : bool, optional
        Show a bar while training; by default in terminals and notebooks.
    with_alone : bool or "auto", optional
        Fit every client's own model, too (:func:`equifed.alone`), so that the report can say who
        would be better off alone; "auto", the default of configurations, does so for small convex
        runs (linear, at most 200 parameters and 50 clients).
    track : sequence of str
        Trackers that follow a run into a folder, by name (``equifed list trackers``).

    Examples
    --------
    >>> import equifed as ef
    >>> history = ef.run({
    ...     "rounds": 20,
    ...     "data": {"name": "fashion-three"},
    ...     "model": {"name": "logistic", "l2": 1e-3},
    ...     "algorithm": {"name": "afl"},
    ... })
    >>> round(min(history.per_client().values()), 1)  # the worst-served client
    0.6
    """
    if isinstance(config, str | Path):
        config = RunConfig.read(config)
    elif not isinstance(config, RunConfig):
        config = RunConfig.from_dict(config)
    if out is not None:
        refuse_existing(Path(out), overwrite)
        callbacks = [*callbacks, *open_trackers(track, Path(out), config.to_dict())]
    built = build_run(config if with_alone is None else replace(config, with_alone=with_alone))
    more = list_beside(built)  # refuses before anything is trained, or written
    if out is None:
        return add_beside(built.train(callbacks, progress=progress), built, None, more)
    with _lock(Path(out)):
        refuse_existing(Path(out), overwrite)  # somebody may have been faster
        return start(built, Path(out), callbacks, progress, more)


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Callback]:
    """Return the trackers of a run by their names in the catalogue."""
    return [SECTIONS["trackers"][name].load()(folder, config) for name in names]


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless to be replaced, or cannot be one."""
    if is_first():  # to the others it looks as if the run that the first one begins had been there
        refuse_run(out, overwrite, CONFIG)


def start(
    built: Run, out: Path, callbacks: Sequence[Callback] = (), progress: bool | None = False,
    more: Sequence[str] = (),
) -> History:  # fmt: skip
    """Run from the first round into a folder, replacing the run that may be there.

    An old run loses its configuration and checkpoints before the new configuration is written, and
    that is written before any table: whatever moment a kill chooses, the folder holds no run, or
    one that :func:`resume` continues under its own configuration. ``more`` is what to solve beside.
    """
    folder = RunFolder(out, built.federation.names, built.clients.group(), bool(more))
    if folder.writes:
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / CONFIG, out / SUMMARY, *folder.checkpoints.glob("*.json")):
            old.unlink(missing_ok=True)
        told = {**built.provenance, "config": built.config.to_dict()}
        private = built.config.privacy is not None  # which rows were trained on is told to nobody
        told_of = replace(built.federation, divided=None) if private else built.federation
        write_provenance(out, told, told_of, None)
    folder.create(overwrite=True, described=True)
    return add_beside(built.train(callbacks, folder, progress=progress), built, folder, more)


def resume(
    out: str | Path,
    callbacks: Sequence[Callback] = (),
    *,
    accept_config: bool = False,
    trust: bool = False,
) -> History:
    """Resume the run in a folder; from its beginning if nothing was saved.

    Parameters
    ----------
    out : path
        The run folder.
    callbacks : sequence of Callback
        Who wants to be told.
    accept_config : bool
        Go on although the folder's configuration was changed since the run began.
    trust : bool
        Load the code of one's own that the folder's configuration names. A folder may come from
        somebody else, and its code would run with your rights.

    Examples
    --------
    >>> import equifed as ef
    >>> import tempfile
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> names = {"data": "fashion-three", "model": "logistic", "algorithm": "fedavg"}
    >>> history = ef.run({"rounds": 2} | {k: {"name": v} for k, v in names.items()}, folder)
    >>> ef.resume(folder).rounds[-1].round  # it had ended, so there is nothing left to do
    2
    """
    out = Path(out)
    if not (out / CONFIG).exists():
        raise RunFolderError(f"{out} holds no run to resume: {CONFIG} is missing; use equifed run.")
    if is_complete(out):
        return History.load(out)
    with _lock(out):
        # Tables are compared later, checkpoint by checkpoint: an older one may do.
        check = partial(check_config, accept=accept_config)
        opened = open_run_folder(out, trust=trust, check=check)
        told, built = opened.sealed(RUN), build_run(RunConfig.of_run(opened))
        more = list_beside(built)
        folder = RunFolder(out, built.federation.names, built.clients.group(), bool(more))
        if not any(folder.checkpoints.glob("*.json")):
            return start(built, out, callbacks, more=more)
        if told["data"].get("sha256") != built.provenance["data"].get("sha256"):
            raise RunFolderError(
                f"{out} was trained on data that differ from those loaded now; start a new run."
            )
        return add_beside(built.train(callbacks, folder, resume=True), built, folder, more)


def _lock(out: Path) -> AbstractContextManager[None]:
    """Let the first process of a run hold its folder."""
    return files.lock_folder(out) if is_first() else nullcontext()


def check_config(run: files.StoredRun, accept: bool = False) -> None:
    """Refuse a configuration that is not the run's, or take it in its place."""
    check_format(run.json(RUN), run.path)
    told, found = run.sealed(RUN), files.digest(run.read(CONFIG))
    run.sums[CONFIG] = found  # the one that is looked at is the one that is built
    if told.get(CONFIG) == found:
        return
    if not accept:
        raise RunFolderError(
            f"{run / CONFIG} was changed since the run began, or is damaged. Start another run "
            "with it, or resume under it with --accept-config (in Python accept_config=True)."
        )
    told = {**told, CONFIG: found, "replaced": [*told.get("replaced", []), told.get(CONFIG)]}
    if is_first():
        files.write_file(run / RUN, files.seal(told))


# -- several processes ------------------------------------------------------------------------
# ``torchrun`` starts the same group, on one machine or many; what is here in its place is for
# people at a terminal: the first process keeps it (a progress bar), says what went wrong in its
# own words even if another process fails before it, and its exit status is that of the command.


def is_first() -> bool:
    """Tell whether this process writes: alone, or the first of its group."""
    return os.environ.get("RANK", "0") == "0"


def run_workers(count: int, arguments: Sequence[str]) -> int:
    """Run ``equifed ARGUMENTS`` in a group of processes and return the exit status."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {"OMP_NUM_THREADS": threads} | os.environ | group
    command = [sys.executable, "-m", "equifed", *arguments]
    # A polite kill must end the workers as well; the default would leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            silent = subprocess.DEVNULL if rank else None
            running.append(subprocess.Popen(command, env=own, stdout=silent, stderr=silent))
        return _wait(running)
    finally:
        for process in running:
            process.terminate()  # those that have ended ignore it
        for process in running:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit status of the group: 0 when all ended well, else that of who failed."""
    while any(p.poll() is None for p in running) and not any(p.returncode for p in running):
        time.sleep(POLL_SECONDS)
    rank = next((r for r, process in enumerate(running) if process.poll()), None)
    if rank is None:
        return 0
    status = running[rank].returncode
    if rank:
        # The first process notices by itself and has the better words; it gets a moment for them.
        try:
            running[0].wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            print(f"Error: worker {rank} of {len(running)} {how}.", file=sys.stderr)
    return status if status > 0 else 1


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
