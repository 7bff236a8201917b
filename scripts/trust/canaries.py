r"""Audit of what the ledger says, by canaries in one run (Steinke, Nasr and Jagielski 2023).

    python -m scripts.trust.canaries

Each of m canaries is a row that is one thing or its opposite by a fair coin. Whoever sees the
noised answers guesses coins, and may leave some out. If the answers are (epsilon, delta)-private
where one row is replaced, then the number W of right ones among r guesses obeys (Theorem 5.2)

.. math:: P(W \ge v) \le \beta + 2 m \delta \max_{1 \le i \le v} P(v > B \ge v - i) / i, \qquad
          \beta = P(B \ge v), \quad B \sim \text{Binomial}(r, 1 / (1 + e^{-\epsilon}))

so that many right guesses refute every smaller epsilon: a lower bound, to be compared with what the
ledger says is spent. Exit code 1 if more than 2 of 20 bounds lie above that, or if none does where
the noise was left out.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom
from torch import Tensor

import equifed as ef
from equifed.privacy.ledger import Entry, NoAccountant, compose
from equifed.privacy.noise import StreamNoise
from equifed.privacy.site import PrivateSite

Array = NDArray[np.float64]
EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-6
CANARIES = 20_000
LEVEL = 0.05
LENGTH = 4.0
"""Of the rows of clients that are audited."""
ROUNDS = 4
FEDAVG = ef.FedAvg(ef.LocalSGD(lr=0.01, steps=2))
NEWTON = ef.FairNewton(ef.objectives.ChiSquare(1.0, scale=1.0))
FEW = 0.05
"""Share of the canaries that the sharper guess is about; another one is about all."""


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many right guesses under (epsilon, delta)."""
    q = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, q))
    if right == 0:
        return 1.0
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))  # P(v > B >= v - i)
    alpha = float((below / np.arange(1, right + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def lower_bound(
    canaries: int, guesses: int, right: int, delta: float, level: float = LEVEL
) -> float:
    """Return an epsilon that is refuted at this level, with all below it; 0 if none is."""
    if p_value(canaries, guesses, right, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(canaries, guesses, right, high, delta) < level:
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = p_value(canaries, guesses, right, middle, delta) < level
        low, high = (middle, high) if refuted else (low, middle)
    return low


def count_right(coins: Array, scores: Array, guesses: int) -> int:
    """Guess the signs of the scores that are farthest from 0, and count the right ones."""
    surest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    return int((coins[surest] * scores[surest] > 0).sum())


def bound_epsilon(coins: Array, scores: Array, delta: float, level: float = LEVEL) -> float:
    """Return the larger bound of a guess about few canaries and one about all.

    Each is at half the level, so that both hold together at the level.
    """
    m = len(coins)
    tries = {max(1, math.ceil(FEW * m)), m}
    rights = {r: count_right(coins, scores, r) for r in tries}
    return max(lower_bound(m, r, v, delta, level / 2) for r, v in rights.items())


def noised_gradients(
    coins: Array, draw: np.random.Generator, sigma: float, steps: int, q: float = 1.0
) -> Array:
    """Return what is seen of each canary in noised sums of gradients clipped to length 1.

    Squared loss, model and rows in as many dimensions as there are canaries: canary i is the row
    e_i with target 2 or its opposite, so gradients are clipped and move by 2 where a row is
    replaced. Each step is about a share q of the rows, and goes on from what was answered.
    """
    m = len(coins)
    x, seen = np.zeros(m), np.zeros(m)
    for _ in range(steps):
        gradients = np.clip(x - 2 * coins, -1, 1)  # of row i in the direction e_i
        gradients[draw.permutation(m)[math.ceil(q * m) :]] = 0.0
        answer = gradients + sigma * draw.normal(size=m)
        seen -= answer
        x = x - 0.1 / steps * np.clip(answer, -1, 1)
    return seen


@functools.cache
def find_sigma(epsilon: float, steps: int, q: float) -> float:
    """Return the least deviation for which the ledger counts at most epsilon."""

    def costs(sigma: float) -> float:
        return compose([Entry("gradient", 2.0, sigma, q, steps)], DELTA) - epsilon

    return float(brentq(costs, 0.5, 1000.0, xtol=1e-6))


def audit(epsilon: float, seed: int, noise: bool, steps: int, q: float = 1.0) -> float:
    """Return the lower bound of one run whose answers cost just ``epsilon`` by the ledger."""
    draw = np.random.default_rng(seed)
    coins = draw.choice([-1.0, 1.0], CANARIES)
    sigma = find_sigma(epsilon, steps, q) if noise else 0.0
    return bound_epsilon(coins, noised_gradients(coins, draw, sigma, steps, q), DELTA)


class Listener:
    """Hears every noised gradient of clients under privacy, beside the model it was asked at."""

    def __init__(self, noise: bool, sites: int, rows: int) -> None:
        self.noise, self.scores = noise, np.zeros((sites, rows))
        self._ask, self._add, self._x = PrivateSite.mean_gradient, StreamNoise.add, torch.zeros(0)
        self._mean: Tensor | float = 0.0  # of a site's rows, as it is told where biases are own

    def mean_gradient(self, site: PrivateSite, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return it, and remember at which model."""
        self._x, self._mean = site.uncentre(x), site.centre() if site.settles else 0.0
        return self._ask(site, x, rows)

    def add(self, source: StreamNoise, value: Tensor, moved: float, sigma: float, *w: Any) -> Any:
        """Return the noised answer, and add to the scores what it says of each row's label."""
        told = self._add(source, value, moved, sigma, *w) if self.noise else value
        if w[0] in ("gradients", "steps"):
            m = self.scores.shape[1]
            known = torch.sigmoid(LENGTH * self._x[:m] + self._x[m]) - 0.5  # of either label
            site = int(source.stream.address[-1])
            seen = told[:m] + told[m] * self._mean  # of a row with its mean
            self.scores[site] += (LENGTH / m * known - seen).double().numpy()
        return told


def audit_clients(
    epsilon: float, seed: int, noise: bool, algorithm: Any, sites: int = 100, rows: int = 200,
    own: str | None = None,
) -> float:  # fmt: skip
    """Return the lower bound of a run whose clients answer under privacy of records.

    Each row of a site has a column of its own, and its label is the coin. The server hears all
    answers, noised, and knows its models. Of own biases it hears what stays at the site, too.
    """
    coins = np.random.default_rng(seed).choice([-1.0, 1.0], (sites, rows))
    inputs = (LENGTH * np.eye(rows)).astype(np.float32)
    data = ef.Federation.from_clients(
        {f"site {i}": (inputs, (mine > 0).astype(np.int64)) for i, mine in enumerate(coins)}
    )
    privacy = ef.Privacy(epsilon=epsilon, rows=LENGTH, loss=2.0, rounds=ROUNDS, delta=DELTA)
    clients = ef.simulate(data, "logistic", "logistic", privacy=privacy, own=own)
    heard = Listener(noise, sites, rows)
    with (
        patch.object(PrivateSite, "mean_gradient", lambda *a: heard.mean_gradient(*a)),
        patch.object(StreamNoise, "add", lambda *a: heard.add(*a)),
    ):
        ef.train(algorithm, clients, rounds=ROUNDS, seed=seed)
    return bound_epsilon(coins.ravel(), heard.scores.ravel(), DELTA)


AUDITS: dict[str, Callable[[float, int, bool], float]] = {
    "12 sums of all gradients": functools.partial(audit, steps=12),
    "60 sums of a fifth of them": functools.partial(audit, steps=60, q=0.2),
    "FedAvg, 100 sites": functools.partial(audit_clients, algorithm=FEDAVG),
    "FairNewton, 100 sites": functools.partial(audit_clients, algorithm=NEWTON),
    "FedAvg, own biases": functools.partial(audit_clients, algorithm=FEDAVG, own="bias"),
    "FairNewton, own biases": functools.partial(audit_clients, algorithm=NEWTON, own="bias"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit every mechanism at every epsilon, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20)
    seeds, failed = range(parser.parse_args(arguments).repetitions), False
    for name, epsilon in product(AUDITS, EPSILONS):
        told = f"{name}, epsilon {epsilon:g} by the ledger"
        try:
            found = {on: [AUDITS[name](epsilon, s, on) for s in seeds] for on in (True, False)}
        except NoAccountant as error:
            print(f"{told}: not audited. {error}")
            continue
        above, caught = (sum(bound > epsilon for bound in found[on]) for on in (True, False))
        failed |= above > 0.1 * len(seeds) or caught == 0
        print(
            f"{told}: {above} of {len(seeds)} lower bounds above (median "
            f"{median(found[True]):.2f}, largest {max(found[True]):.2f}); without noise "
            f"{caught} of {len(seeds)} (median {median(found[False]):.2f})"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
