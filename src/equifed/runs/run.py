"""Run a configuration, into a folder; go on with what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from equifed.data.federation import Federation
from equifed.data.preparation import Preparation
from equifed.runs.build import Run, build_run, limit_threads
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.runs.workers import is_first
from equifed.training.files import (
    RunFolderError,
    digest,
    lock_folder,
    read_json,
    read_sealed,
    refuse_links,
    seal,
    write_file,
)
from equifed.training.folder import RunFolder, is_complete, open_run_folder
from equifed.training.folder import refuse_existing as refuse_run
from equifed.training.history import History
from equifed.training.tables import CONFIG, PREPARATION, RUN, SUMMARY, check_format
from equifed.training.trackers import Callback


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Callback]:
    """Return the trackers of a run by their names in the catalogue."""
    return [SECTIONS["trackers"][name].load()(folder, config) for name in names]


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    with_alone: Literal["auto"] | bool | None = None,
) -> History:
    """Run a configuration, into a run folder if ``out`` names one.

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
    """
    if isinstance(config, str | Path):
        config = RunConfig.read(config)
    elif not isinstance(config, RunConfig):
        config = RunConfig.from_dict(config)
    if out is not None:
        refuse_existing(Path(out), overwrite)
    built = build_run(config if with_alone is None else replace(config, with_alone=with_alone))
    wanted = _wants_alone(built)
    if out is None:
        history = built.train(callbacks, progress=progress)
        return _add_alone(history, built, None) if wanted else history
    with _lock(Path(out)):
        refuse_existing(Path(out), overwrite)  # somebody may have been faster
        history = start(built, Path(out), callbacks, progress, more=wanted)
        return _add_alone(history, built, Path(out)) if wanted else history


def _wants_alone(built: Run) -> bool:
    from equifed.runs.with_alone import wants_alone

    return wants_alone(built.config.with_alone, built)


def _add_alone(history: History, built: Run, out: Path | None) -> History:
    from equifed.runs.with_alone import add_alone

    with limit_threads(built.config.threads):
        add_alone(history, built, out)
    return history


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless to be replaced, or cannot be one."""
    if is_first():  # to the others it looks as if the run that the first one begins had been there
        refuse_run(out, overwrite, CONFIG)


def start(
    built: Run,
    out: Path,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = False,
    more: bool = False,
) -> History:
    """Run from the first round into a folder, replacing the run that may be there.

    An old run loses its configuration and checkpoints before the new configuration is written, and
    that is written before any table: whatever moment a kill chooses, the folder holds no run, or
    one that :func:`resume` continues under its own configuration. With ``more`` the caller adds
    something after training, and finishes the folder.
    """
    folder = RunFolder(out, built.federation.names, built.clients.group(), more)
    if folder.writes:
        out.mkdir(parents=True, exist_ok=True)
        first = (out / CONFIG, out / SUMMARY, out / PREPARATION)
        for old in (*first, *folder.checkpoints.glob("*.json")):
            old.unlink(missing_ok=True)
        _write_preparation(out, built.federation)
        config = built.config.to_toml().encode()
        write_file(out / RUN, seal({**built.provenance, CONFIG: digest(config)}))
        write_file(out / CONFIG, config)
    folder.create(overwrite=True)
    return built.train(callbacks, folder, progress=progress)


def _write_preparation(out: Path, federation: Federation) -> None:
    if federation.preparation is not None:
        text = json.dumps(federation.preparation.to_json(), indent=1)
        write_file(out / PREPARATION, text.encode() + b"\n")


def load_preparation(out: str | Path) -> Preparation | None:
    """Return how the data of a run were prepared; None for data that came as arrays.

    It must be the one whose digest ``run.json`` has: another would give other predictions.
    """
    path = Path(out) / PREPARATION
    try:
        told = read_json(path.parent / RUN)["data"].get("preparation")
        if told is None and not path.exists():
            return None
        found = Preparation.from_json(read_json(path))
    except (RunFolderError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); start the run again.") from None
    if found.digest() != told:
        raise RunFolderError(
            f"{path} is not the preparation that the run was trained with; start the run again."
        )
    return found


def resume(
    out: str | Path,
    callbacks: Sequence[Callback] = (),
    *,
    accept_config: bool = False,
    trust: bool = False,
) -> History:
    """Go on with the run in a folder; from its beginning if it was killed before it saved.

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
    """
    out = Path(out)
    if not (out / CONFIG).exists():
        raise RunFolderError(
            f"{out} holds no run that could go on: {CONFIG} is missing. Start one with: equifed run"
        )
    refuse_links(out)
    if is_complete(out):
        return History.load(out)
    with _lock(out):
        # Tables are compared later, checkpoint by checkpoint: an older one may do.
        open_run_folder(out, trust=trust, check=partial(check_config, accept=accept_config))
        told = read_sealed(out / RUN)
        built = build_run(RunConfig.read(out / CONFIG))
        wanted = _wants_alone(built)
        folder = RunFolder(out, built.federation.names, built.clients.group(), wanted)
        if not any(folder.checkpoints.glob("*.json")):
            history = start(built, out, callbacks, more=wanted)
            return _add_alone(history, built, out) if wanted else history
        if told["data"]["sha256"] != built.federation.checksum():
            raise RunFolderError(
                f"{out} was trained on other data than its configuration now loads; start it again."
            )
        history = built.train(callbacks, folder, resume=True)
        return _add_alone(history, built, out) if wanted else history


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Let the first process of a run hold its folder."""
    if not is_first():
        yield
        return
    with lock_folder(out):
        yield


def check_config(out: Path, accept: bool = False) -> dict[str, Any]:
    """Return what the folder tells of its run; refuse a configuration that is not the run's."""
    check_format(read_json(out / RUN), out)
    told = read_sealed(out / RUN)
    found = digest((out / CONFIG).read_bytes())
    if told.get(CONFIG) == found:
        return told
    if not accept:
        raise RunFolderError(
            f"{out / CONFIG} was changed since the run began, or is damaged. Start another run "
            "with it, or go on under it with --accept-config (in Python accept_config=True)."
        )
    told = {**told, CONFIG: found, "replaced": [*told.get("replaced", []), told.get(CONFIG)]}
    if is_first():
        write_file(out / RUN, seal(told))
    return told
