"""FairNewton: second-order steps in the model, and a step in the weights that is exact in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from equifed.algorithms.absence import Everyone, call_roll
from equifed.contract import Clients, Federated, Index, Info, Losses, Proof, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE
from equifed.contract.algorithm import Bound
from equifed.contract.arrays import ClientVectors
from equifed.contract.curvature import Form
from equifed.objectives.base import FreeSum, SaddleObjective, check_saddle
from equifed.steps.dual_step import Products, largest_coupling, step_exactly
from equifed.steps.metric import (
    Metric,
    MetricKind,
    MetricSizes,
    bound_below,
    choose_form,
    form_metric,
    rounding,
)

# Clients up to which the dual step is exact: inner products of their gradients take 0.8 GB
MOST_CLIENTS = 10_000

TAU = 0.7  # step of the model in rounds with somebody missing; that of the weights is 0.7 / (tau K)


@dataclass(frozen=True)
class State:
    """Model, weights, last losses, the metric in force, rounds since each client's last answer."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round, as are the next two
    sizes: MetricSizes | None = None
    away: Index | None = None


@dataclass(frozen=True)
class FairNewton(Federated):
    r"""Newton's method for fair objectives: a few rounds to a proved optimum. This one is ours.

    .. math::

       P &= \textstyle\sum_i \lambda_i H_i(x) \quad \text{(at times)} \\
       \lambda &\leftarrow \arg\max_{\lambda \in \Lambda}\ \langle\lambda, l\rangle - \psi(\lambda)
              - \tfrac\tau2 \bigl|\textstyle\sum_i \lambda_i c_i\bigr|^2_{P^{-1}},
              \qquad c_i = \nabla f_i(x) \\
       x &\leftarrow x - \tau P^{-1} \textstyle\sum_i \lambda_i c_i

    The :math:`H_i` are the clients' Hessians, or upper bounds of them. The second line is the dual
    of :math:`\min_\delta \Phi(l + c\,\delta) + |\delta|_P^2 / (2\tau)`, so for the average this is
    Newton's method, for a maximum sequential quadratic programming. :math:`\tau` is 1 and is
    shortened where a step lowers the objective by less than a tenth of what it should. Between two
    sums of Hessians the steps correct P (BFGS).

    It is for linear models and heads on frozen features, with all clients and samples in every
    round, on engines that show inner products of the clients' gradients. For networks, sampled
    clients or hidden sums take :class:`ScaffPD`; answers with noise for privacy may be hidden.
    Signed weights (relative fairness) enter P by their absolute values; unless a ``metric`` is
    named they are refused where the weighted loss is not known to be convex.

    When clients are missing, they count with what they sent last, and the weights take a proximal
    step :math:`\mathrm{prox}(\lambda + \sigma (2l - l_\text{prev}), \sigma)`,
    :math:`\sigma = 0.7 / (\tau K)`, K the largest coupling of weights and model in the metric.

    Parameters
    ----------
    objective : SaddleObjective
        Set and penalty of the weights.
    metric : {"auto", "full", "projected", "low-rank"}
        What of the Hessians is summed. ``"auto"`` is full where little is sent; where many classes
        have large blocks projected: their mean once, and then 100 directions of each block; for
        very large models of low rank.
    patience : int
        Rounds without an answer after which a client leaves Lambda until it is back.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.FairNewton(ef.objectives.ChiSquare(rho=0.1))
    >>> history = ef.train(fair, clients, rounds=20, stop=ef.StopWhen(at_gap=1e-2))
    >>> history.given_out.gap < 1e-2
    True
    """

    objective: SaddleObjective
    metric: MetricKind = "auto"
    patience: int = PATIENCE

    allowed: ClassVar = {"metric": get_args(MetricKind)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_saddle(self.objective, "FairNewton")
        if isinstance(self.objective, FreeSum):
            raise ValueError(
                f"FairNewton needs weights with a fixed sum, which {self.objective!r} has not; "
                "use ScaffPD."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        everyone, x = call_roll(self, state, clients), state.x
        size = state.sizes or self._first_sizes(clients, x)
        losses, c = everyone.value_and_gradient(x, stream.at("gradient"))
        proof: Proof | str | None = None
        value, weights = everyone.objective.value(losses), everyone.weights
        if clients.adds_noise():
            new_x, weights, size = self._through_noise(size, everyone, x, losses, c, stream)
            proof = "answers carry noise for privacy"
        elif not everyone.complete:
            new_x, weights, size = self._without_some(size, everyone, x, losses, c, stream)
        else:
            size, kept = size.judged(x, value)
            bound = None
            if kept:
                size, bound = self._refresh(size, everyone, x, losses, c, stream)  # P
                new_x, weights, size = self._step(size, everyone, x, losses, c)
            else:
                assert size.origin is not None
                new_x = size.origin + 0.25 * (x - size.origin)
            gradient = c.weighted_sum(weights)
            proof = Proof(x, losses, weights, gradient, everyone.objective, bound=bound)
        notes = (*size.said(), *everyone.notes)
        info = Info(weights, losses, value, everyone.index, size.numbers(), notes, proof)
        return State(new_x, weights, losses, size, everyone.away), info

    def _first_sizes(self, clients: Clients, x: Vector) -> MetricSizes:
        """Return the form of the metric, or refuse clients that cannot give one."""
        form: Any = f"there are more than {MOST_CLIENTS} clients"
        if clients.hides_sums and not clients.adds_noise():
            form = "the inner products of the clients' gradients are hidden from the server"
        elif len(clients.names) <= MOST_CLIENTS:
            form = self._without_convexity(clients) or choose_form(clients, x, self.metric)
        if isinstance(form, str) and form not in get_args(Form):
            raise ValueError(f"FairNewton cannot run here: {form}. Use ScaffPD.")
        return MetricSizes(1.0, 0.0, 0.0, form=form)

    def _without_convexity(self, clients: Clients) -> str | None:
        """Say why signed weights would not lead to a solution, if so."""
        norm = self.objective.l1_norm(len(clients.names))
        if math.isinf(norm):
            return "its weights have no fixed sum"
        if norm <= 1 + 1e-9 or self.metric != "auto":
            return None
        known = clients.curvature()
        if not isinstance(known, str) and known.least_modulus(norm) > 0:
            return None
        return "its weights may be negative, and the weighted loss is not known to be convex"

    def _refresh(
        self, size: MetricSizes, everyone: Everyone, x: Vector, losses: Losses, c: ClientVectors,
        stream: Stream,
    ) -> tuple[MetricSizes, Bound | None]:  # fmt: skip
        """Return the sizes with a new metric, or with the old one corrected by the last step.

        With them comes a bound below the objective's minimum, where the new metric proves one.
        """
        weights, stale = everyone.weights, size.is_stale(everyone.weights)
        if not (stale and size.exact):
            size = size.corrected(x, c.weighted_sum(weights))
            if not stale:
                return replace(size, age=size.age + 1), None
        metric, summed = form_metric(everyone.behind, x, weights, size.form, stream, size.metric)
        bound = None
        known = summed.constant and summed.exact and everyone.inexactness(x) is None
        if known and weights.min() >= 0:
            gradient = c.weighted_sum(weights)
            bound = bound_below(everyone.objective, losses, weights, gradient, summed, metric)
        if size.metric is not None and not summed.exact:
            metric = replace(metric, steps=size.metric.steps, changes=size.metric.changes)
        size = replace(size, exact=summed.exact, constant=summed.constant, age=0)
        return replace(size, metric=metric, weights=weights, sums=size.sums + 1), bound

    def _step(
        self, size: MetricSizes, everyone: Everyone, x: Vector, losses: Losses, c: ClientVectors
    ) -> tuple[Vector, Weights, MetricSizes]:
        """Return model, weights and sizes after the dual and the primal step."""
        metric, tau = size.metric, size.primal
        assert metric is not None
        products = _products(everyone, c, metric)
        value = everyone.objective.value(losses)
        weights, gain = step_exactly(everyone.objective, losses, products, everyone.weights, tau)
        pull = c.step(weights)
        direction = metric.direction(pull)
        slack = value - float(weights @ losses) + everyone.objective.penalty(weights)
        slack = slack if slack > rounding(x, value) else 0.0
        left = 2 * slack + tau * float(pull @ direction)
        faster = gain / size.gain if size.gain > 0 else 1.0
        size = replace(size, faster=faster, steepest=largest_coupling(products))
        size = replace(size, decrement=math.sqrt(max(left, 0.0)))
        size = replace(size, origin=x, pull=pull, value=value, gain=gain, share=1.0)
        return x - tau * direction, weights, size

    def _through_noise(
        self, size: MetricSizes, everyone: Everyone, x: Vector, losses: Losses, c: ClientVectors,
        stream: Stream,
    ) -> tuple[Vector, Weights, MetricSizes]:  # fmt: skip
        """Return model, weights and sizes after a whole step with answers that are not compared.

        Noise would make steps look bad that are not, and the coupling larger than it is: weights
        are those of the losses alone, and the metric is summed anew by them, which costs nothing.
        """
        objective = everyone.objective
        weights = objective.weights(losses)
        given = everyone.behind, x, everyone.scale(weights), size.form, stream
        metric, summed = form_metric(*given, size.metric)
        size = replace(size, metric=metric, exact=summed.exact, weights=weights, sums=size.sums + 1)
        return x - size.primal * metric.direction(c.step(weights)), weights, size

    def _without_some(
        self, size: MetricSizes, everyone: Everyone, x: Vector, losses: Losses, c: ClientVectors,
        stream: Stream,
    ) -> tuple[Vector, Weights, MetricSizes]:  # fmt: skip
        """Return model, weights and sizes after proximal steps in the metric of before."""
        old = everyone.weights
        if size.metric is None:
            found = form_metric(everyone.behind, x, everyone.scale(old), size.form, stream)
            size = replace(size, metric=found[0], sums=1)
        metric = size.metric
        assert metric is not None
        if not size.steepest:
            size = replace(size, steepest=largest_coupling(_products(everyone, c, metric)))
        sigma = 1 / max(size.steepest, 1e-300)  # 0.7 / (tau K)
        ahead = 2 * losses - everyone.previous(losses)
        weights = everyone.objective.prox(old + sigma * ahead, sigma)
        new_x = x - TAU * metric.direction(c.step(weights))
        return new_x, weights, replace(size, origin=None, pull=None)


def _products(everyone: Everyone, c: ClientVectors, metric: Metric) -> Losses | Products:
    """Return the inner products of the clients' gradients in the metric, or refuse."""
    products = everyone.inner_products(c, metric.multiply)
    if isinstance(products, str):
        raise ValueError(f"FairNewton cannot run here: {products}. Use ScaffPD.")
    return Products.of(products)
