"""Fine-tuning: after training every client takes local steps of its own from the shared model.

What counting and measuring its training samples says may come on top: its own shares of classes,
and its own offset of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation

if TYPE_CHECKING:
    from torch import Tensor

    from equifed.models.class_shares import ClassKinds
    from equifed.models.client_offsets import Components
    from equifed.models.predictor import Predictor

Array = NDArray[np.float64]
RATES = (0.01, 0.03, 0.1)
STEPS = (10, 30, 100)
"""Step sizes and numbers of steps that are tried."""
TRUSTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of what own offsets say that are tried: a network has seen the same inputs already."""
BATCH = 20
"""Samples of a step."""
SAMPLES = 10
"""Training samples of all clients together for each component in which offsets are measured."""
MOST_BYTES = 2**32
"""Of all clients' own models together."""


@dataclass(frozen=True)
class Tuned:
    """How a shared model becomes each client's own: ``steps`` local steps of length ``lr``.

    With ``shares`` logits are then moved by the client's shares of classes, with ``trust`` by so
    large a part of what its offset in ``offsets`` components of the inputs says.
    """

    lr: float
    steps: int
    shares: bool = False
    offsets: int = 0
    trust: float = 0.0

    def __str__(self) -> str:
        told = [f"{self.steps} local steps of {BATCH} samples, lr {self.lr:g}"] * (self.steps > 0)
        told += ["own shares of classes"] * self.shares
        offsets = (
            f"own offsets in {self.offsets} components of the inputs, trusted by {self.trust:g}"
        )
        return " and ".join(told + [offsets] * (self.trust > 0)) or "no change"

    def to_dict(self) -> dict[str, float]:
        """Return it as plain values, which :func:`fine_tune` takes."""
        told: dict[str, float] = {"lr": self.lr, "steps": self.steps}
        told |= {"shares": True} if self.shares else {}
        return told | ({"offsets": self.offsets, "trust": self.trust} if self.trust else {})


def fine_tune(
    predictor: Predictor,
    data: Federation,
    lr: float | None = None,
    steps: int | None = None,
    device: str = "cpu",
    class_kinds: ClassKinds | None = None,
    offsets: int | None = None,
    trust: float | None = None,
) -> tuple[Tuned, Predictor]:
    """Return how the clients' own models were made, and what predicts with them.

    Every client goes from the shared parameters, by minibatches of its training samples. Step size
    and number of steps are one choice for all clients, by the loss on validation samples, averaged
    over clients; to change nothing is among the choices. With ``class_kinds`` each of them is tried
    with and without own shares of classes; where no steps are chosen, shares are used. With
    ``offsets`` each is tried with several parts of what own offsets say, unless ``trust`` is given.
    Without steps only what is moved is own.
    """
    _check(predictor)
    tried, trusts = _tried(data, lr, steps), _trusts(data, offsets, trust)
    chosen = len(tried) > 1 or len(trusts) > 1
    shares = None if class_kinds is None else _shares(predictor, data, class_kinds)
    measured = None if offsets is None else _measure(predictor, data, offsets)
    judged = _judged(data, measured) if chosen else []
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
        outputs = _answer(predictor, judged, own if choice.steps else {})
        for one in _variants(choice, trusts, shares is not None, len(tried) > 1, measured):
            score = _score(predictor, judged, outputs, one, shares) if chosen else 0.0
            if best is None or score < best[0]:
                best = score, one, own
    assert best is not None
    _, choice, own = best
    return choice, _give(predictor, choice, own, shares, measured)


# -- what is moved by counting and measuring ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Shares:
    """The last bias's name, and by how much every client's moves (n, k)."""

    bias: str
    moved: Array


@dataclass(frozen=True, eq=False)
class _Measured:
    """Components of the inputs, and what clients' logits move by: weights (n, k, d), biases."""

    components: Components
    weight: Array
    bias: Array

    def move(self, i: int, inputs: NDArray[Any]) -> Array:
        """Return by how much client i's logits of these inputs move."""
        moved: Array = self.components.of(inputs) @ self.weight[i].T + self.bias[i]
        return moved


def _shares(predictor: Predictor, data: Federation, class_kinds: ClassKinds) -> _Shares:
    """Return by how much every client's last bias moves, for its counts of labels."""
    import torch

    from equifed.models.class_shares import share_shifts
    from equifed.models.fit_own import find_last_layer, read_last_layer
    from equifed.models.own_part import choose_own

    classes = _classes(predictor, data, "class_kinds")
    names, few = choose_own(predictor.module, "bias"), data.train.inputs[:8]
    place = find_last_layer(predictor.module, names)  # both refuse what moves no logits
    read_last_layer(
        predictor.module, place, lambda m: torch.as_tensor(predictor.run_module(m, few))
    )
    counts = [np.bincount(data.train.client(i)[1], minlength=classes)
              for i in range(len(data.names))]  # fmt: skip
    return _Shares(names[0], _of_logits(predictor, share_shifts(np.stack(counts), class_kinds)))


def _measure(predictor: Predictor, data: Federation, count: int) -> _Measured:
    """Return what every client's logits move by, for its offset in components of the inputs."""
    from equifed.models.client_offsets import fit_offsets, leading_components

    classes = _classes(predictor, data, "offsets")
    if predictor.tokens:
        raise ValueError(
            "offsets are of inputs that are numbers, and these are tokens; leave it out."
        )
    most = max(1, len(data.train.targets) // SAMPLES)
    components = leading_components(data.train.inputs, min(int(count), most))
    if not len(components.axes):
        raise ValueError("offsets: all training inputs are the same; leave it out.")
    t = components.of(data.train.inputs)
    owners = np.repeat(np.arange(len(data.names)), data.train.sizes)
    found = fit_offsets(t, data.train.targets, owners, len(data.names), classes)
    weight, bias = found.shifts()
    return _Measured(components, _of_logits(predictor, weight), _of_logits(predictor, bias))


def _classes(predictor: Predictor, data: Federation, what: str) -> int:
    if data.classes is None or predictor.loss not in ("cross_entropy", "binary_logistic"):
        raise ValueError(
            f"{what} is for models of classes with the loss cross_entropy or binary_logistic, "
            f"and this one has {predictor.loss or 'another'}; leave it out."
        )
    if data.train.targets.ndim != 1:
        shape = data.train.targets.shape[1:]
        raise ValueError(
            f"{what} is for one class per sample, and these have {shape}; leave it out."
        )
    return data.classes


def _of_logits(predictor: Predictor, moved: Array) -> Array:
    """Return shifts of the model's logits (n, k, ...); one logit is class 1's against class 0's."""
    return moved[:, 1:] - moved[:, :1] if predictor.loss == "binary_logistic" else moved


def _variants(
    choice: Tuned, trusts: Sequence[float], shares: bool, also_without: bool,
    measured: _Measured | None,
) -> Iterator[Tuned]:  # fmt: skip
    """Yield a choice of steps with own shares, unless these are to be chosen, and every trust."""
    d = 0 if measured is None else len(measured.components.axes)
    for counted in (False, True) if shares and also_without else (shares,):
        for trust in trusts:
            yield replace(choice, shares=counted, offsets=d if trust else 0, trust=trust)


def _give(
    predictor: Predictor, choice: Tuned, own: dict[str, Tensor], shares: _Shares | None,
    measured: _Measured | None,
) -> Predictor:  # fmt: skip
    """Return what predicts with clients' own models."""
    import torch

    from equifed.models.client_offsets import Beside

    moved = shares.moved if shares is not None and choice.shares else None
    if measured is None or not choice.trust:
        if shares is not None and moved is not None:
            last = own[shares.bias]
            last = last + torch.as_tensor(moved).to(last)
            own = {**(own if choice.steps else {}), shares.bias: last}
        return replace(predictor, own=own)
    seen, bias = measured.components, choice.trust * measured.bias
    centre, axes = torch.as_tensor(seen.centre), torch.as_tensor(seen.axes)
    module = Beside(predictor.module, centre, axes, bias.shape[1])
    like = module.linear.bias
    parts = {f"network.{name}": part for name, part in own.items()} if choice.steps else {}
    parts["linear.weight"] = torch.as_tensor(choice.trust * measured.weight).to(like.dtype)
    parts["linear.bias"] = torch.as_tensor(bias if moved is None else bias + moved).to(like.dtype)
    return replace(predictor, module=module, own=parts)


# -- steps and choices ----------------------------------------------------------------------------


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
    _check_held(data, "Step size and number of steps are", "lr= and steps=")
    rates: Sequence[float] = RATES if lr is None else (lr,)
    counts: Sequence[int] = STEPS if steps is None else (steps,)
    return [Tuned(0.0, 0), *(Tuned(r, s) for r in rates for s in counts)]


def _trusts(data: Federation, offsets: int | None, trust: float | None) -> Sequence[float]:
    """Return the parts of what own offsets say that are tried, or the one that is given."""
    if offsets is None:
        if trust is not None:
            raise ValueError("trust is of own offsets; give offsets= with it, as 30 components.")
        return (0.0,)
    if isinstance(offsets, bool) or not (offsets >= 1 and float(offsets).is_integer()):
        raise ValueError(f"offsets is a number of components, at least 1, got {offsets}.")
    if trust is None:
        _check_held(data, "How far own offsets are trusted is", "trust=")
        return TRUSTS
    if not 0 <= trust <= 1:
        raise ValueError(f"trust must lie in [0, 1], got {trust}.")
    return (float(trust),)


def _check_held(data: Federation, what: str, cure: str) -> None:
    if data.validation is None or not len(data.validation.targets):
        raise ValueError(
            f"{what} chosen on validation samples, and these data have none: hold some out "
            f"([data.holdout] validation = 0.2), or give {cure}."
        )


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


@dataclass(frozen=True, eq=False)
class _Judged:
    """A client's validation samples, and by how much its offset moves their logits."""

    client: int
    inputs: NDArray[Any]
    targets: NDArray[Any]
    moved: Array | float


def _judged(data: Federation, measured: _Measured | None) -> list[_Judged]:
    """Return the clients that have validation samples."""
    held, found = data.splits()["validation"], []
    for i in map(int, np.flatnonzero(held.sizes)):
        inputs, targets = held.client(i)
        found.append(_Judged(i, inputs, targets, measured.move(i, inputs) if measured else 0.0))
    return found


def _answer(
    predictor: Predictor, judged: Sequence[_Judged], own: Mapping[str, Tensor]
) -> list[Array]:
    """Return the outputs of every client's model, or of the shared one."""
    from equifed.models.own_prediction import module_of

    module, names = predictor.module, predictor.clients
    models = (module_of(module, own, names, names[one.client]) if own else module for one in judged)
    return [predictor.run_module(m, one.inputs) for m, one in zip(models, judged, strict=True)]


def _score(
    predictor: Predictor, judged: Sequence[_Judged], outputs: Sequence[Array], choice: Tuned,
    shares: _Shares | None,
) -> float:  # fmt: skip
    """Return the loss on validation samples, averaged over the clients that have some."""
    import torch

    from equifed.models.fit_own import check_fit, sample_losses

    loss, found = check_fit(predictor.loss, 1.0), []
    for one, before in zip(judged, outputs, strict=True):
        after = before + choice.trust * one.moved
        if shares is not None and choice.shares:
            after = after + shares.moved[one.client]
        losses = sample_losses(torch.as_tensor(after), torch.as_tensor(one.targets), loss)
        found.append(float(losses.mean()))
    score = float(np.mean(found))
    return score if math.isfinite(score) else math.inf


__all__ = ["Tuned", "fine_tune"]
