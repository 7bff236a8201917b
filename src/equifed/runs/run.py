"""From a configuration to a run: build it, run it, go on with it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients
from equifed.contract.evaluation import Evaluator
from equifed.data.federation import Federation
from equifed.runs.automatic_lr import measure_step
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import CHOSEN, Holdout, ModelSettings, RunConfig, build_algorithm
from equifed.runs.settings import ConfigError, Table, choose, construct
from equifed.runs.workers import is_first
from equifed.training import tables
from equifed.training.folder import RunFolder, RunFolderError
from equifed.training.given_out import Giver
from equifed.training.history import History
from equifed.training.loop import Callback, train
from equifed.training.tables import FORMAT, SUMMARY, check_format, is_complete, write_file

CONFIG, RUN = "config.toml", "run.json"


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
    ) -> History:
        """Train, and return what happened."""
        with _threads(self.config.threads):
            return train(
                self.algorithm,
                self.clients,
                rounds=self.config.rounds,
                seed=self.config.seed,
                evaluate=self.evaluate,
                every=self.config.evaluate.every,
                stop=self.config.stop.rules(),
                give_out=self.config.give_out,
                callbacks=callbacks,
                missing=self.config.missing,
                folder=folder,
                resume=resume,
            )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_data(data: Table) -> Federation:
    """Load the federation of a resolved ``[data]`` table."""
    federation: Federation = choose(SECTIONS["data"], data, "data")
    holdout: Holdout = construct(Holdout, data["holdout"], "data.holdout")
    if not (holdout.validation or holdout.test):
        return federation
    return federation.split(holdout.validation, holdout.test, holdout.seed)


def build(config: RunConfig) -> Run:
    """Load the data and construct model, engine and algorithm."""
    federation = load_data(config.data)
    config = _settled(config, federation)
    clients = _engine(config, federation)
    algorithm = build_algorithm(config.algorithm, federation.train.sizes.tolist())
    table, algorithm = measure_step(config.algorithm, algorithm, clients, config.seed)
    config = replace(config, algorithm=table)
    _check_stop(config, federation)
    _check_give_out(config, federation)
    return Run(config, federation, clients, algorithm, config.evaluate.splits)


def _settled(config: RunConfig, federation: Federation) -> RunConfig:
    """Return the configuration with what was left to the data and the machine."""
    import torch

    from equifed.models.losses import resolve_loss

    loss = resolve_loss(config.model["loss"], federation.classes)
    threads = config.threads or torch.get_num_threads()
    return replace(config, model={**config.model, "loss": loss}, threads=threads)


def _engine(config: RunConfig, federation: Federation) -> Clients:
    import torch

    from equifed.models.losses import outputs_for

    shared: ModelSettings = construct(ModelSettings, config.model, "model")
    try:
        outputs = outputs_for(federation, shared.loss)
    except ValueError as error:
        raise ConfigError([f"model.loss: {error}"]) from error
    loss = SECTIONS["losses"][shared.loss].load()
    _check_device(config.engine.get("device", "cpu"))
    shape = federation.input_shape
    section = SECTIONS[CHOSEN["model"][0]]
    with torch.random.fork_rng(devices=[]):  # own code may draw: by the seed, for nobody else
        torch.manual_seed(config.seed)
        module = choose(section, config.model, "model", input_shape=shape, outputs=outputs)
    init = shared.resolve_init(config.model["name"])
    given: dict[str, Any] = {"data": federation, "model": module, "loss": loss, "init": init}
    dtype = getattr(torch, shared.dtype)
    clients: Clients = choose(
        SECTIONS["engines"], config.engine, "engine", **given, l2=shared.l2, dtype=dtype
    )
    return clients


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError([f"engine.device: {device!r} is no device; say cpu or cuda"]) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["engine.device: there is no CUDA device here; say cpu"])


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


def _check_give_out(config: RunConfig, federation: Federation) -> None:
    try:
        Giver(config.give_out, config.stop.needs_proof)
    except ValueError as error:
        raise ConfigError([f"give_out: {error}"]) from error
    held = "validation" in federation.splits() and "validation" in config.evaluate.splits
    if config.give_out == "validation" and not held:
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
    config: RunConfig,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Run a configuration, into a run folder if ``out`` names one."""
    if out is None:
        return build(config).train(callbacks)
    refuse_existing(Path(out), overwrite)
    return start(build(config), Path(out), callbacks)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless to be replaced, or cannot be one."""
    if is_first():  # to the others it looks as if the run that the first one begins had been there
        tables.refuse_existing(out, overwrite, CONFIG)


def start(built: Run, out: Path, callbacks: Sequence[Callback] = ()) -> History:
    """Run from the first round into a folder, replacing the run that may be there.

    An old run loses its configuration and checkpoints before the new configuration is written, and
    that is written before any table: whatever moment a kill chooses, the folder holds no run, or
    one that :func:`resume` continues under its own configuration.
    """
    folder = RunFolder(out, built.federation.names, built.clients.group())
    if folder.writes:
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / CONFIG, out / SUMMARY, *folder.checkpoints.glob("*.json")):
            old.unlink(missing_ok=True)
        write_file(out / RUN, json.dumps(provenance(built), indent=2).encode() + b"\n")
        write_file(out / CONFIG, built.config.to_toml().encode())
    folder.create(overwrite=True)
    return built.train(callbacks, folder)


def provenance(built: Run) -> dict[str, Any]:
    """Return what the numbers depend on beside the configuration."""
    packages = {name: version(name) for name in ("equifed", "torch", "numpy", "scipy")}
    return {
        "format": FORMAT,
        "versions": {**packages, "python": platform.python_version()},
        "data": {
            "name": built.federation.name,
            "sha256": built.federation.checksum(),
            "source": built.federation.source,
        },
    }


def resume(out: str | Path, callbacks: Sequence[Callback] = ()) -> History:
    """Go on with the run in a folder; from its beginning if it was killed before it saved."""
    out = Path(out)
    if not (out / CONFIG).exists():
        raise RunFolderError(
            f"{out} holds no run that could go on: {CONFIG} is missing. Start one with: equifed run"
        )
    if is_complete(out):
        return History.load(out)
    told = json.loads((out / RUN).read_text(encoding="utf-8"))
    check_format(told, out)
    built = build(RunConfig.read(out / CONFIG))
    folder = RunFolder(out, built.federation.names, built.clients.group())
    if not any(folder.checkpoints.glob("*.json")):
        return start(built, out, callbacks)
    if told["data"]["sha256"] != built.federation.checksum():
        raise RunFolderError(
            f"{out} was trained on other data than its configuration now loads; start it again."
        )
    return built.train(callbacks, folder, resume=True)
