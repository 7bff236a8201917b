"""Generalisation: how far the true weighted loss can lie above the one on the training samples.

All bounds hold with probability at least 1 - ``failure`` over the samples, for all models of a
class at once. They are worst-case bounds: compare them with each other, and use held-out samples
to learn how a model does. RC-FL Theorems 3 and 4; SCAFF-PD-IA Theorem 4 and Proposition 5.

RC-FL's bounds have the Rademacher complexity of the class, which :func:`weighted_massart` bounds
for a finite one: models that were trained without the samples at hand are such a class. IA's has a
VC dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equifed.contract.arrays import Weights
from equifed.objectives.base import SymmetricSet
from equifed.objectives.cvar import check_tails
from equifed.objectives.relative_fairness import IntegratedSet, RelativeFairness

Numbers = Sequence[float] | Weights


def _spread(weights: Numbers, samples: Numbers) -> float:
    """Return sqrt(sum w_i^2 / m_i), by which every bound below scales."""
    w, m = _pair(weights, samples)
    return math.sqrt(float(np.sum(w**2 / m)))


def weighted_massart(weights: Numbers, samples: Numbers, models: int, bound: float = 1.0) -> float:
    r"""Bound the weighted Rademacher complexity of a finite class, by Massart's lemma.

    .. math:: \mathfrak R_m(\mathcal H) = \mathbb E \max_{h} \sum_i \frac{w_i}{m_i} \sum_j
              \sigma_{ij}\, \ell_h(z_{ij})
              \ \le\ B \sqrt{2 \log |\mathcal H| \textstyle\sum_i w_i^2 / m_i}

    For RC-FL :math:`w_i = p_i / \alpha_i`; losses lie in [-B, B], or in an interval of length 2B:
    the complexity does not see a constant.

    >>> weighted_massart([0.5, 0.5], [100, 100], models=1)
    0.0
    """
    if models < 1:
        raise ValueError(f"models is the size of a class, at least 1, got {models}.")
    _positive(bound=bound)
    return bound * math.sqrt(2 * math.log(models)) * _spread(weights, samples)


def rc_fl_bound(
    empirical: float,
    complexity: float,
    shares: Numbers,
    tails: Numbers,
    samples: Numbers,
    *,
    bound: float = 1.0,
    failure: float = 0.05,
) -> float:
    r"""RC-FL's Theorem 3, an upper bound on the true :math:`Q_\alpha`-weighted loss.

    .. math:: f_\alpha \le \tau_\alpha \hat f_\alpha + 2 \mathfrak R_m(\mathcal H)
              + B \sqrt{\textstyle\sum_i \frac{p_i^2 \log(1/\delta)}{2 \alpha_i^2 m_i}},
              \qquad \tau_\alpha = \textstyle\sum_i p_i / \alpha_i

    Parameters
    ----------
    empirical : float
        The heterogeneous CVaR of the losses on the training samples.
    complexity : float
        The weighted Rademacher complexity, with weights p_i / alpha_i.
    shares, tails, samples : sequence
        p_i, alpha_i and m_i.
    bound : float
        B; losses lie in [0, B].
    failure : float
        delta.

    Examples
    --------
    With all tails 1 it is the usual bound for the average over shares:

    >>> shares, samples = [0.5, 0.5], [5000, 5000]
    >>> complexity = weighted_massart(shares, samples, models=10)
    >>> round(rc_fl_bound(0.1, complexity, shares, [1, 1], samples), 4)
    0.1552
    """
    weights = _shares_over_tails(shares, tails)
    _positive(bound=bound)
    luck = bound * math.sqrt(_log_inverse(failure) / 2) * _spread(weights, samples)
    return float(weights.sum()) * empirical + 2 * complexity + luck


def rc_fl_bound_by_client(
    empirical: float,
    complexities: Numbers,
    shares: Numbers,
    tails: Numbers,
    samples: Numbers,
    *,
    bound: float = 1.0,
    failure: float = 0.05,
) -> float:
    r"""RC-FL's Theorem 4: no factor on the empirical loss, for a larger remainder.

    .. math:: f_\alpha \le \hat f_\alpha + 2 \textstyle\sum_i \frac{p_i}{\alpha_i}
              \mathfrak R^i_{m_i}(\mathcal H)
              + \sum_i \frac{p_i}{\alpha_i} B \sqrt{\frac{\log(2n/\delta)}{2 m_i}}

    ``complexities`` are those of each client alone: :func:`weighted_massart` with one weight 1.

    >>> shares, samples = [0.5, 0.5], [5000, 5000]
    >>> each = [weighted_massart([1.0], [m], models=10) for m in samples]
    >>> round(rc_fl_bound_by_client(0.1, each, shares, [0.5, 0.5], samples), 4)
    0.2633
    """
    weights = _shares_over_tails(shares, tails)
    _positive(bound=bound)
    _, m = _pair(weights, samples)
    luck = bound * np.sqrt(_log_inverse(failure / (2 * len(m))) / (2 * m))
    return empirical + float(weights @ (2 * np.asarray(complexities, dtype=np.float64) + luck))


def skewness(weights: Numbers) -> float:
    r"""How uneven weights are, :math:`n\, |\lambda - 1/n|^2 + 1` (SCAFF-PD-IA, Section 6).

    >>> skewness([0.25] * 4), skewness([1.0, 0.0, 0.0, 0.0])
    (1.0, 4.0)
    """
    w = np.asarray(weights, dtype=np.float64)
    return float(len(w) * np.sum((w - 1 / len(w)) ** 2) + 1)


def largest_skewness(objective: SymmetricSet | RelativeFairness, n: int) -> float:
    """Return the skewness of a set of weights: the largest of its members, exactly.

    It is convex in the weights, so a corner attains it, and all corners are permutations of one.

    >>> from equifed.objectives import CVaR
    >>> round(largest_skewness(CVaR(0.2), 100), 9)
    5.0
    """
    if isinstance(objective, RelativeFairness):
        if objective.sides is None:
            raise ValueError(f"the skewness of {objective!r} is known for symmetric sides alone.")
        objective = IntegratedSet(objective.phi, *objective.sides)
    body = objective.permutahedron(n)
    # Largest against largest gives the farthest corner from the uniform weights.
    return skewness(np.sort(body.offset)[::-1] + body.corner)


def limit_skewness(tail: float, phi: float) -> float:
    r"""Return the skewness of relative fairness with A = B = CVaR(tail) for many clients.

    .. math:: \mathfrak s(\Lambda_\varphi) \to \frac{1 + \varphi^2}{(1 - \varphi)^2 \alpha}
              \quad (\alpha \le \tfrac12), \qquad
              \frac{(1 - \alpha)(1 + \varphi^2)}{(1 - \varphi)^2 \alpha^2}
              + \frac{2\alpha - 1}{\alpha^2} \quad (\alpha \ge \tfrac12)

    SCAFF-PD-IA's Proposition 5 prints :math:`\alpha [(\frac{1}{(1-\varphi)\alpha} - 1)^2 +
    (\frac{\varphi}{(1-\varphi)\alpha} + 1)^2] + 1`. Its proof leaves out the clients whose weight
    is zero and counts those twice that are in both tails: for tails up to a half it is short by
    1 - 2 alpha.

    >>> limit_skewness(tail=0.2, phi=0.0), limit_skewness(tail=1.0, phi=0.0)
    (5.0, 1.0)
    """
    if not 0 < tail <= 1 or not 0 <= phi < 1:
        raise ValueError(f"tail lies in (0, 1] and phi in [0, 1), got {tail} and {phi}.")
    ends = (1 + phi**2) / (1 - phi) ** 2
    if tail <= 0.5:
        return ends / tail
    return ((1 - tail) * ends + 2 * tail - 1) / tail**2


def log_covering_number(l1_norm: float, n: int, radius: float) -> float:
    r"""Bound :math:`\log \mathcal N(\Lambda, |\cdot|_1, \epsilon)` for weights that sum to one.

    By volume in n - 1 dimensions: :math:`(n - 1) \log(1 + 2 |\Lambda|_1 / \epsilon)`.

    >>> round(log_covering_number(l1_norm=1.0, n=10, radius=0.1), 1)  # 9 log(21)
    27.4
    """
    _positive(l1_norm=l1_norm, radius=radius)
    return (n - 1) * math.log1p(2 * l1_norm / radius)


def integrated_bound(
    empirical: float,
    objective: SymmetricSet | RelativeFairness,
    clients: int,
    samples: int,
    dimension: int,
    *,
    loss_range: float = 2.0,
    radius: float = 0.01,
    failure: float = 0.05,
    log_covering: float | None = None,
) -> float:
    r"""SCAFF-PD-IA's Theorem 4, for every client with the same number of samples.

    .. math:: L_\lambda \le \hat L_\lambda + M\epsilon + \sqrt{\frac{\mathfrak s(\Lambda)}{2Nn}}
              \Bigl(2M \sqrt{\mathrm{VC} \bigl(1 + \log\tfrac{Nn}{\mathrm{VC}}\bigr)}
              + M \sqrt{\log\tfrac{\mathcal N(\Lambda, |\cdot|_1, \epsilon)}{\delta}}\Bigr)

    for all models and all :math:`\lambda \in \Lambda`, for losses with two values that are M apart.
    The paper says [0, M] and {-1, 1} in one breath and prints 4 for 2M, as its proof has it for the
    latter: M is the range of the losses, 2 for -1 and 1 and 1 for right or wrong.

    Parameters
    ----------
    empirical : float
        The weighted loss on the training samples.
    objective : SymmetricSet or RelativeFairness
        The set of weights.
    clients, samples : int
        n and N.
    dimension : int
        VC dimension of the class of losses.
    loss_range, radius, failure : float
        M, epsilon and delta.
    log_covering : float, optional
        Logarithm of the covering number; a bound by volume if not given.

    Examples
    --------
    More weight on the gap between clients costs generalisation:

    >>> from equifed.objectives import CVaR
    >>> sets = [RelativeFairness(phi, CVaR(0.2), CVaR(0.2)) for phi in (0.0, 0.2)]
    >>> plain, signed = (integrated_bound(0.1, s, 100, 100_000, 50) for s in sets)
    >>> plain < signed < 1
    True
    """
    total = clients * samples
    if not 1 <= dimension < total:
        raise ValueError(
            f"the VC dimension must lie between 1 and the {total} samples, got {dimension}."
        )
    _positive(loss_range=loss_range)
    if log_covering is None:
        log_covering = log_covering_number(objective.l1_norm(clients), clients, radius)
    scale = math.sqrt(largest_skewness(objective, clients) / (2 * total))
    class_term = 2 * loss_range * math.sqrt(dimension * (1 + math.log(total / dimension)))
    set_term = loss_range * math.sqrt(log_covering + _log_inverse(failure))
    return empirical + loss_range * radius + scale * (class_term + set_term)


def _shares_over_tails(shares: Numbers, tails: Numbers) -> Weights:
    p, alpha = _pair(shares, tails)
    p = p / p.sum()
    return np.asarray(p / check_tails(alpha, p, "RC-FL's bound"))


def _pair(first: Numbers, second: Numbers) -> tuple[Weights, Weights]:
    a, b = (np.asarray(v, dtype=np.float64) for v in (first, second))
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"expected one number per client twice, got {a.shape} and {b.shape}.")
    if not (b > 0).all():
        raise ValueError("numbers of samples and tails must be positive.")
    return a, b


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")


def _log_inverse(failure: float) -> float:
    if not 0 < failure < 1:
        raise ValueError(f"failure is a probability in (0, 1), got {failure}.")
    return -math.log(failure)
