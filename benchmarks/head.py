"""Made-up features of a large federation: a softmax head on a trained network."""

from __future__ import annotations

import numpy as np

from equifed.data.federation import Federation
from equifed.data.split import Split


def head(
    clients: int = 1000, samples: int = 50, features: int = 1280, classes: int = 10
) -> Federation:
    """Return features whose spectrum falls as those of a trained network do."""
    draw = np.random.default_rng(0)
    scale = np.arange(1, features + 1) ** -0.5
    centres = draw.standard_normal((classes, features)).astype(np.float32)
    labels = np.concatenate(
        [draw.choice(classes, samples, p=draw.dirichlet(np.full(classes, 0.3)))
         for _ in range(clients)]
    )  # fmt: skip
    noise = 2.5 * draw.standard_normal((len(labels), features), dtype=np.float32)
    inputs = (centres[labels] + noise) * scale.astype(np.float32)
    split = Split(inputs, labels, np.arange(0, len(labels) + 1, samples))
    names = tuple(f"client {i}" for i in range(clients))
    return Federation("head", names, split, classes=classes)
