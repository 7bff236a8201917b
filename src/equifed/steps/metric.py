"""The metric of the clients' summed curvature, and the dual step that is exact in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from typing_extensions import override

from equifed.contract import Clients, Losses, Stream, Vector, Weights
from equifed.contract.algorithm import Bound
from equifed.contract.curvature import CurvatureSum, Form
from equifed.objectives.base import SaddleObjective
from equifed.steps.schedules import StepSizes, epsilon

MetricKind = Literal["auto", "low-rank", "projected", "full"]

WHOLE = {"full": 2000, "auto": 1000}
"""Parameters up to which outputs that softmax mixes have one Hessian together, by metric."""

BLOCKS = 1 << 25
"""Numbers in all blocks up to which they are kept whole; beyond it, low rank."""

WORK = 2e11
"""Products of numbers in a sum of Hessians up to which it is taken whole; beyond it, low rank."""

SENT = 1e8
"""Bytes that all clients' blocks may have for whole ones to be summed; beyond it, projected."""

AXES = 100
"""Directions that a projected metric has of every block's own."""

RANK = 64
"""Columns of the random matrix by which a low-rank metric is found."""

SECANTS = 10
"""Steps that correct a metric."""

FLAT = 1e-26
"""Curvature of a column, relative to the steepest one's, below which rounding hides it."""

PANEL = 256
"""Rows whose products with all rows before them are taken at once: half of all is enough."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A positive definite matrix P in blocks, factored; corrected by the last steps (BFGS)."""

    places: Vector  # (k, q): where the coordinates of each block lie in a model vector
    basis: Vector  # Cholesky factors (b, q, q) or eigenvectors (b, q, r)
    values: Vector | None = None  # (b, r): eigenvalues that belong to the eigenvectors
    rest: Vector | None = None  # (b,): what P is on everything orthogonal to them
    steps: Vector | None = None  # (m, d): steps of the model
    changes: Vector | None = None  # (m, d): what they did to the gradient
    mean: Vector | None = None  # (q, q): the mean block of a projected metric, penalty apart
    axes: Vector | None = None  # (q, r): its first eigenvectors

    def solve(self, rows: Vector) -> Vector:
        """Return P^-1 v for the rows v of a matrix, in float64."""
        rows = rows.double()
        out = self._solve_first(rows)
        if self.steps is None or self.changes is None:
            return out
        s, (hy, inverse, inner) = self.steps, self._secants(self.steps, self.changes)
        sx, yx = rows @ s.T, rows @ hy.T
        first = sx @ (inverse.T @ inner).T - yx @ inverse
        return out + first @ s - sx @ inverse.T @ hy

    def direction(self, pull: Vector) -> Vector:
        """Return P^-1 v for one vector, in its precision."""
        return self.solve(pull[None])[0].to(pull.dtype)

    def multiply(self, rows: Vector) -> Vector:
        """Return <v_i, P^-1 v_j> for the rows v of a matrix, in float64."""
        if self.values is None or self.rest is None:
            rows = rows.double().contiguous()  # products of other strides may have other bits
            return rows @ self.solve(rows).T
        out = self._multiply_in_low_rank(rows, self.values, self.rest)
        if self.steps is None or self.changes is None:
            return out
        hy, inverse, inner = self._secants(self.steps, self.changes)
        sx, yx = (multiply_exactly(rows, both) for both in (self.steps, hy))
        mixed = yx @ inverse @ sx.T
        return out + sx @ (inverse.T @ inner).T @ sx.T - mixed - mixed.T

    def _multiply_in_low_rank(self, rows: Vector, values: Vector, rest: Vector) -> Vector:
        r"""Return the products by P = U diag(values) U' + rest (1 - U U') in each block.

        With z = U'v and v' = v - U z, the part of v orthogonal to the eigenvectors, they are
        :math:`\sum_b \langle z_i, \mathrm{diag}(\mathrm{values}_b)^{-1} z_j\rangle
        + \langle v'_i, v'_j\rangle / \mathrm{rest}_b`: sums of squares on the diagonal, so that
        nothing cancels, however large the eigenvalues are.
        """
        out = rows.new_zeros((len(rows), len(rows))).double()
        for k, block in enumerate(self.places):
            b = k if len(self.basis) == len(self.places) else 0
            part = rows[:, block].double()
            along = part @ self.basis[b]
            part.addmm_(along, self.basis[b].T, alpha=-1.0)
            _add_products(out, part / rest[b].sqrt())
            _add_products(out, along / values[b].sqrt())
        return out.tril() + out.tril(-1).T

    def _secants(self, s: Vector, y: Vector) -> tuple[Vector, Vector, Vector]:
        """Return what the compact form of BFGS's inverse is made of (Byrd et al. 1994)."""
        hy, sy = self._solve_first(y), s @ y.T
        inverse = sy.triu().inverse()
        return hy, inverse, (sy.diagonal().diag() + y @ hy.T) @ inverse

    def with_secant(self, step: Vector, change: Vector) -> Metric:
        """Return the metric in which a step of the model changes the gradient as it was seen to."""
        step, change = step.double(), change.double()
        bend = float(step @ change)
        if not bend > 1e-8 * float(step.norm() * change.norm()):
            return self  # not convex there, or rounding
        if self.steps is None or self.changes is None:
            return replace(self, steps=step[None], changes=change[None])
        both = zip((self.steps, self.changes), (step, change), strict=True)
        steps, changes = (torch.cat([old, new[None]])[-SECANTS:] for old, new in both)
        return replace(self, steps=steps, changes=changes)

    def _solve_first(self, rows: Vector) -> Vector:
        columns = self._columns(rows)
        if self.values is None:
            half = torch.linalg.solve_triangular(self.basis, columns, upper=False)
            out = torch.linalg.solve_triangular(self.basis.mT, half, upper=True)
        else:
            assert self.rest is not None
            scale = 1 / self.values - 1 / self.rest[:, None]
            inside = scale[..., None] * (self.basis.mT @ columns)
            out = self.basis @ inside + columns / self.rest[:, None, None]
        return self._rows(out, rows)

    def _columns(self, rows: Vector) -> Vector:
        """Return the rows of a matrix (n, d) as the columns of blocks (b, q, ...)."""
        k, q = self.places.shape
        parts = rows[:, self.places.reshape(-1)].view(len(rows), k, q).permute(1, 2, 0)
        if len(self.basis) == k:
            return parts
        return parts.permute(1, 0, 2).reshape(1, q, k * len(rows))  # one block for all

    def _rows(self, columns: Vector, like: Vector) -> Vector:
        k, q = self.places.shape
        if len(self.basis) != k:
            columns = columns.view(q, k, len(like)).permute(1, 0, 2)
        out = columns.new_zeros(len(like), like.shape[1])
        out[:, self.places.reshape(-1)] = columns.permute(2, 0, 1).reshape(len(like), k * q)
        return out


def multiply_exactly(rows: Vector, others: Vector) -> Vector:
    """Return all inner products of rows with a few others, in float64, a few rows at a time."""
    return torch.cat([some.double() @ others.T for some in torch.split(rows, PANEL)])


def _add_products(out: Vector, rows: Vector) -> None:
    """Add all inner products of rows to the lower triangle."""
    for begin in range(0, len(rows), PANEL):
        end = begin + PANEL
        out[begin:end, :end].addmm_(rows[begin:end], rows[:end].T)


def choose_form(clients: Clients, x: Vector, kind: MetricKind) -> Form | int | str:
    """Return the form or the rank of a metric of that kind, or why there is no curvature.

    ``"full"`` has all of the Hessian up to 2,000 parameters (``"auto"``: 1,000), and beyond that a
    block for each output that softmax mixes. ``"auto"`` is full as long as blocks have no more than
    :data:`BLOCKS` numbers, take no more than :data:`WORK` to sum and no client sends much; it is
    projected where many blocks would send more than :data:`SENT` bytes, and of low rank beyond.
    The diagonals tell how many there are.
    """
    share = np.full(len(clients.index), 1 / len(clients.index))
    shape = clients.curvature_sum(x, share, "diagonal")
    if isinstance(shape, str):
        return shape
    (b, q), k = shape.blocks.shape, len(shape.places)
    numbers, whole = b * q * q, k * q <= WHOLE.get(kind, WHOLE["auto"])
    if kind == "projected" or (kind == "auto" and not whole and numbers <= BLOCKS):
        sent = numbers // 2 * x.element_size() * len(clients.index)
        pays = kind == "projected" or sent > SENT
        if pays and b > 1 and q > AXES:
            return "projected"
    large = numbers > BLOCKS or numbers * int(clients.sizes.sum()) > WORK
    if kind == "low-rank" or (kind == "auto" and large):
        return min(RANK, q)
    return "full" if whole else "blocks"


def form_metric(
    clients: Clients, x: Vector, weights: Weights, kind: Form | int, stream: Stream,
    old: Metric | None = None,
) -> tuple[Metric, CurvatureSum]:  # fmt: skip
    """Return the metric of the clients' Hessians at x, summed by the sizes of ``weights``.

    ``kind`` is a form of the sum, or the rank of an approximation: by one product with a random
    thin matrix, Nystroem's (Frangella, Tropp and Udell 2023). A projected metric keeps the mean
    block and the axes of the ``old`` one.
    """

    def ask(form: Form, thin: Vector | None = None) -> CurvatureSum:
        found = clients.curvature_sum(x, np.abs(weights), form, thin)
        if isinstance(found, str):
            raise RuntimeError(f"The clients' curvature is no longer available: {found}.")
        return found

    if kind == "projected":
        return _project(ask, old)
    if not isinstance(kind, int):
        found = ask(kind)
        lift = 1e-13 if found.penalty > 0 else 1e-10  # what rounding leaves of rank
        return Metric(found.places, factor_blocks(found.blocks, lift)), found
    shape = ask("diagonal")
    q = shape.places.shape[1]
    drawn = stream.at("metric", "thin").generator().standard_normal((q, min(kind, q)))
    thin = torch.linalg.qr(torch.as_tensor(drawn, device=x.device))[0]
    found = ask("blocks", thin)
    return _nystroem(found, thin, shape.blocks), found


def _project(ask: Callable[..., CurvatureSum], old: Metric | None) -> tuple[Metric, CurvatureSum]:
    r"""Return :math:`P_b = s_b M + T (C_b - s_b T^\top M T) T^\top + \text{l2}` for each block b.

    M is the mean of all blocks, summed once; T holds its first eigenvectors, :math:`C_b = T^\top
    H_b T` is what clients send of block b: 1 % of it. In the directions that T leaves out, the
    block is the mean's, scaled by what its flatter half along T is beside that of the mean.
    """
    mean, axes = (None, None) if old is None else (old.mean, old.axes)
    if mean is None or axes is None:
        whole = ask("mean")
        mean = whole.blocks[0].clone()
        mean.diagonal().sub_(whole.penalty)
        axes = torch.linalg.eigh(mean)[1].flip(1)[:, :AXES].contiguous()
    found = ask("projected", axes)
    eye = torch.eye(len(mean)).to(mean)
    core, along = found.blocks - found.penalty * axes.T @ axes, axes.T @ mean @ axes
    flat = slice(axes.shape[1] // 2, None)
    beside = float(along.diagonal()[flat].sum())
    scale = core.diagonal(dim1=1, dim2=2)[:, flat].sum(dim=1).clamp(min=0.0) / max(beside, 1e-300)
    each = scale[:, None, None]
    blocks = each * mean + axes @ (core - each * along) @ axes.T + found.penalty * eye
    basis = factor_blocks((blocks + blocks.mT) / 2, 1e-10)
    return Metric(found.places, basis, mean=mean, axes=axes), found


def _nystroem(found: CurvatureSum, thin: Vector, diagonal: Vector) -> Metric:
    """Return U diag(values) U' + rest (1 - U U') from one product of the blocks."""
    sketch = found.blocks - found.penalty * thin  # without the penalty
    shift = 1e-12 * float(diagonal.sum(dim=-1).max())
    sketch = sketch + shift * thin
    core = thin.T @ sketch
    factor = factor_blocks((core + core.mT) / 2, 1e-14)
    half = torch.linalg.solve_triangular(factor.mT, sketch, upper=True, left=False)
    basis, roots, _ = torch.linalg.svd(half, full_matrices=False)
    values = (roots.square() - shift).clamp(min=0.0)
    # What the trace has beyond the eigenvalues found, spread over the other directions.
    q, r = basis.shape[1:]
    left = (diagonal.sum(dim=-1) - q * found.penalty - values.sum(dim=-1)).clamp(min=0.0)
    rest = torch.minimum(values[:, -1], 4 * left / max(q - r, 1))
    lift = found.penalty + 1e-10 * values[:, :1]
    return Metric(found.places, basis, values + lift, rest + lift[:, 0])


def least_weighted_loss(summed: CurvatureSum, metric: Metric, gradient: Vector) -> float:
    r"""Return how far at most a quadratic weighted loss lies above its minimum; infinite: unknown.

    With :math:`\delta \approx P^{-1} c` it is :math:`\langle c, \delta\rangle
    - \delta^\top P \delta / 2 + |c - P\delta|^2 / (2 \mu)`, whatever the error of
    :math:`\delta`; mu is the penalty's, or the smallest eigenvalue of P where that is certain.
    What rounding may have done is added.
    """
    c, eps = gradient.double(), epsilon(gradient)
    places = summed.places
    if not summed.exact or summed.blocks.dim() != 3:
        return math.inf
    top = float(summed.blocks.diagonal(dim1=-2, dim2=-1).sum(dim=-1).max())
    error = 8 * eps * top * math.sqrt(places.shape[1])  # of every eigenvalue
    modulus = summed.penalty * (1 - 1e-9)
    if modulus <= 0:
        modulus = float(torch.linalg.eigvalsh(summed.blocks)[..., 0].min()) - error
    if not modulus > 100 * error * (summed.penalty <= 0):
        return math.inf
    delta = metric.solve(c[None])[0]
    bent = torch.zeros_like(c)
    bent[places] = (summed.blocks @ delta[places].unsqueeze(-1)).squeeze(-1)
    left = float((c - bent).square().sum())
    descent = float(c @ delta) - 0.5 * float(delta @ bent)
    rounding = error * float(delta @ delta) + 16 * eps * float(c.abs() @ delta.abs())
    return descent + left / (2 * modulus) + rounding


def bound_below(
    objective: SaddleObjective, losses: Losses, weights: Weights, gradient: Vector,
    summed: CurvatureSum, metric: Metric,
) -> Bound:  # fmt: skip
    """Return the least value of a quadratic weighted loss, below which no objective falls."""
    lower = float(weights @ losses) - objective.penalty(weights)
    lower -= least_weighted_loss(summed, metric, gradient)
    lower -= rounding(gradient, float(weights @ np.abs(losses)))
    return Bound(lower, weights, gradient, summed)


def factor_blocks(blocks: Vector, lift: float) -> Vector:
    """Return Cholesky factors; what is singular is lifted a little, whatever its columns' units."""
    diagonal = blocks.diagonal(dim1=-2, dim2=-1)
    least = FLAT * diagonal.amax(dim=-1, keepdim=True).clamp(min=1e-270)
    scale = torch.maximum(diagonal, least).sqrt()
    alike = blocks / scale[..., None, :] / scale[..., :, None]
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    for _ in range(32):
        factor, failed = torch.linalg.cholesky_ex(alike + lift * eye)
        if not bool(failed.any()):
            factor = scale[..., :, None] * factor
            return cast("Vector", factor.contiguous())  # as a checkpoint gives it back
        lift *= 10
    raise ArithmeticError("The clients' summed curvature is not positive.")


@dataclass(frozen=True, eq=False)
class MetricSizes(StepSizes):
    """Step size tau in a metric, and what the rounds in it remember."""

    metric: Metric | None = None  # P; None before it is known
    form: Form | int = "blocks"  # its form, or its rank
    weights: Weights | None = None  # those by which the clients' Hessians were summed
    exact: bool = True  # whether P is a sum of Hessians
    constant: bool = False  # whether they are the same at every model
    sums: int = 0  # how often Hessians were summed
    age: int = 0  # rounds since then
    origin: Vector | None = None  # where the last step began; None: nothing to compare with
    pull: Vector | None = None  # the weighted gradient there
    value: float = 0.0  # the objective there
    gain: float = 0.0  # by how much the step should lower it
    faster: float = 1.0  # that relative to the gain of the step before
    share: float = 1.0  # how much of the step was taken in the end
    shortened: int = 0  # how often a step was
    steepest: float = 0.0  # bound of the coupling of weights and model; 0 before it is known
    decrement: float = 0.0  # length of the step in the metric, and what weights could gain

    @override
    def numbers(self) -> dict[str, float]:
        """Return the step size, its decrement, and how often Hessians were summed, steps cut."""
        found = {"curvature_sums": float(self.sums), "halvings": float(self.shortened)}
        if self.origin is not None:
            found["decrement"] = self.decrement
        return {"primal_step": self.primal, **found}

    @override
    def halved(self) -> StepSizes | None:
        """Return None: rounds in a metric judge their steps themselves."""
        return None

    def judged(self, x: Vector, value: float) -> tuple[MetricSizes, bool]:
        """Return the sizes after the last step showed what it was worth, and whether it is kept.

        It should have lowered the objective by ``gain``: with less than a tenth of that it is
        shortened, with most of it the next one may be longer.
        """
        if self.origin is None:
            return self, True
        off = rounding(x, value)
        kept_promise = (self.value - value + off) / max(self.gain * self.share, off)
        if kept_promise < 0.1 and self.share > 1e-6:
            shorter = replace(self, share=self.share / 4, primal=self.primal / 2)
            return replace(shorter, shortened=self.shortened + 1), False
        if kept_promise > 0.7:
            return replace(self, primal=min(1.0, 2 * self.primal)), True
        return self, True

    def is_stale(self, weights: Weights) -> bool:
        """Tell whether Hessians are to be summed: ever more seldom where they are bounds."""
        if self.metric is None or self.weights is None:
            return True
        if not self.exact:
            return self.age + 1 >= self.sums
        turned = float(np.abs(weights - self.weights).sum())
        if self.constant and turned <= 0.01 * float(np.abs(self.weights).sum()):
            return False
        return self.faster > 0.02

    def corrected(self, x: Vector, pull: Vector) -> MetricSizes:
        """Return the sizes with a metric that knows what the last step did to the gradient."""
        if self.metric is None or self.origin is None or self.pull is None:
            return self
        step, least = x - self.origin, math.sqrt(epsilon(x)) / 100 * float(x.norm())
        if not float(step.norm()) > least:  # rounding
            return self
        return replace(self, metric=self.metric.with_secant(step, pull - self.pull))

    @override
    def said(self) -> tuple[str, ...]:
        """Say what the metric is and what it costs, when it is new."""
        if self.metric is None or self.origin is None or self.sums > 1 or self.age > 0:
            return ()
        basis = self.metric.basis
        (b, q), kind, numbers = basis.shape[:2], "low-rank ", basis.numel()
        if self.metric.axes is not None:
            kind, r = "projected ", self.metric.axes.shape[1]
            numbers = b * r * (r + 1) // 2
        elif self.metric.values is None:
            kind, numbers = "", b * q * (q + 1) // 2
        cost = numbers * self.origin.element_size()
        size = f"{cost / 1e6:.3g} MB" if cost >= 1e5 else f"{cost / 1e3:.3g} kB"
        return (f"Using {kind}second-order steps ({size} extra per client and update).",)


def rounding(x: Vector, value: float) -> float:
    """Return by how much a computed objective may be off."""
    return 8 * epsilon(x) * abs(value) + 1e-300
