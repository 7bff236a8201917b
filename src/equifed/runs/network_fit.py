"""``fit`` for networks: few are trained, own biases are fitted after it, and one is chosen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn
from typing_extensions import override

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.shelf.reweighted import Reweighted
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.engines.evaluate import FederationEvaluator, to_array
from equifed.engines.simulate import Simulated, simulate
from equifed.metrics.metric import find_metric
from equifed.models import losses
from equifed.models.curvature import linear_layer
from equifed.models.flat import EXAMPLES, FlatModel, as_data
from equifed.models.own_part import OwnPart, choose_own
from equifed.models.predictor import Predictor
from equifed.objectives import ChiSquare
from equifed.runs.alone import in_units
from equifed.runs.build import has_rare_class
from equifed.runs.candidates import (
    BASE,
    TRIED,
    Choice,
    Point,
    Score,
    check_clients,
    find_best,
    join_names,
    refuse_other,
)
from equifed.runs.held_out import with_validation
from equifed.runs.new_rows import own_rows
from equifed.runs.outcome import NO_TEST, add_auroc, describe_gain, list_rows, tell_apart
from equifed.runs.personalise import Choice as Fit
from equifed.runs.personalise import fit_last_layer, read_samples
from equifed.training.files import digest, read_sealed, seal, write_file
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.units import settle_work

FAIR = (1.0, 0.1)
"""Strengths rho of chi-square; every one is a whole training."""
ROUNDS = 100
MADE = "network.json"
UNCHANGED = Fit({"steps": 0})


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


@dataclass(frozen=True, eq=False)
class Networks:
    """What was trained and chosen; test rows were not read."""

    choice: Choice
    runs: dict[str, History]  # the best of every family

    def finish(self, data: Federation) -> tuple[str, list[dict[str, Any]], dict[str, History]]:
        """Read test rows: what was gained, a row for every kind of candidate, and their runs."""
        split = "train" if data.test is None else "test"
        more = ["auroc"] if has_rare_class(data) else []
        for run in self.runs.values():
            _measure(run, data, split, more)
        rows = list_rows(self.choice, self.runs, None, split)
        if more:
            add_auroc(rows, self.runs, data, [], split)
        if data.test is None:
            return NO_TEST, rows, self.runs
        pair = (_score_rows(self.runs[k], data, data.test) for k in (self.choice.name, BASE))
        gain = describe_gain(self.choice, self.runs, split, tell_apart(*pair), False)
        return gain, rows, self.runs


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
) -> Networks:  # fmt: skip
    """Train for every objective with the same work, fit own biases, choose on validation rows."""
    check_clients(data)
    data, rounds = with_validation(data, seed), ROUNDS if rounds is None else rounds
    tried = None if folder is None else folder / TRIED
    clients, work = _prepare(data, model, rounds, local, seed, tried)
    scores, runs = dict[Point, Score](), dict[Point, History]()
    for rho in (None, *FAIR):
        point = Network(0.0, rho=rho, rounds=rounds)
        tell(f"network, {'average' if rho is None else f'fair, rho = {rho:g}'}")
        runs[point] = _train(point, work, clients, seed, tried)
        predictor = cast(Predictor, runs[point].predictor())
        names = choose_own(predictor.module, "bias")
        found, fits, sources = fit_last_layer(predictor, data, names, None, None)
        how = "; ".join(f"on {source} samples: {fit}" for source, fit in fits.items())
        own = replace(point, own_l2=0.0, fitted=f"({how})")
        scores[point] = _judge(predictor, data, names, sources, {})
        scores[own] = _judge(predictor, data, names, sources, fits)
        runs[own] = _with_own(runs[point], found, own.fitted)
    notes = [f"Local work: {work}.", *_describe(data, sources)]
    held, best, model = data.validation, find_best(scores), str(clients.origin()["model"])
    assert held is not None
    choice = Choice(
        min(scores, key=lambda p: scores[p].mean), best, {k: scores[p] for k, p in best.items()},
        (), np.zeros(len(data)),
        f"{len(held):,} validation rows of {int((held.sizes > 0).sum())} clients",
        len(scores), tuple(notes), (model, str(predictor.loss)),
    )  # fmt: skip
    return Networks(choice, {family: runs[p] for family, p in best.items()})


def _describe(data: Federation, sources: Sequence[str]) -> list[str]:
    """Say what own biases are fitted to, and what is not known."""
    told = [
        f"Own biases: those of {sources.count('validation')} of {len(data)} clients are fitted to "
        "validation rows, and judged on those that a fit has not seen (folds); others take "
        "training rows. Networks are not trained again after the choice, and nothing is proved "
        "about them."
    ]
    if one_class := data.find_one_class():
        alike = "training rows of one class only; an own bias may simply always answer it."
        told.append(f"{join_names(one_class)}: {alike}")
    return told


def _prepare(
    data: Federation, model: nn.Module | str, rounds: int, local: LocalSGD | None, seed: int,
    tried: Path | None,
) -> tuple[Simulated, LocalSGD]:  # fmt: skip
    """Return clients and their work, those of an interrupted fit where there was one."""
    file = None if tried is None else tried / MADE
    held = read_sealed(file) if file is not None and file.exists() else None
    clients = simulate(data, model, engine="auto" if held is None else held["made"]["engine"])
    x = clients.initial(Stream(seed).at("initial"))  # where training starts
    if local is None:
        plain, stream = FedAvg(weighting="uniform"), Stream(seed).at("network fit")
        local = settle_work(plain, clients, x, stream)[0].local
    made = {
        "data": data.checksum(), "seed": seed, "rounds": rounds, "local": repr(local),
        "tried": FAIR, "model": clients.origin()["model"], "start": digest(to_array(x).tobytes()),
        "engine": clients.engine,
    }  # fmt: skip
    if held is not None and tried is not None:
        refuse_other(held, made, tried)
    elif file is not None and tried is not None:
        clear(tried)
        tried.mkdir(parents=True, exist_ok=True)
        write_file(file, seal({"made": made}))
    return clients, local


def _train(
    point: Network, work: LocalSGD, clients: Simulated, seed: int, tried: Path | None
) -> History:
    """Train, or go on from where an interrupted fit was."""
    algorithm: Any = FedAvg(work, weighting="uniform")
    if point.rho is not None:
        algorithm = Reweighted(ChiSquare(point.rho), work)
    place, resume = None, False
    if tried is not None:
        name = "average" if point.rho is None else f"fair-{point.rho:g}"
        place = RunFolder(tried / name, clients.names)
        resume = any(place.checkpoints.glob("*.json"))
        if not resume:
            place.create(overwrite=True)
    told: Any = {"every": point.rounds, "folder": place, "resume": resume, "progress": False}
    return train(algorithm, clients, rounds=point.rounds, seed=seed, **told)


def _with_own(history: History, predictor: Predictor, how: str) -> History:
    """Return a run whose model has own parts, which were fitted after it."""
    ran = f"{history.algorithm}; own biases fitted after training {how}"
    made = {**history.provenance, "own": [*predictor.own], "ran": ran}
    own, events = dict(predictor.own), [*history.events]
    return replace(history, metrics=[], events=events, own=own, trained=predictor, provenance=made)


def clear(tried: Path) -> None:
    """Remove trainings of an earlier fit."""
    (tried / MADE).unlink(missing_ok=True)
    for run in tried.glob("*/rounds.csv"):
        shutil.rmtree(run.parent)


# -- numbers ----------------------------------------------------------------------------------


def _judge(
    predictor: Predictor, data: Federation, names: tuple[str, ...], sources: Sequence[str],
    fits: Mapping[str, Fit],
) -> Score:  # fmt: skip
    """Return what clients have on validation rows that the fit of their own bias has not used."""
    assert data.validation is not None
    train = read_samples(predictor, data, names, data.train)
    held = read_samples(predictor, data, names, data.validation)
    kind, found = find_metric("mse" if data.classes is None else "accuracy"), []
    for name, mine, others, source in zip(data.names, held, train, sources, strict=True):
        if not len(mine.targets):
            found.append((np.nan, np.nan))
            continue
        outputs = mine.answer_held(name, fits.get(source, UNCHANGED), others, source)
        each = to_array(mine.losses(outputs))
        seen = in_units(data, to_array(mine.targets), each, to_array(outputs))
        found.append((each.mean(), kind.measure(seen.targets, seen.answer(kind.needs))))
    return Score(*np.array(found, dtype=np.float64).T)


def _measure(history: History, data: Federation, split: str, more: Sequence[str]) -> None:
    """Measure a run's model, which is not trained any more."""
    predictor = cast(Predictor, history.predictor())
    dtype = next(predictor.module.parameters()).dtype
    part = OwnPart(tuple(predictor.own), "joint", 0.0) if predictor.own else None
    few, loss = as_data(data.train.inputs[:EXAMPLES], dtype, "cpu"), str(predictor.loss)
    model = FlatModel(predictor.module, getattr(losses, loss), few, dtype=dtype, own=part)
    x, own = model.flatten(predictor.module), None
    if part is not None:
        own = own_rows(predictor, data.names, model)
    evaluator, kinds = FederationEvaluator(data, model), [find_metric(name) for name in more]
    history.add_evaluation(history.rounds[-1].round, evaluator(x, [split], kinds, own))
    shown = [find_metric(r.metric) for r in history.metrics if r.split == split]
    history.details = evaluator.describe(split, x, shown, own)


def _score_rows(history: History, data: Federation, split: Split) -> list[Any]:
    """Return the loss of every row, by client."""
    predictor = cast(Predictor, history.predictor())
    names = choose_own(predictor.module, "bias")
    seen = read_samples(predictor, data, names, split)
    return [to_array(mine.losses(mine.outputs)) for mine in seen]
