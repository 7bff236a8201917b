"""Histories as training would leave them, made up quickly: no model, no data."""

import numpy as np

from equifed.report import Method
from equifed.training.history import History, MetricRecord, RoundRecord

METHODS = ("fedavg", "scaffold", "afl", "drfa", "q-fedavg", "scaff-pd")


def history(
    names: tuple[str, ...] = ("a", "b", "c"),
    *,
    seed: int = 0,
    pull: float = 0.0,
    rounds: int = 20,
    every: int = 5,
    samples: int = 200,
    gap: bool = False,
    known: bool = False,
) -> History:
    """Return a run whose clients' true accuracies are pulled towards their mean by ``pull``."""
    n = len(names)
    fixed = np.random.default_rng(7)
    true = np.sort(fixed.beta(12, 4, n))
    sizes = fixed.integers(samples // 2, samples * 2, n)
    draw = np.random.default_rng([seed, int(100 * pull)])
    served = (1 - pull) * true + pull * (true.mean() - 0.02)
    made = History(names, provenance={"seed": seed} if known else {})
    for r in range(rounds + 1):
        if r:
            numbers = {"gap": 2.0 ** (-r)} if gap else {}
            made.rounds.append(RoundRecord(r, 1.0 / r, 2, 4000 * n, 4000 * n, 0.01, numbers))
        if r % every == 0:
            reached = served * (1 - np.exp(-(r + 1) / (rounds / 4)))
            accuracy = draw.binomial(sizes, reached) / sizes
            made.metrics.append(MetricRecord(r, "test", "accuracy", accuracy, sizes))
            made.metrics.append(MetricRecord(r, "test", "loss", 1.5 - accuracy, sizes))
            if r:
                tilt = np.exp(-pull * 4 * accuracy)
                made.weights[r] = tilt / tilt.sum()
    return made


def comparison(clients: int = 100, methods: tuple[str, ...] = METHODS, seeds: int = 5):
    """Return methods that pull harder and harder, over several seeds."""
    names = tuple(f"client {i:03d}" for i in range(clients))
    pulls = np.linspace(0.0, 0.75, len(methods))
    return [
        Method(
            name,
            tuple(
                history(names, seed=s, pull=float(p), gap=name == "scaff-pd", known=True)
                for s in range(seeds)
            ),
        )
        for name, p in zip(methods, pulls, strict=True)
    ]
