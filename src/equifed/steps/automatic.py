"""Step sizes that choose themselves, by how curved the client losses are.

``clients.curvature()`` answers with bounds that are true at every model; a certificate may rest on
them. :func:`measured_smoothness` is an estimate at one model; step sizes may rest on it, since a
safeguard watches them, but no proof does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from equifed.contract import Clients, ClientVectors, Curvature, LocalSGD, MissingClients, Stream
from equifed.contract.absence import carry_over
from equifed.contract.arrays import Losses, Vector, Weights, check_settings
from equifed.steps.schedules import Problem, StepSizes, WeightChange, epsilon

A = TypeVar("A")

LARGEST, TINY = 1e300, 1e-300
STILL = 1e-6
"""Share of the losses below which what gradients promise is too little to tell a curvature."""

DECAY = 0.8
"""How much of the steepest coupling so far a round remembers."""


@dataclass(frozen=True)
class AutoSizes(StepSizes):
    """Step sizes with what the automatic rule remembers."""

    smoothness: float = 0.0  # L, measured or known
    halvings: int = 0  # how often a safeguard halved the step sizes
    steepest: float = 0.0  # the coupling of weights and model, its largest over the last rounds
    free: bool = False  # whether the sum S of the weights is, so that the model's step is tau / S

    def numbers(self) -> dict[str, float]:
        """Return the step sizes and the measured smoothness for the round's record."""
        return {**super().numbers(), "smoothness": self.smoothness, "halvings": self.halvings}

    def said(self) -> tuple[str, ...]:
        """Return the chosen sizes in words."""
        sizes = f"tau {self.primal:.4g}, eta {self.local:.4g}, first sigma {self.dual:.4g}"
        return (f"automatic step sizes for smoothness {self.smoothness:.4g}: {sizes}",)

    def halved(self) -> AutoSizes:
        """Return half the step sizes."""
        assert self.local is not None
        sizes = replace(self, primal=self.primal / 2, dual=self.dual / 2, local=self.local / 2)
        return replace(sizes, halvings=self.halvings + 1)


@dataclass(frozen=True)
class AutoSteps:
    r"""Step sizes for SCAFF-PD and SCAFF-PD-IA that need no tuning.

    .. math::

       T &= \min(4, J) / (L\, |\Lambda|_1), \qquad \tau = T, \quad \eta = T / J, \quad \theta = 1 \\
       K &\leftarrow \max\Bigl(\frac{|\sum_i \Delta\lambda_i \nabla f_i(x)|^2}
                     {|\Delta\lambda|^2},\ 0.8\, K\Bigr), \qquad
              \sigma \leftarrow \frac{0.7}{T K}, \ \text{changing at most twofold a round},
              \qquad \sigma_0 = \frac{0.7}{T \sum_i |\nabla f_i(x)|^2}

    L is the largest smoothness of any client: the largest eigenvalue from the data for linear
    models where the Hessian's bound is tight (squared and logistic loss, softmax of two classes)
    and every client tells its own, else measured (:func:`measured_smoothness`, about 7 exchanges
    before the first round). The dual step follows the coupling of weights and model in the
    direction in which the weights turned: the condition :math:`\sigma \tau |\nabla l|^2 < 1` of
    primal-dual methods with the norm taken where it matters, as in the line search of Malitsky and
    Pock (2018). Where the sum S of the weights is free (q-fair), the model's step is T / S, so
    :math:`|\Lambda|_1` does not enter and sigma is S times as large; the first S is that of the
    weights at the first losses, at the cost of an exchange.

    For **minibatches** T is half of that, because a minibatch is steeper than all samples. For
    **neural networks** L is that at the first model. Neither has a guarantee:
    :class:`equifed.algorithms.safeguarded.Safeguarded`, in which SCAFF-PD is usually run, goes back
    and halves the steps when they were too bold.

    Parameters
    ----------
    smoothness : float, optional
        L, if it is known; saves the measurement.
    horizon : float
        T L for full gradients; 4 is the paper-free default, 8 can diverge.
    coupling : float
        The product of step sizes and squared coupling; must stay below 1.
    probe : int
        Clients to ask at most when the smoothness is measured.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.ScaffPD(ef.objectives.ChiSquare(rho=0.1), steps=ef.steps.AutoSteps())
    >>> numbers = ef.train(fair, clients, rounds=1).rounds[0].numbers
    >>> round(numbers["smoothness"] * numbers["primal_step"], 3)  # T L
    4.0
    """

    smoothness: float | None = None
    horizon: float = 4.0
    coupling: float = 0.7
    probe: int = 32

    def __post_init__(self) -> None:
        check_settings(self, **dict.fromkeys(vars(self), "(0, inf]") | {"coupling": "(0, 1)"})

    def start(self, problem: Problem) -> AutoSizes:
        """Return the step sizes of the first round; may measure."""
        algorithm, clients = problem.algorithm, problem.clients
        smoothness = self._smoothness(problem)
        steps = int(algorithm.local.steps_for(clients.sizes).max())
        norm = algorithm.objective.l1_norm(len(clients.names))
        free = math.isinf(norm)
        time = min(self.horizon, steps) / (smoothness * (1.0 if free else norm))
        if algorithm.local.batch_size is not None or algorithm.gradient_batch_size is not None:
            time /= 2
        total = self._first_total(problem) if free else 1.0
        squares = float(problem.gradients.squared_norms().sum())
        dual = min(self.coupling * total / max(time * squares, TINY), LARGEST)
        local = time / steps
        return AutoSizes(time, dual, 1.0, local, smoothness=smoothness, free=free)

    def next(self, sizes: StepSizes, turned: WeightChange) -> AutoSizes:
        """Return the sizes with the next dual step; each halving has halved it as well."""
        assert isinstance(sizes, AutoSizes)
        coupling = turned.coupling()
        if coupling is None:
            return sizes
        steepest = max(coupling, DECAY * sizes.steepest)
        total = float(turned.weights.sum()) if sizes.free else 1.0
        wanted = self.coupling * total / max(sizes.primal * 4.0**sizes.halvings * steepest, TINY)
        dual = float(np.clip(wanted, sizes.dual / 2, min(2 * sizes.dual, LARGEST)))
        return replace(sizes, dual=dual, steepest=steepest)

    def _first_total(self, problem: Problem) -> float:
        """Return the sum of the weights at the first losses."""
        clients, objective = problem.clients, problem.algorithm.objective
        seen = clients.losses(problem.x, problem.stream.at("losses"))
        losses = carry_over(None, clients.index, seen, len(clients.names))
        return float(objective.total(objective.weights(losses)))

    def _smoothness(self, problem: Problem) -> float:
        if self.smoothness is not None:
            return self.smoothness
        known, bound = problem.clients.curvature(), math.inf
        if isinstance(known, Curvature):
            bound = float(known.smoothness.max())
            if known.tight and math.isfinite(bound):
                return bound
        measured = measured_smoothness(
            problem.clients, problem.x, problem.stream.at("smoothness"), self.probe
        )
        found = min(measured, bound)
        return found if found > 0 else 1.0  # flat: any step will do


def with_measured_step(
    algorithm: A, clients: Clients, x: Vector, stream: Stream, horizon: float = 2.0
) -> A:
    r"""Return the algorithm with a local step size that suits these clients.

    .. math:: \text{lr} = \min(\text{horizon}, J) / (L J)

    for J local steps (the most that a client takes) and the smoothness L of the least smooth client
    at x, measured (:func:`measured_smoothness`, about 7 exchanges).
    Without a correction clients drift towards their own optima for J lr, which 2/L keeps short. It
    is a rule of ours, with no guarantee; SCAFF-PD has a better one (:class:`AutoSteps`).
    """
    holder: Any = algorithm  # any frozen dataclass with local work
    local: LocalSGD = holder.local
    steps = int(local.steps_for(clients.sizes).max())
    smoothness = measured_smoothness(clients, x, stream)
    if smoothness <= 0:  # flat here: nothing to go by
        return algorithm
    lr = min(horizon, steps) / (smoothness * steps)
    changed: A = replace(holder, local=replace(local, lr=lr))
    return changed


def hessian_product(
    clients: Clients, x: Vector, weights: Weights, direction: Vector, stream: Stream
) -> Vector:
    r"""Return :math:`\sum_i w_i \nabla^2 f_i(x)\, v` from two exchanges of weighted gradients.

    .. math:: \frac{g(x + h v) - g(x - h v)}{2 h}, \qquad g = \textstyle\sum_i w_i \nabla f_i,
              \quad h |v| = \epsilon^{1/3} (1 + |x|)

    Exact up to rounding for quadratics. Otherwise about 1e-9 relative in float64 and 1e-4 in
    float32.
    """
    length = float(direction.norm())
    if length == 0:
        return direction
    h = epsilon(x) ** (1 / 3) * (1 + float(x.norm())) / length
    ahead, behind = (
        clients.value_and_gradient(at, stream)[1].weighted_sum(weights)
        for at in (x + h * direction, x - h * direction)
    )
    product: Vector = (ahead - behind) / (2 * h)
    return product


def measured_smoothness(clients: Clients, x: Vector, stream: Stream, probe: int = 32) -> float:
    r"""Estimate the largest Hessian eigenvalue, in size, of any client's loss at x.

    Corrected local steps are a power iteration that every client does by itself: with control
    :math:`c_i = \nabla f_i(x)` and a common small target v the displacement obeys
    :math:`e \leftarrow (I - \eta \nabla^2 f_i)\, e + \eta v`, so for :math:`\eta L_i > 2` it grows
    by :math:`\eta L_i - 1` a step. Two calls, of J and J + 1 steps, show by how much, and only
    squared norms reach the server. Which :math:`\eta` to try first follows from losses and lengths
    of gradients. No sum of vectors is asked for: sums so near to those of a round could be
    subtracted where sums are hidden.

    Costs an exchange (two at rest), 2 for each of about three tries. It is low by a few percent,
    in float32 by up to some tens; it is local, and no bound.

    Parameters
    ----------
    probe : int
        Clients to ask at most, evenly spaced.

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.Federation.from_clients({"north": ([[2.0]], [1.0]), "south": ([[1.0]], [1.0])})
    >>> clients = ef.simulate(data, "linear")
    >>> round(measured_smoothness(clients, clients.initial(Stream(0)), Stream(0)), 1)  # 2 (2 2 + 1)
    10.0
    """
    if len(clients.index) > probe:
        evenly = np.linspace(0, len(clients.index) - 1, probe, dtype=int)
        clients = clients.subset(clients.index[evenly])
    losses, control = clients.value_and_gradient(x, stream.at("gradient"))
    rough, size = _bound(losses, control), 1 + float(x.norm())
    if rough * size**2 <= STILL * losses.max():  # at rest, as with balanced labels: look beside it
        drawn = x.new_tensor(stream.at("beside").generator().standard_normal(x.numel()))
        beside = x + drawn * (size / drawn.norm())
        rough = max(rough, _bound(*clients.value_and_gradient(beside, stream.at("beside"))))
    if rough == 0:
        return 0.0
    rate, low, high, near = 3 / rough, 0.0, math.inf, rough
    for attempt in range(16):
        growth = _growth(clients, x, control, rate, near, stream.at("try", attempt))
        if growth is not None and growth >= 1.6:
            return max(rough, (1 + growth) / rate)
        if growth == 0 and near < 1e6 * rough:
            near *= 100
            continue
        if not growth:  # moved too far to count as one Hessian
            high, wanted = rate, rate / 3
        else:  # too little to tell the largest eigenvalue from the others
            low, wanted = rate, rate * (3.1 / (1 + growth) if growth > 1.1 else 2.0)
        rate = wanted if low < wanted < high else math.sqrt(low * high)
    if low == 0:  # too steep for any of them: whoever gives no usable answer is named
        _walk(clients, x, control, rate, rough, stream.at("steep"))
    return 2 * rough


def _bound(losses: Losses, gradients: ClientVectors) -> float:
    """Return a smoothness that there is at least: f >= 0 has |f'|^2 <= 2 L f."""
    return float((gradients.squared_norms() / (2 * np.maximum(losses, TINY))).max())


def _growth(
    clients: Clients, x: Vector, control: ClientVectors, rate: float, rough: float, stream: Stream
) -> float | None:
    """Return by how much the displacement grew in the last step; None if it went too far.

    With one Hessian no step grows it by less than those before: 0 if the last one did.
    """
    limit = (0.1 if epsilon(x) < 1e-10 else 1.0) / math.sqrt(rough)
    steps, first = _plan(x, rough)
    try:
        before, after = _walk(clients, x, control, rate, rough, stream)
    except MissingClients:
        return None
    went = before > 0  # half precision loses some steps altogether
    if after.max() > limit or not went.any():
        return None if after.max() > limit else 1.0
    growth = after[went] / before[went]
    most = first * np.power.outer(growth, np.arange(steps + 1)).sum(axis=1)
    return 0.0 if (after[went] > 1.5 * most).any() else float(growth.max())


def _plan(x: Vector, rough: float) -> tuple[int, float]:
    """Return how many steps to walk, and the length of the first."""
    steps, first = (16, 1e-8) if epsilon(x) < 1e-10 else (8, 1e-3)
    return steps, first / math.sqrt(rough)  # over that a loss of order one changes its curvature


def _walk(
    clients: Clients, x: Vector, control: ClientVectors, rate: float, rough: float, stream: Stream
) -> tuple[Losses, Losses]:
    """Return the lengths of every client's displacement before and after the last step."""
    steps, first = _plan(x, rough)
    drawn = x.new_tensor(stream.at("direction").generator().standard_normal(x.numel()))
    target = drawn / drawn.norm() * (first / rate)
    lengths = []
    for more in (0, 1):
        work = LocalSGD(lr=rate, steps=steps + more)
        moved = clients.local_steps(x, work, stream.at("local"), control=control, target=target)
        lengths.append(np.sqrt(moved.displacement.squared_norms()))
    return lengths[0], lengths[1]
