"""From a configuration to objects: data, model, engine and algorithm, checked together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from equifed.algorithms.guarded import guard_algorithm
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients
from equifed.contract.evaluation import Evaluator
from equifed.contract.own import uses_minibatches
from equifed.data.federation import Federation
from equifed.data.split import Holdout
from equifed.metrics.metric import Metric, as_metrics
from equifed.runs.automatic_lr import measure_step
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig, build_algorithm
from equifed.runs.entries import load_address
from equifed.runs.modules import build_module, freeze_features
from equifed.runs.settings import ConfigError, Table, choose, construct, settings
from equifed.runs.tables import ModelSettings
from equifed.training.folder import RunFolder
from equifed.training.given_out import Giver
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.provenance import FORMAT, package_versions
from equifed.training.trackers import Callback


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

    from equifed.engines.own import settle_own
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
    if clients.choice is None or engine["name"] != "auto":
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
    from equifed.engines.evaluate import check_metrics

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
