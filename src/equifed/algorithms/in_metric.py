"""SCAFF-PD's round in the metric of the clients' curvature: tens of rounds become a few."""

from __future__ import annotations

import math
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
    Metric,
    MetricKind,
    choose_form,
    form_metric,
    least_weighted_loss,
    step_exactly,
)
from equifed.steps.schedule import StepSizes

__all__ = ["MetricKind", "MetricSizes", "check_metric", "play_in_metric"]

MOST_CLIENTS = 4000
"""Clients up to which the dual step is exact: it takes all inner products of their gradients."""


@dataclass(frozen=True, eq=False)
class MetricSizes(StepSizes):
    """Step size tau in a metric, and what the rounds in it remember.

    Parameters
    ----------
    metric : Metric, optional
        P; None before it is known.
    form : str or int
        Its form, or its rank.
    weights : Weights, optional
        Those by which the clients' Hessians were summed.
    exact, constant : bool
        Whether P is a sum of Hessians, and whether they are the same at every model.
    sums, age : int
        How often Hessians were summed, and rounds since then.
    origin, pull : Vector, optional
        Where the last step began, and the weighted gradient there; None: nothing to compare with.
    value, gain, faster : float
        The objective there, by how much the step should lower it, and that relative to the gain of
        the step before.
    share : float
        How much of that step was taken in the end.
    shortened : int
        How often a step was shortened.
    """

    metric: Metric | None = None
    form: Form | int = "blocks"
    weights: Weights | None = None
    exact: bool = True
    constant: bool = False
    sums: int = 0
    age: int = 0
    origin: Vector | None = None
    pull: Vector | None = None
    value: float = 0.0
    gain: float = 0.0
    faster: float = 1.0
    share: float = 1.0
    shortened: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the step size, and how often Hessians were summed and steps shortened."""
        found = {"curvature_sums": float(self.sums), "halvings": float(self.shortened)}
        return {"primal_step": self.primal, **found}

    def halved(self) -> StepSizes | None:
        """Return None: rounds in a metric judge their steps themselves."""
        return None


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
    products cannot be had. Signed weights enter P by their absolute values.
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
    size, kept = _judge(size, here)
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
    notes = (*(() if size.sums > 1 or not kept else _say(size, here)), *here.roll.notes)
    told = (here.value, clients.index, size.numbers(), notes, gradient, lower)
    after = {"x": new_x, "weights": weights, "losses": here.losses, "sizes": size}
    return replace(state, **after, away=here.roll.away), Info(weights, here.losses, *told)


def _listen(algorithm: Any, state: Any, clients: Clients, stream: Stream) -> Here:
    """Ask everybody for loss and gradient."""
    losses, c = clients.value_and_gradient(state.x, stream.at("gradient"))
    roll = take_attendance(algorithm, state, clients)
    return Here(clients, roll, state.x, losses, c, roll.objective.value(losses))


def _judge(size: MetricSizes, here: Here) -> tuple[MetricSizes, bool]:
    """Return the sizes after the last step showed what it was worth, and whether it is kept."""
    if size.origin is None:
        return size, True
    rounding = _rounding(here.x, here.value)
    kept_promise = (size.value - here.value + rounding) / max(size.gain * size.share, rounding)
    if kept_promise < 0.1 and size.share > 1e-6:
        less: dict[str, Any] = {"share": size.share / 4, "primal": size.primal / 2}
        return replace(size, shortened=size.shortened + 1, **less), False
    if kept_promise > 0.7:
        size = replace(size, primal=min(1.0, 2 * size.primal))
    return size, True


def _refresh(size: MetricSizes, here: Here, stream: Stream) -> tuple[MetricSizes, float | None]:
    """Return the sizes with a new metric, or with the old one corrected by the last step.

    With them comes a bound below the objective's minimum, where the new metric proves one.
    """
    weights, stale = here.roll.weights, _is_stale(size, here)
    if size.metric is not None and not (stale and size.exact):
        if size.origin is not None and size.pull is not None:
            change = here.gradients.weighted_sum(weights) - size.pull
            step, eps = here.x - size.origin, _epsilon(here.x)
            if float(step.norm()) > math.sqrt(eps) / 100 * float(here.x.norm()):  # not rounding
                size = replace(size, metric=size.metric.with_secant(step, change))
        if not stale:
            return replace(size, age=size.age + 1), None
    found = form_metric(here.clients, here.x, np.abs(weights), size.form, stream.at("metric"))
    if isinstance(found, str):
        raise RuntimeError(f"The clients' curvature can no longer be had: {found}.")
    metric, summed = found
    lower = None
    if summed.constant and summed.exact and weights.min() >= 0:
        least = least_weighted_loss(summed, metric, here.gradients.weighted_sum(weights))
        lower = float(weights @ here.losses) - here.roll.objective.penalty(weights) - least
        lower -= _rounding(here.x, float(weights @ np.abs(here.losses)))
    if size.metric is not None and not summed.exact:
        metric = replace(metric, steps=size.metric.steps, changes=size.metric.changes)
    known: dict[str, Any] = {"exact": summed.exact, "constant": summed.constant, "age": 0}
    return replace(size, metric=metric, weights=weights, sums=size.sums + 1, **known), lower


def _is_stale(size: MetricSizes, here: Here) -> bool:
    """Tell whether Hessians are to be summed: ever more seldom where they are bounds."""
    if size.metric is None or size.weights is None:
        return True
    if not size.exact:
        return size.age + 1 >= size.sums
    turned = float(np.abs(here.roll.weights - size.weights).sum())
    if size.constant and turned <= 0.01 * float(np.abs(size.weights).sum()):
        return False
    return size.faster > 0.02


def _step(size: MetricSizes, here: Here) -> tuple[Vector, Weights, MetricSizes] | str:
    """Return model, weights and sizes after the dual and the primal step, or why there are none."""
    metric, tau, before = size.metric, size.primal, size.gain
    assert metric is not None
    products = here.clients.inner_products(here.gradients, metric.solve)
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
    if algorithm.metric == "auto" and objective.l1_norm(len(clients.names)) > 1 + 1e-9:
        return None  # with signed weights such steps do not always end at the solution
    form: Form | int | str = f"there are more than {MOST_CLIENTS} clients"
    if hides_sums(clients):
        form = "the inner products of the clients' gradients are hidden from the server"
    elif len(clients.names) <= MOST_CLIENTS:
        form = choose_form(clients, state.x, algorithm.metric)
    if not isinstance(form, int) and form not in get_args(Form):
        return None if algorithm.metric == "auto" else form
    return MetricSizes(1.0, 0.0, 1.0, form=form)  # type: ignore[arg-type]


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


def _say(size: MetricSizes, here: Here) -> tuple[str, ...]:
    """Say what the metric is and what it costs."""
    metric = size.metric
    assert metric is not None
    (b, q), kind = metric.basis.shape[:2], "low rank"
    numbers = metric.basis.numel()
    if metric.values is None:
        kind = "diagonal" if metric.basis.dim() == 2 else "whole"
        numbers = b * q if kind == "diagonal" else b * q * (q + 1) // 2
    cost = numbers * here.x.element_size()
    what = f"{b} block{'s' if b > 1 else ''} of {q} x {q}, {kind}"
    return (
        f"steps in the metric of the clients' curvature ({what}): {_bytes(cost)} more per client "
        "whenever it is summed, in place of local steps",
    )


def _bytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} kB"


def _rounding(x: Vector, value: float) -> float:
    """Return by how much a computed objective may be off."""
    return 8 * _epsilon(x) * abs(value) + 1e-300


def _epsilon(x: Vector) -> float:
    return float(np.finfo(str(x.dtype).removeprefix("torch.")).eps)
