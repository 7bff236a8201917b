"""Own parts and own models after training, chosen among candidates on validation samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.engines.simulate import simulate
from equifed.models import losses
from equifed.models.newton import fit_linear, sample_losses
from equifed.models.own_part import check_fit, read_last_layer, split_own
from equifed.models.predictor import Predictor

TEMPERATURES = (1.0, 2.0, 4.0)
"""Training outputs of a network are too sure of themselves: they are divided by this in the fit."""
PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Strengths tried: (penalty / 2) |v - shared|^2 beside the sum of the losses."""
RATES, STEPS = (0.01, 0.03, 0.1), (10, 30, 100)
"""Step sizes and numbers of steps of fine-tuning that are tried."""
BATCH = 20  # samples of a step of fine-tuning
MOST_BYTES = 2**32  # of all clients' own models together
ENOUGH = 20  # validation samples from which on a client's own part is fitted to them
FOLDS = 5

Found = tuple[Predictor, dict[str, "Choice"], tuple[str, ...]]
"""What predicts with own parts, how they were chosen, and on which samples each was fitted."""


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

    def to_dict(self) -> dict[str, float | None]:
        """Return it as plain values."""
        return {name: None if math.isinf(value) else value for name, value in self.settings.items()}


def _list_tried(
    data: Federation, usual: Mapping[str, Sequence[float]], given: Mapping[str, float | None],
    unchanged: Mapping[str, float],
) -> list[Choice]:  # fmt: skip
    """Return what is tried, "no change" among it, or the one thing that is given."""
    if None not in given.values():
        return [Choice({name: value for name, value in given.items() if value is not None})]
    if data.validation is None or not len(data.validation.targets):
        raise ValueError(
            f"{' and '.join(given)} are chosen on validation samples, and these data have none: "
            "hold some out ([data.holdout] validation = 0.2), or give "
            f"{' and '.join(f'{name}=' for name in given)}."
        )
    fixed = {name: (value,) for name, value in given.items() if value is not None}
    grid = itertools.product(*({**usual, **fixed}[name] for name in given))
    return [Choice(unchanged), *(Choice(dict(zip(given, one, strict=True))) for one in grid)]


def _take_best(tried: Sequence[Choice], score: Callable[[Choice], float]) -> Choice:
    return min(tried, key=score) if len(tried) > 1 else tried[0]


# -- own parts of the last layer --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Samples:
    """A client's samples as the last layer sees them: rows of the own part's design, outputs."""

    design: Tensor
    outputs: Tensor
    targets: Tensor
    loss: Any

    def take(self, rows: Any) -> _Samples:
        return _Samples(self.design[rows], self.outputs[rows], self.targets[rows], self.loss)

    def fit(self, choice: Choice) -> Tensor:
        """Return what the own part differs by from the shared one (q, k)."""
        if not len(self.targets) or not choice.changes:
            return self.outputs.new_zeros(self.design.shape[1], self.outputs.shape[1])
        l2, t = choice.settings["penalty"] / len(self.targets), choice.settings["temperature"]
        return fit_linear(self.design, self.outputs / t, self.targets, self.loss, l2) * t

    def score(self, change: Tensor) -> Tensor:
        """Return the loss of every sample."""
        return sample_losses(self.outputs + self.design @ change, self.targets, self.loss)

    def score_folds(self, client: str, choice: Choice) -> Tensor:
        """Return the loss of every sample in a fit to others, in five ways."""
        order = Stream(0).at("folds", client).generator().permutation(len(self.targets))
        folds = ((np.setdiff1d(order, fold), fold) for fold in np.array_split(order, FOLDS))
        return torch.cat([self.take(fold).score(self.take(rest).fit(choice))
                          for rest, fold in folds])  # fmt: skip


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
    train = _read_samples(predictor, data, names, data.train)
    judged = [] if held is None else _read_samples(predictor, data, names, held)
    rows = {"train": train, "validation": judged}

    def score(source: str, choice: Choice) -> float:
        """Return the mean over clients of the loss on validation samples that no fit has used."""
        found = []
        for i, client in enumerate(data.names):
            # Few or no validation samples of their own: what suits everybody's training samples.
            if len(judged[i].targets) and source == "train":
                found.append(float(judged[i].score(train[i].fit(choice)).mean()))
            elif sources[i] == source:
                found.append(float(judged[i].score_folds(client, choice).mean()))
        return float(np.mean(found))

    choices = {source: _take_best(tried, partial(score, source))
               for source in sorted({*sources} - {"nothing"}, reverse=True)}  # fmt: skip
    parts = []
    for i, source in enumerate(sources):
        module = predictor.module_for(data.names[i])
        part = {name: module.get_parameter(name).detach() for name in names}
        if source != "nothing":
            shapes = {name: p.shape for name, p in part.items()}
            moved = split_own(rows[source][i].fit(choices[source]), names, shapes)
            part = {name: p + moved[name].to(p) for name, p in part.items()}
        parts.append(part)
    own = {name: torch.stack([part[name] for part in parts]) for name in names}
    return replace(predictor, own={**predictor.own, **own}), choices, sources


def _read_samples(
    predictor: Predictor, data: Federation, names: tuple[str, ...], split: Split
) -> list[_Samples]:
    loss, found = check_fit(predictor.loss, 1.0), []
    for i, client in enumerate(data.names):
        inputs, targets = split.client(i)

        def run(module: Any, inputs: Any = inputs) -> Tensor:
            return torch.as_tensor(predictor.run_module(module, inputs))

        seen = read_last_layer(predictor.module_for(client), names, run)
        found.append(_Samples(*seen, torch.as_tensor(targets), loss))
    return found


# -- all parameters ---------------------------------------------------------------------------


def fine_tune(
    predictor: Predictor, data: Federation, lr: float | None, steps: int | None, device: str
) -> Found:
    """Let every client walk from the shared parameters."""
    if predictor.own:
        raise ValueError(
            "The model has own parts already; fine-tuning is for one that all clients share."
        )
    if predictor.loss is None:
        raise ValueError(
            "Fine-tuning goes on with the loss of training, which is known for cross_entropy, "
            "logistic and squared losses without class weights; the model was trained with another."
        )
    unmoved = lr in (None, 0) and steps == 0  # as a choice of no steps is written
    if lr is not None and not unmoved and not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a number above 0, got {lr}.")
    if steps is not None and not (steps >= 0 and float(steps).is_integer()):
        raise ValueError(f"steps must be a whole number, at least 0, got {steps}.")
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
    held, loss, found = data.splits()["validation"], check_fit(predictor.loss, 1.0), []
    for i in map(int, np.flatnonzero(held.sizes)):
        inputs, targets = held.client(i)
        outputs = predictor.run_module(predictor.module_for(data.names[i]), inputs)
        each = sample_losses(torch.as_tensor(outputs), torch.as_tensor(targets), loss)
        found.append(float(each.mean()))
    score = float(np.mean(found))
    return score if math.isfinite(score) else math.inf
