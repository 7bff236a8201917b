"""Exact steps that measure distance by relative entropy, as plain functions of arrays.

Two problems over W = {0 <= w_i <= caps_i, sum of w = 1}, each with one monotone scalar root:

* ``tilt``: the maximiser of step <w, losses> - KL(w, reference), that is
  reference_i exp(step losses_i), scaled and cut at the caps;
* ``entropic_prox``: the minimiser of |w - point|^2 / 2 + temperature KL(w, prior), where each
  weight solves w_i + temperature log(w_i / prior_i) = point_i - nu (the Wright omega function).

Which clients sit at their caps is found by bisection over the sorted order, so that both are exact
at every scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.objectives.projections import project_capped_simplex

Fill = Callable[[Index, float], Weights]
"""(clients, mass) -> their weights if they share that mass and no cap binds."""
Beside = Callable[[Index], Weights]
"""clients -> their weights when the first of them is exactly at its cap."""

_EXTREME = 1e300  # tilts beyond this are treated as equal
_COLD = 1e-200  # below this temperature the entropy changes no digit of the answer
_PRECISION = 4 * np.finfo(np.float64).eps


def tilt(reference: Weights, losses: Losses, step: float, caps: Weights) -> Weights:
    """Return argmax over W of step <w, losses> - KL(w, reference); a zero reference stays zero.

    >>> tilt(np.array([0.5, 0.5]), np.log([3.0, 1.0]), step=1.0, caps=np.ones(2))
    array([0.75, 0.25])
    >>> tilt(np.array([0.25, 0.25, 0.5]), np.array([800.0, 0.0, 0.0]), 1.0, caps=np.full(3, 0.4))
    array([0.4, 0.2, 0.4])
    """
    if caps[reference > 0].sum() < 1.0 - 1e-12:
        raise ValueError(
            f"the {np.count_nonzero(reference)} clients with positive weight have caps that sum to "
            f"{caps[reference > 0].sum():g} < 1, and an entropic step cannot revive the others; "
            "start from positive weights or use the Euclidean step."
        )
    with np.errstate(divide="ignore", over="ignore"):
        logits = np.log(reference) + np.clip(step * losses, -_EXTREME, _EXTREME)
    everyone = np.arange(logits.size)

    def fill(who: Index, mass: float) -> Weights:
        return _softmax(logits[who], mass)

    def beside(who: Index) -> Weights:
        return np.asarray(caps[who[0]] * np.exp(logits[who] - logits[who[0]]))

    if (caps >= 1.0).all():
        return fill(everyone, 1.0)
    return _with_caps(logits - np.log(caps), caps, fill, beside)


def _softmax(logits: Weights, mass: float) -> Weights:
    if logits.max() == -np.inf:
        return np.zeros_like(logits)
    odds = np.exp(logits - logits.max())
    return np.asarray(mass * (odds / odds.sum()))


def entropic_prox(point: Weights, temperature: float, prior: Weights, caps: Weights) -> Weights:
    """Return argmin over W of |w - point|^2 / 2 + temperature * KL(w, prior).

    >>> entropic_prox(np.zeros(2), 1e9, prior=np.array([0.75, 0.25]), caps=np.ones(2)).round(6)
    array([0.75, 0.25])
    """
    from scipy.special import wrightomega

    if temperature < _COLD:
        return project_capped_simplex(point, caps)
    if temperature == np.inf:
        return tilt(prior, np.zeros_like(point), 0.0, caps)
    with np.errstate(divide="ignore"):
        log_prior = np.log(prior)

    def fill(who: Index, mass: float) -> Weights:
        return _omega_shares(point[who], temperature, log_prior[who], mass)

    def beside(who: Index) -> Weights:
        ratio = caps[who[0]] / temperature
        with np.errstate(over="ignore"):
            height = (point[who] - point[who[0]]) / temperature
        height += log_prior[who] - log_prior[who[0]]
        return np.asarray(temperature * wrightomega(height + ratio + np.log(ratio)))

    if (caps >= 1.0).all():
        return fill(np.arange(point.size), 1.0)
    # Client i reaches its cap when nu falls to this; so it orders the clients.
    key = point - caps - temperature * (np.log(caps) - log_prior)
    return _with_caps(key, caps, fill, beside)


def _omega_shares(point: Weights, temperature: float, log_prior: Weights, mass: float) -> Weights:
    """Solve w_i + temperature log(w_i / prior_i) = point_i - nu for sum w = mass."""
    from scipy.special import wrightomega

    with np.errstate(over="ignore"):
        height = (point - point.max()) / temperature + log_prior
    if height.max() == -np.inf or mass == 0.0:
        return np.zeros_like(height)
    height -= height.max()
    # The highest client alone has all the mass, or an equal part of it: a bracket, with some room.
    total, part = mass / temperature, mass / temperature / point.size
    room = 1.0 + 0.01 * total
    low, high = -(total + np.log(total)) - room, -(part + np.log(part)) + room
    nu = high - room
    while True:
        omega = wrightomega(height - nu)  # weights in units of the temperature
        held = float(omega.sum())
        slope = float((omega / (1.0 + omega)).sum())
        # Newton on held / m + log(held) for m as below: exact in one step for m equal clients.
        change = (held - total) * (1.0 / slope - 1.0 / held) + float(np.log(held / total))
        if abs(change) <= _PRECISION * max(1.0, abs(nu)) or not low < nu < high:
            return np.asarray(mass * (omega / held))
        low, high = (nu, high) if held > total else (low, nu)
        nu = nu + change if low < nu + change < high else 0.5 * (low + high)


def _with_caps(key: Weights, caps: Weights, fill: Fill, beside: Beside) -> Weights:
    """Put the clients with the largest ``key`` at their caps and let ``fill`` share the rest.

    How many: the least k for which client k of the order, put at its cap, together with what the
    later ones then get, leaves nothing of the mass. Then its own weight is its cap or less.
    """
    order = np.argsort(-key, kind="stable")
    spent = np.concatenate([[0.0], np.cumsum(caps[order])])
    low, high = -1, min(caps.size, int(np.searchsorted(spent, 1.0, side="left"))) - 1
    while high - low > 1:  # with ``high`` clients at their caps, the next cap takes the rest
        middle = (low + high) // 2 if low >= 0 else 0  # 0 first: mostly no cap binds
        enough = spent[middle] + float(beside(order[middle:]).sum()) >= 1.0
        low, high = (low, middle) if enough else (middle, high)
    weights, rest = caps.astype(np.float64), order[high:]
    while True:
        weights[rest] = 0.0
        weights[rest] = fill(rest, max(0.0, 1.0 - float(weights.sum())))
        over = weights[rest] > caps[rest]  # by rounding of ``key``, at huge scales only
        weights[rest] = np.minimum(weights[rest], caps[rest])
        rest = rest[~over]
        if not over.any() or rest.size == 0:
            return weights
