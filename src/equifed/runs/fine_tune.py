"""Fine-tuning: after training every client takes local steps of its own from the shared model.

Where kinds of classes are given, its own shares of them move the bias of the last layer, too.
"""

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

    from equifed.models.class_shares import ClassKinds
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
    """How a shared model becomes each client's own: ``steps`` local steps of length ``lr``.

    With ``shares`` the bias of the last layer is then moved by the client's shares of classes.
    """

    lr: float
    steps: int
    shares: bool = False

    def __str__(self) -> str:
        told = [f"{self.steps} local steps of {BATCH} samples, lr {self.lr:g}"] * (self.steps > 0)
        return " and ".join(told + ["own shares of classes"] * self.shares) or "no change"

    def to_dict(self) -> dict[str, float]:
        """Return it as plain values."""
        told = {"lr": self.lr, "steps": self.steps}
        return {**told, "shares": True} if self.shares else told


SHARES = Tuned(0.0, 0, shares=True)
"""No steps: own shares of classes alone."""


def fine_tune(
    predictor: Predictor,
    data: Federation,
    lr: float | None = None,
    steps: int | None = None,
    device: str = "cpu",
    class_kinds: ClassKinds | None = None,
) -> tuple[Tuned, dict[str, Tensor]]:
    """Return how the clients' own models were made, and their parameters, clients first.

    Every client goes from the shared parameters, by minibatches of its training samples. Step size
    and number of steps are one choice for all clients, by the loss on validation samples, averaged
    over clients; to change nothing is among the choices. With ``class_kinds`` each of them is tried
    with and without own shares of classes; where nothing is chosen, they are used, and without
    steps they are all that is own.
    """
    _check(predictor)
    tried = _tried(data, lr, steps)
    shifts = None if class_kinds is None else _shifts(predictor, data, class_kinds)
    if shifts is not None and steps == 0:
        name, moved = shifts
        bias = predictor.module.get_parameter(name).detach().cpu()
        return SHARES, {name: bias + moved.to(bias)}
    clients = _simulate(predictor, data, device)
    start = clients.flatten(predictor.module)
    held = clients.model.unflatten(start)
    shared = {name: part.to("cpu", copy=True) for name, part in held.items()}
    best: tuple[float, Tuned, dict[str, Tensor]] | None = None
    for choice in tried:
        try:
            own = _stack(shared, clients, start, choice)
        except MissingClients as lost:
            if len(tried) == 1:
                raise ValueError(f"{choice}: {lost}; give a smaller lr.") from lost
            continue  # it diverges for somebody
        for one, parts in _with_shares(choice, own, shifts, also_without=len(tried) > 1):
            score = 0.0 if len(tried) == 1 else _score(predictor, data, parts)
            if best is None or score < best[0]:
                best = score, one, parts
    assert best is not None
    _, choice, own = best
    if shifts is not None and choice == SHARES:
        own = {shifts[0]: own[shifts[0]]}
    return choice, own


def _shifts(predictor: Predictor, data: Federation, class_kinds: ClassKinds) -> tuple[str, Tensor]:
    """Return the last bias's name, and by how much every client's moves, for its counts of labels.

    One logit is that of the second class against the first.
    """
    import torch

    from equifed.models.class_shares import share_shifts
    from equifed.models.fit_own import find_last_layer, read_last_layer
    from equifed.models.own_part import choose_own

    if data.classes is None or predictor.loss not in ("cross_entropy", "binary_logistic"):
        raise ValueError(
            "class_kinds is for models of classes with the loss cross_entropy or binary_logistic, "
            f"and this one has {predictor.loss or 'another'}; leave it out."
        )
    names, few = choose_own(predictor.module, "bias"), data.train.inputs[:8]
    place = find_last_layer(predictor.module, names)  # both refuse what moves no logits
    read_last_layer(
        predictor.module, place, lambda m: torch.as_tensor(predictor.run_module(m, few))
    )
    counts = [np.bincount(data.train.client(i)[1], minlength=data.classes)
              for i in range(len(data.names))]  # fmt: skip
    shifts = share_shifts(np.stack(counts), class_kinds)
    if predictor.loss == "binary_logistic":
        shifts = shifts[:, 1:] - shifts[:, :1]
    return names[0], torch.as_tensor(shifts)


def _with_shares(
    choice: Tuned, own: dict[str, Tensor], shifts: tuple[str, Tensor] | None, also_without: bool
) -> Iterator[tuple[Tuned, dict[str, Tensor]]]:
    """Yield own models as they are, unless own shares are given and not to be chosen, and moved."""
    if shifts is None or also_without:
        yield choice, own
    if shifts is not None:
        name, moved = shifts
        yield replace(choice, shares=True), {**own, name: own[name] + moved.to(own[name])}


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
                       dtype=dtype, init="own")  # fmt: skip
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
    shared: Mapping[str, Tensor], clients: Any, start: Tensor, choice: Tuned
) -> dict[str, Tensor]:
    """Return every client's parameters; those without training samples keep the shared ones."""
    n = len(clients.names)
    own = {name: part.expand(n, *part.shape).clone() for name, part in shared.items()}
    if choice.steps:
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

    from equifed.models.fit_own import check_fit, sample_losses
    from equifed.models.own_prediction import module_of

    held, loss = data.splits()["validation"], check_fit(predictor.loss, 1.0)
    found = []
    for i in np.flatnonzero(held.sizes):
        inputs, targets = held.client(int(i))
        module = module_of(predictor.module, own, data.names, data.names[i])
        outputs = torch.as_tensor(predictor.run_module(module, inputs)).double()
        found.append(float(sample_losses(outputs, torch.as_tensor(targets), loss).mean()))
    score = float(np.mean(found))
    return score if math.isfinite(score) else math.inf


__all__ = ["SHARES", "Tuned", "fine_tune"]
