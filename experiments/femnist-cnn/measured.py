r"""What counting and measuring a writer's training images says about the network's logits.

A network that has its training images by heart gives no sign on them that a writer differs from
others, so nothing that is fitted to its outputs there finds it out. The images do.

*Own shares.* Where p(x | y) is the same, a writer with shares s of classes instead of p is served
best by logits moved by log(s / p) (Bayes' rule; Saerens et al. 2002).

*Own offsets.* A stroke of medium weight is a capital from a fine pen and a small letter from a
broad one. With t, a few principal components of the images, of an image of class y from writer i,

.. math:: t = m_y + e_i + r, \qquad e_i \sim N(0, E), \qquad r \sim N(0, R),

a model of random effects (Laird and Ware 1982), whose m, E and R are those of the largest
likelihood (by EM). A writer's images tell its offset up to a doubt, :math:`N(\hat e_i, P_i)`. To
know the writer multiplies the odds of class y by

.. math:: \frac{N(t;\ m_y + \hat e_i,\ R + P_i)}{N(t;\ m_y,\ R + E)},

and up to what is the same for all classes the logarithm of that is linear in t, with
:math:`A_i = (R + P_i)^{-1}` and :math:`B = (R + E)^{-1}`:

.. math:: t^\top (A_i - B)\, m_y - \tfrac12 m_y^\top (A_i - B)\, m_y - m_y^\top A_i\, \hat e_i.

A writer without images has :math:`A_i = B` and no offset: nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from scipy.special import expit, gammaln, logit, xlogy

from equifed import Federation, History
from equifed.contract import MissingClients

Array = NDArray[np.float64]
RATES, STEPS, TRUSTS = (0.01, 0.03, 0.1), (10, 30, 100), (0.0, 0.25, 0.5, 0.75, 1.0)
"""Local steps that are tried, and parts of what offsets say: the network has seen the images."""
BLOCK = 4096
ROUNDS = 200
SETTLED = 1e-6
"""Of EM: the most rounds, and the change of E and R, in shares of t's variance, that ends them."""
DENSE, LEAST = 64, 1e-5
"""Up to this many dimensions all components are found; those of less deviation, in shares of the
largest input, are rounding."""
FLOOR = 1e-6
"""Least variance of r in every direction, in shares of t's: inputs may repeat exactly."""


def fit(
    history: History, data: Federation, kind: str, how: Mapping[str, Any] | None, device: str,
    class_kinds: Sequence[int], offsets: int,
) -> tuple[dict[str, Any], Array, NDArray[Any]]:  # fmt: skip
    """Return what was chosen, and every writer's test accuracy and number of test images with it.

    ``kind`` is "shares", "offsets" (and shares) or "all": local steps with or without either.
    ``how`` is an earlier choice; otherwise the loss on validation images chooses.

    Parameters
    ----------
    class_kinds
        How many classes are of the same kind, one kind after the other.
    offsets
        Components in which offsets are measured.
    """
    moved = Moves.of(data, class_kinds, offsets)
    best: tuple[float, dict[str, Any], Any] | None = None
    for steps, variants in choices(kind, how):
        try:
            told = history.predictor()
            if steps["steps"]:
                told = history.personalise(data, own="all", device=device, **steps).predictor
        except ValueError as error:
            if not isinstance(error.__cause__, MissingClients) or how is not None:
                raise
            continue  # it diverges for somebody
        answers = None if how is not None else answer(told, data, "validation")
        for one in variants:
            score = 0.0 if answers is None else loss_of(answers, data, moved, one)
            if best is None or score < best[0]:
                best = score, {**steps, **one}, told
    assert best is not None
    _, chosen, told = best
    test, values = data.splits()["test"], np.full(len(data.names), np.nan)
    for i, outputs in answer(told, data, "test").items():
        inputs, targets = test.client(i)
        said = (outputs + moved.of_images(i, inputs, chosen)).argmax(1)
        values[i] = np.mean(said == targets)
    return chosen, values, np.asarray(test.sizes)


def choices(
    kind: str, how: Mapping[str, Any] | None
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield local steps, and what is tried on top of each: own shares, trust in own offsets."""
    if how is not None:
        told = {k: how[k] for k in ("shares", "trust") if k in how}
        yield {"lr": how["lr"], "steps": how["steps"]}, [told]
        return
    trusts = (0.0,) if kind == "shares" else TRUSTS
    variants = [({"shares": True} if shares else {}) | ({"trust": trust} if trust else {})
                for shares in ((False, True) if kind == "all" else (True,))
                for trust in trusts]  # fmt: skip
    yield {"lr": 0.0, "steps": 0}, variants
    for lr in RATES if kind == "all" else ():
        for steps in STEPS:
            yield {"lr": lr, "steps": steps}, variants


def answer(predictor: Any, data: Federation, split: str) -> dict[int, Array]:
    """Return the network's outputs for the images of every writer that has some."""
    held = data.splits()[split]
    found = {}
    for i in map(int, np.flatnonzero(held.sizes)):
        one = predictor.for_client(data.names[i]) if predictor.own else predictor
        found[i] = one.answer(held.client(i)[0])
    return found


def loss_of(
    answers: Mapping[int, Array], data: Federation, moved: Moves, chosen: Mapping[str, Any]
) -> float:
    """Return the loss on validation images, averaged over the writers that have some."""
    held, found = data.splits()["validation"], []
    for i, outputs in answers.items():
        inputs, targets = held.client(i)
        logits = torch.as_tensor(outputs + moved.of_images(i, inputs, chosen))
        found.append(float(torch.nn.functional.cross_entropy(logits, torch.as_tensor(targets))))
    score = float(np.mean(found))
    return score if math.isfinite(score) else math.inf


@dataclass(frozen=True, eq=False)
class Moves:
    """What writers' logits move by: for their shares (n, k), and for their offsets, linear in t."""

    shares: Array
    components: Components
    weight: Array
    bias: Array

    @classmethod
    def of(cls, data: Federation, class_kinds: Sequence[int], offsets: int) -> Moves:
        """Count and measure the training images, at least ten for each component."""
        n, k, train = len(data.names), sum(class_kinds), data.train
        counts = [np.bincount(train.client(i)[1], minlength=k) for i in range(n)]
        kinds = np.repeat(np.arange(len(class_kinds)), class_kinds).tolist()
        found = leading_components(train.inputs, min(offsets, max(1, len(train.targets) // 10)))
        owners = np.repeat(np.arange(n), train.sizes)
        fitted = fit_offsets(found.of(train.inputs), train.targets, owners, n, k)
        return cls(share_shifts(np.stack(counts), kinds), found, *fitted.shifts())

    def of_images(self, i: int, inputs: NDArray[Any], chosen: Mapping[str, Any]) -> Array | float:
        """Return by how much writer i's logits of these images move."""
        moved: Array | float = self.shares[i] if chosen.get("shares") else 0.0
        if not chosen.get("trust"):
            return moved
        seen = self.components.of(inputs) @ self.weight[i].T + self.bias[i]
        return moved + chosen["trust"] * seen


# -- own shares -----------------------------------------------------------------------------------


def share_shifts(counts: NDArray[Any], kinds: Sequence[int] | None = None) -> NDArray[np.float64]:
    """Return by how much every client's logits move (clients, classes), given counts of labels.

    Clients are as everybody, with the shares p (the mean of all clients' shares), or differ, with
    shares of their own, of which nothing is known (uniform over all shares). How many differ is the
    likeliest part of all; a client that differs with probability w has the shares
    ``w (n_k + 1) / (n + K) + (1 - w) p_k``. So chance moves nobody, and a client without
    digits stops seeing them. Classes of one kind move alike, which takes fewer samples than classes
    by themselves (``kinds`` has each class's number). Kinds that nobody has do not move, nor do
    clients without samples.

    >>> share_shifts(np.array([[70, 30]] * 20 + [[0, 60]]))[-1].round(1)
    array([-3.7,  1.1])
    """
    counts = np.asarray(counts, dtype=np.float64)
    classes = np.arange(counts.shape[1]) if kinds is None else kinds
    of = np.unique(classes, return_inverse=True)[1]
    held = np.stack([counts[:, of == k].sum(1) for k in range(of.max() + 1)], axis=1)
    n, seen = held.sum(1), held.sum(0) > 0
    shifts = np.zeros_like(held)
    if not seen.any():
        return shifts[:, of]
    here = held[np.ix_(n > 0, seen)]
    n, many = here.sum(1, keepdims=True), here.shape[1]
    p = (here / n).mean(0)
    alike = xlogy(here, p).sum(1)
    # The same counts under shares of which nothing is known: Dirichlet(1, ..., 1), integrated out.
    differ = gammaln(many) - gammaln(n[:, 0] + many) + gammaln(here + 1).sum(1)
    w = _differing(differ - alike)[:, None]
    own = (here + 1) / (n + many)
    shifts[np.ix_(held.sum(1) > 0, seen)] = np.log(w * own / p + 1 - w)
    return shifts[:, of]


def _differing(evidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each client's probability to differ, given log likelihood ratios (by EM)."""
    part = 0.5
    for _ in range(500):
        w: NDArray[np.float64] = expit(evidence + logit(part))
        part = float(np.clip(w.mean(), 1e-6, 1 - 1e-6))
    return w


# -- own offsets ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Components:
    """Principal components of inputs: ``(x - centre) @ axes.T``, of variance 1 on these inputs."""

    centre: Array
    axes: Array

    def of(self, inputs: NDArray[Any]) -> Array:
        """Return the components of samples (m, d)."""
        out = np.empty((len(inputs), len(self.axes)))
        for k in range(0, len(inputs), BLOCK):  # of which alone there is a copy in float64
            block = np.asarray(inputs[k : k + BLOCK], dtype=np.float64)
            out[k : k + BLOCK] = (block.reshape(len(block), -1) - self.centre) @ self.axes.T
        return out


def leading_components(inputs: NDArray[Any], count: int) -> Components:
    """Return the leading components of the inputs; fewer where these vary in fewer directions."""
    flat = np.asarray(inputs).reshape(len(inputs), -1)
    if flat.dtype not in (np.float32, np.float64):
        flat = flat.astype(np.float32)
    centre, small = flat.mean(0, dtype=np.float64), min(flat.shape)
    if count < small and small > DENSE:
        start = np.random.default_rng(0).standard_normal(small)
        _, sizes, axes = svds(_centred(flat, centre), k=count, v0=start)
    else:
        _, sizes, axes = np.linalg.svd(flat - centre, full_matrices=False)
    order = np.argsort(-sizes)[:count]
    order = order[sizes[order] > LEAST * np.sqrt(max(len(flat), 1)) * np.abs(flat).max(initial=0.0)]
    axes = axes[order]
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(1)])  # theirs are arbitrary
    scale = sizes[order] / np.sqrt(len(flat))
    return Components(centre, axes * (signs / scale)[:, None])


def _centred(flat: NDArray[Any], centre: Array) -> LinearOperator:
    """Return ``flat - centre`` as an operator: large inputs are not copied."""

    def times(matrix: NDArray[Any], v: Array) -> Array:
        product: Array = (matrix @ v.astype(flat.dtype)).astype(np.float64)
        return product

    def forth(v: Array) -> Array:
        return times(flat, v.ravel()) - centre @ v.ravel()

    def back(u: Array) -> Array:
        return times(flat.T, u.ravel()) - centre * float(u.sum())

    return LinearOperator(flat.shape, matvec=forth, rmatvec=back, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Offsets:
    """Class means m (k, d), E and R (d, d), and every client's offset (n, d) and doubt P (n, d, d).

    A class without samples has the mean of the others'.
    """

    means: Array
    between: Array
    within: Array
    offsets: Array
    doubts: Array

    def shifts(self) -> tuple[Array, Array]:
        """Return what clients' logits move by: weights on t (n, k, d) and biases (n, k)."""
        m = self.means
        known = np.linalg.inv(self.within + self.doubts)
        unknown = np.linalg.inv(self.within + self.between)
        weight = np.einsum("kd,nde->nke", m, known - unknown)
        bias = -0.5 * np.einsum("nke,ke->nk", weight, m)
        bias -= np.einsum("kd,nde,ne->nk", m, known, self.offsets)
        return weight, bias


def fit_offsets(
    t: Array, labels: NDArray[Any], owners: NDArray[Any], clients: int, classes: int
) -> Offsets:
    """Return the likeliest model of samples (m, d) with their classes and clients."""
    m, d = t.shape
    counts = np.bincount(owners, minlength=clients)
    of_class = np.bincount(labels, minlength=classes)
    spread = np.diag(t.var(0)) if m and t.var(0).any() else np.eye(d)
    between, within = 0.2 * spread, 0.8 * spread
    floor, settled = (share * np.diag(spread).mean() for share in (FLOOR, SETTLED))
    means, seen = _means(t, labels, of_class), counts > 0
    for _ in range(ROUNDS if m else 0):
        offsets, doubts = _find(t - means[labels], owners, counts, between, within)
        rest = t - means[labels] - offsets[owners]
        before = between, within
        # Clients without samples have E itself as their doubt, and tell nothing of it.
        between = (offsets[seen].T @ offsets[seen] + doubts[seen].sum(0)) / seen.sum()
        within = (rest.T @ rest + np.einsum("n,nde->de", counts, doubts)) / m + floor * np.eye(d)
        means = _means(t - offsets[owners], labels, of_class)
        now = between, within
        if max(np.abs(a - b).max() for a, b in zip(before, now, strict=True)) <= settled:
            break
    offsets, doubts = _find(t - means[labels], owners, counts, between, within)
    return Offsets(means, between, within, offsets, doubts)


def _find(
    residuals: Array, owners: NDArray[Any], counts: NDArray[Any], between: Array, within: Array
) -> tuple[Array, Array]:
    """Return every client's offset and doubt, given E and R."""
    sums, n = np.zeros((len(counts), len(within))), counts[:, None, None]
    np.add.at(sums, owners, residuals)
    gain = between @ np.linalg.inv(n * between + within)
    doubts = between - n * gain @ between
    return np.einsum("nde,ne->nd", gain, sums), (doubts + doubts.transpose(0, 2, 1)) / 2


def _means(t: Array, labels: NDArray[Any], counts: NDArray[Any]) -> Array:
    sums = np.zeros((len(counts), t.shape[1]))
    np.add.at(sums, labels, t)
    seen = counts > 0
    sums[seen] /= counts[seen, None]
    sums[~seen] = sums[seen].mean(0) if seen.any() else 0.0
    return sums
