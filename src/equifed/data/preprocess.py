"""Preparation that learns from training samples alone, so that nothing held out leaks in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.federation import Federation, Split


def standardise(federation: Federation, columns: Sequence[int] | None = None) -> Federation:
    """Shift and scale feature columns to mean 0 and deviation 1 over all training samples.

    One mean and one deviation for all clients: clients send only sums and sums of squares, and
    differences between clients stay visible to the model. A constant column is only shifted.
    Held-out samples are transformed with the training numbers.

    >>> X = np.array([[0.0], [2.0]])
    >>> fed = Federation.from_clients({"a": (X, [0, 1])}, test={"a": (X + 2, [0, 1])})
    >>> standardise(fed).train.inputs.ravel(), standardise(fed).test.inputs.ravel()
    (array([-1.,  1.]), array([1., 3.]))
    """
    chosen = slice(None) if columns is None else list(columns)
    train = federation.train.inputs[:, chosen].astype(np.float64)
    mean, deviation = train.mean(0), train.std(0)
    deviation = np.where(deviation > 1e-12 * np.maximum(1, np.abs(mean)), deviation, 1.0)

    def scaled(split: Split) -> Split:
        inputs = split.inputs.copy()
        inputs[:, chosen] = (inputs[:, chosen] - mean) / deviation
        return replace(split, inputs=inputs)

    return with_splits(federation, scaled)


def fill_missing(
    federation: Federation, gaps: dict[str, NDArray[np.bool_]], columns: Sequence[int]
) -> Federation:
    """Put the median of the present training values where values are missing.

    ``gaps`` says for each split, row and column of ``columns`` whether the value is missing.
    """
    inputs = federation.train.inputs
    medians = [
        float(np.median(inputs[~gaps["train"][:, k], column])) for k, column in enumerate(columns)
    ]
    held: dict[str, Any] = {}
    for label, split in federation.splits().items():
        filled = split.inputs.copy()
        for k, column in enumerate(columns):
            filled[gaps[label][:, k], column] = medians[k]
        held[label] = replace(split, inputs=filled)
    return replace(federation, **held)


def with_splits(federation: Federation, change: Any) -> Federation:
    """Return the federation with ``change`` applied to each of its splits."""
    held: dict[str, Any] = {label: change(s) for label, s in federation.splits().items()}
    return replace(federation, **held)
