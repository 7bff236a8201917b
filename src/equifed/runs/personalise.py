"""Own parts and own models after training, chosen on validation samples, compared on test ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from equifed.contract import Index, LocalSGD, Losses, MissingClients, Stream
from equifed.data import Federation, Split
from equifed.data.split import refuse_any
from equifed.engines.evaluate import SampleScores
from equifed.engines.simulate import simulate
from equifed.metrics import Interval, find_metric, mean_interval
from equifed.metrics.paired import combine_sources, count_pairs, newcombe_interval
from equifed.models import losses
from equifed.models.losses import DERIVATIVES
from equifed.models.newton import fit_linear
from equifed.models.own_part import check_fit, choose_own, read_last_layer, split_own
from equifed.models.predictor import Predictor
from equifed.runs.alone import in_units, measure_each
from equifed.runs.load import PERSONAL_PARTS, PERSONALISED, load_with_data, open_evaluator
from equifed.training import History, files, open_run_folder, tables

TEMPERATURES = (1.0, 2.0, 4.0)  # outputs, too sure of themselves, are divided by this in the fit
PENALTIES = (0.1, 1.0, 10.0, 100.0)  # (penalty / 2) |v - shared|^2 beside the sum of the losses
RATES, STEPS = (0.01, 0.03, 0.1), (10, 30, 100)  # of fine-tuning that are tried
BATCH = 20  # samples of a step of fine-tuning
MOST_BYTES = 2**32  # of all clients' own models together
ENOUGH = 20  # validation samples from which on a client's own part is fitted to them
FOLDS = 5
# Predicts with own parts; how they were chosen; on which samples each was fitted
Found = tuple[Predictor, dict[str, "Choice"], tuple[str, ...]]


@dataclass(frozen=True)
class Choice:
    """How own parts are found: by a fit (temperature, penalty) or by local steps (lr, steps)."""

    settings: Mapping[str, float]

    @property
    def changes(self) -> bool:
        """Whether there is anything to fit."""
        return math.isfinite(self.settings.get("penalty", 1.0)) and self.settings.get("steps") != 0

    def __str__(self) -> str:
        if not self.changes:
            return "no change"
        if "steps" in self.settings:
            lr, steps = self.settings["lr"], self.settings["steps"]
            return f"{steps} local steps of {BATCH} samples, lr {lr:g}"
        return ", ".join(f"{name} {value:g}" for name, value in self.settings.items())


@dataclass(frozen=True, eq=False)
class Personalised:
    """A finished model with an own part for every client, and what that changed."""

    predictor: Predictor
    names: tuple[str, ...]
    choices: Mapping[str, Choice]  # for own parts fitted to validation or to train samples
    fitted_on: tuple[str, ...]  # of each client: "validation", "train" or "nothing"
    metric: str  # "" without a test split
    split: str
    sizes: Index  # test samples of each client
    before: Losses
    after: Losses
    differences: tuple[Interval | None, ...]  # after minus before on the same samples
    average: Interval | None

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per client."""
        found = []
        for i, name in enumerate(self.predictor.clients):
            told = {"client": name, "fitted_on": self.fitted_on[i], "test": int(self.sizes[i])}
            told |= {"before": float(self.before[i]), "after": float(self.after[i])}
            limits = zip(("change", "lower", "upper"), _limits(self.differences[i]), strict=True)
            found.append(told | dict(limits))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return what came of it as plain values."""
        chosen = {source: choice.settings for source, choice in self.choices.items()}
        told = None if self.average is None else _limits(self.average)
        plain = {"own": self.names, "chosen": chosen, "metric": self.metric, "split": self.split,
                 "average_change": told, "clients": self.rows()}  # fmt: skip
        return files.as_plain(plain)  # type: ignore[no-any-return]

    def save(self, folder: str | Path) -> Path:
        """Write it beside the model of a run, for ``equifed predict --personalised``."""
        run = open_run_folder(folder, data_only=True)
        parts = save({name: part.contiguous() for name, part in self.predictor.own.items()})
        held = {"parts": files.digest(parts), "model": files.digest(run.read(tables.MODEL))}
        files.write_file(run / PERSONAL_PARTS, parts)
        files.write_file(run / PERSONALISED, files.seal({**self.to_dict(), **held}))
        return run / PERSONALISED


def describe(found: Personalised) -> str:
    """Return in words what was fitted and how it was chosen."""
    chosen = "; ".join(f"on {k} samples: {c}" for k, c in found.choices.items())
    tuned = any("steps" in one.settings for one in found.choices.values())
    what = "all parameters fine-tuned" if tuned else f"own part {', '.join(found.names)} fitted"
    return f"{what} after training ({chosen})"


def _limits(found: Interval | None) -> list[float | None]:
    return [None] * 3 if found is None else [found.estimate, found.lower, found.upper]


def personalise(
    run: str | Path | History, data: Federation | None = None, own: str | Sequence[str] = "bias", *,
    temperature: float | None = None, penalty: float | None = None, lr: float | None = None,
    steps: int | None = None, device: str = "cpu", trust: bool = False,
) -> Personalised:  # fmt: skip
    """Fit an own part to every client at the shared parameters of a finished model.

    The own part is the bias of the last layer, or weight and bias (``own="head"``, up to 2,000
    numbers): a convex problem, solved by Newton's method. A client with at least 20 validation
    samples is fitted to these, whose outputs the model was not trained on; others to their training
    samples. Temperature and penalty are chosen for both kinds by the loss on validation samples,
    averaged over clients (by five folds where the fit uses them, too).

    With ``own="all"`` every client fine-tunes the whole model: local steps from the shared
    parameters, by minibatches of its training samples. Step size and number of steps are one choice
    for all clients, by the loss on validation samples. An own bias repairs other shares of classes;
    fine-tuning also other looks of them, and needs more samples.

    To change nothing is always among the choices. Test samples compare before and after.

    Parameters
    ----------
    run : path or History
        Folder of a complete run, or what training returned.
    data : Federation, optional
        The data of the run; a folder's configuration loads them.
    own : {"bias", "head", "all"} or sequence of str
        What becomes the clients' own.
    temperature, penalty, lr, steps : float, optional
        Use these, the last two of fine-tuning; needed where the data have no validation split.
    device : str
        Where fine-tuning computes.
    trust : bool
        Load the code that the folder names; see :func:`equifed.load_predictor`.

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.load("heart-disease", validation=0.2)
    >>> clients = ef.simulate(data, "logistic", l2=0.01)
    >>> history = ef.train(ef.ScaffPD(ef.objectives.Average()), clients, rounds=5)
    >>> found = ef.personalise(history, data)
    >>> found.names, found.fitted_on[0]
    (('1.bias',), 'validation')
    """
    predictor, data = load_with_data(run, data, trust)
    if ((temperature, penalty) if own == "all" else (lr, steps)) != (None, None):
        raise ValueError(
            "temperature and penalty apply to own biases, lr and steps to fine-tuning "
            f"(own='all'); got own={own!r}."
        )
    if own == "all":
        found = fine_tune(predictor, data, lr, steps, device)
        return _compare(predictor, data, tuple(found[0].own), *found)
    names = choose_own(predictor.module, own)
    found = fit_last_layer(predictor, data, names, temperature, penalty)
    return _compare(predictor, data, names, *found)


def _list_tried(
    data: Federation, usual: Mapping[str, Sequence[float]], given: Mapping[str, float | None],
    unchanged: Mapping[str, float],
) -> list[Choice]:  # fmt: skip
    """Return what is tried, "no change" among it, or the one thing that is given."""
    fixed = {name: value for name, value in given.items() if value is not None}
    if len(fixed) == len(given):
        return [Choice(fixed)]
    if data.validation is None or not len(data.validation.targets):
        raise ValueError(
            f"{' and '.join(given)} are chosen on validation samples, and these data have none: "
            "hold some out ([data.holdout] validation = 0.2), or give "
            f"{' and '.join(f'{name}=' for name in given)}."
        )
    grid = itertools.product(*([fixed[k]] if k in fixed else usual[k] for k in given))
    return [Choice(unchanged), *(Choice(dict(zip(given, one, strict=True))) for one in grid)]


def _take_best(tried: Sequence[Choice], score: Callable[[Choice], float]) -> Choice:
    return min(tried, key=score) if len(tried) > 1 else tried[0]


# -- own parts of the last layer --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Samples:
    """A client's samples as the last layer sees them: rows of the own part's design, outputs."""

    design: Tensor
    outputs: Tensor
    targets: Tensor
    loss: Any

    def take(self, rows: Any) -> Samples:
        """Return some of them."""
        return Samples(self.design[rows], self.outputs[rows], self.targets[rows], self.loss)

    def fit(self, choice: Choice) -> Tensor:
        """Return what the own part differs by from the shared one (q, k)."""
        if not len(self.targets) or not choice.changes:
            return self.outputs.new_zeros(self.design.shape[1], self.outputs.shape[1])
        l2, t = choice.settings["penalty"] / len(self.targets), choice.settings["temperature"]
        return fit_linear(self.design, self.outputs / t, self.targets, self.loss, l2) * t

    def losses(self, outputs: Tensor) -> Tensor:
        """Return the loss of every sample."""
        return DERIVATIVES[self.loss].loss(outputs, self.targets)

    def answer_held(self, client: str, choice: Choice, train: Samples, source: str) -> Tensor:
        """Return the outputs by a fit to ``train``, or to others of these samples, in five ways."""
        if source != "validation":
            return self.outputs + self.design @ train.fit(choice)
        order = Stream(0).at("folds", client).generator().permutation(len(self.targets))
        found = self.outputs.clone()
        for fold in np.array_split(order, FOLDS):
            found[fold] += self.design[fold] @ self.take(np.setdiff1d(order, fold)).fit(choice)
        return found


def fit_last_layer(
    predictor: Predictor, data: Federation, names: tuple[str, ...], temperature: float | None,
    penalty: float | None,
) -> Found:  # fmt: skip
    """Fit own parts of the last layer, each a convex problem."""
    given = {"temperature": temperature, "penalty": penalty}
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a number above 0, got {value}.")
    warm = (1.0,) if predictor.loss == "squared" else TEMPERATURES
    usual, unchanged = {"temperature": warm, "penalty": PENALTIES}, (1.0, math.inf)
    tried = _list_tried(data, usual, given, dict(zip(given, unchanged, strict=True)))
    held = data.validation
    many = np.zeros(len(data.names), bool) if held is None else held.sizes >= ENOUGH
    sources = tuple("validation" if enough else "train" if m else "nothing"
                    for enough, m in zip(many, data.train.sizes, strict=True))  # fmt: skip
    train = read_samples(predictor, data, names, data.train)
    judged = [] if held is None else read_samples(predictor, data, names, held)

    def score(source: str, choice: Choice) -> float:
        """Return the mean over clients of the loss on validation samples that no fit has used."""
        found = []
        for i, client in enumerate(data.names):
            # Few or no validation samples of their own: what suits everybody's training samples.
            if len(judged[i].targets) and source in ("train", sources[i]):
                outputs = judged[i].answer_held(client, choice, train[i], source)
                found.append(float(judged[i].losses(outputs).mean()))
        return float(np.mean(found))

    choices = {source: _take_best(tried, partial(score, source))
               for source in sorted({*sources} - {"nothing"}, reverse=True)}  # fmt: skip
    own: dict[str, list[Tensor]] = {name: [] for name in names}
    for i, source in enumerate(sources):
        module = predictor.module_for(data.names[i])
        part = {name: module.get_parameter(name).detach() for name in names}
        if source != "nothing":
            fitted = (judged if source == "validation" else train)[i].fit(choices[source])
            moved = split_own(fitted, names, {name: p.shape for name, p in part.items()})
            part = {name: p + moved[name].to(p) for name, p in part.items()}
        for name in names:
            own[name].append(part[name])
    stacked = {name: torch.stack(parts) for name, parts in own.items()}
    return replace(predictor, own={**predictor.own, **stacked}), choices, sources


def read_samples(
    predictor: Predictor, data: Federation, names: tuple[str, ...], split: Split
) -> list[Samples]:
    """Return every client's samples as its last layer sees them."""
    loss, found = check_fit(predictor.loss, 1.0), []
    for i, client in enumerate(data.names):
        inputs, targets = split.client(i)

        def run(module: Any, inputs: Any = inputs) -> Tensor:
            return torch.as_tensor(predictor.run_module(module, inputs))

        seen = read_last_layer(predictor.module_for(client), names, run)
        found.append(Samples(*seen, torch.as_tensor(targets), loss))
    return found


# -- all parameters ---------------------------------------------------------------------------


def fine_tune(
    predictor: Predictor, data: Federation, lr: float | None, steps: int | None, device: str
) -> Found:
    """Let every client walk from the shared parameters."""
    unmoved = lr in (None, 0) and steps == 0  # as a choice of no steps is written
    moves = lr is None or unmoved or (lr > 0 and math.isfinite(lr))
    whole = steps is None or (steps >= 0 and float(steps).is_integer())
    known = "cross_entropy, logistic and squared losses without class weights"
    refuse_any(
        (predictor.own, "The model has own parts already; fine-tuning is for a shared one."),
        (predictor.loss is None, f"Fine-tuning continues with the loss of training: {known}."),
        (not moves, f"lr must be a number above 0, got {lr}."),
        (not whole, f"steps must be a whole number, at least 0, got {steps}."),
    )
    given = {"lr": 0.0 if unmoved else lr, "steps": steps}
    tried = _list_tried(data, {"lr": RATES, "steps": STEPS}, given, {"lr": 0.0, "steps": 0})
    clients = _simulate(predictor, data, device) if any(one.changes for one in tried) else None

    def score(choice: Choice) -> float:
        try:
            return _score(replace(predictor, own=_walk(predictor, clients, choice)), data)
        except MissingClients:  # it diverges for somebody
            return math.inf

    best = _take_best(tried, score)
    try:
        own = _walk(predictor, clients, best)
    except MissingClients as lost:
        raise ValueError(f"{best}: {lost}; give a smaller lr.") from lost
    sources = tuple("train" if size else "nothing" for size in data.train.sizes)
    return replace(predictor, own=own), {"train": best}, sources


def _simulate(predictor: Predictor, data: Federation, device: str) -> Any:
    dtype = next(p.dtype for p in predictor.module.parameters() if p.requires_grad)
    loss = getattr(losses, str(predictor.loss))
    clients = simulate(data, predictor.module, loss, device=device, dtype=dtype, init="given")
    wanted = len(data.names) * clients.model.size * dtype.itemsize
    if wanted > MOST_BYTES:
        raise ValueError(
            f"Own models of {len(data.names)} clients with {clients.model.size:,} parameters take "
            f"{wanted / 2**30:.1f} GiB, the limit is {MOST_BYTES / 2**30:.0f}; use own='bias' or "
            "own='head', which are small."
        )
    return clients


def _walk(predictor: Predictor, clients: Any, choice: Choice) -> dict[str, Tensor]:
    """Return every client's parameters; those without training samples keep the shared ones."""
    n = len(predictor.clients)
    shared = {k: p for k, p in predictor.module.named_parameters() if p.requires_grad}
    own = {k: p.detach().to("cpu").expand(n, *p.shape) for k, p in shared.items()}  # no copies
    if not choice.changes:
        return own
    own = {name: part.clone() for name, part in own.items()}
    start, settings = clients.flatten(predictor.module), choice.settings
    work = LocalSGD(lr=settings["lr"], steps=int(settings["steps"]), batch_size=BATCH)
    moved = clients.local_steps(start, work, Stream(0).at("fine-tune")).displacement
    for i, only in enumerate(np.eye(n)):
        if clients.sizes[i]:
            for name, part in clients.model.unflatten(start - moved.weighted_sum(only)).items():
                own[name][i] = part.to("cpu")
    return own


def _score(predictor: Predictor, data: Federation) -> float:
    """Return the loss on validation samples, averaged over the clients that have some."""
    loss = DERIVATIVES[check_fit(predictor.loss, 1.0)].loss
    evaluator, x, own = open_evaluator(predictor, data, loss)
    (found,) = evaluator(x, ["validation"], own=own)
    score = float(found.metrics["loss"][found.sizes > 0].mean())
    return score if math.isfinite(score) else math.inf


# -- before and after -------------------------------------------------------------------------


def _compare(
    before: Predictor, data: Federation, names: tuple[str, ...], after: Predictor,
    choices: Mapping[str, Choice], fitted_on: tuple[str, ...],
) -> Personalised:  # fmt: skip
    """Measure both on the same test samples."""
    n, classes, split = len(data.names), data.classes is not None, data.test
    kind = find_metric("accuracy" if classes else "mse")
    values, told = np.full((2, n), np.nan), list[Interval | None]([None] * n)
    sizes = np.zeros(n, dtype=np.int64) if split is None else np.asarray(split.sizes)
    for i in map(int, np.flatnonzero(sizes)):
        assert split is not None
        old, new = (measure_each(kind, _answer(p, data, split, i)) for p in (before, after))
        values[:, i] = old.mean(), new.mean()
        told[i] = mean_interval(new - old)
        if classes:
            limits = newcombe_interval(count_pairs(new > 0, old > 0, [len(old)]))
            told[i] = Interval(*(float(limit[0]) for limit in limits))
    measured, average = ("", "") if split is None else (kind.name, "test"), None
    if known := [d for d in told if d is not None]:  # independent differences
        parts = [Interval(*(v / len(known) for v in (d.estimate, d.lower, d.upper))) for d in known]
        average = combine_sources(sum(part.estimate for part in parts), parts)
    return Personalised(
        after, names, dict(choices), fitted_on, *measured, sizes, values[0], values[1],
        tuple(told), average,
    )  # fmt: skip


def _answer(predictor: Predictor, data: Federation, split: Split, i: int) -> SampleScores:
    """Return what a client's model gives for its samples, and what is right."""
    inputs, targets = split.client(i)
    outputs = predictor.run_module(predictor.module_for(data.names[i]), inputs)
    return in_units(data, targets, np.empty(0), outputs)
