"""SCAFF-PD's round in the metric of the clients' curvature: tens of rounds become a few."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equifed.algorithms.attendance import Attendance, take_attendance
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors
from equifed.contract.curvature import Form
from equifed.contract.participation import carry_over, sample_clients
from equifed.contract.streams import Stream
from equifed.steps.automatic import DECAY, AutoSteps
from equifed.steps.metric import (
    Metric,
    MetricKind,
    check_metric,
    choose_form,
    form_metric,
    least_weighted_loss,
    step_exactly,
)
from equifed.steps.schedule import StepSizes

__all__ = ["MetricKind", "MetricSizes", "check_metric", "play_in_metric"]

MOST_CLIENTS = 4000
"""Clients up to which the dual step is exact: it takes all inner products of their gradients."""

COUPLING = 0.7
"""The product of step sizes and squared coupling where the dual step is not exact."""


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
    coupling : float
        That of weights and model in the metric: used where the dual step is not exact.
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
    value: float = math.inf
    gain: float = 0.0
    faster: float = math.inf
    share: float = 1.0
    shortened: int = 0
    coupling: float = 0.0

    def numbers(self) -> dict[str, float]:
        """Return the step size, and how often Hessians were summed and steps shortened."""
        found = {"curvature_sums": float(self.sums), "halvings": float(self.shortened)}
        return {"primal_step": self.primal, **found}

    def halved(self) -> StepSizes | None:
        """Return half the step sizes; None where rounds judge their steps themselves."""
        if self.origin is not None or self.metric is None:
            return None
        return replace(self, primal=self.primal / 2, shortened=self.shortened + 1)


@dataclass(frozen=True, eq=False)
class Here:
    """What a round has heard: who is there, the losses, the gradients, the objective."""

    clients: Clients
    roll: Attendance
    x: Vector
    losses: Losses
    gradients: ClientVectors
    value: float
    complete: bool  # everybody answered, on all samples


def may_use_metric(algorithm: Any) -> bool:
    """Tell whether rounds of this algorithm may be steps in a metric.

    ``"auto"`` leaves alone what somebody chose: step sizes, local work, samples of clients and
    minibatches.
    """
    kind: MetricKind = algorithm.metric
    if kind != "auto":
        return kind != "none"
    chosen = (algorithm.steps, algorithm.local)
    default = (AutoSteps(), type(algorithm).local)
    batches = (algorithm.gradient_batch_size, algorithm.loss_batch_size)
    return chosen == default and batches == (None, None) and algorithm.participation == 1


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

    Where somebody is missing, or inner products stay unknown, the dual step is (4.1) itself with
    the coupling measured in the last P. Signed weights enter P by their absolute values.
    """
    size = state.sizes or _first_sizes(algorithm, state, clients)
    if not isinstance(size, MetricSizes):
        return None
    here = _listen(algorithm, state, clients, stream)
    size, kept = _judge(size, here) if here.complete else (replace(size, origin=None), True)
    lower = None
    if kept:
        size, lower = _refresh(size, here, stream)
        new_x, weights, size = _step(size, here, state)
    else:
        assert size.origin is not None
        new_x, weights = size.origin + 0.25 * (here.x - size.origin), here.roll.weights
    roll, full = here.roll, algorithm.gradient_batch_size is None
    gradient = here.gradients.weighted_sum(roll.scale(weights)) if full else None
    notes = (*(() if state.sizes else _say(size, here)), *roll.notes)
    index = here.clients.index
    info = Info(weights, here.losses, here.value, index, size.numbers(), notes, gradient, lower)
    after = {"x": new_x, "weights": weights, "losses": here.losses, "sizes": size}
    return replace(state, **after, away=roll.away), info


def _listen(algorithm: Any, state: Any, clients: Clients, stream: Stream) -> Here:
    """Ask those who take part for losses and gradients."""
    clients, x = sample_clients(clients, algorithm.participation, stream), state.x
    batch = algorithm.gradient_batch_size
    seen, c = clients.value_and_gradient(x, stream.at("gradient"), batch)
    if algorithm.loss_batch_size != batch:
        seen = clients.losses(x, stream.at("losses"), algorithm.loss_batch_size)
    n, roll = len(clients.names), take_attendance(algorithm, state, clients)
    losses = carry_over(state.losses, clients.index, seen, n)
    complete = len(clients.index) == n and batch is None and algorithm.loss_batch_size is None
    return Here(clients, roll, x, losses, c, roll.objective.value(losses), complete)


def _judge(size: MetricSizes, here: Here) -> tuple[MetricSizes, bool]:
    """Return the sizes after the last step showed what it was worth, and whether it is kept."""
    if size.origin is None:
        return size, True
    rounding = _rounding(here.x, here.value)
    kept_promise = (size.value - here.value + rounding) / max(size.gain * size.share, rounding)
    if kept_promise < 0.1 and size.share > 1e-6:
        less = {"share": size.share / 4, "primal": size.primal / 2}
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
            corrected = size.metric.with_secant(here.x - size.origin, change)
            size = replace(size, metric=corrected)
        if not stale:
            return replace(size, age=size.age + 1), None
    present = np.abs(here.roll.scale(weights))
    found = form_metric(here.clients, here.x, present, size.form, stream.at("metric"))
    if isinstance(found, str):
        raise RuntimeError(f"The clients' curvature can no longer be had: {found}.")
    metric, summed = found
    lower = None
    if summed.constant and summed.exact and here.complete and weights.min() >= 0:
        least = least_weighted_loss(summed, metric, here.gradients.weighted_sum(weights))
        lower = float(weights @ here.losses) - here.roll.objective.penalty(weights) - least
    if size.metric is not None and not summed.exact:
        metric = replace(metric, steps=size.metric.steps, changes=size.metric.changes)
    known = {"exact": summed.exact, "constant": summed.constant, "age": 0}
    return replace(size, metric=metric, weights=weights, sums=size.sums + 1, **known), lower


def _is_stale(size: MetricSizes, here: Here) -> bool:
    """Tell whether Hessians are to be summed: seldom where they are bounds or somebody is away."""
    if size.metric is None or size.weights is None:
        return True
    if len(here.clients.index) < len(here.clients.names) and len(here.roll.away) > 0:
        return size.age + 1 >= 4 * size.sums
    if not (size.exact and here.complete):
        return size.age + 1 >= size.sums
    turned = float(np.abs(here.roll.weights - size.weights).sum())
    if size.constant and turned <= 0.01 * float(np.abs(size.weights).sum()):
        return False
    return size.faster > 0.02


def _step(size: MetricSizes, here: Here, state: Any) -> tuple[Vector, Weights, MetricSizes]:
    """Return model, weights and sizes after the dual and the primal step."""
    metric, roll, x, c = size.metric, here.roll, here.x, here.gradients
    assert metric is not None
    products: Losses | str = "somebody is missing"
    if here.complete and len(here.losses) <= MOST_CLIENTS:
        products = here.clients.inner_products(c, metric.solve)
    if isinstance(products, str):
        return _step_by_coupling(size, here, state)
    before, tau = size.gain, size.primal
    weights, gain = step_exactly(roll.objective, here.losses, products, roll.weights, tau)
    pull = c.weighted_sum(weights)
    new_x = x - tau * _answer(metric, pull)  # x - tau P^-1 sum_i lambda_i c_i
    size = replace(size, origin=x, pull=pull, value=here.value, gain=gain, share=1.0)
    most = float(np.linalg.norm(products, 2)) if size.coupling == 0 else size.coupling
    return (
        new_x,
        weights,
        replace(size, faster=gain / before if before > 0 else math.inf, coupling=most),
    )


def _step_by_coupling(
    size: MetricSizes, here: Here, state: Any
) -> tuple[Vector, Weights, MetricSizes]:
    """Take (4.1) with sigma = 0.7 / (tau K), K in the metric, and one step of the model."""
    metric, roll, c = size.metric, here.roll, here.gradients
    assert metric is not None
    steepest, tau = size.coupling, COUPLING * size.primal
    if steepest == 0:  # the sum of all squared lengths, as signs at random show it
        signs = np.where(np.arange(len(here.clients.index)) % 2, 1.0, -1.0)
        steepest = 2 * _squared_length(metric, c.weighted_sum(signs))
        steepest = max(steepest, _squared_length(metric, c.weighted_sum(np.abs(signs))))
    sigma = min(COUPLING / max(tau * steepest, 1e-300), 1e300)
    ahead = 2 * here.losses - roll.previous(state.losses, here.losses)  # s
    weights = roll.objective.prox(roll.weights + sigma * ahead, sigma)  # (4.1)
    pull = c.weighted_sum(roll.scale(weights))
    turned = roll.scale(weights) - roll.scale(roll.weights)
    if (length := float(turned @ turned)) > 1e-24 * float(weights @ weights):
        seen = _squared_length(metric, c.weighted_sum(turned)) / length
        steepest = max(seen, DECAY * steepest)
    new_x = here.x - tau * _answer(metric, pull)
    return new_x, weights, replace(size, origin=None, pull=None, coupling=steepest, dual=sigma)


def _answer(metric: Metric, pull: Vector) -> Vector:
    return metric.solve(pull[None])[0].to(pull.dtype)


def _squared_length(metric: Metric, vector: Vector) -> float:
    return float(vector.double() @ metric.solve(vector[None])[0])


def _first_sizes(algorithm: Any, state: Any, clients: Clients) -> MetricSizes | None:
    """Return the sizes of the first round, if there is to be a metric and it can be had."""
    if not may_use_metric(algorithm):
        return None
    form = choose_form(clients, state.x, algorithm.metric)
    return None if form is None else MetricSizes(1.0, 0.0, 1.0, form=form)


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
    eps = np.finfo(str(x.dtype).removeprefix("torch.")).eps
    return float(8 * eps * abs(value)) + 1e-300
