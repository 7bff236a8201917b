r"""The loss scale of a federation: what strengths of objectives are multiples of.

A penalty has the unit of a loss. With losses in another unit, dollars instead of thousands, the
same strength would be another objective. So it is given as a multiple of a scale s that is
measured once, before the first round, and recorded: the mean loss of the clients under the best
model without features. All of it comes from the losses and gradients of the clients at zero
parameters, where a model answers zero, and the bias of its last layer has the gradients

.. math:: \tfrac1K - p_k, \quad \tfrac12 - p_1, \quad -2\,\mathrm E\,y

for cross-entropy, the logistic and the squared loss, p and E being means over the clients. So

.. math:: s = -\sum_k p_k \log p_k \quad\text{or}\quad s = \mathrm E\,y^2 - (\mathrm E\,y)^2

takes one sum over clients, which hidden sums carry. A model without such a bias has the mean loss
at zero; any other loss than these three that of the first model.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar, cast

import numpy as np

from equifed.contract import Clients, MissingClients, Stream, Vector
from equifed.contract.clients import ask_those_present
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives.base import Relative
from equifed.steps.automatic import with_measured_step

T = TypeVar("T")

_NOTHING = 1e-9  # of the loss at zero: less than this is no scale


def lacks_scale(value: Any) -> bool:
    """Tell whether an algorithm, or an objective in it, has a strength without a scale."""
    if isinstance(value, Relative) and value.lacks_scale:
        return True
    parts = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return any(lacks_scale(getattr(value, part.name)) for part in parts)


def with_scale(value: T, scale: float) -> T:
    """Return an algorithm or objective whose strengths are multiples of ``scale``, unless given.

    >>> from equifed.objectives import ChiSquare
    >>> with_scale(ChiSquare(rho=0.1), 2.0).strong_convexity(5)
    1.0
    """
    if not lacks_scale(value):
        return value
    whole: Any = value
    names = [part.name for part in dataclasses.fields(whole) if part.init]
    changed = {name: with_scale(getattr(whole, name), scale) for name in names}
    if isinstance(value, Relative):
        changed["scale"] = scale if value.lacks_scale else whole.scale
    return cast(T, dataclasses.replace(whole, **changed))


def settle_work(
    algorithm: T, clients: Clients, x: Vector, stream: Stream
) -> tuple[T, list[tuple[str, str]]]:
    """Return FedAvg with a measured step size where nothing was said of its work, and a note.

    Profile losses need all samples, so that every algorithm's default minibatches become whole
    steps there.
    """
    holder: Any = algorithm
    whole, default = clients.needs_all_samples(), getattr(holder, "local", None) is DEFAULT_WORK
    if not default or not (whole or getattr(holder, "averages", False)) or clients.adds_noise():
        return algorithm, []
    work = dataclasses.replace(DEFAULT_WORK, batch_size=None) if whole else DEFAULT_WORK
    given = dataclasses.replace(holder, local=work)
    try:  # the first round will name those who are missing
        found: Any = ask_those_present(
            clients, lambda there: with_measured_step(given, there, x, stream.at("measured lr"))
        )
    except MissingClients:
        return cast(T, given), []
    told = f"Local work was not given: {found.local!r}, a step size measured for these clients"
    return cast(T, found), [("note", told)]


def loss_scale(clients: Clients, x: Vector, stream: Stream) -> float:
    """Return the mean loss of the clients under the best model without features."""
    if clients.adds_noise():
        raise ValueError(
            "The scale that the objective's strength is a multiple of would be read off the "
            "clients' rows, which are private here; declare it: scale = 1.0 in the objective makes "
            "the strength a number in the loss's unit."
        )
    scale, whole = ask_those_present(clients, lambda there: _measure(there, x, stream))
    if not scale > _NOTHING * whole or not math.isfinite(scale):
        raise ValueError(
            f"The mean loss of a model without features is {max(scale, 0.0):g}: all labels are the "
            "same, so a strength has nothing to be a multiple of. Check the target column, or set "
            "scale = 1.0 in the objective, which makes its strength a number in the loss's unit."
        )
    return scale


def _measure(clients: Clients, x: Vector, stream: Stream) -> tuple[float, float]:
    """Return the mean loss without features and the one that it is small against."""
    model = clients.model
    name = None if model is None else model.known_loss
    if name not in ("cross_entropy", "squared", "binary_logistic") or clients.remembers_own():
        first = float(np.mean(clients.require_finite(clients.losses(x, stream), "the loss")))
        return first, abs(first)
    zero = x.new_zeros(x.shape)
    losses, gradients = clients.value_and_gradient(zero, stream)
    mean = float(np.mean(clients.require_finite(losses, "the loss at zero")))
    bias = _last_bias(model.shapes)
    outputs = 2 if name == "binary_logistic" else (0 if bias is None else bias.stop - bias.start)
    silent = name == "squared" or bool(np.allclose(losses, math.log(max(outputs, 1)), rtol=1e-4))
    if bias is None or not silent:  # an own bias is fitted already, other answers are not zero
        return mean, mean
    equal = np.full(len(losses), 1.0 / len(losses))
    slopes = gradients.weighted_sum(equal)[bias].double().cpu().numpy()
    if not np.isfinite(slopes).all():  # the first round will say whose
        return mean, mean
    if name == "squared":
        return mean - float(slopes @ slopes) / 4.0, mean
    shares = 1.0 / outputs - slopes
    if name == "binary_logistic":
        shares = np.array([shares[0], 1.0 - shares[0]])
    shares = np.clip(shares, 0.0, 1.0)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return -float(shares @ logs), mean


def _last_bias(shapes: dict[str, Any]) -> slice | None:
    """Return where the last layer's bias stands in the vector, if it has one."""
    name = list(shapes)[-1]
    if not name.endswith("bias") or len(shapes[name]) != 1:
        return None
    end = sum(math.prod(shape) for shape in shapes.values())
    return slice(end - shapes[name][0], end)
