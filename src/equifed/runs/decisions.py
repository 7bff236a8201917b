"""What predictions are worth at every client, and what a threshold of its own would change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from equifed.contract.arrays import Losses
from equifed.contract.evaluation import Details
from equifed.data.federation import Federation
from equifed.models.predictor import Predictor, class_scores
from equifed.runs.candidates import Point
from equifed.runs.held_out import ENOUGH
from equifed.runs.linear_paths import LinearPaths, predict_split
from equifed.training.history import History


def choose_thresholds(folds: Sequence[Federation], point: Point) -> Losses:
    """Return the threshold of probability that is right most often on each client's held-out rows.

    The model is solved without these rows. NaN where there are fewer than ten, and where there are
    not two classes.
    """
    found = np.full(len(folds[0]), math.nan)
    if folds[0].classes != 2 or not LinearPaths.serves(folds[0]):
        return found
    rows, wanted, owners = [], [], []
    for fold in folds:
        assert fold.validation is not None
        at = LinearPaths(fold).solve(point.l2, point.own_l2, point.rho)
        rows.append(predict_split(fold, at, "validation"))
        wanted.append(fold.validation.targets)
        owners.append(fold.validation.owners())
    scores, targets, owner = map(np.concatenate, (rows, wanted, owners))
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(found)))
    for i, mine in enumerate(np.split(order, ends[:-1])):
        if len(mine) >= ENOUGH:
            found[i] = find_threshold(scores[mine], targets[mine])
    return found


def find_threshold(scores: NDArray[np.float64], targets: NDArray[np.int64]) -> float:
    """Return the best threshold of probability; of equally good ones the nearest to 0.5.

    >>> bool(find_threshold(np.arange(4.0), np.array([0, 0, 1, 1])) == expit(1.5))
    True
    """
    order = np.argsort(scores)
    ranked, second = scores[order], targets[order]
    levels = np.unique(ranked)
    middle = (levels[1:] + levels[:-1]) / 2
    cuts = np.concatenate([[0.0, ranked[0] - 1, ranked[-1] + 1], middle])
    below = np.searchsorted(ranked, cuts, "right")
    firsts = np.concatenate([[0], np.cumsum(1 - second)])
    right = firsts[below] + second.sum() - (below - firsts[below])
    best = cuts[right == right.max()]
    return float(expit(best[np.abs(best).argmin()]))


def add_decisions(history: History, data: Federation, split: str, thresholds: Losses) -> None:
    """Put into the details of a run what its predictions are worth at every client."""
    predictor, part = history.predictor(), data.splits()[split]
    if history.details is None or history.details.split != split or part.targets.ndim > 1:
        return
    if data.classes not in (None, 2) or not isinstance(predictor, Predictor):
        return
    names = np.repeat(np.asarray(data.names, dtype=object), part.sizes)
    outputs = predictor.answer_owners(part.inputs, names.tolist())
    told = list(history.details.clients)
    for i, detail in enumerate(told):
        mine = slice(*part.offsets[i : i + 2])
        if detail is not None:
            given = outputs[mine], part.targets[mine], float(thresholds[i])
            told[i] = replace(detail, decision=_describe(predictor, *given))
    history.details = Details(split, tuple(told))


def _describe(
    predictor: Predictor, outputs: NDArray[np.float64], targets: NDArray[np.float64], cut: float
) -> dict[str, float]:
    """Return mean prediction and mean target, their standard error, and accuracies."""
    if predictor.classes is None:
        made, there = predictor.in_units(outputs[:, 0]), predictor.in_units(targets)
        spread = float(np.std(made - there, ddof=1)) if len(there) > 1 else math.nan
        error = spread / math.sqrt(len(there))
        told = {"predicted": float(made.mean()), "observed": float(there.mean()), "error": error}
        return {k: v for k, v in told.items() if v == v}
    chance = predictor.to_chances(class_scores(outputs))[:, 1]
    error = math.sqrt(float((chance * (1 - chance)).sum())) / len(chance)
    told = {"predicted": float(chance.mean()), "observed": float(targets.mean()), "error": error}
    told |= {"threshold": cut, "accuracy": float(((chance > 0.5) == targets).mean())}
    moved = math.nan if math.isnan(cut) else float(((chance > cut) == targets).mean())
    return {k: v for k, v in {**told, "accuracy_at_threshold": moved}.items() if v == v}
