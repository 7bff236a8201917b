"""What every client would have with a model of its own, by itself or beside a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.fedavg import FedAvg
from equifed.contract import Index, LocalSGD, Losses
from equifed.contract.algorithm import AnyAlgorithm, layers
from equifed.data.federation import Federation
from equifed.engines.evaluate import SampleScores, to_array
from equifed.engines.in_process import resolve_model
from equifed.engines.simulate import simulate
from equifed.metrics.metric import Metric, find_metric
from equifed.metrics.paired import gain_of_pairs
from equifed.models.architectures import choose_init
from equifed.models.curvature import PIECE, find_places, linear_layer, read_design, trained_rows
from equifed.models.flat import EXAMPLES, FlatModel, Penalise, as_data
from equifed.models.losses import (
    ClassWeights,
    SampleLoss,
    WeightedLoss,
    base_loss,
    fitted_loss,
    squared,
    weigh_classes,
)
from equifed.models.newton import MOST_NUMBERS, fit_many
from equifed.objectives import Average
from equifed.runs.build import Run, limit_threads
from equifed.training import History, RunFolder, StopWhen, train
from equifed.training.history import HELD
from equifed.training.tables import MetricRecord

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # strengths of the penalty that are tried beside the given one
WithAlone: TypeAlias = Literal["auto"] | bool  # own models; "auto": where is_small_and_convex
# Up to so many clients, parameters, and training samples times parameters a run is small.
FEW_CLIENTS, FEW_PARAMETERS, LITTLE_WORK = 50, 200, 10_000_000


@dataclass(frozen=True, eq=False)
class Alone:
    """Every client's own model, measured."""

    record: MetricRecord  # the main metric; of a client with one class its accuracy, else NaN
    losses: Losses  # training loss with the given l2: baselines of equifed.objectives.ExcessRisk
    l2: Losses  # strength of each client's penalty behind record
    one_class: tuple[str, ...]  # clients with one class in training
    how: str
    samples: list[Losses] = field(default_factory=list, repr=False)  # of the metric, by client
    data: Federation | None = field(default=None, repr=False)

    @classmethod
    def measure(
        cls, data: Federation, model: FlatModel, rows: Tensor, losses: Losses, l2: Losses, how: str,
        metric: str | None = None, split: str | None = None,
    ) -> Alone:  # fmt: skip
        """Measure own models, a row each, by what a run on these data shows or as is told."""
        one_class = tuple(data.find_one_class())
        if one_class:
            who = ", ".join(one_class)
            how += f"; one class in training, shown with it and not compared: {who}"
        record, samples = measure_models(data, model, rows, metric, split, one_class)
        return cls(record, losses, l2, one_class, how, samples, data)

    def add_to(self, history: History) -> dict[str, Any]:
        """Put it into the history of the shared model, and return the event that tells of it."""
        shown, mine = history.main_metric(), (self.record.metric, self.record.split)
        if shown != mine:
            raise ValueError(
                f"The run shows {shown}, own models were measured by {mine}; pass "
                "the same metric= and split= to alone()."
            )
        event = {"event": "alone", "round": 0, "reason": self.how}
        event |= {"one_class": list(self.one_class), "gains": self._compare(history.trained)}
        history.alone = self.record
        history.events = [e for e in history.events if e["event"] != "alone"] + [event]
        return event

    def _compare(self, trained: Any) -> dict[str, list[float]]:
        """Return each compared client's gain by its own model: difference, limits, p."""
        out: dict[str, list[float]] = {}
        if trained is None or self.data is None or not self.samples:
            return out
        kind, split = find_metric(self.record.metric), self.data.splits()[self.record.split]
        sides = {"higher_is_better": kind.higher_is_better, "fraction": kind.is_fraction}
        for i, name in enumerate(self.data.names):
            if len(self.samples[i]) and name not in self.one_class:
                shared = trained.for_client(name) if trained.own else trained
                inputs, targets = split.client(i)
                seen = in_units(self.data, targets, np.empty(0), shared.answer(inputs))
                found = gain_of_pairs(self.samples[i], measure_each(kind, seen), **sides)
                if math.isfinite(found.difference):
                    out[name] = [found.difference, found.lower, found.upper, found.p]
        return out


def alone(
    data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", *, l2: float = 0.0,
    tune: bool = True, class_weights: ClassWeights | None = None, penalise: Penalise = "all",
    dtype: torch.dtype = torch.float32, algorithm: AnyAlgorithm | None = None,
    rounds: int | None = None, seed: int = 0, metric: str | None = None, split: str | None = None,
) -> Alone:  # fmt: skip
    """Fit a model of the same kind to every client's own samples.

    Linear models are solved exactly, by Newton's method in float64 for all clients at once.
    Networks, linear models of more than 2,000 parameters, and those with a hinge loss or one of
    your own are trained by ``algorithm`` on each client for ``rounds``: those of the shared run,
    for the same budget.

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
    linear = build_linear(data, model, loss, l2, class_weights, penalise)
    exact, tuned = is_solvable(linear), tune and data.validation is not None
    strengths, chosen = [l2], np.zeros(len(data.names), dtype=np.int64)
    if exact:
        strengths += [g for g in GRID if tuned and g != l2]
        found, late = solve_each(linear, data, strengths)
        if late:
            warnings.warn(
                f"Own models of {', '.join(late[:5])} have not converged (classes that can be told "
                f"apart need a penalty); give l2 > 0, got {l2:g}.",
                UserWarning,
                stacklevel=2,
            )
        if len(strengths) > 1:  # those without validation samples keep the first
            held = (measure_models(data, linear, x, "loss", "validation")[0] for x in found)
            chosen = np.nan_to_num([record.values for record in held]).argmin(axis=0)
        rows, given = found[chosen, np.arange(len(chosen))], found[0]
    else:
        if algorithm is None or rounds is None:
            raise ValueError(
                "Own models of this kind have no exact solution; give algorithm= and rounds= of "
                "the shared run, for the same budget."
            )
        engine: Any = {"loss": linear.loss, "l2": l2, "penalise": penalise, "dtype": dtype}
        (module, _), trained = resolve_model(data, model, loss), []
        for name in data.names:
            part = data.subset([name])
            clients = simulate(part, module, init=choose_init(model, None), **engine)
            history = train(algorithm, clients, rounds=rounds, seed=seed, evaluate=())
            trained.append(clients.flatten(history.parameters or {}))
        linear, rows = clients.model, torch.stack(trained)
        given = rows
    how = "own models by Newton's method" if exact else f"own models by {algorithm!r}"
    how += ", l2 chosen on validation samples" if exact and tuned else f", l2 = {l2:g}"
    losses = [score_samples(data, linear, x, *data.train.client(i)).losses.mean()
              + float(linear.penalty(x)) for i, x in enumerate(given)]  # fmt: skip
    l2s = np.array(strengths)[chosen]
    return Alone.measure(data, linear, rows, np.array(losses), l2s, how, metric, split)


def build_linear(
    data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", l2: float = 0.0,
    class_weights: ClassWeights | None = None, penalise: Penalise = "all",
) -> FlatModel:  # fmt: skip
    """Return a model of clients' own, in double precision."""
    module, found_loss = resolve_model(data, model, loss)
    found_loss = weigh_classes(found_loss, class_weights, data)
    held = data.train.inputs[:EXAMPLES], data.train.targets[:EXAMPLES]
    few = [as_data(values, torch.float64, "cpu") for values in held]
    shape: Any = {"classes": data.classes, "l2": l2, "penalise": penalise}
    return FlatModel(module, found_loss, *few, dtype=torch.float64, **shape)


def is_solvable(model: FlatModel) -> bool:
    """Tell whether Newton's method is for this model: small, linear, of a loss that it knows."""
    known = fitted_loss(base_loss(model.loss)) is not None and trained_rows(model) is not None
    return known and model.size <= MOST_NUMBERS


def solve_each(
    model: FlatModel, data: Federation, strengths: Sequence[float]
) -> tuple[Tensor, list[str]]:
    """Return every client's best model for each strength of the penalty, (strengths, N, d).

    And the clients for whom the first strength has not converged.
    """
    train, places, late = data.train, find_places(model), set[str]()
    found = torch.zeros(len(strengths), len(train.sizes), model.size, dtype=torch.float64)
    loss, free = fitted_loss(base_loss(model.loss)), model.pull(torch.ones(model.size).double())
    assert loss is not None
    ridge = free[places[0]]
    alike = bool((ridge == 1).all()) and min(strengths) > 0
    for clients in _group_alike(train.sizes, places.shape[1]):
        sizes, k = train.sizes[clients][:, None], np.arange(train.sizes[clients].max())
        rows = np.where(k < sizes, train.offsets[clients][:, None] + k, 0)
        inputs, targets = (as_data(v[rows.ravel()], torch.float64, "cpu")
                           for v in (train.inputs, train.targets))  # fmt: skip
        counts = torch.as_tensor((k < sizes) / np.maximum(sizes, 1))
        if isinstance(model.loss, WeightedLoss):
            counts = counts * model.loss.counts(targets).view(counts.shape)
        given = read_design(model, inputs), model.outputs(0 * free, inputs), targets
        design, outputs, targets = (v.view(*rows.shape, *v.shape[1:]) for v in given)
        span = None
        if rows.shape[1] < len(ridge) and alike:  # solutions are sums of rows
            span, upper = torch.linalg.qr(design.mT)
            design = upper.mT
        v = outputs.new_zeros(len(clients), design.shape[2], len(places))
        for s, strength in sorted(enumerate(strengths), key=lambda pair: -pair[1]):  # a path
            penalty = strength * ridge[: design.shape[2]]
            v, going = fit_many(design, outputs, targets, counts, loss, penalty, v)
            found[s][clients[:, None, None], places.T] = v if span is None else span @ v
            late |= {data.names[i] for i in clients[going.numpy()] if strength == strengths[0]}
    return found, sorted(late)


def _group_alike(sizes: Index, width: int) -> Iterator[Index]:
    """Yield clients whose numbers of samples are within a factor of two, few enough for memory."""
    powers = np.ceil(np.log2(np.maximum(sizes, 1))).astype(int)
    for power in np.unique(powers):
        alike, few = np.flatnonzero(powers == power), max(1, PIECE // (8 * width * 2**power))
        yield from np.split(alike, range(few, len(alike), few))


def score_samples(
    data: Federation, model: FlatModel, x: Tensor, inputs: Any, targets: Any
) -> SampleScores:
    """Return losses and outputs of samples."""
    rows, wanted = (as_data(v, model.dtype, model.device) for v in (inputs, targets))
    with torch.no_grad():
        outputs = model.outputs(x, rows)
        losses = model.loss(outputs, wanted)
    return in_units(data, targets, to_array(losses), to_array(outputs))


def in_units(data: Federation, targets: Any, losses: Any, outputs: Any) -> SampleScores:
    """Return samples with the values of a regression in the unit of the target column."""
    if data.classes is None:
        targets, outputs = data.in_units(targets.astype(np.float64)), data.in_units(outputs)
    return SampleScores(targets, losses, outputs, data.classes)


def measure_models(
    data: Federation, model: FlatModel, rows: Tensor, metric: str | None = None,
    split: str | None = None, one_class: Sequence[str] = (),
) -> tuple[MetricRecord, list[Losses]]:  # fmt: skip
    """Return a metric of every client's model, and of every single sample where it is a mean."""
    held = {name: part for name, part in data.splits().items() if len(part.targets)}
    split = split or next(name for name in HELD if name in held)
    values = "mse" if model.loss is squared else "loss"
    metric = metric or (values if data.classes is None else "accuracy")
    kind = find_metric(metric)
    if split not in held or kind.compute is None:
        raise ValueError(f"There is no {metric} on {split} to measure.")
    found, samples = np.full(len(data.names), np.nan), [np.empty(0)] * len(data.names)
    for i, name in enumerate(data.names):
        inputs, targets = held[split].client(i)
        if not len(targets):
            continue
        scores = score_samples(data, model, rows[i], inputs, targets)
        samples[i] = measure_each(kind, scores)
        if name not in one_class:
            found[i] = kind.measure(scores.targets, scores.answer(kind.needs))
        elif metric == "accuracy":  # the only class is its model
            found[i] = (targets == data.train.client(i)[1][0]).mean()
    record = MetricRecord(0, split, metric, found, held[split].sizes)
    return record, samples if any(map(len, samples)) else []


def measure_each(kind: Metric, scores: SampleScores) -> Losses:
    """Return a metric of every single sample; empty where it is no mean of such."""
    if kind.each is None or kind.needs != "prediction":
        return np.empty(0)
    return np.asarray(kind.each(scores.targets, scores.answer(kind.needs)), dtype=np.float64)


# -- beside a run -----------------------------------------------------------------------------


def is_small_and_convex(clients: Any, data: Federation) -> bool:
    """Tell whether own models cost next to nothing, so that every run can have them."""
    model, train = clients.model, data.train
    if model is None or clients.group() is not None or clients.adds_noise():
        return False
    if linear_layer(model.module, model.input_dimensions) is None:
        return False
    size = model.size + model.own_size
    few = len(data.names) <= FEW_CLIENTS and size <= FEW_PARAMETERS
    little = int(train.sizes.sum()) * size <= LITTLE_WORK and int(train.sizes.min()) > 0
    return few and little and fitted_loss(base_loss(model.loss)) is not None


def list_beside(built: Run) -> list[str]:
    """Return what to solve beside a run: ``alone``, ``average``; refuse what cannot be.

    The average is for small convex runs of another objective without privacy: there it costs next
    to nothing.
    """
    asked, splits, clients = built.config.with_alone, built.config.evaluate.splits, built.clients
    small = bool(splits) and is_small_and_convex(clients, built.federation)
    found, core = list[str](), layers(built.algorithm)[-1]
    if small if asked == "auto" else asked:
        _refuse_noised(clients)
        if not is_solvable(clients.model) and find_local(built.algorithm) is None:
            raise ValueError(
                "Own models of this kind are trained by local steps of a fixed length, which "
                f"{type(built.algorithm).__name__} has not: compare with fedavg or scaffold, call "
                "equifed.alone(..., algorithm=), or leave out --with-alone."
            )
        if not splits:
            raise ValueError("Own models are compared by what is measured: give evaluate.splits.")
        found.append("alone")
    averages = getattr(core, "averages", isinstance(getattr(core, "objective", None), Average))
    if small and not (averages or clients.remembers_own() or built.config.privacy):
        found.append("average")
    return found


def add_beside(
    history: History, built: Run, folder: RunFolder | None, wanted: Sequence[str]
) -> History:
    """Solve what stands beside a trained run; write it into its folder, if any, and finish it."""
    clients, shown = built.clients, history.main_metric()
    if not wanted:
        return history
    if folder is not None:
        folder.more = False
    try:
        with limit_threads(built.config.threads):
            if "alone" in wanted:
                given = built.federation, built.algorithm, built.config.rounds
                event = fit_alone(history, clients, *given)
                if folder is not None and event is not None:
                    folder.event(event)
            if "average" in wanted and shown is not None:
                metrics = [] if shown[0] in ("loss", "accuracy", "mse") else [shown[0]]
                history.average = train(
                    FairNewton(Average()), clients, rounds=60, every=60, evaluate=[shown[1]],
                    stop=StopWhen(at_relative_gap=1e-6), metrics=metrics, progress=False,
                ).last(*shown)  # fmt: skip
    except Exception:
        if folder is not None:
            folder.finish(history)
        raise
    if folder is not None:
        folder.finish(history)
    return history


def _refuse_noised(clients: Any) -> None:
    """Refuse own models beside a private run: their numbers would tell of the rows, unpaid."""
    if clients.adds_noise():
        raise ValueError(
            "Own models are fitted to the rows without noise, which no privacy budget covers; omit "
            "with_alone."
        )


def fit_alone(
    history: History, clients: Any, data: Federation, algorithm: Any, rounds: int
) -> dict[str, Any] | None:
    """Fit own models to be told beside a shared one, and return the event; None: no metric."""
    _refuse_noised(clients)
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
    """Return the plain local steps of an algorithm, or of the one inside it; None: not fixed."""
    for part in layers(algorithm):
        if hasattr(part, "steps"):  # a schedule
            return None
        if isinstance(work := getattr(part, "local", None), LocalSGD):
            return LocalSGD(work.lr, work.steps, work.epochs, work.batch_size)
    return None
