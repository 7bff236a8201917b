"""From which probability on the second of two classes is the better answer."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

Rule: TypeAlias = Literal["accuracy", "balanced_accuracy"]
"""What a threshold makes as large as possible."""


def best_threshold(chance: NDArray[Any], truth: NDArray[Any], rule: Rule) -> float:
    """Return the threshold with the best score, the nearest to 0.5 among equals.

    >>> best_threshold(np.array([0.125, 0.25, 0.375]), np.array([0, 0, 1]), "accuracy")
    0.3125
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule is 'accuracy' or 'balanced_accuracy', got {rule!r}.")
    if len(set(truth.tolist())) < 2:
        return 0.5
    levels = np.unique(chance)
    cuts = np.unique([0.5, *(levels[:-1] + levels[1:]) / 2, levels[0] / 2, (levels[-1] + 1) / 2])
    yes, no = np.sort(chance[truth == 1]), np.sort(chance[truth == 0])
    found, spared = len(yes) - np.searchsorted(yes, cuts), np.searchsorted(no, cuts)
    if rule == "accuracy":
        score = (found + spared) / len(truth)
    else:
        score = (found / len(yes) + spared / len(no)) / 2
    best = cuts[score >= score.max() - 1e-12]
    return float(best[np.abs(best - 0.5).argmin()])
