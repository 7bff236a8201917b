"""From a configuration to objects: data, model, engine and algorithm, checked together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from equifed.algorithms.guard import guard_algorithm
from equifed.contract.algorithm import AnyAlgorithm, as_run
from equifed.contract.clients import Clients, MissingClients, ask_those_present
from equifed.contract.evaluation import Evaluator
from equifed.contract.local import LocalSGD, uses_minibatches
from equifed.contract.streams import Stream
from equifed.data import Federation, Holdout
from equifed.engines.base import describe_data, describe_samples
from equifed.engines.evaluate import check_metrics
from equifed.engines.own import settle_own
from equifed.metrics.metric import Metric, as_metrics
from equifed.models.losses import outputs_for, resolve_loss, weigh_classes
from equifed.runs import schema
from equifed.runs.catalogue import SECTIONS, load_address
from equifed.runs.config import ModelSettings, RunConfig, build_algorithm
from equifed.runs.schema import ConfigError, Table
from equifed.steps.automatic import with_measured_step
from equifed.training import Callback, History, RunFolder, train
from equifed.training.events import show_algorithm
from equifed.training.final_model import Giver
from equifed.training.tables import FORMAT, package_versions

HUGE = "number out of range; use a smaller value: "


@dataclass(frozen=True)
class Run:
    """Everything a run needs: the resolved configuration and the objects that it describes."""

    config: RunConfig
    federation: Federation
    clients: Clients
    algorithm: AnyAlgorithm
    evaluate: Sequence[str] | Evaluator

    def train(
        self, callbacks: Sequence[Callback] = (), folder: RunFolder | None = None,
        resume: bool = False, progress: bool | None = False,
    ) -> History:  # fmt: skip
        """Train, and return what happened."""
        config, metrics = self.config, [*self.config.evaluate.metrics]
        if has_rare_class(self.federation) and "auroc" not in metrics:
            metrics.append("auroc")  # accuracy says little there
        with limit_threads(config.threads), schema.blame(HUGE, OverflowError):
            history = train(
                self.algorithm, self.clients, rounds=config.rounds, seed=config.seed,
                evaluate=self.evaluate, every=config.evaluate.every,
                metrics=load_metrics(metrics), stop=config.stop,
                give_out=config.give_out, missing=config.missing, callbacks=callbacks,
                progress=progress, folder=folder, resume=resume,
            )  # fmt: skip
        ran = history.provenance["ran"]  # with the scale, which is measured when the run begins
        history.provenance |= {**self.provenance, "config": config.to_dict(), "ran": ran}
        return history

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """What the numbers depend on beside the configuration; samples as the model needs them."""
        data, loss = self.federation, self.config.model["loss"]
        return {
            "format": FORMAT,
            "versions": package_versions(),
            "ran": show_algorithm(as_run(self.algorithm)),
            "data": self.clients.origin().get("data") or describe_data(data),
            "samples": describe_samples(data) | {"outputs": outputs_for(data, loss)},
        }


@contextmanager
def limit_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many processor threads in a block; None: as many as it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics of a resolved configuration."""
    return as_metrics([load_address(name) if ":" in name else name for name in names])


def load_data(data: Table) -> Federation:
    """Load the federation of a resolved ``[data]`` table."""
    federation: Federation = schema.choose("data", data, "data")
    if "holdout" in schema.settings(SECTIONS["data"][data["name"]].load()):
        return federation  # divided before it was prepared
    holdout: Holdout = schema.construct(Holdout, data["holdout"], "data.holdout")
    if not holdout.wanted:
        return federation
    return federation.split(holdout.validation, holdout.test, holdout.seed)


def has_rare_class(data: Federation) -> bool:
    """Tell whether more than four fifths of the training samples are of one class."""
    most = 0 if data.classes is None else int(np.bincount(data.train.targets).max())
    return most > 0.8 * len(data.train)


@schema.blame(HUGE, OverflowError)
def build_run(config: RunConfig) -> Run:
    """Load the data and construct model, engine and algorithm."""
    shared: ModelSettings = schema.construct(ModelSettings, config.model, "model")
    data = load_data(config.data)
    loss = resolve_loss(shared.loss, data.classes)
    threads = config.threads or torch.get_num_threads()
    algorithm = build_algorithm(config.algorithm, data.train.sizes.tolist())
    with limit_threads(threads):
        clients = _build_engine(config, shared, loss, data, algorithm)
    table, algorithm = measure_step(config.algorithm, algorithm, clients, config.seed)
    model, engine = {**config.model, "loss": loss}, config.engine
    if clients.choice is not None and engine["name"] == "auto":
        # with the name that measuring chose, for resumes and repeats
        known = schema.settings(SECTIONS["engines"][clients.engine].load())
        engine = {"name": clients.engine} | {k: v for k, v in engine.items() if k in known}
    config = replace(config, model=model, algorithm=table, engine=engine, threads=threads)
    _check_measured(config, data)
    guarded = guard_algorithm(algorithm, config.guard)
    return Run(config, data, clients, guarded, config.evaluate.splits)


def _build_engine(
    config: RunConfig, shared: ModelSettings, named: str, data: Federation, algorithm: AnyAlgorithm
) -> Clients:
    with schema.blame("model.loss: "):
        outputs = outputs_for(data, named)
    with schema.blame("model."):
        loss = weigh_classes(SECTIONS["losses"][named].load(), shared.class_weights, data)
    device = config.engine.get("device", "cpu")
    with schema.blame("engine.device: "):
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError):
            raise ValueError(f"unknown device {device!r}; use 'cpu' or 'cuda'") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; use 'cpu'")
    module, steps = build_module(config, data.input_shape, outputs), shared.own_steps
    if shared.own is not None and steps == "auto" and uses_minibatches(algorithm):
        steps = "joint"  # profile losses need all samples
    with schema.blame("model."):
        dimensions = len(data.input_shape)
        settle_own(module, loss, dimensions, shared.own, steps, shared.own_l2, shared.l2)
    given: dict[str, Any] = {
        "l2": shared.l2, "init": shared.resolve_init(config.model["name"]),
        "penalise": shared.penalise, "dtype": getattr(torch, shared.dtype), "own": shared.own,
        "own_l2": shared.own_l2, "own_steps": steps,
    }  # fmt: skip
    if config.privacy is not None:
        if config.engine["name"] not in ("auto", "loop"):
            raise ConfigError([f"engine: {config.engine['name']} adds no noise; use 'loop'"])
        with schema.blame("privacy: "):
            return config.privacy.make_clients(data, module, loss, device=device, **given)
    given |= {"data": data, "model": module, "loss": loss}
    clients: Clients = schema.choose("engines", config.engine, "engine", **given)
    return clients


def build_module(config: RunConfig, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return the module of a configuration; your code may draw: by the seed, for nobody else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        given: dict[str, Any] = {"input_shape": input_shape, "outputs": outputs}
        module: nn.Module = schema.choose("models", config.model, "model", **given)
    return module


def measure_step(
    table: Table, algorithm: AnyAlgorithm, clients: Clients, seed: int
) -> tuple[Table, AnyAlgorithm]:
    """Return an algorithm and its table with the local step size measured, if it is ``"auto"``."""
    if isinstance(table.get("algorithm"), Mapping):  # a wrapper: it is the one inside that steps
        wrapper: Any = algorithm
        inner, core = measure_step(table["algorithm"], wrapper.algorithm, clients, seed)
        return {**table, "algorithm": inner}, replace(wrapper, algorithm=core)
    holder = table.get("local", table)
    if holder.get("lr") != schema.AUTO:
        return table, algorithm
    if not isinstance(getattr(algorithm, "local", None), LocalSGD):
        raise ConfigError([f"algorithm.lr: {table['name']} has no local work; give a number"])
    if clients.adds_noise():
        why = "measuring it queries rows, and the privacy budget has no share for that"
        raise ConfigError([f"algorithm.lr: {why}; give a number"])
    stream = Stream(seed)
    x = clients.initial(stream.at("initial"))
    try:  # training will name those who are missing
        measured: Any = ask_those_present(
            clients, lambda there: with_measured_step(algorithm, there, x, stream.at("measured lr"))
        )
    except MissingClients as lost:
        why = f"no step size can be measured ({lost}); give a number"
        raise ConfigError([f"algorithm.lr: {why}"]) from lost
    chosen = {**holder, "lr": measured.local.lr}
    return ({**table, "local": chosen} if "local" in table else chosen), measured


def resolve_algorithm(
    given: Any, clients: Clients, seed: int, sizes: schema.Sizes = None
) -> AnyAlgorithm:
    """Return an algorithm that is given as one, as a name or as a table."""
    if not isinstance(given, str | Mapping):
        return given  # type: ignore[no-any-return]
    table = schema.resolve_choice("algorithms", given, "algorithm", measures=True)
    made = build_algorithm(table, clients.sizes.tolist() if sizes is None else sizes)
    return measure_step(table, made, clients, seed)[1]


def _check_measured(config: RunConfig, data: Federation) -> None:
    """Refuse metrics, stops and final models that need what is not there or not measured."""
    stop, evaluated, there = config.stop, config.evaluate, data.splits()
    loss = SECTIONS["losses"][config.model["loss"]].load()
    with schema.blame("evaluate.metrics: "):
        check_metrics(load_metrics(evaluated.metrics), data.classes, loss)
    with schema.blame("give_out: "):
        Giver(config.give_out, stop.proof)
    known = {*there} & {*evaluated.splits}
    lacks = config.give_out == "validation" and "validation" not in known
    why = "the validation split is not there or not evaluated; see [data.holdout]"
    schema.refuse_settings((lacks, f"give_out: {why} and evaluate.splits"))
    if not stop.needs_metric:
        return
    wrong = stop.metric == "accuracy" and data.classes is None
    always = ("loss", "accuracy" if data.classes is not None else "mse")
    has = f"the data have no {stop.split} split; they have {', '.join(there)} (see [data.holdout])"
    measured = stop.metric in (*always, *evaluated.metrics)
    schema.refuse_settings(
        (stop.split not in there, f"stop.split: {has}"),
        (stop.split not in known, f"stop.split: {stop.split} is not in evaluate.splits"),
        (wrong, "stop.metric: accuracy is not defined for regression; use loss"),
        (not measured, f"stop.metric: {stop.metric} is not in evaluate.metrics"),
    )
