"""SCAFF-PD's round in the metric of the clients' curvature: tens of rounds become a few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from equifed.algorithms.attendance import Attendance, take_attendance
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors, hides_sums
from equifed.contract.curvature import Form
from equifed.contract.streams import Stream
from equifed.objectives.base import FreeSum
from equifed.steps.automatic import AutoSteps
from equifed.steps.metric import (
    MetricKind,
    choose_form,
    form_metric,
    least_weighted_loss,
    step_exactly,
)
from equifed.steps.metric_sizes import MetricSizes, rounding

__all__ = ["MetricKind", "MetricSizes", "check_metric", "play_in_metric"]

MOST_CLIENTS = 4000
"""Clients up to which the dual step is exact: it takes all inner products of their gradients."""


@dataclass(frozen=True, eq=False)
class Here:
    """What a round has heard: who is there, the losses, the gradients, the objective."""

    clients: Clients
    roll: Attendance
    x: Vector
    losses: Losses
    gradients: ClientVectors
    value: float


def check_metric(algorithm: Any) -> None:
    """Refuse a metric that there is not, and one for parts of the samples or clients."""
    kind = algorithm.metric
    if kind not in get_args(MetricKind):
        raise ValueError(f"metric must be one of {', '.join(get_args(MetricKind))}, got {kind!r}.")
    if kind not in ("auto", "none") and not _hears_everything(algorithm):
        raise ValueError(
            f"metric={kind!r} needs losses and gradients on all samples of all clients; leave out "
            "gradient_batch_size, loss_batch_size and participation, or the metric."
        )


def _hears_everything(algorithm: Any) -> bool:
    batches = (algorithm.gradient_batch_size, algorithm.loss_batch_size)
    return batches == (None, None) and bool(algorithm.participation == 1)


def may_use_metric(algorithm: Any) -> bool:
    """Tell whether rounds of this algorithm may be steps in a metric: on all samples of everybody.

    ``"auto"`` leaves alone what somebody chose: step sizes and local work.
    """
    kind: MetricKind = algorithm.metric
    whole = _hears_everything(algorithm)
    chosen, default = (algorithm.steps, algorithm.local), (AutoSteps(), type(algorithm).local)
    return whole and kind != "none" and (kind != "auto" or chosen == default)


def play_in_metric(
    algorithm: Any, state: Any, clients: Clients, stream: Stream
) -> tuple[Any, Info] | None:
    r"""Return the state after a round in the metric, or None where there is no metric.

    .. math::

       P &= \textstyle\sum_i \lambda_i H_i(x) \quad \text{(at times)} \\
       \lambda &\leftarrow \arg\max_{\lambda \in \Lambda}\ \langle\lambda, l\rangle - \psi(\lambda)
              - \tfrac\tau2 \bigl|\textstyle\sum_i \lambda_i c_i\bigr|^2_{P^{-1}} \\
       x &\leftarrow x - \tau P^{-1} \textstyle\sum_i \lambda_i c_i

    That is (4.1) and (4.2) with one local step in the metric P and the dual step solved exactly
    against the model's answer to it: Newton's method for the average, sequential quadratic
    programming for a maximum. A step that lowers the objective by less than a tenth of what it
    should is shortened in the next round. Between two sums of Hessians the steps themselves correct
    P (:meth:`equifed.steps.metric.Metric.with_secant`).

    From the first round in which somebody is missing on, rounds are SCAFF-PD's own, with step sizes
    of their own; they are so from the beginning where the clients' curvature or their inner
    products cannot be had. Signed weights enter P by their absolute values; ``"auto"`` takes such
    steps only where all weighted losses are known to be convex (else they end at a stationary point
    that need not be the best). With the average this is what SCAFFOLD's fresh variates and with no
    penalty what AFL would do in a metric: neither local steps nor a dual step size are left in it.
    """
    size = state.sizes or _first_sizes(algorithm, state, clients)
    plain = replace(algorithm, metric="none")
    if isinstance(size, str):
        return _without_metric(plain, state, clients, stream, size)
    if not isinstance(size, MetricSizes):
        return None
    if len(clients.index) < len(clients.names):
        why = "somebody was missing; from here on rounds are SCAFF-PD's own"
        return _without_metric(plain, state, clients, stream, why)
    here = _listen(algorithm, state, clients, stream)
    size, kept = size.judged(here.x, here.value)
    lower = None
    if kept:
        size, lower = _refresh(size, here, stream)
        stepped = _step(size, here)
        if isinstance(stepped, str):
            return _without_metric(plain, state, clients, stream, stepped)
        new_x, weights, size = stepped
    else:
        assert size.origin is not None
        new_x, weights = size.origin + 0.25 * (here.x - size.origin), here.roll.weights
    gradient = here.gradients.weighted_sum(weights)
    notes = (*(size.said() if kept else ()), *here.roll.notes)
    told = (here.value, clients.index, size.numbers(), notes, gradient, lower)
    after = {"x": new_x, "weights": weights, "losses": here.losses, "sizes": size}
    return replace(state, **after, away=here.roll.away), Info(weights, here.losses, *told)


def _listen(algorithm: Any, state: Any, clients: Clients, stream: Stream) -> Here:
    """Ask everybody for loss and gradient."""
    losses, c = clients.value_and_gradient(state.x, stream.at("gradient"))
    roll = take_attendance(algorithm, state, clients)
    return Here(clients, roll, state.x, losses, c, roll.objective.value(losses))


def _refresh(size: MetricSizes, here: Here, stream: Stream) -> tuple[MetricSizes, float | None]:
    """Return the sizes with a new metric, or with the old one corrected by the last step.

    With them comes a bound below the objective's minimum, where the new metric proves one.
    """
    weights = here.roll.weights
    stale = size.is_stale(weights)
    if not (stale and size.exact):
        size = size.corrected(here.x, here.gradients.weighted_sum(weights))
        if not stale:
            return replace(size, age=size.age + 1), None
    found = form_metric(here.clients, here.x, np.abs(weights), size.form, stream.at("metric"))
    if isinstance(found, str):
        raise RuntimeError(f"The clients' curvature can no longer be had: {found}.")
    metric, summed = found
    lower = None
    if summed.constant and summed.exact and weights.min() >= 0 and _tells_exactly(here):
        least = least_weighted_loss(summed, metric, here.gradients.weighted_sum(weights))
        lower = float(weights @ here.losses) - here.roll.objective.penalty(weights) - least
        lower -= rounding(here.x, float(weights @ np.abs(here.losses)))
    if size.metric is not None and not summed.exact:
        metric = replace(metric, steps=size.metric.steps, changes=size.metric.changes)
    known: dict[str, Any] = {"exact": summed.exact, "constant": summed.constant, "age": 0}
    return replace(size, metric=metric, weights=weights, sums=size.sums + 1, **known), lower


def _tells_exactly(here: Here) -> bool:
    """Tell whether losses and gradients are exact: those with own parts are nearly so."""
    return here.clients.inexactness(here.x) is None


def _step(size: MetricSizes, here: Here) -> tuple[Vector, Weights, MetricSizes] | str:
    """Return model, weights and sizes after the dual and the primal step, or why there are none."""
    metric, tau, before = size.metric, size.primal, size.gain
    assert metric is not None
    products = here.clients.inner_products(here.gradients, metric.multiply)
    if isinstance(products, str):
        return products
    objective, old = here.roll.objective, here.roll.weights
    weights, gain = step_exactly(objective, here.losses, products, old, tau)
    pull = here.gradients.weighted_sum(weights)
    new_x = here.x - tau * metric.solve(pull[None])[0].to(pull.dtype)
    size = replace(size, origin=here.x, pull=pull, value=here.value, gain=gain, share=1.0)
    return new_x, weights, replace(size, faster=gain / before if before > 0 else 1.0)


def _first_sizes(algorithm: Any, state: Any, clients: Clients) -> MetricSizes | str | None:
    """Return the sizes of the first round; why there is no metric, where one was asked for."""
    if not may_use_metric(algorithm):
        return None
    objective = objective_of(algorithm, state)
    if isinstance(objective, FreeSum):
        return None if algorithm.metric == "auto" else "its weights have no fixed sum"
    if algorithm.metric == "auto" and not _has_one_solution(objective, clients):
        return None
    form: Form | int | str = f"there are more than {MOST_CLIENTS} clients"
    if hides_sums(clients):
        form = "the inner products of the clients' gradients are hidden from the server"
    elif len(clients.names) <= MOST_CLIENTS:
        form = choose_form(clients, state.x, algorithm.metric)
    if not isinstance(form, int) and form not in get_args(Form):
        return None if algorithm.metric == "auto" else form
    return MetricSizes(1.0, 0.0, 1.0, form=form)  # type: ignore[arg-type]


def _has_one_solution(objective: Any, clients: Clients) -> bool:
    """Tell whether every weighted loss is known to be convex, signed weights or not.

    Where it is not, steps in a metric end at the next stationary point, which need not be the best.
    """
    norm = objective.l1_norm(len(clients.names))
    if norm <= 1 + 1e-9:
        return True
    known = clients.curvature()
    return not isinstance(known, str) and known.least_modulus(norm) > 0


def objective_of(algorithm: Any, state: Any) -> Any:
    """Return what an algorithm minimises in a state."""
    asks = getattr(algorithm, "objective_at", None)
    return algorithm.objective if asks is None else asks(state)


def _without_metric(
    plain: Any, state: Any, clients: Clients, stream: Stream, reason: str
) -> tuple[Any, Info]:
    """Return the state after a round of the algorithm's own, and say why it is one."""
    moved, info = plain.round(replace(state, sizes=None), clients, stream)
    return moved, replace(info, notes=(f"no steps in a metric: {reason}", *info.notes))
