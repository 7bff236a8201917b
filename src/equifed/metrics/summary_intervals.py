"""Bootstrap intervals for every reducer at once, from one set of resamples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics.bootstrap import (
    Resample,
    check_measured,
    client_quantile,
    common_accuracies,
    corrected_interval,
    resample_accuracies,
    resample_clients,
    widen,
)
from equifed.metrics.checks import Values, check_finite
from equifed.metrics.intervals import Interval, check_level, worst_client_interval
from equifed.metrics.summary import Direction, Reducer, reducers


def _intervals(
    chosen: Sequence[Reducer],
    values: Values,
    blocks: Iterable[Values],
    higher_is_better: bool,
    quantile: float,
    level: float,
) -> dict[str, Interval]:
    draws: dict[str, list[Values]] = {reducer.name: [] for reducer in chosen}
    for block in blocks:
        for reducer in chosen:
            draws[reducer.name].append(reducer.compute(block, higher_is_better))
    return {
        reducer.name: corrected_interval(
            reducer.compute(values, higher_is_better),
            np.concatenate(draws[reducer.name]),
            quantile=quantile,
            level=level,
            bounds=reducer.bounds,
        )
        for reducer in chosen
    }


def summary_intervals(
    values: ArrayLike,
    *,
    higher_is_better: bool,
    fractions: Sequence[float] = (0.1, 0.2),
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    names: Collection[str] | None = None,
) -> dict[str, Interval]:
    """Return an interval for each reducer when *other clients* are drawn, as ``bootstrap_clients``.

    For losses and for anything else that is one number per client. Reducers that rest on one client
    are left out, and so are those that are not defined for negative values when there are any, and
    all but ``names`` where these are given.

    >>> intervals = summary_intervals([0.2, 0.4, 0.3, 0.9], higher_is_better=False, resamples=100)
    >>> "gini" in intervals, "worst" in intervals
    (True, False)
    """
    array = check_finite(values)
    negative = bool((array < 0).any())
    chosen = [r for r in _named(fractions, names) if r.signed or not negative]
    blocks = (block[0] for block in resample_clients([array], resamples, seed))
    c = client_quantile(check_level(level), array.size)
    return _intervals(chosen, array, blocks, higher_is_better, c, level)


def accuracy_intervals(
    correct: ArrayLike,
    trials: ArrayLike,
    *,
    resample: Resample = "samples",
    fractions: Sequence[float] = (0.1, 0.2),
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    names: Collection[str] | None = None,
) -> dict[str, Interval]:
    """Return an interval for each reducer of the clients' *true* accuracies.

    ``"samples"`` is about these clients, ``"both"`` about others of their kind; see
    :mod:`equifed.metrics.bootstrap`. With ``"samples"`` the worst client is included (``worst`` and
    ``minimum``), with the interval of :func:`~equifed.metrics.worst_client_interval` in place of
    the bootstrap. Of ``names``, where given, alone.

    >>> intervals = accuracy_intervals([60, 80, 95], [100, 100, 100], resamples=100)
    >>> round(intervals["worst"].estimate, 2), intervals["worst"].lower < 0.6
    (0.6, True)
    """
    k, m = check_measured(correct, trials)
    chosen = [_for_accuracies(r) for r in _named(fractions, names)]
    quantile, blocks = resample_accuracies(k, m, resample, level, resamples, seed)
    result = _intervals(chosen, k / m, blocks, True, quantile, level)
    common = common_accuracies(k, m, level)
    if common is not None:
        for r in chosen:
            result[r.name] = widen(result[r.name], np.asarray(r.compute(common, True)))
    if resample == "samples" and names is None:
        result["worst"] = result["minimum"] = worst_client_interval(k, m, level).interval
    return result


def _named(fractions: Sequence[float], names: Collection[str] | None) -> list[Reducer]:
    """Return the reducers that rest on more than one client, or those of them that are named."""
    return [r for r in reducers(fractions) if not r.extreme and (names is None or r.name in names)]


def _for_accuracies(reducer: Reducer) -> Reducer:
    """Return the reducer, with levels of service between 0 and 1."""
    unit = reducer.direction is Direction.AS_VALUES
    return replace(reducer, bounds=(0.0, 1.0)) if unit else reducer
