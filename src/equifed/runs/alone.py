"""What every client would have with a model of its own, by itself or beside a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.arrays import Losses
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.evaluate import SampleScores
from equifed.engines.in_process import resolve_model
from equifed.engines.simulate import Simulated, simulate
from equifed.metrics import gain_of_pairs
from equifed.metrics.metric import Metric, find_metric
from equifed.models.architectures import choose_init
from equifed.models.curvature import linear_layer
from equifed.models.flat import Penalise
from equifed.models.losses import (
    ClassWeights,
    SampleLoss,
    base_loss,
    binary_logistic,
    cross_entropy,
    hinge,
    squared,
    weigh_classes,
)
from equifed.models.predictor import Predictor
from equifed.objectives import Average
from equifed.runs.build import Run, limit_threads
from equifed.runs.newton import Newton, State
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.tables import MetricRecord

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Strengths of the penalty that are tried beside the given one."""
STEPS, TOLERANCE = 100, 1e-10
"""Most Newton steps, and the decrease of the loss, in its units, that ends them."""
MOST_PARAMETERS = 2000
"""Larger linear models are trained as networks are: Newton's matrix would be too large."""
WithAlone: TypeAlias = Literal["auto"] | bool
"""Whether own models are fitted; ``"auto"``: where :func:`is_small_and_convex`."""
FEW_CLIENTS, FEW_PARAMETERS, LITTLE_WORK = 50, 200, 10_000_000
"""Up to so many clients, parameters, and training samples times parameters a run is small."""
CONVEX = (squared, binary_logistic, cross_entropy)


@dataclass(frozen=True, eq=False)
class Alone:
    """Every client's own model, measured.

    Parameters
    ----------
    record : MetricRecord
        The main metric on its split: what ``history.alone`` takes. A client with one class in
        training has the accuracy of that class, and NaN in other metrics.
    losses : array, shape (N,)
        Training loss, penalty included, of the own model with the given ``l2``: for exact solves
        the least one there is, so baselines of :class:`equifed.objectives.ExcessRisk`.
    l2 : array, shape (N,)
        The strength of the penalty behind ``record``.
    one_class : tuple of str
        Clients with one class in training.
    how : str
        How the models were found.
    samples : list of arrays
        The main metric of every single sample, client by client; empty if it is no mean of such.
    """

    record: MetricRecord
    losses: Losses
    l2: Losses
    one_class: tuple[str, ...]
    how: str
    samples: list[Losses] = field(default_factory=list, repr=False)
    data: Federation | None = field(default=None, repr=False)

    def add_to(self, history: History) -> dict[str, Any]:
        """Put it into the history of the shared model, and return the event that tells of it.

        Both models' answers to the same samples are compared there, where the history knows the
        shared one (``history.trained``).
        """
        shown, mine = history.main_metric(), (self.record.metric, self.record.split)
        if shown != mine:
            raise ValueError(
                f"The run shows {shown}, own models were measured by {mine}; say "
                "alone(..., metric=, split=) as the run has it."
            )
        event = {"event": "alone", "round": 0, "reason": self.how}
        event |= {"one_class": list(self.one_class), "gains": self._compare(history)}
        history.alone = self.record
        history.events = [e for e in history.events if e["event"] != "alone"] + [event]
        return event

    def _compare(self, history: History) -> dict[str, list[float]]:
        """Return each compared client's gain by its own model: difference, limits, p."""
        if history.trained is None or self.data is None or not self.samples:
            return {}
        kind, split = find_metric(self.record.metric), self.data.splits()[self.record.split]
        out = {}
        for i, name in enumerate(self.data.names):
            if len(self.samples[i]) and name not in self.one_class:
                shared = history.trained
                shared = shared.for_client(name) if shared.own else shared
                theirs = measure_samples(shared, kind, *split.client(i))
                sides = {"higher_is_better": kind.higher_is_better, "fraction": kind.is_fraction}
                found = gain_of_pairs(self.samples[i], theirs, **sides)
                if math.isfinite(found.difference):
                    out[name] = [found.difference, found.lower, found.upper, found.p]
        return out


def alone(
    data: Federation,
    model: nn.Module | str,
    loss: SampleLoss | str = "auto",
    *,
    l2: float = 0.0,
    tune: bool = True,
    class_weights: ClassWeights | None = None,
    penalise: Penalise = "all",
    dtype: torch.dtype = torch.float32,
    algorithm: AnyAlgorithm | None = None,
    rounds: int | None = None,
    seed: int = 0,
    metric: str | None = None,
    split: str | None = None,
) -> Alone:
    """Fit a model of the same kind to every client's own samples.

    Linear models are solved exactly, by Newton's method in float64. Networks, linear models of more
    than 2,000 parameters, and those with a hinge loss are trained by ``algorithm`` on each client
    for ``rounds``: those of the shared run, for the same budget.

    Parameters
    ----------
    data, model, loss, class_weights, penalise, dtype
        As for :func:`equifed.simulate`.
    l2 : float
        Strength of the penalty.
    tune : bool
        Choose each exactly solved client's penalty among ``l2`` and a grid from 1e-4 to 1, by the
        loss on its validation samples; a client without any keeps ``l2``.
    algorithm, rounds, seed
        How networks are trained.
    metric, split : str, optional
        What is measured: by default what a run on these data shows.

    Examples
    --------
    >>> import equifed as ef
    >>> found = ef.alone(ef.load("heart-disease"), "logistic", l2=0.01)
    >>> len(found.losses), found.record.metric
    (4, 'accuracy')
    """
    module, found_loss = resolve_model(data, model, loss)
    given: dict[str, Any] = {
        "model": module,
        "loss": weigh_classes(found_loss, class_weights, data),
        "penalise": penalise,
        "init": choose_init(model, None),
    }
    fit = _Fit(given, l2, tune, dtype, algorithm, rounds, seed)
    fits = [fit.of(data.subset([name])) for name in data.names]
    shown = _gather(data, [one.measured for one in fits]).last(metric, split)
    if shown is None:
        raise ValueError(f"There is no {metric or 'metric'} on {split or 'any split'} to measure.")
    one_class = find_one_class(data)
    record = _with_majorities(shown, data, one_class)
    kind, part = find_metric(record.metric), data.splits()[record.split]
    samples = [measure_samples(one.predictor, kind, *part.client(i)) for i, one in enumerate(fits)]
    exact, tuned = all(one.exact for one in fits), tune and data.validation is not None
    how = "own models by Newton's method" if exact else f"own models by {algorithm!r}"
    how += ", l2 chosen on validation samples" if exact and tuned else f", l2 = {l2:g}"
    if one_class:
        how += f"; one class in training, shown with it and not compared: {', '.join(one_class)}"
    losses, chosen = np.array([one.loss for one in fits]), np.array([one.l2 for one in fits])
    known = samples if can_measure(kind) else []
    return Alone(record, losses, chosen, one_class, how, known, data)


@dataclass(frozen=True, eq=False)
class _Found:
    """One client's own model: what was measured, its training loss, and how it was found."""

    measured: list[Any]
    loss: float
    l2: float
    exact: bool
    predictor: Predictor


@dataclass(frozen=True, eq=False)
class _Fit:
    given: dict[str, Any]
    l2: float
    tune: bool
    dtype: torch.dtype
    algorithm: AnyAlgorithm | None
    rounds: int | None
    seed: int

    def of(self, data: Federation) -> _Found:
        """Return the own model of the only client of the data."""
        stream, held = Stream(self.seed).at("alone"), _held(data)
        clients = self._clients(data, self.l2, torch.float64)
        x = clients.initial(stream)
        small = clients.model.size <= MOST_PARAMETERS
        if not small or isinstance(clients.hessian(x, np.ones(1)), str):
            clients = self._clients(data, self.l2, self.dtype)
            x = self._train(clients)
            found = float(clients.losses(x, stream)[0])
            return _Found(clients.evaluate(x, held), found, self.l2, False, clients.predictor(x))
        best = self._solve(clients, x, stream)
        found = float(clients.losses(best, stream)[0])
        tries = [(self.l2, clients, best)]
        if self.tune and "validation" in held:
            for strength in (g for g in GRID if g != self.l2):
                other = self._clients(data, strength, torch.float64)
                # The neighbour's solution is near.
                tries.append((strength, other, self._solve(other, tries[-1][2], stream)))
            scores = [c.evaluate(y, ["validation"])[0].metrics["loss"][0] for _, c, y in tries]
            tries = [tries[int(np.argmin(scores))]]
        strength, clients, best = tries[0]
        told = clients.evaluate(best, held)
        return _Found(told, found, strength, True, clients.predictor(best))

    def _clients(self, data: Federation, l2: float, dtype: torch.dtype) -> Simulated:
        return simulate(data, **self.given, l2=l2, dtype=dtype)

    def _train(self, clients: Simulated) -> Any:
        if self.algorithm is None or self.rounds is None:
            raise ValueError(
                "Own models of this kind have no exact solution; give algorithm= and rounds= of "
                "the shared run, for the same budget."
            )
        given: Any = {"rounds": self.rounds, "seed": self.seed, "evaluate": ()}
        return clients.flatten(train(self.algorithm, clients, **given).parameters or {})

    def _solve(self, clients: Simulated, x: Any, stream: Stream) -> Any:
        """Return the best model of one client; a warning if there is none in reach."""
        newton, state = Newton(Average()), State(x, np.ones(1))
        for k in range(STEPS):
            state, info = newton.round(state, clients, stream.at(k))
            if info.numbers["decrement"] ** 2 <= TOLERANCE or info.numbers["step"] == 0:
                return state.x
        warnings.warn(
            f"Client {clients.names[0]!r}: its own model has not converged after {STEPS} Newton "
            "steps (classes that can be told apart need a penalty); give l2 > 0, got "
            f"{clients.model.l2:g}.",
            UserWarning,
            stacklevel=2,
        )
        return state.x


def can_measure(kind: Metric) -> bool:
    """Tell whether a metric is the mean of numbers of single samples that answers suffice for."""
    return kind.each is not None and kind.needs == "prediction"


def measure_samples(predictor: Predictor, kind: Metric, inputs: Any, targets: Any) -> Losses:
    """Return a metric of every single sample; empty where it is no mean of such."""
    if not len(targets) or not can_measure(kind) or kind.each is None:
        return np.empty(0)
    outputs = predictor.answer(inputs)
    classes = None if predictor.classes is None else len(predictor.classes)
    answers = SampleScores(targets, np.empty(0), outputs, classes).answer(kind.needs)
    return np.asarray(kind.each(targets, answers), dtype=np.float64)


def find_one_class(data: Federation) -> tuple[str, ...]:
    """Return the clients whose training samples are of one class."""
    if data.classes is None:
        return ()
    parts = ((name, data.train.client(i)[1]) for i, name in enumerate(data.names))
    return tuple(name for name, targets in parts if len(np.unique(targets)) == 1)


def _held(data: Federation) -> list[str]:
    return [name for name, part in data.splits().items() if len(part.targets)]


def _gather(data: Federation, own: Sequence[list[Any]]) -> History:
    """Return what was measured of one client at a time as the evaluation of all."""
    history, n = History(data.names), len(data.names)
    for split, part in data.splits().items():
        found = {i: e.metrics for i, told in enumerate(own) for e in told if e.split == split}
        for metric in dict.fromkeys(m for told in found.values() for m in told):
            values = np.array([found[i][metric][0] if i in found else np.nan for i in range(n)])
            history.metrics.append(MetricRecord(0, split, metric, values, part.sizes))
    return history


def _with_majorities(
    record: MetricRecord, data: Federation, one_class: tuple[str, ...]
) -> MetricRecord:
    """Return the record in which clients with one class have that class as their model."""
    values, part = record.values.copy(), data.splits()[record.split]
    for i in (data.names.index(name) for name in one_class):
        targets, only = part.client(i)[1], data.train.client(i)[1][0]
        known = record.metric == "accuracy" and len(targets)
        values[i] = (targets == only).mean() if known else np.nan
    return replace(record, values=values)


# -- beside a run -----------------------------------------------------------------------------


def is_small_and_convex(clients: Any, data: Federation) -> bool:
    """Tell whether own models cost next to nothing, so that every run can have them.

    A linear model of at most 200 parameters with the squared, logistic or cross-entropy loss, at
    most 50 clients that all have training samples, at most 10 million numbers (training samples
    times parameters), in one process.
    """
    model, train = clients.model, data.train
    if model is None or clients.group() is not None:
        return False
    if linear_layer(model.module, model.input_dimensions) is None:
        return False
    size = model.size + model.own_size
    few = len(data.names) <= FEW_CLIENTS and size <= FEW_PARAMETERS
    little = int(train.sizes.sum()) * size <= LITTLE_WORK and int(train.sizes.min()) > 0
    return few and little and base_loss(model.loss) in CONVEX


def wants_alone(built: Run) -> bool:
    """Tell whether to fit own models; refuse, before anything is trained, what has none."""
    asked, splits = built.config.with_alone, built.config.evaluate.splits
    if asked == "auto":
        return bool(splits) and is_small_and_convex(built.clients, built.federation)
    if not asked:
        return False
    model = built.clients.model
    linear = linear_layer(model.module, model.input_dimensions) is not None
    solved = linear and model.size <= MOST_PARAMETERS and base_loss(model.loss) is not hinge
    if not solved and find_local(built.algorithm) is None:
        raise ValueError(
            "Own models of this kind are trained by local steps of a fixed length, which "
            f"{type(built.algorithm).__name__} has not: compare with fedavg or scaffold, call "
            "equifed.alone(..., algorithm=), or leave out --with-alone."
        )
    if not splits:
        raise ValueError("Own models are compared by what is measured: give evaluate.splits.")
    return True


def add_alone(history: History, built: Run, out: Path | None) -> History:
    """Fit own models beside a trained run; write them into its folder, if any, and finish it.

    Where own models cannot be fitted, the shared one is still there; a kill leaves the folder
    unfinished.
    """
    given = built.clients, built.federation, built.algorithm, built.config.rounds
    folder = None if out is None else RunFolder(out, history.names, built.clients.group())
    try:
        with limit_threads(built.config.threads):
            event = fit_alone(history, *given)
    except Exception:
        if folder is not None:
            folder.finish(history.summary(), history.parameters, history.own)
        raise
    if folder is not None:
        if event is not None:
            folder.event(event)
            folder.alone(history.alone)
        folder.finish(history.summary(), history.parameters, history.own)
    return history


def fit_alone(
    history: History, clients: Any, data: Federation, algorithm: Any, rounds: int
) -> dict[str, Any] | None:
    """Fit own models to be told beside a shared one, and return the event; None: no metric.

    What would be warnings of the fit is told with it: the shared model is what was asked for.
    """
    shown, local = history.main_metric(), find_local(algorithm)
    if shown is None:
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        found = alone(
            data, clients._template, clients.model.loss, l2=clients.model.l2,
            penalise="all" if clients.model.penalised is None else "weights",
            dtype=clients.model.dtype, algorithm=None if local is None else FedAvg(local),
            rounds=rounds, seed=history.seed or 0, metric=shown[0], split=shown[1],
        )  # fmt: skip
    event = found.add_to(history)
    notes = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
    event["reason"] = " ".join([event["reason"], *notes])
    return event


def find_local(algorithm: Any) -> LocalSGD | None:
    """Return the plain local steps of an algorithm, or of the one inside it; None: not fixed.

    A schedule sets the length of SCAFF-PD's steps, round by round.
    """
    work, inner = getattr(algorithm, "local", None), getattr(algorithm, "algorithm", None)
    if hasattr(algorithm, "steps"):  # a schedule
        return None
    if not isinstance(work, LocalSGD):
        return None if inner is None else find_local(inner)
    return LocalSGD(
        lr=work.lr, steps=work.steps, epochs=work.epochs, batch_size=work.batch_size,
    )  # fmt: skip
