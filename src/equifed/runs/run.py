"""From a configuration to a run: build it, run it, go on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from equifed.algorithms.guarded import guard_algorithm
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients
from equifed.contract.evaluation import Evaluator
from equifed.contract.own import uses_minibatches
from equifed.contract.provenance import ChoseEngine
from equifed.data.federation import Federation
from equifed.data.holdout import Holdout
from equifed.data.preparation import Preparation
from equifed.metrics.metric import Metric, as_metrics
from equifed.runs.automatic_lr import measure_step
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import ModelSettings, RunConfig, build_algorithm
from equifed.runs.entries import load_address
from equifed.runs.modules import build_module, find_code, freeze_features
from equifed.runs.settings import ConfigError, Table, choose, construct, settings
from equifed.runs.workers import is_first
from equifed.training import tables
from equifed.training.callback import Callback
from equifed.training.files import (
    RunFolderError,
    digest,
    lock_folder,
    read_json,
    read_sealed,
    seal,
    write_file,
)
from equifed.training.folder import RunFolder
from equifed.training.given_out import Giver
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.provenance import CONFIG, FORMAT, PREPARATION, RUN
from equifed.training.tables import SUMMARY, check_format, is_complete
from equifed.training.versions import package_versions


@dataclass(frozen=True)
class Run:
    """Everything a run needs: the resolved configuration and the objects that it describes."""

    config: RunConfig
    federation: Federation
    clients: Clients
    algorithm: AnyAlgorithm
    evaluate: Sequence[str] | Evaluator

    def train(
        self,
        callbacks: Sequence[Callback] = (),
        folder: RunFolder | None = None,
        resume: bool = False,
        progress: bool | None = False,
    ) -> History:
        """Train, and return what happened."""
        with limit_threads(self.config.threads), refuse_huge_numbers():
            history = train(
                guard_algorithm(self.algorithm, self.config.guard),
                self.clients,
                rounds=self.config.rounds,
                seed=self.config.seed,
                evaluate=self.evaluate,
                every=self.config.evaluate.every,
                metrics=load_metrics(self.config.evaluate.metrics),
                stop=self.config.stop.rules(),
                give_out=self.config.give_out,
                callbacks=callbacks,
                missing=self.config.missing,
                progress=progress,
                folder=folder,
                resume=resume,
            )
        history.provenance = {**history.provenance, **provenance(self)}
        history.provenance["config"] = self.config.to_dict()
        return history


@contextmanager
def limit_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many processor threads in a block; None: as many as it does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def refuse_huge_numbers() -> Iterator[None]:
    """Say of a number beyond what can be computed with that it is one."""
    try:
        yield
    except OverflowError as error:
        raise ConfigError([f"a number is too large to compute with ({error}); say less"]) from error


def load_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics of a resolved configuration."""
    return as_metrics([load_address(name) if ":" in name else name for name in names])


def load_data(data: Table) -> Federation:
    """Load the federation of a resolved ``[data]`` table."""
    federation: Federation = choose(SECTIONS["data"], data, "data")
    if "holdout" in settings(SECTIONS["data"][data["name"]].load()):
        return federation  # divided before it was prepared
    holdout: Holdout = construct(Holdout, data["holdout"], "data.holdout")
    if not holdout.wanted:
        return federation
    return federation.split(holdout.validation, holdout.test, holdout.seed)


def build(config: RunConfig) -> Run:
    """Load the data and construct model, engine and algorithm."""
    with refuse_huge_numbers():
        return _build(config)


def _build(config: RunConfig) -> Run:
    federation = freeze_features(config, load_data(config.data))
    config = _settled(config, federation)
    with limit_threads(config.threads):
        clients = _engine(config, federation)
    config = replace(config, engine=_settled_engine(config.engine, clients))
    algorithm = build_algorithm(config.algorithm, federation.train.sizes.tolist())
    table, algorithm = measure_step(config.algorithm, algorithm, clients, config.seed)
    config = replace(config, algorithm=table)
    _check_metrics(config, federation)
    _check_stop(config, federation)
    _check_give_out(config, federation)
    return Run(config, federation, clients, algorithm, config.evaluate.splits)


def _settled(config: RunConfig, federation: Federation) -> RunConfig:
    """Return the configuration with what was left to the data and the machine."""
    import torch

    from equifed.models.losses import resolve_loss

    loss = resolve_loss(config.model["loss"], federation.classes)
    threads = config.threads if isinstance(config.threads, int) else torch.get_num_threads()
    return replace(config, model={**config.model, "loss": loss}, threads=threads)


def _engine(config: RunConfig, federation: Federation) -> Clients:
    import torch

    from equifed.engines.own_parts import settle_own
    from equifed.models.losses import outputs_for, weigh_classes

    shared: ModelSettings = construct(ModelSettings, config.model, "model")
    try:
        outputs = outputs_for(federation, shared.loss)
    except ValueError as error:
        raise ConfigError([f"model.loss: {error}"]) from error
    try:
        loss = weigh_classes(
            SECTIONS["losses"][shared.loss].load(), shared.class_weights, federation
        )
    except ValueError as error:
        raise ConfigError([f"model.{error}"]) from error
    _check_device(config.engine.get("device", "cpu"))
    shape = federation.input_shape
    module = build_module(config, shape, outputs)
    init = shared.resolve_init(config.model["name"])
    given: dict[str, Any] = {"data": federation, "model": module, "loss": loss, "init": init}
    given |= {"own": shared.own, "own_l2": shared.own_l2, "own_steps": shared.own_steps}
    if shared.own is not None and shared.own_steps == "auto":
        minibatches = uses_minibatches(build_algorithm(config.algorithm))
        given["own_steps"] = "joint" if minibatches else "auto"  # profile losses need all samples
    try:
        settle_own(module, loss, len(shape), shared.own, given["own_steps"], shared.own_l2,
                   shared.l2)  # fmt: skip
    except ValueError as error:
        raise ConfigError([f"model.{error}"]) from error
    dtype = getattr(torch, shared.dtype)
    clients: Clients = choose(
        SECTIONS["engines"], config.engine, "engine", **given, l2=shared.l2,
        penalise=shared.penalise, dtype=dtype,
    )  # fmt: skip
    return clients


def _settled_engine(engine: Table, clients: Clients) -> Table:
    """Return the engine's table with the name that measuring chose, for resumes and repeats."""
    if not isinstance(clients, ChoseEngine) or clients.choice is None or engine["name"] != "auto":
        return engine
    name = clients.engine
    known = settings(SECTIONS["engines"][name].load())
    return {"name": name} | {key: value for key, value in engine.items() if key in known}


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError([f"engine.device: {device!r} is no device; say cpu or cuda"]) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["engine.device: there is no CUDA device here; say cpu"])


def _check_metrics(config: RunConfig, federation: Federation) -> None:
    """Refuse metrics that these data, or this loss, do not have, before anything is trained."""
    from equifed.engines.answers import check_metrics

    loss = SECTIONS["losses"][config.model["loss"]].load()
    try:
        check_metrics(load_metrics(config.evaluate.metrics), federation.classes, loss)
    except ValueError as error:
        raise ConfigError([f"evaluate.metrics: {error}"]) from error


def _check_stop(config: RunConfig, federation: Federation) -> None:
    stop = config.stop
    if stop.needs_metric and stop.split not in federation.splits():
        raise ConfigError(
            [
                f"stop.split: the data have no {stop.split} split; they have "
                f"{', '.join(federation.splits())} (see [data.holdout])"
            ]
        )
    if stop.needs_metric and stop.split not in config.evaluate.splits:
        raise ConfigError([f"stop.split: {stop.split} is not in evaluate.splits"])
    if stop.needs_metric and stop.metric == "accuracy" and federation.classes is None:
        raise ConfigError(["stop.metric: regression data have no accuracy; say loss"])
    always = ("loss", "accuracy" if federation.classes is not None else "mse")
    if stop.needs_metric and stop.metric not in (*always, *config.evaluate.metrics):
        raise ConfigError([f"stop.metric: {stop.metric} is not in evaluate.metrics"])


def _check_give_out(config: RunConfig, federation: Federation) -> None:
    try:
        Giver(config.give_out, config.stop.needs_proof)
    except ValueError as error:
        raise ConfigError([f"give_out: {error}"]) from error
    held = "validation" in federation.splits() and "validation" in config.evaluate.splits
    if config.give_out.startswith("validation") and not held:
        raise ConfigError(
            [
                "give_out: the validation split is not there or not evaluated; see "
                "[data.holdout] and evaluate.splits"
            ]
        )


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
    built = build(config if with_alone is None else replace(config, with_alone=with_alone))
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
        tables.refuse_existing(out, overwrite, CONFIG)


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
        write_file(out / RUN, seal({**provenance(built), CONFIG: digest(config)}))
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


def provenance(built: Run) -> dict[str, Any]:
    """Return what the numbers depend on beside the configuration."""
    prepared = built.federation.preparation
    return {
        "format": FORMAT,
        "versions": package_versions(),
        "data": {
            "name": built.federation.name,
            "sha256": built.federation.checksum(),
            "source": built.federation.source,
            **({"preparation": prepared.digest()} if prepared is not None else {}),
        },
        "samples": _describe_samples(built),
    }


def _describe_samples(built: Run) -> dict[str, Any]:
    """Return what must be known of the samples to build the model again without them."""
    from equifed.models.losses import outputs_for

    data = built.federation
    return {
        "input_shape": list(data.input_shape),
        "tokens": data.train.inputs.dtype.kind == "i",
        "classes": data.classes,
        "class_names": list(data.class_names),
        "target_shape": list(data.train.targets.shape[1:]),
        "outputs": outputs_for(data, built.config.model["loss"]),
    }


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
    if is_complete(out):
        return History.load(out)
    with _lock(out):
        told = check_config(out, accept_config)
        code = find_code(out)
        if code and not trust:
            raise RunFolderError(
                f"{out / CONFIG} would load code: {', '.join(code)}. If it is yours, resume with "
                "--trust (in Python trust=True)."
            )
        built = build(RunConfig.read(out / CONFIG))
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
