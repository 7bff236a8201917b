"""Preparation that learns from training samples alone, so that nothing held out leaks in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equifed.data.federation import Federation
from equifed.data.split import Array


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

    def scale(inputs: Array) -> Array:
        scaled = inputs.copy()
        scaled[:, chosen] = (inputs[:, chosen] - mean) / deviation
        return scaled

    return federation.with_inputs({k: scale(s.inputs) for k, s in federation.splits().items()})


def fill_missing(
    federation: Federation, gaps: dict[str, NDArray[np.bool_]], columns: Sequence[int]
) -> Federation:
    """Put the median of the present training values where values are missing.

    ``gaps`` says for each split, row and column of ``columns`` whether the value is missing.
    """
    filled = {label: split.inputs.copy() for label, split in federation.splits().items()}
    for k, column in enumerate(columns):
        median = float(np.median(federation.train.inputs[~gaps["train"][:, k], column]))
        for label, inputs in filled.items():
            inputs[gaps[label][:, k], column] = median
    return federation.with_inputs(filled)
