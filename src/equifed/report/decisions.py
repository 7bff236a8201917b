"""Whether predictions are right on average at each client; what own thresholds would change."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from equifed.contract.evaluation import Details
from equifed.metrics.metric import Metric, find_metric
from equifed.metrics.reducers import worst_fraction
from equifed.report.methods import Method, Scale, join_names

HEADS = ("client", "rows", "predicted", "observed", "own threshold", "accuracy", "with it")
MOST = 20
"""Clients in the table: those whose predictions are farthest off."""
LEVEL = 0.05
"""Over all clients together, how often chance alone would name one."""


def read_decisions(details: Details | None) -> dict[str, NDArray[np.float64]]:
    """Return every number of the decisions, by client; empty where none are known."""
    told = [{} if c is None else c.decision for c in (() if details is None else details.clients)]
    keys = dict.fromkeys(key for one in told for key in one)
    return {k: np.array([one.get(k, math.nan) for one in told]) for k in keys}


def describe_decisions(method: Method, scale: Scale | None) -> list[str]:
    """Say where predictions are off on average, and what own thresholds would change."""
    told = {} if scale is None else read_decisions(method.details(scale))
    if not told:
        return []
    kind, far = _find_kind(told), _measure_distance(told)
    known = int(np.isfinite(far).sum())
    limit = NormalDist().inv_cdf(1 - LEVEL / 2 / max(known, 1))
    off = [int(i) for i in np.argsort(-far) if far[i] > limit]
    said = "mean probability" if "accuracy" in told else "mean prediction"
    if not off:
        return [f"No client's {said} is off beyond chance.", *_describe_thresholds(told)]
    where = join_names([
        f"{method.clients[i]} ({kind.write(told['predicted'][i])} predicted, "
        f"{kind.write(told['observed'][i])} observed)" for i in off
    ])  # fmt: skip
    first = f"The {said} is off beyond chance for {len(off):,} of {known:,} clients: {where}."
    return [first, *_describe_thresholds(told)]


def list_decisions(method: Method, scale: Scale) -> list[list[str]]:
    """Return a row for every client, those that are farthest off first, twenty at most."""
    details = method.details(scale)
    told, size = read_decisions(details), 0 if details is None else len(details.clients)
    if not told or details is None:
        return []
    kind, share, far = _find_kind(told), find_metric("accuracy"), _measure_distance(told)
    known = [int(i) for i in np.argsort(-far, kind="stable")[:size] if np.isfinite(far[i])]
    rows = []
    for i in known[:MOST]:
        one = details.clients[i]
        value = {k: float(v[i]) for k, v in told.items()}
        more = [value.get(k, math.nan) for k in ("threshold", "accuracy", "accuracy_at_threshold")]
        wide = kind.write_number(1.96 * value["error"])
        rows.append([
            method.clients[i], f"{0 if one is None else one.size:,}",
            kind.write(value["predicted"]), f"{kind.write(value['observed'])} ± {wide}",
            *("" if math.isnan(v) else share.write(v) for v in more),
        ])  # fmt: skip
    return rows


def _find_kind(told: dict[str, NDArray[np.float64]]) -> Metric:
    """Return how means are written: as shares, or as values."""
    return find_metric("accuracy" if "accuracy" in told else "mse")


def _measure_distance(told: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return how many standard errors predictions are off, by client; NaN last in order."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.abs(told["predicted"] - told["observed"]) / told.get("error", math.nan)


def _describe_thresholds(told: dict[str, NDArray[np.float64]]) -> list[str]:
    """Say what thresholds of the clients' own would change, where there are any."""
    moved = told.get("accuracy_at_threshold", np.empty(0))
    if not np.isfinite(moved).any():
        return []
    now, write = told["accuracy"], find_metric("accuracy").write
    then = np.where(np.isfinite(moved), moved, now)
    known = np.isfinite(now)
    pairs = [(f(now[known]), f(then[known])) for f in (np.mean, _worst_fifth)]
    average, worst = (f"{write(float(a))} to {write(float(b))}" for a, b in pairs)
    better, worse = int((then > now).sum()), int((then < now).sum())
    return [
        f"Thresholds of {int(np.isfinite(moved).sum()):,} clients' own, chosen on held-out rows in "
        f"place of 50 %, would change the average from {average}, the worst-served fifth from "
        f"{worst} (better: {better:,}, worse: {worse:,}). They are not applied."
    ]


def _worst_fifth(values: NDArray[np.float64]) -> float:
    return float(worst_fraction(values, 0.2, higher_is_better=True))
