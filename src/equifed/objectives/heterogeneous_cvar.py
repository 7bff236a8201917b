"""CVaR with a tail per client (RC-FL)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.checks import distribution, finite, frozen_numbers
from equifed.objectives.projections import project_capped_simplex


@dataclass(frozen=True)
class HeterogeneousCVaR:
    r"""Worst weighted loss when client i can be over-weighted at most 1 / alpha_i times.

    .. math:: \Phi(\ell) = \max_w \langle w, \ell\rangle, \quad
        0 \le w_i \le \frac{p_i}{\alpha_i}, \ \textstyle\sum_i w_i = 1, \qquad \psi = 0

    and :math:`\Phi(\ell) = \min_\eta\ \eta + \sum_i \frac{p_i}{\alpha_i} (\ell_i - \eta)_+` (Lemma
    1). Every alpha_i = 1 gives the average with weights p, every alpha_i = p_i the worst case.
    Equal tails give the size-weighted CVaR, and with uniform p that is ``CVaR``.

    The paper writes the value as a conditional expectation above a quantile. That form fails when
    the quantile is an atom, which it always is for finitely many clients; the maximum above is the
    definition here.

    Parameters
    ----------
    tails
        alpha_i in [p_i, 1], one per client, or one number for all.
    sizes
        Positive numbers, one per client, normalised to the p_i; None is uniform.

    Examples
    --------
    >>> objective = HeterogeneousCVaR(tails=(0.5, 1.0, 1.0, 0.25))
    >>> objective.caps(4)
    array([0.5 , 0.25, 0.25, 1.  ])
    >>> objective.weights(np.array([4.0, 3.0, 2.0, 1.0]))
    array([0.5 , 0.25, 0.25, 0.  ])

    References
    ----------
    RC-FL Definition 1 (with w_i = p_i q_i), Definition 2, Lemma 1.
    """

    tails: float | tuple[float, ...]
    sizes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", frozen_numbers(self.sizes, "HeterogeneousCVaR sizes"))
        if isinstance(self.tails, Iterable):
            object.__setattr__(self, "tails", frozen_numbers(self.tails, "HeterogeneousCVaR tails"))
        if not (np.asarray(self.tails) > 0).all() or not (np.asarray(self.tails) <= 1).all():
            raise ValueError(f"HeterogeneousCVaR tails must lie in [p_i, 1], got {self.tails}.")
        if self.sizes is not None:
            self.caps(len(self.sizes))

    def caps(self, n: int) -> Weights:
        """Return p_i / alpha_i."""
        sizes = self.start(n)
        tails = np.broadcast_to(np.asarray(self.tails, dtype=np.float64), self._shape())
        if tails.ndim and tails.size != n:
            raise ValueError(f"HeterogeneousCVaR has {tails.size} tails for {n} clients.")
        caps = sizes / tails
        if (caps > 1.0 + 1e-12).any():
            worst = int(caps.argmax())
            raise ValueError(
                f"the tail of client {worst} is {np.broadcast_to(tails, n)[worst]:g}, below its "
                f"share {sizes[worst]:g} of the data; RC-FL needs every tail in [share, 1]."
            )
        return np.minimum(caps, 1.0)

    def value(self, losses: Losses) -> float:
        """Return the largest feasible weighted loss."""
        losses = finite(losses, "losses")
        return float(self.weights(losses) @ losses)

    def weights(self, losses: Losses) -> Weights:
        """Fill the caps from the largest loss down; equal losses share in proportion to them."""
        losses = finite(losses, "losses")
        caps = self.caps(losses.size)
        order = np.argsort(-losses, kind="stable")
        ordered = losses[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        held = np.add.reduceat(caps[order], starts)  # cap mass of each group of equal losses
        taken = np.clip(1.0 - (np.cumsum(held) - held), 0.0, held)
        last = np.flatnonzero(taken)[-1]
        taken[last] = min(held[last], max(0.0, 1.0 - float(taken[:last].sum())))  # less rounding
        weights = np.empty_like(caps)
        lengths = np.diff(np.r_[starts, losses.size])
        weights[order] = np.repeat(taken / held, lengths) * caps[order]
        return weights

    def penalty(self, weights: Weights) -> float:
        """Return 0."""
        return 0.0

    def prox(self, point: Weights, step: float) -> Weights:
        """Project onto the simplex with a cap per client."""
        point = finite(point, "point")
        return project_capped_simplex(point, self.caps(point.size))

    def start(self, n: int) -> Weights:
        """Return the shares p."""
        return distribution(self.sizes, n, "HeterogeneousCVaR sizes")

    def strong_convexity(self, n: int) -> float:
        """Return 0."""
        return 0.0

    def l1_norm(self, n: int) -> float:
        """Return 1."""
        return 1.0

    def _shape(self) -> tuple[int, ...]:
        return (len(self.tails),) if isinstance(self.tails, tuple) else ()
