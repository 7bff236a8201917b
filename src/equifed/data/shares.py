"""Shares of a pool: Dirichlet draws, cuts, limited counts, and held-out samples that follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream

Rows = NDArray[np.int64]


def dirichlet(draw: np.random.Generator, alpha: float, size: int) -> NDArray[np.float64]:
    """Draw from a symmetric Dirichlet law; stable when alpha is so small that gammas underflow.

    log Gamma(alpha) = log Gamma(alpha + 1) + log(U) / alpha, then a softmax.
    """
    logs = np.log(draw.standard_gamma(alpha + 1, size)) + np.log(draw.random(size)) / alpha
    shares = np.exp(logs - logs.max())
    return np.asarray(shares / shares.sum())


def cuts(shares: NDArray[np.float64], total: int) -> Rows:
    """Return where to cut ``total`` items so that the pieces have these shares, up to rounding."""
    return np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)


def limited_counts(
    mixture: NDArray[np.float64], size: int, left: Rows, draw: np.random.Generator
) -> Rows:
    """Draw how many samples of each class to take, ``size`` in all, at most what is left."""
    counts = np.zeros(len(mixture), dtype=np.int64)
    while (missing := size - counts.sum()) > 0:
        open_classes = left > counts
        chances = np.where(open_classes, mixture, 0.0)
        if chances.sum() <= 0:
            chances = open_classes.astype(np.float64)  # what the client wanted is used up
        more = draw.multinomial(missing, chances / chances.sum())
        counts = np.minimum(counts + more, left)
    return counts


def topped_up(parts: list[Rows], least: int, draw: np.random.Generator) -> list[Rows]:
    """Move random samples from whoever has most to clients with fewer than ``least``."""
    sizes = np.array([len(part) for part in parts])
    for i in np.flatnonzero(sizes < least):
        while sizes[i] < least:
            giver = int(sizes.argmax())
            taken = int(draw.integers(sizes[giver]))
            parts[i] = np.append(parts[i], parts[giver][taken])
            parts[giver] = np.delete(parts[giver], taken)
            sizes[i] += 1
            sizes[giver] -= 1
    return parts


def follow(parts: Sequence[Rows], labels: Rows, held_labels: Rows, stream: Stream) -> list[Rows]:
    """Divide held-out samples so that every client meets the classes it trains on.

    The held-out samples of a class are shuffled and divided among the clients in proportion to
    their training samples of that class, so a client's held-out class mixture is that of its
    training samples up to rounding, and a client may end without held-out samples.

    >>> parts = [np.array([0, 1, 2]), np.array([3])]
    >>> held = follow(parts, np.zeros(4, dtype=int), np.zeros(8, dtype=int), Stream(0))
    >>> [len(rows) for rows in held]
    [6, 2]
    """
    pieces: list[list[Rows]] = [[np.empty(0, dtype=np.int64)] for _ in parts]
    for label in np.unique(held_labels):
        counts = np.array([np.count_nonzero(labels[rows] == label) for rows in parts])
        if not counts.any():
            continue
        rows = (
            stream.at("held out", int(label))
            .generator()
            .permutation(np.flatnonzero(held_labels == label))
        )
        for i, piece in enumerate(np.split(rows, cuts(counts / counts.sum(), len(rows)))):
            pieces[i].append(piece)
    return [np.sort(np.concatenate(piece)) for piece in pieces]
