"""What a client's shares of classes say about its outputs: a shift of the last bias, by counting.

A network that has learnt its training samples by heart gives no sign on them that a client has
other shares of classes than everybody, so nothing fitted to these outputs finds it out. Counts of
labels do. Where p(x | y) is the same, a client with shares s instead of p is served best by logits
moved by log(s / p) (Bayes' rule; Saerens et al. 2002); and s is not known, but counted in few
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, gammaln, logit, xlogy

ClassKinds: TypeAlias = Literal["classes"] | Sequence[int]
"""For every class the number of its kind, or "classes": each class is a kind of its own."""
ROUNDS = 500
"""Of the search for the part of clients that differ."""


def check_kinds(kinds: Any, classes: int) -> NDArray[np.int64]:
    """Return for every class the number of its kind.

    >>> check_kinds([0, 0, 1], 3), check_kinds("classes", 2)
    (array([0, 0, 1]), array([0, 1]))
    """
    if isinstance(kinds, str) and kinds == "classes":
        return np.arange(classes)
    given = [] if isinstance(kinds, str) or not isinstance(kinds, Sequence) else list(kinds)
    whole = all(isinstance(k, int | np.integer) and k >= 0 for k in given)
    if len(given) != classes or not whole:
        raise ValueError(
            'class_kinds is "classes", or for every class the number of its kind (0, 1, ...): '
            f"{classes} numbers, got {kinds!r}."
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def share_shifts(counts: NDArray[Any], kinds: ClassKinds = "classes") -> NDArray[np.float64]:
    """Return by how much every client's logits move (clients, classes), given counts of labels.

    Clients are as everybody, with the shares p (the mean of all clients' shares), or differ, with
    shares of their own, of which nothing is known (uniform over all shares). How many differ is the
    likeliest part of all; a client that differs with probability w has the shares
    ``w (n_k + 1) / (n + K) + (1 - w) p_k``. So chance moves nobody, and a client without
    digits stops seeing them. Classes of one kind move alike, which takes fewer samples than classes
    by themselves. Kinds that nobody has do not move, nor do clients without samples.

    >>> share_shifts(np.array([[70, 30]] * 20 + [[0, 60]]))[-1].round(1)
    array([-3.7,  1.1])
    """
    counts = np.asarray(counts, dtype=np.float64)
    of = check_kinds(kinds, counts.shape[1])
    held = np.stack([counts[:, of == k].sum(1) for k in range(of.max() + 1)], axis=1)
    n, seen = held.sum(1), held.sum(0) > 0
    shifts = np.zeros_like(held)
    if not seen.any():
        return shifts[:, of]
    here = held[np.ix_(n > 0, seen)]
    n, many = here.sum(1, keepdims=True), here.shape[1]
    p = (here / n).mean(0)
    alike = xlogy(here, p).sum(1)
    # The same counts under shares of which nothing is known: Dirichlet(1, ..., 1), integrated out.
    differ = gammaln(many) - gammaln(n[:, 0] + many) + gammaln(here + 1).sum(1)
    w = _differing(differ - alike)[:, None]
    own = (here + 1) / (n + many)
    shifts[np.ix_(held.sum(1) > 0, seen)] = np.log(w * own / p + 1 - w)
    return shifts[:, of]


def _differing(evidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each client's probability to differ, given log likelihood ratios (by EM)."""
    part = 0.5
    for _ in range(ROUNDS):
        w: NDArray[np.float64] = expit(evidence + logit(part))
        part = float(np.clip(w.mean(), 1e-6, 1 - 1e-6))
    return w
