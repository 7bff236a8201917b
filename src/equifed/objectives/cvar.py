"""Weights under caps: the average, the worst case, and the tails of losses between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.base import CappedSet, SymmetricSet, WithPrior, check_numbers, normalise
from equifed.objectives.projections import Permutahedron, capped_corner, group_ties


@dataclass(frozen=True)
class Average(WithPrior, SymmetricSet, CappedSet):
    r"""Mean loss of the clients, uniform or weighted by a prior.

    .. math:: \Phi(\ell) = \sum_i p_i \ell_i, \qquad \Lambda = \{p\}, \quad \psi = 0

    Parameters
    ----------
    prior
        Positive numbers, one per client (sample counts, say), normalised to sum one; None is
        uniform.

    Examples
    --------
    >>> Average().value(np.array([1.0, 2.0, 6.0]))
    3.0
    >>> Average(prior=(100, 100, 200)).weights(np.array([1.0, 2.0, 6.0]))
    array([0.25, 0.25, 0.5 ])

    References
    ----------
    FedAvg and SCAFFOLD. The averages that the SCAFF-PD and SCAFF-PD-IA papers report are uniform.
    """

    prior: tuple[float, ...] | None = None

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        return Permutahedron(corner=np.zeros(n), offset=self.start(n))

    @override
    def caps(self, n: int) -> Weights:  # with sum one, no other weights keep below the prior
        return self.start(n)


@dataclass(frozen=True)
class WorstCase(SymmetricSet, CappedSet):
    r"""Loss of the client that is served worst (agnostic federated learning).

    .. math:: \Phi(\ell) = \max_i \ell_i, \qquad
        \Lambda = \{w \ge 0, \textstyle\sum_i w_i = 1\}, \quad \psi = 0

    One client that reports a large loss takes the whole weight; ``CVaR`` caps what one can take.

    Examples
    --------
    >>> WorstCase().value(np.array([1.0, 4.0, 2.0]))
    4.0
    >>> WorstCase().prox(np.array([0.2, 1.4, 0.0]), step=1.0)
    array([0., 1., 0.])

    References
    ----------
    Mohri et al. 2019 (AFL); SCAFF-PD (3.3) with rho = 0.
    """

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        return Permutahedron(corner=np.eye(1, n)[0], offset=np.zeros(n))

    @override
    def caps(self, n: int) -> Weights:
        return np.ones(n)


@dataclass(frozen=True)
class CVaR(SymmetricSet, CappedSet):
    r"""Mean loss of the worst ``tail`` fraction of clients (superquantile).

    .. math:: \Phi(\ell) = \max_w \langle w, \ell\rangle, \quad
        0 \le w_i \le \frac{1}{\mathrm{tail}\cdot n}, \ \textstyle\sum_i w_i = 1, \qquad \psi = 0

    ``tail = 1`` is the average; ``tail <= 1/n`` is the worst case. A fraction that is not a whole
    number of clients takes a share of the next one. For a cap per client see
    ``HeterogeneousCVaR``, of which the size-weighted CVaR is the case of equal tails.

    Parameters
    ----------
    tail
        The fraction alpha in (0, 1].

    Examples
    --------
    >>> CVaR(tail=0.5).value(np.array([1.0, 2.0, 3.0, 4.0]))
    3.5
    >>> CVaR(tail=0.5).weights(np.array([1.0, 2.0, 3.0, 4.0]))
    array([0. , 0. , 0.5, 0.5])

    References
    ----------
    SCAFF-PD-IA Example 1; Delta-FL (Pillutla et al. 2021); Rockafellar and Uryasev 2000.
    """

    tail: float

    def __post_init__(self) -> None:
        check_settings(self, "for the limit at 0 use WorstCase", tail="(0, 1]")

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        return Permutahedron(corner=capped_corner(n, self.tail), offset=np.zeros(n))

    @override
    def caps(self, n: int) -> Weights:
        return np.full(n, min(1.0, 1.0 / (self.tail * n)))


@dataclass(frozen=True)
class HeterogeneousCVaR(CappedSet):
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
        object.__setattr__(self, "sizes", check_numbers(self.sizes, "HeterogeneousCVaR sizes"))
        if isinstance(self.tails, Iterable):
            object.__setattr__(self, "tails", check_numbers(self.tails, "HeterogeneousCVaR tails"))
        if not (np.asarray(self.tails) > 0).all() or not (np.asarray(self.tails) <= 1).all():
            raise ValueError(f"HeterogeneousCVaR tails must lie in [p_i, 1], got {self.tails}.")
        if self.sizes is not None:
            self.caps(len(self.sizes))

    @override
    def caps(self, n: int) -> Weights:
        sizes = self.start(n)
        return np.minimum(sizes / check_tails(self.tails, sizes, "HeterogeneousCVaR"), 1.0)

    @override
    def weights(self, losses: Losses) -> Weights:
        """Fill the caps from the largest loss down; equal losses share in proportion to them."""
        caps = self.caps(losses.size)
        order, starts = group_ties(losses)
        held = np.add.reduceat(caps[order], starts)  # cap mass of each group of equal losses
        taken = np.clip(1.0 - (np.cumsum(held) - held), 0.0, held)
        last = np.flatnonzero(taken)[-1]
        taken[last] = min(held[last], max(0.0, 1.0 - float(taken[:last].sum())))  # minus rounding
        weights = np.empty_like(caps)
        lengths = np.diff(np.r_[starts, losses.size])
        weights[order] = np.repeat(taken / held, lengths) * caps[order]
        return weights

    @override
    def start(self, n: int) -> Weights:
        return normalise(self.sizes, n, "HeterogeneousCVaR sizes")


def check_tails(
    tails: ArrayLike, shares: Weights, who: str, names: Sequence[str] | None = None
) -> Weights:
    """Return RC-FL's alpha_i of clients with these shares, or refuse one outside of [share, 1]."""
    n, alpha = len(shares), np.asarray(tails, dtype=np.float64)
    if alpha.ndim and alpha.size != n:
        raise ValueError(f"{who} has {alpha.size} tails for {n} clients.")
    alpha = np.broadcast_to(alpha, n)
    wrong = (alpha < shares * (1 - 1e-12)) | (alpha > 1)
    if wrong.any():
        i = int(np.argmax(np.where(wrong, shares / alpha, -1.0)))
        seen = "above 1" if alpha[i] > 1 else f"below its share {shares[i]:g} of the weight"
        raise ValueError(
            f"the tail of client {i if names is None else names[i]} is {alpha[i]:g}, {seen}; RC-FL "
            "needs every tail in [share, 1]."
        )
    return alpha
