"""Every algorithm a second time: its pseudo-code in NumPy, one client after the other.

Full batches; nothing is shared with the library but the address of the server's draws. Each
function plays ``rounds`` rounds from x and returns the model, or what the paper gives out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tests.oracles import capped_simplex_by_bisection
from tests.problems import Problem

from equifed.contract.streams import Stream

Array = NDArray[np.float64]


def walk(
    problem: Problem,
    i: int,
    x: Array,
    lr: float,
    steps: int,
    correction: Array | float = 0.0,
    proximal: float = 0.0,
    radius: float | None = None,
) -> list[Array]:
    """Return all iterates of client i, the first one included."""
    path = [x]
    for _ in range(steps):
        u = path[-1]
        u = u - lr * (problem.gradient_of(i, u) + correction + proximal * (u - x))
        if radius is not None and np.linalg.norm(u) > radius:
            u = radius * u / np.linalg.norm(u)
        path.append(u)
    return path


def simplex(point: Array, cap: float = 1.0) -> Array:
    """Project onto the simplex, capped or not."""
    return capped_simplex_by_bisection(point, np.full(len(point), cap))


def chi_square_step(point: Array, step: float, rho: float, cap: float = 1.0) -> Array:
    """Minimise step rho n/2 |w - 1/n|^2 + 1/2 |w - point|^2 over the (capped) simplex."""
    return simplex((point + step * rho) / (1 + step * rho * len(point)), cap)


def fedavg(
    problem: Problem,
    x: Array,
    rounds: int,
    p: Array,
    lr: float,
    steps: int,
    proximal: float = 0.0,
    server_lr: float = 1.0,
) -> Array:
    for _ in range(rounds):
        ends = [walk(problem, i, x, lr, steps, proximal=proximal)[-1] for i in range(problem.n)]
        average = sum(p[i] * ends[i] for i in range(problem.n))
        x = x + server_lr * (average - x)
    return x


def scaffold_stored(
    problem: Problem,
    x: Array,
    rounds: int,
    lr: float,
    steps: int,
    fraction: float,
    seed: int,
    p: Array,
    option: int = 2,
) -> Array:
    n = problem.n
    variates, c = [np.zeros(problem.d) for _ in range(n)], np.zeros(problem.d)
    m = int(np.ceil(fraction * n))
    for r in range(1, rounds + 1):
        pick = Stream(seed).at("round", r, "participants").generator()
        chosen = pick.choice(n, size=m, replace=False) if m < n else np.arange(n)
        model_change, variate_change = np.zeros(problem.d), np.zeros(problem.d)
        for i in chosen:
            end = walk(problem, i, x, lr, steps, correction=c - variates[i])[-1]
            along = variates[i] - c + (x - end) / (steps * lr)
            new = problem.gradient_of(i, x) if option == 1 else along
            model_change += p[i] * (end - x) / p[chosen].sum()
            variate_change += p[i] * (new - variates[i])
            variates[i] = new
        x, c = x + model_change, c + variate_change
    return x


def scaff_pd(
    problem: Problem,
    x: Array,
    rounds: int,
    rho: float,
    cap: float,
    tau: float,
    sigma: float,
    theta: float,
    eta: float,
    steps: int,
) -> tuple[Array, Array]:
    n = problem.n
    weights, before = np.full(n, 1 / n), problem.losses(x)
    for _ in range(rounds):
        losses, controls = problem.losses(x), [problem.gradient_of(i, x) for i in range(n)]
        ahead = (1 + theta) * losses - theta * before
        weights = chi_square_step(weights + sigma * ahead, sigma, rho, cap)
        c = sum(weights[i] * controls[i] for i in range(n))
        moves = [
            (x - walk(problem, i, x, eta, steps, correction=c - controls[i])[-1]) / (eta * steps)
            for i in range(n)
        ]
        x, before = x - tau * sum(weights[i] * moves[i] for i in range(n)), losses
    return x, weights


def scaffold_fresh(problem: Problem, x: Array, rounds: int, lr: float, steps: int) -> Array:
    n = problem.n
    for _ in range(rounds):
        controls = [problem.gradient_of(i, x) for i in range(n)]
        c = sum(controls) / n
        ends = [walk(problem, i, x, lr, steps, correction=c - controls[i])[-1] for i in range(n)]
        x = sum(ends) / n
    return x


def primal_dual(
    problem: Problem, x: Array, rounds: int, rho: float, tau: float, sigma: float, theta: float
) -> tuple[Array, Array]:
    """The centralised primal-dual method with one gradient step in x."""
    weights, before = np.full(problem.n, 1 / problem.n), problem.losses(x)
    for _ in range(rounds):
        losses = problem.losses(x)
        ahead = losses + theta * (losses - before)
        weights = chi_square_step(weights + sigma * ahead, sigma, rho)
        x, before = x - tau * weights @ problem.gradients(x), losses
    return x, weights


def afl(
    problem: Problem, x: Array, rounds: int, lr: float, gamma: float, steps: int = 1
) -> tuple[Array, Array]:
    """Descent, then ascent at the new model; the last ascent is left out (nobody uses it yet)."""
    n = problem.n
    weights = np.full(n, 1 / n)
    for r in range(rounds):
        if r > 0:
            weights = simplex(weights + gamma * problem.losses(x))
        ends = [walk(problem, i, x, lr, steps)[-1] for i in range(n)]
        x = sum(weights[i] * ends[i] for i in range(n))
    return x, weights


def drfa(
    problem: Problem,
    x: Array,
    rounds: int,
    lr: float,
    steps: int,
    gamma: float,
    m: int,
    seed: int,
    rho: float = 0.0,
    radius: float | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return the last model and weights, and the averages."""
    n = problem.n
    weights, iterates, duals = np.full(n, 1 / n), [], []
    for s in range(1, rounds + 1):
        at = Stream(seed).at("round", s)
        duals.append(weights)
        drawn = at.at("participants").generator().choice(n, size=m, p=weights)
        snapshot = at.at("snapshot").generator().integers(1, steps + 1)
        paths = [walk(problem, i, x, lr, steps, radius=radius) for i in drawn]
        x, middle = (sum(path[t] for path in paths) / m for t in (steps, snapshot))
        iterates += [u for path in paths for u in path[1:]]
        v = np.zeros(n)
        for i in at.at("asked").generator().choice(n, size=m, replace=False):
            v[i] = n / m * problem.loss_of(i, middle)
        weights = chi_square_step(weights + steps * gamma * v, steps * gamma, rho)
    return x, weights, np.mean(iterates, axis=0), np.mean(duals, axis=0)


def drfa_gda(
    problem: Problem, x: Array, rounds: int, lr: float, steps: int, gamma: float, rho: float,
    printed: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Section 5.2 with every client: one full dual step at the model the round began with.

    As printed, or with the proximal step in place of the gradient of the penalty.
    """
    n = problem.n
    weights = np.full(n, 1 / n)
    for _ in range(rounds):
        ends = [walk(problem, i, x, lr, steps)[-1] for i in range(n)]
        new = chi_square_step(weights + gamma * problem.losses(x), gamma, rho)
        if printed:
            slope = problem.losses(x) - rho * n * (weights - 1 / n)
            new = simplex(weights + gamma * slope)
        x, weights = sum(weights[i] * ends[i] for i in range(n)), new
    return x, weights


def rfedfair(
    problem: Problem,
    x: Array,
    threshold: float,
    rounds: int,
    lr: float,
    steps: int,
    mu: float,
    tails: Array,
    p: Array,
    k: int | None = None,
    seed: int = 0,
) -> tuple[Array, float, Array]:
    """Return the last model and threshold, and the mean of the models before each step."""
    n, visited = problem.n, []
    for r in range(1, rounds + 1):
        pick = Stream(seed).at("round", r, "participants").generator()
        chosen = range(n) if k is None else pick.choice(n, size=k, p=p)
        share = [p[i] if k is None else 1 / k for i in chosen]
        ends, thresholds, means = [], [], []
        for i in chosen:
            w, e, seen = x, threshold, []
            for _ in range(steps):
                seen.append(w)
                s = 1 / (1 + np.exp(-(problem.loss_of(i, w) - e) / mu))
                w, e = (
                    w - lr * s / tails[i] * problem.gradient_of(i, w),
                    e - lr * (1 - s / tails[i]),
                )
            ends.append(w), thresholds.append(e), means.append(np.mean(seen, axis=0))
        visited.append(sum(q * w for q, w in zip(share, means, strict=True)))
        x = sum(q * w for q, w in zip(share, ends, strict=True))
        threshold = float(sum(q * e for q, e in zip(share, thresholds, strict=True)))
    return x, threshold, np.mean(visited, axis=0)


def qfedavg(
    problem: Problem, x: Array, rounds: int, q: float, lr: float, steps: int, p: Array
) -> Array:
    big = 1 / lr
    for _ in range(rounds):
        losses = problem.losses(x)
        top, bottom = np.zeros(problem.d), 0.0
        for k in range(problem.n):
            change = big * (x - walk(problem, k, x, lr, steps)[-1])
            top += p[k] * losses[k] ** q * change
            bottom += p[k] * (q * losses[k] ** (q - 1) * change @ change + big * losses[k] ** q)
        x = x - top / bottom
    return x


def qfedsgd(problem: Problem, x: Array, rounds: int, q: float, big: float) -> Array:
    for _ in range(rounds):
        losses, gradients = problem.losses(x), problem.gradients(x)
        top = sum(losses[k] ** q * gradients[k] for k in range(problem.n))
        bottom = sum(
            q * losses[k] ** (q - 1) * gradients[k] @ gradients[k] + big * losses[k] ** q
            for k in range(problem.n)
        )
        x = x - top / bottom
    return x


def delta_fl(
    problem: Problem, x: Array, rounds: int, lr: float, steps: int, level: float, p: Array
) -> Array:
    for _ in range(rounds):
        losses = problem.losses(x)
        enough = [e for e in losses if p[losses >= e].sum() >= level - 1e-12]
        tail = np.flatnonzero(losses >= max(enough))
        ends = {i: walk(problem, i, x, lr, steps)[-1] for i in tail}
        x = sum(p[i] * ends[i] for i in tail) / p[tail].sum()
    return x


def agnostic_fedavg(
    problem: Problem, x: Array, rounds: int, lr: float, steps: int, gamma: float
) -> tuple[Array, Array]:
    """Ro et al. for domains = clients, with their alpha_p = lambda_p / N_p and beta_k."""
    n, sizes = problem.n, problem.sizes
    weights = np.full(n, 1 / n)
    for _ in range(rounds):
        alpha = weights / sizes
        beta = alpha * sizes
        losses = problem.losses(x)
        ends = [walk(problem, i, x, lr, steps)[-1] for i in range(n)]
        x = sum(beta[i] * ends[i] for i in range(n)) / beta.sum()
        weights = weights * np.exp(gamma * losses)
        weights = weights / weights.sum()
    return x, weights


def tilted(problem: Problem, x: Array, rounds: int, lr: float, steps: int, t: float) -> Array:
    for _ in range(rounds):
        weights = np.exp(t * problem.losses(x))
        weights = weights / weights.sum()
        ends = [walk(problem, i, x, lr, steps)[-1] for i in range(problem.n)]
        x = sum(weights[i] * ends[i] for i in range(problem.n))
    return x
