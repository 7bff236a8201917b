"""Metrics of one client: functions of its targets and of what the model answers.

``y`` holds classes 0..K - 1, or values to regress on. Scores and probabilities of two classes are
one number per sample, that of class 1, the positive one; of more classes one per class, and recall,
precision, F1, AUROC and average precision are then means over the classes that the client has
("macro", one against the rest). Where scikit-learn warns that a metric is not defined, it is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equifed.metrics.checks import Values


def take_losses(y: Any, losses: Any) -> Values:
    """Return the losses that the model was trained on, without the L2 penalty."""
    return np.asarray(losses, dtype=np.float64)


def mean_loss(y: Any, losses: Any) -> float:
    """Return the mean of the losses."""
    return float(take_losses(y, losses).mean())


def correct(y: Any, predicted: Any) -> Values:
    """Return 1 for every sample that was answered correctly, else 0."""
    return np.asarray(y == predicted, dtype=np.float64)


def accuracy(y: Any, predicted: Any) -> float:
    """Return the fraction of samples that were answered correctly."""
    return float(correct(y, predicted).mean())


def balanced_accuracy(y: Any, predicted: Any) -> float:
    """Return the mean over the client's classes of the fraction answered correctly."""
    hits = correct(y, predicted)
    return float(np.mean([hits[y == k].mean() for k in np.unique(y)]))


def count_correct(y: Any, predicted: Any) -> tuple[int, int]:
    """Return how many samples were answered correctly, and of how many."""
    return int(np.count_nonzero(y == predicted)), len(y)


def _confusion(y: Any, score: Any) -> list[tuple[int, int, int]]:
    """Return (hits, predicted, true) of the positive class, or of every class that y has."""
    binary = score.ndim == 1
    predicted = (score > 0).astype(np.int64) if binary else score.argmax(axis=1)
    return [
        (int(((y == k) & (predicted == k)).sum()), int((predicted == k).sum()), int((y == k).sum()))
        for k in ([1] if binary else np.unique(y))
    ]


def _mean_ratio(parts: list[tuple[int, int]], binary: bool) -> float:
    """Return the mean of ratios; 0/0 is not defined for one class, and 0 in a mean over several."""
    if binary and parts[0][1] == 0:
        return float("nan")
    return float(np.mean([k / m if m else 0.0 for k, m in parts]))


def recall(y: Any, score: Any) -> float:
    """Return which fraction of the positive samples were found."""
    return _mean_ratio([(hit, true) for hit, _, true in _confusion(y, score)], score.ndim == 1)


def precision(y: Any, score: Any) -> float:
    """Return which fraction of the samples that were predicted positive are."""
    return _mean_ratio([(hit, said) for hit, said, _ in _confusion(y, score)], score.ndim == 1)


def f1(y: Any, score: Any) -> float:
    """Return the harmonic mean of recall and precision."""
    parts = [(2 * hit, said + true) for hit, said, true in _confusion(y, score)]
    return _mean_ratio(parts, score.ndim == 1)


def count_recalled(y: Any, score: Any) -> tuple[int, int] | None:
    """Return how many positive samples were found, and of how many; None for several classes."""
    hit, _, true = _confusion(y, score)[0]
    return (hit, true) if score.ndim == 1 else None


def count_precise(y: Any, score: Any) -> tuple[int, int] | None:
    """Return how many predicted positives are, and of how many; None for several classes."""
    hit, said, _ = _confusion(y, score)[0]
    return (hit, said) if score.ndim == 1 else None


def auroc(y: Any, score: Any) -> float:
    """Return how often a positive sample is ranked before a negative one, ties counting half."""
    if score.ndim == 2:
        return _one_against_rest(auroc, y, score)
    positive = y == 1
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return float("nan")
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # equal scores share their mean rank
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * n))


def average_precision(y: Any, score: Any) -> float:
    """Return the mean precision at the ranks of the positive samples, equal scores together."""
    if score.ndim == 2:
        return _one_against_rest(average_precision, y, score)
    positive = y == 1
    if positive.all() or not positive.any():
        return float("nan")
    order = np.argsort(-score, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(score[order])), len(y) - 1)  # the last of each score
    found = np.cumsum(positive[order])[ends]
    gained = np.diff(found, prepend=0) / positive.sum()
    return float((gained * found / (ends + 1)).sum())


def _one_against_rest(metric: Any, y: Any, score: Any) -> float:
    classes = np.unique(y)
    if len(classes) < 2:
        return float("nan")
    powers = np.exp(score - score.max(axis=1, keepdims=True))
    chances = powers / powers.sum(axis=1, keepdims=True)
    return float(np.mean([metric((y == k).astype(np.int64), chances[:, k]) for k in classes]))


def squared_distances(y: Any, probability: Any) -> Values:
    """Return the squared distance of every answer from the truth; of two classes, of the second."""
    if probability.ndim == 1:
        return np.asarray((probability - y) ** 2, dtype=np.float64)
    truth = np.eye(probability.shape[1])[y]
    return np.asarray(((probability - truth) ** 2).sum(axis=1))


def brier(y: Any, probability: Any) -> float:
    """Return the mean squared distance of the probabilities from the truth."""
    return float(squared_distances(y, probability).mean())


def log_losses(y: Any, probability: Any) -> Values:
    """Return minus the logarithm of the probability of the true class, which is at least 2e-16."""
    two = probability.ndim == 1
    chances = np.column_stack([1 - probability, probability]) if two else probability
    least = np.finfo(np.float64).eps
    return np.asarray(-np.log(np.clip(chances[np.arange(len(y)), y], least, 1 - least)))


def log_loss(y: Any, probability: Any) -> float:
    """Return minus the mean logarithm of the probability of the true class."""
    return float(log_losses(y, probability).mean())


def _per_sample(errors: Any) -> Values:
    wide = np.asarray(errors, dtype=np.float64).reshape(len(errors), -1)
    return np.asarray(wide.mean(axis=1))


def squared_errors(y: Any, predicted: Any) -> Values:
    """Return the squared error of every sample, mean over its targets."""
    return _per_sample((np.asarray(y, np.float64) - predicted) ** 2)


def absolute_errors(y: Any, predicted: Any) -> Values:
    """Return the absolute error of every sample, mean over its targets."""
    return _per_sample(np.abs(np.asarray(y, np.float64) - predicted))


def mse(y: Any, predicted: Any) -> float:
    """Return the mean squared error."""
    return float(squared_errors(y, predicted).mean())


def rmse(y: Any, predicted: Any) -> float:
    """Return the root of the mean squared error; of several targets the mean of their roots."""
    errors = (np.asarray(y, np.float64) - predicted) ** 2
    return float(np.sqrt(errors.reshape(len(errors), -1).mean(axis=0)).mean())


def mae(y: Any, predicted: Any) -> float:
    """Return the mean absolute error."""
    return float(absolute_errors(y, predicted).mean())


def r2(y: Any, predicted: Any) -> float:
    """Return which fraction of the variance of the client's targets is explained."""
    truth = np.asarray(y, np.float64).reshape(len(y), -1)
    spread = ((truth - truth.mean(axis=0)) ** 2).sum(axis=0)
    if len(y) < 2 or not (np.ptp(truth, axis=0) > 0).all():
        return float("nan")
    rest = ((truth - np.asarray(predicted, np.float64).reshape(truth.shape)) ** 2).sum(axis=0)
    return float((1 - rest / spread).mean())
