r"""How well clients are served: averages, the worst, the best, and how far they lie apart.

``higher_is_better`` says whether the values are something like accuracies (True) or something like
losses (False). It decides who is *worst*. None of these reducers minds negative values.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics.checks import Reduced, Values, client_weights, finite, level_in_unit, reduced


def average_by_client(values: ArrayLike) -> Reduced:
    r"""Return the plain mean over clients, :math:`\frac1n\sum_i v_i`: every client counts the same.

    This is the average of PD and IA (Table 1, column "All").

    >>> average_by_client([0.9, 0.5])
    0.7
    """
    return reduced(finite(values).mean(axis=-1))


def average_by_sample(values: ArrayLike, sizes: ArrayLike) -> Reduced:
    r"""Return the mean over samples, :math:`\sum_i m_i v_i / \sum_i m_i`: large clients count more.

    With ``sizes`` the number of test samples this is the accuracy on the pooled test set.

    >>> average_by_sample([0.9, 0.5], sizes=[300, 100])
    0.8
    """
    array = finite(values)
    return reduced((client_weights(sizes, array) * array).sum(axis=-1))


def count_of_fraction(fraction: float, clients: int) -> int:
    r"""Return :math:`\lceil k n\rceil`, at least 1: how many clients "the worst k" are among n.

    Rounded up, so that a small federation still has a worst client; a product that is an integer
    but for rounding (0.1 * 30 is 3.0000000000000004) counts as that integer.

    >>> count_of_fraction(0.1, 30), count_of_fraction(0.1, 31), count_of_fraction(0.2, 3)
    (3, 4, 1)
    """
    return max(1, math.ceil(level_in_unit(fraction, "fraction") * clients - 1e-9))


def worst_fraction(values: ArrayLike, fraction: float, *, higher_is_better: bool) -> Reduced:
    r"""Return the mean over the :math:`\lceil k n\rceil` worst-served clients, k = ``fraction``.

    The lowest accuracies or the highest losses. :func:`~equifed.metrics.cvar` is the same without
    rounding, with the last client counted in part. IA Section 6 (ii).

    >>> worst_fraction([0.5, 1.0, 0.75, 0.75], 0.5, higher_is_better=True)
    0.625
    >>> worst_fraction([0.5, 1.0, 0.75, 0.75], 0.5, higher_is_better=False)
    0.875
    """
    array = finite(values)
    count = count_of_fraction(fraction, array.shape[-1])
    ordered = np.sort(array, axis=-1)
    tail = ordered[..., :count] if higher_is_better else ordered[..., -count:]
    return reduced(tail.mean(axis=-1))


def best_fraction(values: ArrayLike, fraction: float, *, higher_is_better: bool) -> Reduced:
    r"""Return the mean over the :math:`\lceil k n\rceil` best-served clients. IA Section 6 (iii).

    >>> best_fraction([0.5, 1.0, 0.75, 0.75], 0.5, higher_is_better=True)
    0.875
    """
    return worst_fraction(values, fraction, higher_is_better=not higher_is_better)


def minimum(values: ArrayLike) -> Reduced:
    """Return the smallest value, whoever that is good for.

    >>> minimum([0.5, 0.9])
    0.5
    """
    return reduced(finite(values).min(axis=-1))


def maximum(values: ArrayLike) -> Reduced:
    """Return the largest value.

    >>> maximum([0.5, 0.9])
    0.9
    """
    return reduced(finite(values).max(axis=-1))


def worst(values: ArrayLike, *, higher_is_better: bool) -> Reduced:
    """Return the value of the worst-served client: the lowest accuracy or the highest loss.

    The worst of many noisy clients looks bad by chance: see
    :func:`~equifed.metrics.worst_client_interval` for what the data say about its true accuracy.

    >>> worst([0.5, 0.9], higher_is_better=True), worst([0.5, 0.9], higher_is_better=False)
    (0.5, 0.9)
    """
    return minimum(values) if higher_is_better else maximum(values)


def best(values: ArrayLike, *, higher_is_better: bool) -> Reduced:
    """Return the value of the best-served client.

    >>> best([0.5, 0.9], higher_is_better=True)
    0.9
    """
    return worst(values, higher_is_better=not higher_is_better)


def spread(values: ArrayLike) -> Reduced:
    r"""Return the range :math:`\max_i v_i - \min_i v_i`: between the best and the worst served.

    >>> spread([0.5, 0.75, 0.625])
    0.25
    """
    return reduced(np.ptp(finite(values), axis=-1))


def _from_first(values: ArrayLike) -> Values:
    """Return the distances to the first client: equal values then vary by exactly 0."""
    array = finite(values)
    return array - array[..., :1]


def variance(values: ArrayLike) -> Reduced:
    r"""Return :math:`\frac1n\sum_i (v_i - \bar v)^2`.

    Divided by n, not n - 1: the clients of the federation are all the clients there are. One client
    has variance 0.

    >>> variance([1.0, 2.0, 3.0, 6.0])
    3.5
    """
    return reduced(_from_first(values).var(axis=-1))


def standard_deviation(values: ArrayLike) -> Reduced:
    r"""Return the square root of :func:`variance`, in the unit of the values.

    >>> standard_deviation([1.0, 3.0])
    1.0
    """
    return reduced(_from_first(values).std(axis=-1))
