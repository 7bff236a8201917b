r"""Second derivatives of linear models: what is certain about them, and weighted sums of Hessians.

A sample with features a and outputs z adds :math:`w\, h(z) \otimes a a^\top`, h being the second
derivative of its loss in the outputs. Profile losses :math:`\min_v f_i(u, v)` have the Schur
complement :math:`H_{uu} - H_{uv} H_{vv}^{-1} H_{vu}`, which grows with H: bounds stay bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, get_float32_matmul_precision, nn

from equifed.contract.arrays import Index, Weights
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.models.architectures import ZeroLinear
from equifed.models.checks import find_reason, is_plain
from equifed.models.flat import FlatModel, unflatten
from equifed.models.losses import DERIVATIVES, FittedLoss, Weighted, fitted_loss

REAL = (torch.float32, torch.float64)
PARTS = ("weight", "bias")  # parameters of a linear layer

# Most operations to spend on exact eigenvalues; beyond it, bounds that cost one pass
EIGENVALUE_WORK = 2e10

PIECE = 1 << 25  # features that are multiplied at once, in bytes

FIXED_PIECE = 1024  # samples that fixed parts of a model are run on at once

MOST_CLIENTS = 5000  # beyond this many clients their data are not looked at one by one


def known_curvature(
    model: FlatModel, n: int, inputs_of: Callable[[int], Tensor] | None = None,
    here: Sequence[int] | Index | None = None,
) -> Curvature | str:  # fmt: skip
    r"""Return what is certain about the curvature of n clients' losses, or why nothing is.

    For a linear model and a convex loss the Hessian of :math:`f_i` lies between
    :math:`\text{l2}\, I` and :math:`(s\, \lambda_{\max}(A_i^\top A_i / m_i) + \text{l2})\, I`,
    s being the largest second derivative of the loss. Of clients whose inputs are not ``here``, and
    of very many, the lower bound alone is known.
    """
    why, rows_of = refuse_bounds(model), trained_rows(model)
    if why is not None or rows_of is None:
        return str(why)
    loss = fitted_loss(model.loss)
    steepest = math.inf if loss is None else DERIVATIVES[loss].steepest  # the hinge has a kink
    sure = 0.0 if model.penalised is not None else model.l2  # a free bias may be all but flat
    smoothness, convexity = np.full(n, math.inf), np.full(n, sure)
    if inputs_of is None or n > MOST_CLIENTS:
        return Curvature(smoothness, convexity, lowest=0.0)
    here, exact = range(n) if here is None else here, True
    for i in here:
        rows = rows_of(inputs_of(i))
        least, largest, ends = _eigenvalues(_append_ones(rows, model.shapes), n)
        if model.own_shapes:  # a Schur complement is at least the least of both parts together
            least = _eigenvalues(_append_ones(rows, PARTS), n)[0]
        smoothness[i], exact = steepest * largest + model.l2, exact and ends
        if loss == "squared":
            convexity[i] += 2.0 * least
            if model.penalised is not None and len(model.shapes) == 2:  # weight and bias
                convexity[i] = max(convexity[i], _free_bias(rows, model.l2))
    pair = loss == "cross_entropy" and next(iter(model.shapes.values()))[0] == 2
    tight = exact and (pair or loss in ("squared", "binary_logistic"))  # at zero, all of them
    return Curvature(smoothness, convexity, tight, lowest=0.0)


def refuse_bounds(model: FlatModel) -> str | None:
    """Return why nothing is certain about the losses' curvature, if nothing is."""
    if trained_rows(model) is None:
        return f"the model is not linear, so its losses need not be convex{_cure(model)}"
    if model.known_loss is None:
        name = getattr(model.loss, "__name__", "?")
        return f"nothing is known about the loss {name}; state strong_convexity yourself"
    return _rounded(model.dtype, model.device)


def _free_bias(inputs: Tensor, l2: float) -> float:
    """Return a bound below the curvature of least squares with a bias that is not penalised."""
    # With the mean c of the inputs: l2, or the smaller eigenvalue of a matrix of determinant 2 l2,
    # [[2 |c|^2 + l2, 2 |c|], [2 |c|, 2]]
    mean = inputs.detach().to("cpu", torch.float64).flatten(1).mean(dim=0)
    trace, determinant = 2 * float(mean.square().sum()) + l2 + 2, 2 * l2
    smaller = 2 * determinant / (trace + math.sqrt(max(trace**2 - 4 * determinant, 0.0)))
    return min(l2, smaller) * (1 - 1e-13)


def linear_layer(module: nn.Module, input_dimensions: int) -> nn.Linear | None:
    """Return the one layer of a linear model of torch's own classes, else None."""
    parts = list(module) if type(module) is nn.Sequential else [module]
    if not all(is_plain(part) for part in (module, *parts)):
        return None
    found: Any = None
    flat = input_dimensions == 1
    for part in parts:
        if type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1):
            flat = True
        elif type(part) in (nn.Linear, ZeroLinear) and flat and found is None:
            found = part
        elif type(part) is not nn.Identity:
            return None
    known = found is not None and set(found._parameters) <= set(PARTS)
    return found if known else None


def trained_rows(model: FlatModel) -> Callable[[Tensor], Tensor] | None:
    """Return what makes of samples the rows of the one trained linear layer; None without one."""
    if linear_layer(model.module, model.input_dimensions) is not None:
        return lambda inputs: inputs.to(model.device, model.dtype).reshape(len(inputs), -1)
    if type(model.module) is not nn.Sequential or model.dropouts or model.output_dimensions != 1:
        return None
    *fixed, last = model.module
    held = {id(part) for one in fixed for part in one.modules()}
    if linear_layer(last, 1) is None or not is_plain(model.module) or id(last) in held:
        return None
    place = [*model.module._modules][-1] + "."
    if not all(name.startswith(place) for name in model.names):
        return None
    before = nn.Sequential(*fixed)

    def compute(inputs: Tensor) -> Tensor:
        model.module.train(True)  # as in the losses
        with torch.no_grad():
            pieces = torch.split(inputs, FIXED_PIECE)
            return torch.cat([before(piece.to(model.device)) for piece in pieces])

    return compute


def _append_ones(rows: Tensor, trained: Iterable[str]) -> Tensor:
    """Return the columns that trained parameters are multiplied with; the bias's come last."""
    weight, bias = (any(name.endswith(part) for name in trained) for part in PARTS)
    return torch.cat([rows, rows.new_ones(len(rows), 1)][not weight : 1 + bias], dim=1)


def _cure(model: FlatModel) -> str:
    """Say how a model of which one linear layer alone is trained becomes a linear one."""
    places = {name.rpartition(".")[0] for name in model.names}
    place, held = places.pop(), dict(model.module.named_parameters())
    linear = isinstance(model.module.get_submodule(place), nn.Linear)
    if places or not linear or held.keys() <= model.names.keys():
        return ""
    return (
        f"; if the layer {place!r}, the only one that is trained, gives the outputs, a linear "
        "model on equifed.features(...) of what comes before it has certificates"
    )


def _rounded(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why numbers are too coarse for bounds, if they are."""
    autocast, products = torch.is_autocast_enabled(device.type), get_float32_matmul_precision()
    coarse = dtype == torch.float32 and products != "highest"
    reasons = {
        "torch.autocast rounds what the model computes, which no bound here covers": autocast,
        f"the model computes in {dtype}, whose rounding no bound here covers": dtype not in REAL,
        f"torch rounds matrix products to {products!r} precision, which no bound covers": coarse,
    }
    return find_reason(reasons)


def _eigenvalues(a: Tensor, clients: int) -> tuple[float, float, bool]:
    """Return bounds on the eigenvalues of A'A / m, and whether they are its ends."""
    a, (m, d) = a.detach().to("cpu", torch.float64), a.shape
    if clients * min(m, d) ** 2 * (min(m, d) + max(m, d)) > EIGENVALUE_WORK:
        return 0.0, float(a.square().sum()) / m, False  # the trace
    gram = a.T @ a if d <= m else a @ a.T
    values = torch.linalg.eigvalsh(gram / m)
    rounding = 1e-13 * float(values[-1])  # eigvalsh may be off by this: stay on the safe side
    least = max(0.0, float(values[0]) - rounding) if d <= m else 0.0
    return least, float(values[-1]) + rounding, True


@dataclass(frozen=True, eq=False)
class LinearHessian:
    """Hessians of a linear model's loss: where blocks lie, and how samples add to them."""

    model: FlatModel
    rows: Callable[[Tensor], Tensor]  # what the layer is applied to, of samples
    loss: FittedLoss
    places: Tensor  # (k, q): flat positions of the k outputs' parameters
    form: Form

    @classmethod
    def of(
        cls, model: FlatModel, form: Form, thin: Tensor | None = None, profile: bool = False
    ) -> LinearHessian | str:
        """Return the Hessians of a model, or why not; ``profile``: own biases are the best ones."""
        if thin is not None and form not in ("blocks", "projected"):
            raise ValueError(f"A thin matrix is multiplied with blocks, not with form={form!r}.")
        if thin is None and form == "projected":
            raise ValueError("Blocks are projected on a thin matrix; give one.")
        rows, name = trained_rows(model), getattr(model.loss, "__name__", "?")
        loss = fitted_loss(model.loss.base if isinstance(model.loss, Weighted) else model.loss)
        without = "clients have own parameters, and the sum would have to do without them"
        reasons = {
            "the model is not linear": rows is None,
            f"the second derivative of the loss {name} is not known": loss is None,
            without: model.own_size and not profile,
            f"the model computes in {model.dtype}": model.dtype not in REAL,
        }
        if why := find_reason(reasons):
            return why
        assert rows is not None and loss is not None
        return cls(model, rows, loss, find_places(model), form)

    @property
    def whole(self) -> bool:
        """Whether all outputs have one Hessian together: softmax mixes them."""
        return self.loss == "cross_entropy" and self.form == "full"

    @property
    def size(self) -> tuple[int, int]:
        """How many different blocks there are, and of how many rows."""
        k, q = self.places.shape
        if self.whole:
            return 1, k * q
        return 1 if self.loss == "squared" else k, q

    def shape(self, thin: Tensor | None = None) -> tuple[int, ...]:
        """Return the shape of what is summed."""
        b, q = self.size
        if self.form == "diagonal":
            return b, q
        r = q if thin is None else thin.shape[1]
        return 1 if self.form == "mean" else b, r if self.form == "projected" else q, r

    def zeros(self, thin: Tensor | None = None) -> Tensor:
        """Return the blocks of nobody."""
        return torch.zeros(self.shape(thin), dtype=torch.float64, device=self.model.device)

    def add(
        self, total: Tensor, x: Tensor, inputs: Tensor, counts: Tensor, thin: Tensor | None = None
    ) -> None:
        """Add samples, each as often as ``counts`` says; x ends with their client's own biases."""
        a = self._features(inputs)
        if self.whole:
            few = max(1, PIECE // (self.places.numel() * a.element_size()))
            samples = a, torch.softmax(self._outputs(x, inputs), dim=1), counts
            for parts in zip(*(torch.split(values, few) for values in samples), strict=True):
                self._add_whole(total[0], *parts)
            return
        derivatives = list(self._second_derivatives(x, inputs))
        if self.form == "diagonal":
            total += (torch.stack([counts * h for h in derivatives]) @ a.square()).double()
            return
        right = a if thin is None else a @ thin.to(a)
        left = right if self.form == "projected" else a
        if self.form == "mean":
            derivatives = [torch.stack(derivatives).mean(dim=0)]
        for block, h in zip(total, derivatives, strict=True):
            block += (left.T @ ((counts * h)[:, None] * right)).double()

    def add_profile(
        self, total: Tensor, x: Tensor, pieces: Iterable[Tensor], weight: float, size: int,
        thin: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add the Hessian of one client's profile loss from pieces of its ``size`` samples."""
        (b, q), k = self.size, len(self.places)
        mixed = total.new_zeros((k, k, q // k) if self.whole else (b, q))  # H_vu
        own = total.new_zeros((k, k) if self.whole else (b,))  # H_vv
        for inputs in pieces:
            share = x.new_full((len(inputs),), 1 / size)
            self.add(total, x, inputs, weight * share, thin)
            a = self._features(inputs)
            if self.whole:
                h = DERIVATIVES[self.loss].second(self._outputs(x, inputs)) / size
                mixed += torch.einsum("sce,sq->ecq", h, a).double()
                own += h.sum(dim=0).double()
            else:
                h = torch.stack([v * share for v in self._second_derivatives(x, inputs)])
                mixed, own = mixed + (h @ a).double(), own + h.sum(dim=1).double()
        if self.whole:
            factor = torch.linalg.cholesky(own + self.model.own_l2 * torch.eye(k).to(own))
            root = torch.linalg.solve_triangular(factor, mixed.reshape(k, q), upper=False)
            total[0] -= weight * root.T @ root
            return
        root = mixed * (weight / (own + self.model.own_l2)).sqrt()[:, None]
        if self.form == "diagonal":
            total -= root.square()
        elif self.form == "mean":
            total[0] -= root.T @ root / b
        else:
            right = root if thin is None else root @ thin.double()
            left = right if self.form == "projected" else root
            total -= left[:, :, None] * right[:, None]

    def answer(self, total: Tensor, weights: Weights, thin: Tensor | None = None) -> CurvatureSum:
        """Return the blocks with the penalty's part."""
        penalty = self.model.l2 * float(np.sum(weights))
        places = self.places.reshape(1, -1) if self.whole else self.places
        ridge = penalty * self.model.pull(total.new_ones(self.model.size))[places[0]]
        if self.form == "diagonal":
            total += ridge
        elif thin is not None:
            thin = thin.to(total)
            ridges = ridge[:, None] * thin
            total += thin.T @ ridges if self.form == "projected" else ridges
        else:
            total.diagonal(dim1=-2, dim2=-1).add_(ridge)
        exact = self.form in ("full", "blocks") and (self.loss != "cross_entropy" or self.whole)
        common = penalty if self.model.penalised is None else 0.0  # biases may be free
        return CurvatureSum(total, places, common, exact, self.loss == "squared")

    def numbers(self, thin: Tensor | None = None) -> int:
        """Return how many numbers a client sends: of a symmetric matrix one triangle."""
        shape = self.shape(thin)
        if self.form == "diagonal" or (thin is not None and self.form == "blocks"):
            return int(np.prod(shape))
        return shape[0] * shape[1] * (shape[1] + 1) // 2

    def _features(self, inputs: Tensor) -> Tensor:
        return _append_ones(self.rows(inputs), self.model.shapes)

    def _outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.model.outputs(x, inputs.to(self.model.device))

    def _second_derivatives(self, x: Tensor, inputs: Tensor) -> Iterable[Tensor]:
        """Return one row of second derivatives for each block, or bounds of them."""
        if self.loss == "squared":
            return [torch.full((), 2.0, dtype=x.dtype, device=x.device)]
        p = DERIVATIVES[self.loss].mean(self._outputs(x, inputs))
        if self.loss == "binary_logistic":
            return [p[:, 0] * (1 - p[:, 0])]
        return (2 * p * (1 - p)).T  # diag(p) - pp' <= 2 diag(p (1 - p)): diagonally dominant

    def _add_whole(self, total: Tensor, a: Tensor, p: Tensor, counts: Tensor) -> None:
        """Add diag(p) - pp' times aa', a row of blocks up to the diagonal at a time."""
        k, q = self.places.shape
        for c in range(k):
            h = -counts[:, None] * p[:, c : c + 1] * p[:, : c + 1]
            h[:, c] += counts * p[:, c]
            blocks = a.T @ (h[:, :, None] * a[:, None, :]).reshape(len(a), -1)
            rows, before = slice(c * q, (c + 1) * q), c * q
            total[rows, : before + q] += blocks.double()
            total[:before, rows] += blocks[:, :before].T.double()


def check_sum_weights(weights: Weights, n: int) -> None:
    """Refuse weights that make no positive sum of Hessians."""
    if weights.shape != (n,) or not np.isfinite(weights).all() or weights.min() < 0:
        raise ValueError(
            f"A sum of Hessians needs one weight of at least 0 for each of {n} clients, got "
            f"{np.array2string(np.asarray(weights), threshold=8)}; take absolute values of signed "
            "ones."
        )


def find_places(model: FlatModel) -> Tensor:
    """Return where the k outputs' parameters of a linear model lie in the vector, (k, q)."""
    parts = unflatten(torch.arange(model.size, device=model.device), model.shapes)
    ends = [part for end in PARTS for name, part in parts.items() if name.endswith(end)]
    return torch.cat([part.reshape(len(part), -1) for part in ends], dim=1)


def read_design(model: FlatModel, inputs: Tensor) -> Tensor:
    """Return what the trained parameters of a linear model are multiplied with, (m, q)."""
    rows = trained_rows(model)
    assert rows is not None
    return _append_ones(rows(inputs), model.shapes)
