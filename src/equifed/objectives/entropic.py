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
from numpy.typing import NDArray

from equifed.arrays import Losses, Weights
from equifed.objectives.projections import project_capped_simplex

Fill = Callable[[NDArray[np.int64], float], Weights]
"""(clients, mass) -> their weights if they share that mass and no cap binds."""

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
    return _with_caps(logits - np.log(caps), caps, lambda who, mass: _softmax(logits[who], mass))


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
    if temperature < _COLD:
        return project_capped_simplex(point, caps)
    if temperature > 1.0 / _COLD:
        return tilt(prior, np.zeros_like(point), 0.0, caps)
    with np.errstate(divide="ignore"):
        log_prior = np.log(prior)
    # Client i reaches its cap when nu falls to this; so it orders the clients.
    key = point - caps - temperature * (np.log(caps) - log_prior)

    def fill(who: NDArray[np.int64], mass: float) -> Weights:
        return _omega_shares(point[who], temperature, log_prior[who], mass)

    return _with_caps(key, caps, fill)


def _omega_shares(point: Weights, temperature: float, log_prior: Weights, mass: float) -> Weights:
    """Solve w_i + temperature log(w_i / prior_i) = point_i - nu for sum w = mass."""
    from scipy.special import wrightomega

    with np.errstate(over="ignore"):
        height = (point - point.max()) / temperature + log_prior
    if height.max() == -np.inf:
        return np.zeros_like(height)
    height -= height.max()
    # Bracket: the highest client alone has the mass, or an equal part of it.
    total = mass / temperature
    low = -(total + np.log(total))
    high = -(total / point.size + np.log(total / point.size))
    nu = high
    while True:  # Newton on the logarithm of the sum, kept inside a shrinking bracket
        omega = wrightomega(height - nu)  # weights in units of the temperature
        error = float(np.log(omega.sum() / total))
        change = error / float((omega / (1.0 + omega)).sum() / omega.sum())
        if abs(change) <= _PRECISION * abs(nu) or abs(error) <= _PRECISION or low >= high:
            return np.asarray(mass * (omega / omega.sum()))
        low, high = (nu, high) if error > 0 else (low, nu)
        nu = nu + change if low < nu + change < high else 0.5 * (low + high)


def _with_caps(key: Weights, caps: Weights, fill: Fill) -> Weights:
    """Put the clients with the largest ``key`` at their caps and let ``fill`` share the rest.

    The number at their caps is the least k for which the next client in the order of ``key``
    keeps below its own. A client at its cap stays there when others join: they leave mass.
    """
    order = np.argsort(-key, kind="stable")
    spent = np.concatenate([[0.0], np.cumsum(caps[order])])

    def fits(k: int) -> bool:
        if spent[k] >= 1.0:
            return True
        rest = fill(order[k:], 1.0 - float(spent[k]))
        return bool(rest[0] <= caps[order[k]])

    low, high = -1, min(caps.size - 1, int(np.searchsorted(spent, 1.0, side="left")) - 1)
    while high - low > 1:  # fits(high) holds or high is the last client that can be cut
        middle = (low + high) // 2 if low >= 0 else 0  # k = 0 first: mostly no cap binds
        low, high = (low, middle) if fits(middle) else (middle, high)
    weights = np.zeros_like(caps)
    weights[order[:high]] = caps[order[:high]]
    rest = order[high:]
    weights[rest] = fill(rest, max(0.0, 1.0 - float(weights.sum())))
    return np.minimum(weights, caps)
