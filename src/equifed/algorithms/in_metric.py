"""SCAFF-PD's round in the metric of the clients' curvature: tens of rounds become a few."""

from __future__ import annotations

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
from equifed.steps.automatic import AutoSteps
from equifed.steps.metric import BLOCKS, RANK, WHOLE, Metric, MetricKind, form_metric, step_exactly
from equifed.steps.schedule import StepSizes

MOST_CLIENTS = 4000
"""Clients up to which the dual step is exact: it takes all inner products of their gradients."""


@dataclass(frozen=True, eq=False)
class MetricSizes(StepSizes):
    """Step size tau in a metric, and what the rounds in it remember.

    Parameters
    ----------
    metric : Metric, optional
        P; None before it is known.
    kind : str or int
        Its form, or its rank.
    weights : Weights, optional
        Those by which the clients' Hessians were summed.
    exact, constant : bool
        Whether P is a sum of Hessians, and whether they are the same at every model.
    origin : Vector, optional
        Where the last step began; None where there is nothing to compare with.
    value, gain : float
        The objective there, and by how much the step should have lowered it.
    share : float
        How much of that step was taken in the end.
    steep : float
        The squared length of the gradient in the metric: a round ago, relative to the round before.
    age : int
        Rounds since Hessians were summed.
    pull : Vector, optional
        The weighted gradient at ``origin``.
    coupling : float
        The coupling of weights and model in the metric, where the dual step is not exact.
    sums, shortened : int
        How often Hessians were summed, and steps shortened.
    """

    metric: Metric | None = None
    kind: Form | int = "blocks"
    weights: Weights | None = None
    exact: bool = True
    constant: bool = False
    age: int = 0
    pull: Vector | None = None
    origin: Vector | None = None
    value: float = np.inf
    gain: float = 0.0
    share: float = 1.0
    steep: float = np.inf
    coupling: float = 0.0
    sums: int = 0
    shortened: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the step size, and how often Hessians were summed and steps shortened."""
        return {
            "primal_step": self.primal,
            "curvature_sums": float(self.sums),
            "halvings": float(self.shortened),
        }


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

    A step that lowers the objective by less than a tenth of what it should is shortened in the next
    round; tau follows how well steps keep their promise. Where somebody is missing, or inner
    products stay unknown, the dual step is SCAFF-PD's (4.1) with the coupling in the metric.
    """
    size = state.sizes or _choose(algorithm, state, clients, stream)
    if not isinstance(size, MetricSizes):
        return None
    clients, x = sample_clients(clients, algorithm.participation, stream), state.x
    batch = algorithm.gradient_batch_size
    seen, c = clients.value_and_gradient(x, stream.at("gradient"), batch)
    if algorithm.loss_batch_size != batch:
        seen = clients.losses(x, stream.at("losses"), algorithm.loss_batch_size)
    roll = take_attendance(algorithm, state, clients)
    losses = carry_over(state.losses, clients.index, seen, len(clients.names))
    value = roll.objective.value(losses)
    everybody = len(clients.index) == len(clients.names) and batch is None
    size, kept = _judge(size, value, _rounding(x, value)) if everybody else (size, True)
    if kept:
        size = _refresh(size, roll, clients, x, c, stream)
        new_x, weights, size = _step(size, roll, clients, x, c, losses, state, everybody, value)
    else:
        assert size.origin is not None
        new_x, weights = size.origin + 0.25 * (x - size.origin), roll.weights
    gradient = c.weighted_sum(roll.scale(weights)) if batch is None else None
    said = () if state.sizes else _say(size, x)
    info = Info(weights, losses, value, clients.index, size.numbers(), said + roll.notes, gradient)
    after = {"x": new_x, "weights": weights, "losses": losses, "sizes": size, "away": roll.away}
    return replace(state, **after), info


def _judge(size: MetricSizes, value: float, rounding: float) -> tuple[MetricSizes, bool]:
    """Return the sizes after the last step showed what it was worth, and whether it is kept."""
    if size.origin is None:
        return size, True
    kept_promise = (size.value - value + rounding) / max(size.gain * size.share, rounding)
    if kept_promise < 0.1 and size.share > 1e-6:
        return replace(
            size, share=size.share / 4, primal=size.primal / 2, shortened=size.shortened + 1
        ), False
    if kept_promise > 0.7:
        return replace(size, primal=min(1.0, 2 * size.primal)), True
    return size, True


def _refresh(
    size: MetricSizes, roll: Attendance, clients: Clients, x: Vector, c: ClientVectors,
    stream: Stream,
) -> MetricSizes:  # fmt: skip
    """Return the sizes with a new metric, or with the old one corrected by the last step."""
    metric = size.metric
    if metric is not None and not (size.exact and _is_stale(size, roll.weights)):
        if size.origin is not None and size.pull is not None:
            change = c.weighted_sum(roll.weights) - size.pull
            size = replace(size, metric=metric.with_secant(x - size.origin, change))
        if not _is_stale(size, roll.weights):
            return replace(size, age=size.age + 1)
    present = np.abs(roll.scale(roll.weights))
    found = form_metric(clients, x, present, size.kind, stream.at("metric"))
    if isinstance(found, str):
        return size
    new, summed = found
    if size.metric is not None and not summed.exact:
        new = replace(new, steps=size.metric.steps, changes=size.metric.changes)
    known = {"exact": summed.exact, "constant": summed.constant, "age": 0}
    return replace(size, metric=new, weights=roll.weights, sums=size.sums + 1, **known)


def _is_stale(size: MetricSizes, weights: Weights) -> bool:
    """Tell whether Hessians are to be summed again."""
    assert size.weights is not None
    if not size.exact:  # a bound stays one: seldom, and ever more so
        return size.age + 1 >= size.sums
    turned = float(np.abs(weights - size.weights).sum())
    if size.constant and turned <= 0.01 * float(np.abs(weights).sum()):
        return False
    return size.steep > 0.02


def _step(
    size: MetricSizes, roll: Attendance, clients: Clients, x: Vector, c: ClientVectors,
    losses: Losses, state: Any, everybody: bool, value: float,
) -> tuple[Vector, Weights, MetricSizes]:  # fmt: skip
    """Return model, weights and sizes after the dual and the primal step."""
    metric, tau = size.metric, size.primal
    assert metric is not None
    products: Losses | str = "somebody is missing"
    if everybody and len(losses) <= MOST_CLIENTS and roll.members is None:
        products = clients.inner_products(c, metric.solve)
    if isinstance(products, str):
        raise NotImplementedError(products)
    weights, gain = step_exactly(roll.objective, losses, products, roll.weights, tau)
    pull = c.weighted_sum(weights)
    new_x = x - tau * metric.solve(pull[None])[0].to(x.dtype)
    steep = gain / size.gain if size.gain > 0 else np.inf
    return new_x, weights, replace(
        size, origin=x, value=value, gain=gain, share=1.0, steep=steep, pull=pull
    )


def _choose(algorithm: Any, state: Any, clients: Clients, stream: Stream) -> MetricSizes | None:
    """Return the sizes of the first round, if the clients' curvature can be had."""
    if not may_use_metric(algorithm):
        return None
    kind = algorithm.metric
    n = len(clients.names)
    shape = clients.curvature_sum(state.x, np.full(len(clients.index), 1 / n), "diagonal")
    if isinstance(shape, str):
        return None
    (b, q), k = shape.blocks.shape, len(shape.places)
    if kind == "auto":
        kind = "full" if b * q * q <= BLOCKS else "low-rank"
    form: Form | int = "diagonal"
    if kind == "full":
        form = "full" if k * q <= WHOLE or b == 1 else "blocks"
    elif kind == "low-rank":
        form = RANK
    return MetricSizes(1.0, 0.0, 0.0, kind=form)


def _say(size: MetricSizes, x: Vector) -> tuple[str, ...]:
    return ()


def _rounding(x: Vector, value: float) -> float:
    """Return by how much a computed objective may be off."""
    eps = np.finfo(str(x.dtype).removeprefix("torch.")).eps
    return float(8 * eps * abs(value)) + 1e-300
