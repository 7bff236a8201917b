"""Fine-tuning: after training every client takes local steps of its own from the shared model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation

if TYPE_CHECKING:
    from torch import Tensor

    from equifed.models.predictor import Predictor

RATES = (0.01, 0.03, 0.1)
STEPS = (10, 30, 100)
"""Step sizes and numbers of steps that are tried."""
BATCH = 20
"""Samples of a step."""
MOST_BYTES = 2**32
"""Of all clients' own models together."""


@dataclass(frozen=True)
class Tuned:
    """How a shared model becomes each client's own: ``steps`` local steps of length ``lr``."""

    lr: float
    steps: int

    def __str__(self) -> str:
        if not self.steps:
            return "no change"
        return f"{self.steps} local steps of {BATCH} samples, lr {self.lr:g}"

    def to_dict(self) -> dict[str, float]:
        """Return it as plain values, which :func:`fine_tune` takes."""
        return {"lr": self.lr, "steps": self.steps}


def fine_tune(
    predictor: Predictor,
    data: Federation,
    lr: float | None = None,
    steps: int | None = None,
    device: str = "cpu",
) -> tuple[Tuned, Predictor]:
    """Return how the clients' own models were made, and what predicts with them.

    Every client goes from the shared parameters, by minibatches of its training samples. Step size
    and number of steps are one choice for all clients, by the loss on validation samples, averaged
    over clients; to change nothing is among the choices.
    """
    _check(predictor)
    tried = _tried(data, lr, steps)
    clients = start = None
    if any(choice.steps for choice in tried):
        clients = _simulate(predictor, data, device)
        start = clients.flatten(predictor.module)
    best: tuple[float, Tuned, dict[str, Tensor]] | None = None
    for choice in tried:
        try:
            own = _stack(predictor, clients, start, choice)
        except MissingClients as lost:
            if len(tried) == 1:
                raise ValueError(f"{choice}: {lost}; give a smaller lr.") from lost
            continue  # it diverges for somebody
        score = _score(predictor, data, own if choice.steps else {}) if len(tried) > 1 else 0.0
        if best is None or score < best[0]:
            best = score, choice, own
    assert best is not None
    return best[1], replace(predictor, own=best[2])


def _check(predictor: Predictor) -> None:
    if predictor.own:
        raise ValueError(
            "The model has own parts already; fine-tuning is for one that all clients share."
        )
    if predictor.loss is None:
        raise ValueError(
            "Fine-tuning goes on with the loss of training, which is known for cross_entropy, "
            "logistic and squared losses without class weights; the model was trained with another."
        )


def _simulate(predictor: Predictor, data: Federation, device: str) -> Any:
    from equifed.engines.simulate import simulate
    from equifed.models import losses

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


def _tried(data: Federation, lr: float | None, steps: int | None) -> list[Tuned]:
    """Return what is tried, or the one thing that is given."""
    unmoved = lr == 0 and steps == 0  # as a choice of no steps is written
    if lr is not None and not unmoved and not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a number above 0, got {lr}.")
    if steps is not None and not (steps >= 0 and float(steps).is_integer()):
        raise ValueError(f"steps must be a whole number, at least 0, got {steps}.")
    if steps == 0 or (lr is not None and steps is not None):
        return [Tuned(lr or 0.0, int(steps))]
    if data.validation is None or not len(data.validation.targets):
        raise ValueError(
            "Step size and number of steps are chosen on validation samples, and these data have "
            "none: hold some out ([data.holdout] validation = 0.2), or give lr= and steps=."
        )
    rates: Sequence[float] = RATES if lr is None else (lr,)
    counts: Sequence[int] = STEPS if steps is None else (steps,)
    return [Tuned(0.0, 0), *(Tuned(r, s) for r in rates for s in counts)]


def _stack(
    predictor: Predictor, clients: Any, start: Tensor | None, choice: Tuned
) -> dict[str, Tensor]:
    """Return every client's parameters; those without training samples keep the shared ones."""
    n = len(predictor.clients)
    shared: Mapping[str, Tensor] = (
        clients.model.unflatten(start) if start is not None
        else {k: p for k, p in predictor.module.named_parameters() if p.requires_grad}
    )  # fmt: skip
    own = {k: p.detach().to("cpu").expand(n, *p.shape) for k, p in shared.items()}  # no copies
    if choice.steps and start is not None:
        own = {name: part.clone() for name, part in own.items()}
        for i, moved in _walk(clients, start, choice):
            for name, part in clients.model.unflatten(start - moved).items():
                own[name][i] = part.to("cpu")
    return own


def _walk(clients: Any, start: Tensor, choice: Tuned) -> Iterator[tuple[int, Tensor]]:
    """Yield clients with training samples, and how far each went."""
    work = LocalSGD(lr=choice.lr, steps=choice.steps, batch_size=BATCH)
    moved = clients.local_steps(start, work, Stream(0).at("fine-tune")).displacement
    for i in np.flatnonzero(clients.sizes):
        only = np.zeros(len(clients.names))
        only[i] = 1.0
        yield int(i), moved.weighted_sum(only)


def _score(predictor: Predictor, data: Federation, own: Mapping[str, Tensor]) -> float:
    """Return the loss on validation samples, averaged over the clients that have some."""
    import torch

    from equifed.models.own_part import check_fit, module_of, sample_losses

    held, names, module = data.splits()["validation"], predictor.clients, predictor.module
    loss, found = check_fit(predictor.loss, 1.0), []
    for i in map(int, np.flatnonzero(held.sizes)):
        inputs, targets = held.client(i)
        one = module_of(module, own, names, names[i]) if own else module
        outputs = torch.as_tensor(predictor.run_module(one, inputs))
        found.append(float(sample_losses(outputs, torch.as_tensor(targets), loss).mean()))
    score = float(np.mean(found))
    return score if math.isfinite(score) else math.inf


__all__ = ["Tuned", "fine_tune"]
