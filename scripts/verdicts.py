"""Verdicts on generated federations whose truth is known; exits 1 if fewer than 95 % are right.

    python scripts/verdicts.py [--each 100] [--seed 0]

Every federation has 3 to 200 clients with unequal numbers of test samples. What is right:

* *equally served*, *all chance* (a model that guesses, on 2 to 30 samples each), *equal losses*:
  the verdict does not say that anybody is served worse.
* *one underserved*: the verdict names that client and no other. Its accuracy is the highest at
  which Fisher's exact test of its samples against all others', corrected for n clients, finds it in
  99 of 100 cases even when the others are as unlucky as in 2 of 100; a client with too few samples
  for that is not made the underserved one.
* *two kinds*: half of the clients are served worse by four standard errors of the median client
  (at least 12 clients): the verdict says that the spread is wider than chance explains.
* *one larger loss*: one client's errors are three times as large, on at least 20 samples.
* *nobody better alone*: own models answer each sample as well as the shared one, with answers that
  agree on most samples: the verdict names nobody.
* *one better alone*: one client's own model answers correctly where the shared one does, and on
  some more samples, as many as McNemar's test, corrected for n clients, needs: the verdict names
  that client and no other.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import astuple

import numpy as np
from scipy.stats import binom, hypergeom

from equifed.contract.evaluation import ClientDetail, Details
from equifed.metrics.metric import limit_mean
from equifed.metrics.paired import gain_of_pairs
from equifed.report import Method, Scale, Verdict, write_verdict
from equifed.training.history import History, MetricRecord

LEVEL = 0.025
Draw = np.random.Generator


def judge(correct: np.ndarray, sizes: np.ndarray) -> Verdict:
    """Return the verdict of a report on these answers."""
    names = tuple(f"client {i}" for i in range(len(sizes)))
    record = MetricRecord(1, "test", "accuracy", correct / sizes, sizes)
    method = Method("run", (History(names, metrics=[record]),))
    return write_verdict(method, Scale("accuracy", "test"))


def judge_losses(samples: list[np.ndarray]) -> Verdict:
    """Return the verdict of a report on squared errors."""
    sizes = np.array([len(s) for s in samples])
    names = tuple(f"client {i}" for i in range(len(sizes)))
    record = MetricRecord(1, "test", "mse", np.array([s.mean() for s in samples]), sizes)
    told = [ClientDetail(len(s), {"mse": limit_mean(s)}) for s in samples]
    history = History(names, metrics=[record], details=Details("test", tuple(told)))
    return write_verdict(Method("run", (history,)), Scale("mse", "test"))


def draw_sizes(draw: Draw, low: float = 5, high: float = 400) -> np.ndarray:
    """Return the test samples of 3 to 200 clients, unequal by up to a factor of 80."""
    n = int(np.exp(draw.uniform(np.log(3), np.log(200))).round())
    return np.exp(draw.uniform(np.log(low), np.log(high), n)).round().astype(np.int64)


def equally_served(draw: Draw) -> bool:
    """Return whether the verdict on equally served clients is right."""
    sizes = draw_sizes(draw)
    return judge(draw.binomial(sizes, draw.uniform(0.5, 0.98)), sizes).equal is True


def all_chance(draw: Draw) -> bool:
    """Return whether the verdict on a model that guesses is right."""
    sizes = draw_sizes(draw, 2, 30)
    return judge(draw.binomial(sizes, 1 / draw.integers(2, 11)), sizes).equal is True


def find_low(m: int, rest: int, p: float, n: int) -> float | None:
    """Return the highest accuracy on m samples that is told from p on the rest; see above."""
    others, k = int(binom.ppf(0.02, rest, p)), np.arange(m + 1)
    told = k[2 * n * hypergeom.cdf(k, m + rest, k + others, m) <= LEVEL]
    grid = np.arange(0.0, p, 0.005)
    good = grid[binom.cdf(told[-1], m, grid) >= 0.99] if len(told) else grid[:0]
    return float(good[-1]) if len(good) else None


def one_underserved(draw: Draw) -> bool:
    """Return whether the verdict names the client that is served worse."""
    low = None
    while low is None:
        sizes, p = draw_sizes(draw), draw.uniform(0.6, 0.98)
        i = int(draw.integers(len(sizes)))
        low = find_low(int(sizes[i]), int(sizes.sum() - sizes[i]), p, len(sizes))
    accuracies = np.full(len(sizes), p)
    accuracies[i] = low
    found = judge(draw.binomial(sizes, accuracies), sizes)
    return found.equal is False and found.underserved == (f"client {i}",)


def two_kinds(draw: Draw) -> bool:
    """Return whether the verdict says that half of the clients are served worse."""
    sizes = draw_sizes(draw)
    while len(sizes) < 12:
        sizes = draw_sizes(draw)
    p = draw.uniform(0.7, 0.95)
    step = 4 * np.sqrt(p * (1 - p) / np.median(sizes))
    accuracies = np.where(np.arange(len(sizes)) % 2, p, max(p - step, 0.0))
    return judge(draw.binomial(sizes, accuracies), sizes).equal is False


def equal_losses(draw: Draw) -> bool:
    """Return whether the verdict on equal squared errors is right."""
    return judge_losses([draw.normal(size=m) ** 2 for m in draw_sizes(draw)]).equal is True


def one_larger_loss(draw: Draw) -> bool:
    """Return whether the verdict names the client whose errors are larger."""
    sizes = draw_sizes(draw, 20, 400)
    samples = [draw.normal(size=m) ** 2 for m in sizes]
    i = int(draw.integers(len(sizes)))
    samples[i] = 9 * samples[i]
    return judge_losses(samples).underserved == (f"client {i}",)


def judge_alone(shared: list[np.ndarray], own: list[np.ndarray]) -> Verdict:
    """Return the verdict of a report on the answers of shared and own models."""
    sizes = np.array([len(s) for s in shared])
    names = tuple(f"client {i}" for i in range(len(sizes)))
    means = (np.array([a.mean() for a in answers]) for answers in (shared, own))
    records = [MetricRecord(1, "test", "accuracy", values, sizes) for values in means]
    sides = {"higher_is_better": True, "fraction": True}
    gains = {
        n: astuple(gain_of_pairs(a, b, **sides)) for n, a, b in zip(names, own, shared, strict=True)
    }
    event = {"event": "alone", "reason": "", "one_class": [], "gains": gains}
    history = History(names, metrics=records[:1], alone=records[1], events=[event])
    return write_verdict(Method("run", (history,)), Scale("accuracy", "test"))


def draw_answers(draw: Draw) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return answers of two models that are equally good and agree on four fifths of samples."""
    p, shared, own = draw.uniform(0.5, 0.95), [], []
    for m in draw_sizes(draw):
        ours, anew = draw.random((2, m)) < p
        shared.append(ours.astype(float))
        own.append(np.where(draw.random(m) < 0.8, ours, anew).astype(float))
    return shared, own


def nobody_better_alone(draw: Draw) -> bool:
    """Return whether the verdict on equally good own models names nobody."""
    return judge_alone(*draw_answers(draw)).better_alone == ()


def one_better_alone(draw: Draw) -> bool:
    """Return whether the verdict names the client whose own model is better."""
    while True:
        shared, own = draw_answers(draw)
        i = int(draw.integers(len(own)))
        wrong = np.flatnonzero(shared[i] == 0)
        needed = int(np.ceil(np.log2(len(own) / LEVEL)))  # 2^-k n <= level: all pairs in favour
        if len(wrong) >= needed:
            break
    own[i] = shared[i].copy()
    own[i][wrong[:needed]] = 1.0
    return judge_alone(shared, own).better_alone == (f"client {i}",)


KINDS = {
    "equally served": equally_served,
    "all chance": all_chance,
    "one underserved": one_underserved,
    "two kinds": two_kinds,
    "equal losses": equal_losses,
    "one larger loss": one_larger_loss,
    "nobody better alone": nobody_better_alone,
    "one better alone": one_better_alone,
}


def count_right(kind: str, each: int, seed: int) -> int:
    """Return how many verdicts on generated federations of a kind are right."""
    place = list(KINDS).index(kind)
    return sum(KINDS[kind](np.random.default_rng([seed, place, k])) for k in range(each))


def main() -> None:
    """Judge the federations of every kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    bad = False
    for kind in KINDS:
        right = count_right(kind, given.each, given.seed)
        bad |= right < 0.95 * given.each
        print(f"{kind:20s} {right} of {given.each} right", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
