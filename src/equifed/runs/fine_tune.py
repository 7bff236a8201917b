"""Own parts and own models after training, chosen among candidates on validation samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Index
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.engines.simulate import simulate
from equifed.models import losses
from equifed.models.newton import fit_linear, sample_losses
from equifed.models.own_part import check_fit, choose_own, module_of, read_last_layer, split_own
from equifed.models.predictor import Predictor

TEMPERATURES = (1.0, 2.0, 4.0)
"""Training outputs of a network are too sure of themselves: they are divided by this in the fit."""
PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Strengths tried: (penalty / 2) |v - shared|^2 beside the sum of the losses."""
RATES, STEPS = (0.01, 0.03, 0.1), (10, 30, 100)
"""Step sizes and numbers of steps of fine-tuning that are tried."""
BATCH = 20
"""Samples of a step of fine-tuning."""
MOST_BYTES = 2**32
"""Of all clients' own models together."""
ENOUGH = 20
"""Validation samples from which on a client's own part is fitted to them."""
FOLDS = 5


@dataclass(frozen=True)
class Choice:
    """How own parts are fitted: temperature and penalty; an infinite penalty changes nothing."""

    temperature: float
    penalty: float

    def __str__(self) -> str:
        if math.isinf(self.penalty):
            return "no change: nothing tried was better on held-out samples"
        return f"temperature {self.temperature:g}, penalty {self.penalty:g}"

    def to_dict(self) -> dict[str, float | None]:
        """Return it as plain values."""
        return {
            "temperature": self.temperature,
            "penalty": None if math.isinf(self.penalty) else self.penalty,
        }


@dataclass(frozen=True)
class Tuned:
    """How a shared model becomes each client's own: ``steps`` local steps of length ``lr``."""

    lr: float
    steps: int

    def __str__(self) -> str:
        if not self.steps:
            return "no change"
        return f"{self.steps} local steps of {BATCH} samples, lr {self.lr:g}"

    def to_dict(self) -> dict[str, float | None]:
        """Return it as plain values."""
        return {"lr": self.lr, "steps": self.steps}


def module_for(predictor: Predictor, client: str) -> Any:
    """Return the module with a client's own part, where there is one."""
    if not predictor.own:
        return predictor.module
    return module_of(predictor.module, predictor.own, predictor.clients, client)


def _need_validation(data: Federation, what: str, options: str) -> None:
    if data.validation is None or not len(data.validation.targets):
        raise ValueError(
            f"{what} are chosen on validation samples, and these data have none: hold some out "
            f"([data.holdout] validation = 0.2), or give {options}."
        )


def split_folds(client: str, count: int) -> Iterator[tuple[Index, Index]]:
    """Yield rows to fit and rows to judge by, in five ways."""
    order = Stream(0).at("folds", client).generator().permutation(count)
    for fold in np.array_split(order, FOLDS):
        yield np.setdiff1d(order, fold), fold


# -- own parts of the last layer --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnFit:
    """Own parts of the last layer, each a convex problem."""

    predictor: Predictor
    data: Federation
    names: tuple[str, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Where each client's own part is fitted."""
        held, train = self.data.validation, self.data.train
        many = np.zeros(len(train.sizes), bool) if held is None else held.sizes >= ENOUGH
        return tuple("validation" if enough else "train" if m else "nothing"
                     for enough, m in zip(many, train.sizes, strict=True))  # fmt: skip

    def read(self, i: int, split: Split) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of the own part's design, outputs and targets of a client's samples."""
        inputs, targets = split.client(i)
        design, outputs = read_last_layer(
            module_for(self.predictor, self.data.names[i]), self.names,
            lambda m: torch.as_tensor(self.predictor.run_module(m, inputs)),
        )  # fmt: skip
        return design, outputs, torch.as_tensor(targets)

    def change(self, held: tuple[Tensor, Tensor, Tensor], choice: Choice) -> Tensor:
        """Return what the own part differs by from the shared one (q, k)."""
        design, outputs, targets = held
        if not len(targets) or math.isinf(choice.penalty):
            return outputs.new_zeros(design.shape[1], outputs.shape[1])
        l2 = choice.penalty / len(targets)
        loss, t = check_fit(self.predictor.loss, l2), choice.temperature
        return fit_linear(design, outputs / t, targets, loss, l2) * t

    def of(self, i: int, source: str, choice: Choice | None) -> dict[str, Tensor]:
        """Return client i's own parameters by name."""
        module = module_for(self.predictor, self.data.names[i])
        held = {n: module.get_parameter(n).detach().clone() for n in self.names}
        if source == "nothing" or choice is None:
            return held
        v = self.change(self.read(i, self.data.splits()[source]), choice)
        moved = split_own(v, self.names, {n: p.shape for n, p in held.items()})
        return {n: held[n] + moved[n].to(held[n]) for n in self.names}

    def told(self, choices: Mapping[str, Choice]) -> Predictor:
        """Return what predicts with every client's own part; those of training stay among them."""
        parts = [self.of(i, source, choices.get(source)) for i, source in enumerate(self.sources)]
        found = {name: torch.stack([part[name] for part in parts]) for name in self.names}
        return replace(self.predictor, own={**self.predictor.own, **found})

    def score(
        self, source: str, clients: Sequence[int], held: Sequence[Any], choice: Choice
    ) -> float:
        """Return the mean over clients of the loss on validation samples that no fit has used."""
        loss, found = check_fit(self.predictor.loss, 1.0), []
        for i in clients:
            design, outputs, targets = held[i]
            if source == "train":
                v = self.change(self.read(i, self.data.train), choice)
                found.append(float(sample_losses(outputs + design @ v, targets, loss).mean()))
                continue
            total = 0.0
            for rest, fold in split_folds(self.data.names[i], len(targets)):
                v = self.change((design[rest], outputs[rest], targets[rest]), choice)
                left = sample_losses(outputs[fold] + design[fold] @ v, targets[fold], loss)
                total += float(left.sum())
            found.append(total / len(targets))
        return float(np.mean(found)) if found else math.inf


def fit_parts(
    predictor: Predictor, data: Federation, own: str | Sequence[str],
    temperature: float | None, penalty: float | None,
) -> tuple[OwnFit, dict[str, Choice]]:  # fmt: skip
    """Return the fit, with temperature and penalty for both kinds of samples it may be on."""
    fit = OwnFit(predictor, data, choose_own(predictor.module, own))
    for name, value in (("temperature", temperature), ("penalty", penalty)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a number above 0, got {value}.")
    if temperature is not None and penalty is not None:
        return fit, dict.fromkeys(("validation", "train"), Choice(temperature, penalty))
    _need_validation(data, "Temperature and penalty", "temperature= and penalty=")
    assert data.validation is not None
    usual = (1.0,) if predictor.loss == "squared" else TEMPERATURES
    warm = usual if temperature is None else (temperature,)
    tried = [Choice(*both) for both in
             itertools.product(warm, PENALTIES if penalty is None else (penalty,))]  # fmt: skip
    tried.append(Choice(1.0, math.inf))
    held = [fit.read(i, data.validation) for i in range(len(data.names))]
    there, out = [i for i, h in enumerate(held) if len(h[2])], {}
    for source in sorted({*fit.sources} - {"nothing"}, reverse=True):
        # Few or no validation samples of their own: what suits everybody's training samples.
        judged = there if source == "train" else [i for i in there if fit.sources[i] == source]
        scores = [fit.score(source, judged, held, choice) for choice in tried]
        out[source] = tried[int(np.argmin(scores))]
    return fit, out


# -- all parameters ---------------------------------------------------------------------------


def fine_tune(
    predictor: Predictor, data: Federation, lr: float | None, steps: int | None, device: str
) -> tuple[Tuned, Predictor]:
    """Return how the clients' own models were made, and what predicts with them."""
    if predictor.own:
        raise ValueError(
            "The model has own parts already; fine-tuning is for one that all clients share."
        )
    if predictor.loss is None:
        raise ValueError(
            "Fine-tuning goes on with the loss of training, which is known for cross_entropy, "
            "logistic and squared losses without class weights; the model was trained with another."
        )
    tried = _list_tried(data, lr, steps)
    clients = _simulate(predictor, data, device) if any(one.steps for one in tried) else None
    best: tuple[float, Tuned, dict[str, Tensor]] | None = None
    for choice in tried:
        try:
            own = _walk(predictor, clients, choice)
        except MissingClients as lost:
            if len(tried) == 1:
                raise ValueError(f"{choice}: {lost}; give a smaller lr.") from lost
            continue  # it diverges for somebody
        told = replace(predictor, own=own if choice.steps else {})
        score = _score(told, data) if len(tried) > 1 else 0.0
        if best is None or score < best[0]:
            best = score, choice, own
    assert best is not None
    return best[1], replace(predictor, own=best[2])


def _list_tried(data: Federation, lr: float | None, steps: int | None) -> list[Tuned]:
    """Return what is tried, or the one thing that is given."""
    unmoved = lr == 0 and steps == 0  # as a choice of no steps is written
    if lr is not None and not unmoved and not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a number above 0, got {lr}.")
    if steps is not None and not (steps >= 0 and float(steps).is_integer()):
        raise ValueError(f"steps must be a whole number, at least 0, got {steps}.")
    if steps == 0 or (lr is not None and steps is not None):
        return [Tuned(lr or 0.0, int(steps))]
    _need_validation(data, "Step size and number of steps", "lr= and steps=")
    rates, counts = RATES if lr is None else (lr,), STEPS if steps is None else (steps,)
    return [Tuned(0.0, 0), *itertools.starmap(Tuned, itertools.product(rates, counts))]


def _simulate(predictor: Predictor, data: Federation, device: str) -> Any:

    assert predictor.loss is not None
    dtype = next(p.dtype for p in predictor.module.parameters() if p.requires_grad)
    clients = simulate(data, predictor.module, getattr(losses, predictor.loss), device=device,
                       dtype=dtype, init="given")  # fmt: skip
    wanted = len(data.names) * clients.model.size * dtype.itemsize
    if wanted > MOST_BYTES:
        raise ValueError(
            f"Own models of {len(data.names)} clients with {clients.model.size:,} parameters take "
            f"{wanted / 2**30:.1f} GiB, the limit is {MOST_BYTES / 2**30:.0f}; use own='bias' or "
            "own='head', which are small."
        )
    return clients


def _walk(predictor: Predictor, clients: Any, choice: Tuned) -> dict[str, Tensor]:
    """Return every client's parameters; those without training samples keep the shared ones."""
    n = len(predictor.clients)
    shared = {k: p for k, p in predictor.module.named_parameters() if p.requires_grad}
    own = {k: p.detach().to("cpu").expand(n, *p.shape) for k, p in shared.items()}  # no copies
    if not choice.steps:
        return own
    own = {name: part.clone() for name, part in own.items()}
    start = clients.flatten(predictor.module)
    work = LocalSGD(lr=choice.lr, steps=choice.steps, batch_size=BATCH)
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
        outputs = predictor.run_module(module_for(predictor, data.names[i]), inputs)
        each = sample_losses(torch.as_tensor(outputs), torch.as_tensor(targets), loss)
        found.append(float(each.mean()))
    score = float(np.mean(found))
    return score if math.isfinite(score) else math.inf
