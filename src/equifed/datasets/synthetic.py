"""Generated federations."""

from __future__ import annotations

import numpy as np

from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import DataError, Split


def synthetic_regression(
    *,
    clients: int = 5,
    features: int = 10,
    samples: int = 100,
    scale: float = 1.0,
    shift: float = 0.1,
    seed: int = 0,
) -> Federation:
    r"""Linear regression with a different true model on every client (SCAFF-PD, Section 6.1).

    .. math:: a_i^j \sim N(0, I_d), \quad \hat x \sim N(0, c^2 I_d), \quad
       \delta_i \sim N(0, \sigma^2 I_d), \quad y_i^j = \langle a_i^j, \hat x + \delta_i \rangle

    Targets carry no noise. The paper gives N = 5, d = 10 and m = 100 but neither c nor
    :math:`\sigma`; we take 1 and 0.1. Use it with the model ``linear`` without bias and the loss
    ``squared``. Client i draws from its own address, so the first clients stay the same when
    more are asked for.

    Parameters
    ----------
    clients, features, samples : int
        N, d, and m for every client.
    scale, shift : float
        c and :math:`\sigma`: how large the common model is, and how far clients differ from it.
    seed : int
        Seed of the draws.

    Examples
    --------
    >>> fed = synthetic_regression(clients=2, features=3, samples=4)
    >>> fed.train.inputs.shape, fed.train.inputs.dtype
    ((8, 3), dtype('float64'))
    """
    for name, value in (("clients", clients), ("features", features), ("samples", samples)):
        if value < 1:
            raise DataError(f"synthetic-regression: {name} must be at least 1, got {value}.")
    if scale < 0 or shift < 0:
        raise DataError(f"synthetic-regression: scale {scale} and shift {shift} must be >= 0.")
    stream = Stream(seed).at("synthetic-regression")
    common = scale * stream.at("model").generator().standard_normal(features)
    data = []
    for i in range(clients):
        draw = stream.at("client", i).generator()
        truth = common + shift * draw.standard_normal(features)
        inputs = draw.standard_normal((samples, features))
        data.append((inputs, np.asarray(inputs @ truth)))
    return Federation(
        name="synthetic-regression",
        names=tuple(f"client {i}" for i in range(clients)),
        train=Split.from_clients(data),
        source={"publisher": "generated", "reference": "SCAFF-PD, Section 6.1", "seed": str(seed)},
    )
