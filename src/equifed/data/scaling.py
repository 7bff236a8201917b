"""One scale for all clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equifed.data.federation import Federation
from equifed.data.split import Array, DataError


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
    if federation.layout is not None:
        raise DataError(f"A sample is {federation.layout}; standardise its arrays before.")
    chosen = slice(None) if columns is None else list(columns)
    train = federation.train.inputs[:, chosen].astype(np.float64)
    mean, deviation = train.mean(0), train.std(0)
    deviation = np.where(deviation > 1e-12 * np.maximum(1, np.abs(mean)), deviation, 1.0)

    def scale(inputs: Array) -> Array:
        scaled = inputs.copy()
        scaled[:, chosen] = (inputs[:, chosen] - mean) / deviation
        return scaled

    return federation.with_inputs({k: scale(s.inputs) for k, s in federation.splits().items()})
