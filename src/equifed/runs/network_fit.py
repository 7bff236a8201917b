"""``fit`` for networks: few are trained, own biases are fitted after it, and one is chosen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from typing_extensions import override

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.shelf.reweighted import Reweighted
from equifed.contract import LocalSGD, Stream
from equifed.data.federation import Federation
from equifed.engines.evaluate import to_array
from equifed.engines.simulate import Simulated, simulate
from equifed.metrics.metric import find_metric
from equifed.models.curvature import linear_layer
from equifed.models.own_part import choose_own
from equifed.models.predictor import Predictor
from equifed.objectives import ChiSquare
from equifed.runs import candidates, personalise
from equifed.runs.alone import in_units
from equifed.runs.candidates import TRIED, Choice, Point, Score
from equifed.training import History, RunFolder, files, train
from equifed.training.units import settle_work

FAIR = (1.0, 0.1)  # strengths rho of chi-square; every one is a whole training
ROUNDS, MADE = 100, "network.json"


@dataclass(frozen=True)
class Network(Point):
    """A network that was trained, with own biases fitted after it or without."""

    rounds: int = 0
    fitted: str = ""

    @property
    @override
    def settings(self) -> str:
        told = [f"{self.rounds} rounds"]
        told += [] if self.rho is None else [f"rho = {self.rho:g}"]
        return ", ".join([*told, f"fitted after training {self.fitted}"] if self.fitted else told)


def is_network(model: nn.Module | str | None, data: Federation) -> bool:
    """Tell whether a model is none of those that are solved: linear, with an intercept."""
    if model is None or isinstance(model, str):
        return model not in (None, "linear", "logistic")
    layer = linear_layer(model, data.train.inputs.ndim - 1)
    frozen = any(not p.requires_grad for p in model.parameters())
    return layer is None or layer.bias is None or frozen


def try_networks(
    data: Federation, model: nn.Module | str, rounds: int | None, local: LocalSGD | None, seed: int,
    folder: Path | None, tell: Callable[[str], None],
) -> tuple[Choice, dict[Point, History]]:  # fmt: skip
    """Train for every objective with the same work, fit own biases, choose on validation rows."""
    candidates.check_clients(data)
    data, rounds = candidates.with_validation(data, seed), ROUNDS if rounds is None else rounds
    tried = None if folder is None else folder / TRIED
    clients, work = _prepare(data, model, rounds, local, seed, tried)
    scores, runs = dict[Point, Score](), dict[Point, History]()
    for rho in (None, *FAIR):
        point = Network(0.0, rho=rho, rounds=rounds)
        tell(f"network, {'average' if rho is None else f'fair, rho = {rho:g}'}")
        run = runs[point] = _train(point, work, clients, seed, tried)
        predictor = run.predictor()
        names = choose_own(predictor.module, "bias")
        found, fits, sources = personalise.fit_last_layer(predictor, data, names, None, None)
        how = "; ".join(f"on {source} samples: {fit}" for source, fit in fits.items())
        own = replace(point, own_l2=0.0, fitted=f"({how})")
        judge = partial(_judge, predictor, data, names, sources)
        scores |= {point: judge({}), own: judge(fits)}
        ran = f"{run.algorithm}; own biases fitted after training {own.fitted}"
        made = {**run.provenance, "own": [*found.own], "ran": ran}
        told: Any = {"metrics": [], "events": [*run.events], "provenance": made}
        runs[own] = replace(run, own=dict(found.own), trained=found, **told)
    notes = [
        f"Local work: {work}.",
        f"Own biases: those of {sources.count('validation')} of {len(data)} clients are fitted to "
        "validation rows, and judged on those that a fit has not seen (folds); others take "
        "training rows. Networks are not trained again after the choice, and nothing is proved "
        "about them.",
    ]
    if one_class := data.find_one_class():
        alike = "training rows of one class only; an own bias may simply always answer it."
        notes.append(f"{candidates.join_names(one_class)}: {alike}")
    named = str(clients.origin()["model"]), str(predictor.loss)
    return Choice.take(scores, candidates.describe_held(data), named, notes), runs


def _prepare(
    data: Federation, model: nn.Module | str, rounds: int, local: LocalSGD | None, seed: int,
    tried: Path | None,
) -> tuple[Simulated, LocalSGD]:  # fmt: skip
    """Return clients and their work, those of an interrupted fit where there was one."""
    held = None
    if tried is not None and (tried / MADE).exists():
        held = files.read_sealed(tried / MADE)
    clients = simulate(data, model, engine="auto" if held is None else held["made"]["engine"])
    x = clients.initial(Stream(seed).at("initial"))  # where training starts
    if local is None:
        plain, stream = FedAvg(weighting="uniform"), Stream(seed).at("network fit")
        local = settle_work(plain, clients, x, stream)[0].local
    made = {
        "data": data.checksum(), "seed": seed, "rounds": rounds, "local": repr(local),
        "tried": FAIR, "model": clients.origin()["model"], "engine": clients.engine,
        "start": files.digest(to_array(x).tobytes()),
    }  # fmt: skip
    if tried is not None and held is not None:
        candidates.refuse_other(held, made, tried)
    elif tried is not None:
        shutil.rmtree(tried, ignore_errors=True)
        tried.mkdir(parents=True, exist_ok=True)
        files.write_file(tried / MADE, files.seal({"made": made}))
    return clients, local


def _train(
    point: Network, work: LocalSGD, clients: Simulated, seed: int, tried: Path | None
) -> History:
    """Train, or go on from where an interrupted fit was."""
    algorithm: Any = FedAvg(work, weighting="uniform")
    place, resume, name = None, False, "average"
    if point.rho is not None:
        algorithm, name = Reweighted(ChiSquare(point.rho), work), f"fair-{point.rho:g}"
    if tried is not None:
        place = RunFolder(tried / name, clients.names)
        resume = any(place.checkpoints.glob("*.json"))
        if not resume:
            place.create(overwrite=True)
    told: Any = {"every": point.rounds, "folder": place, "resume": resume, "progress": False}
    return train(algorithm, clients, rounds=point.rounds, seed=seed, **told)


def _judge(
    predictor: Predictor, data: Federation, names: tuple[str, ...], sources: Sequence[str],
    fits: Mapping[str, personalise.Choice],
) -> Score:  # fmt: skip
    """Return what clients have on validation rows that the fit of their own bias has not used."""
    assert data.validation is not None
    train = personalise.read_samples(predictor, data, names, data.train)
    held = personalise.read_samples(predictor, data, names, data.validation)
    kind = find_metric("mse" if data.classes is None else "accuracy")
    found, unchanged = np.full((2, len(data)), np.nan), personalise.Choice({"steps": 0})
    for i, (name, mine, source) in enumerate(zip(data.names, held, sources, strict=True)):
        if len(mine.targets):
            outputs = mine.answer_held(name, fits.get(source, unchanged), train[i], source)
            each = to_array(mine.losses(outputs))
            seen = in_units(data, to_array(mine.targets), each, to_array(outputs))
            found[:, i] = each.mean(), kind.measure(seen.targets, seen.answer(kind.needs))
    return Score(*found)
