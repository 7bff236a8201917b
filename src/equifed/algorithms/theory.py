"""DRFA and rFedFair with the local work and step sizes for which their papers prove convergence.

Constants of proofs: safe and slow. The schedules of SCAFF-PD's papers are in
:mod:`equifed.steps.schedules`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from equifed.algorithms.drfa import DRFA
from equifed.algorithms.rfedfair import RFedFair
from equifed.contract.local import LocalSGD


def drfa_by_theory(
    iterations: int,
    smoothness: float,
    clients_per_round: int,
    *,
    convex: bool = True,
    strong_convexity: tuple[float, float] | None = None,
    batch_size: int | None = None,
    **settings: Any,
) -> DRFA:
    r"""Return DRFA with the local work and step sizes of its theorems.

    .. math:: \tau = \frac{T^{1/4}}{\sqrt m}, \quad \eta = \frac{1}{4 L \sqrt T}, \quad
              \gamma = T^{-5/8} \quad \text{(convex, Theorems 1 and 3)}; \qquad
              \tau = T^{1/4}, \quad \eta = \frac{1}{4 L T^{3/4}}, \quad
              \gamma = T^{-1/2} \quad \text{(not convex, Theorems 2 and 4)}

    For convex losses the averages are given out, of which the theorem speaks. tau is rounded to a
    whole number of at least one; train for T / tau rounds.

    With ``strong_convexity`` it is the alternative of Section 5.2, ``ascent="full"``:

    .. math:: \tau = \sqrt{T/m}, \quad
              \eta = \min\Bigl(\frac{4 \log T}{\mu T}, \frac{1}{4 L \tau}\Bigr), \quad
              \gamma = \frac{1}{\mu_\lambda}

    tau is the paper's, for the rate :math:`\tilde O(1/\sqrt{mT})` (the :math:`\tau = 1` of its
    :math:`\tilde O(1/T)` is one local step). Its other constants stand in a supplement; these are
    ours, for large T: each round halves the distance of the weights to their best.

    Parameters
    ----------
    iterations, smoothness, clients_per_round
        T, the local steps of the whole training; L, of every client's loss; m.
    convex : bool
        Whether the losses are.
    strong_convexity : tuple of float, optional
        mu of every client's loss, or of the Polyak-Lojasiewicz condition, and mu_lambda of the
        penalty (rho N for chi-square): Section 5.2.
    batch_size : int, optional
        Samples of a local step; None means all.
    **settings
        Others of :class:`equifed.algorithms.drfa.DRFA`.

    Examples
    --------
    >>> drfa_by_theory(10_000, smoothness=2.0, clients_per_round=4).local.steps
    5
    >>> drfa_by_theory(10_000, 2.0, 4, strong_convexity=(1.0, 0.5)).local.steps
    50
    """
    if not (iterations > 1 and min(smoothness, *(strong_convexity or (1.0,))) > 0):
        raise ValueError(
            "drfa_by_theory needs iterations > 1, a smoothness > 0 and strong convexities > 0, got "
            f"{iterations}, {smoothness} and {strong_convexity}."
        )
    t, m = float(iterations), clients_per_round
    gap, lr, dual_step, output = t**0.25, 1 / (4 * smoothness * t**0.75), t**-0.5, "last"
    if convex:
        gap, lr, dual_step, output = (
            gap / m**0.5, 1 / (4 * smoothness * t**0.5), t**-0.625, "average"
        )  # fmt: skip
    if strong_convexity is not None:
        gap, output = (t / m) ** 0.5, "last"
        lr = min(4 * math.log(t) / (strong_convexity[0] * t), 1 / (4 * smoothness * gap))
        dual_step, settings = 1 / strong_convexity[1], {"ascent": "full", **settings}
    local = LocalSGD(lr=lr, steps=max(1, round(gap)), batch_size=batch_size)
    return DRFA(local, dual_step, **{"clients_per_round": m, "output": output, **settings})


def rfedfair_by_theory(
    smoothness: float, lipschitz: float, steps: int, batch_size: int | None = None, **settings: Any
) -> RFedFair:
    r"""Return rFedFair with the largest step size that its theorems allow.

    .. math:: L = \Bigl(L_1 + \frac{L_2^2 + 1}{\mu}\Bigr) \max_i \frac{1}{\alpha_i}, \qquad
              \sqrt 6\, L \beta (\kappa - 1) \le 1 \quad \text{and} \quad
              \beta \le \frac{1}{40 L} \ \text{(Theorem 1)} \quad \text{or} \quad
              L \beta \Bigl(\frac{3 \kappa}{K} + 2\Bigr) \le \frac{1}{20} \
              \text{(Theorem 2, K clients)}

    Parameters
    ----------
    smoothness, lipschitz
        L_1 and L_2, of every client's loss.
    steps
        kappa, local steps in a round.
    batch_size : int, optional
        Samples of a local step; None means all, as in the paper.
    **settings
        Others of :class:`equifed.algorithms.rfedfair.RFedFair`.

    Examples
    --------
    >>> rfedfair_by_theory(1.0, 2.0, steps=5, tails=0.5, smoothing=1.0).local.lr == 1 / (40 * 12)
    True
    """
    if not (smoothness > 0 and lipschitz >= 0):
        raise ValueError(
            "rfedfair_by_theory needs a smoothness > 0 and a lipschitz >= 0, got "
            f"{smoothness} and {lipschitz}."
        )
    plain = RFedFair(LocalSGD(lr=1.0, steps=steps, batch_size=batch_size), **settings)
    constant = (smoothness + (lipschitz**2 + 1) / plain.smoothing) / float(np.min(plain.tails))  # L
    drawn = 3 * steps / plain.clients_per_round if plain.clients_per_round else 0.0
    lr = 1 / (constant * max(20 * (drawn + 2), 6**0.5 * (steps - 1)))
    return replace(plain, local=replace(plain.local, lr=lr))
