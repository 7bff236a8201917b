"""How curved the client losses are: known from the data, or measured through the contract.

Two kinds of numbers, kept apart. A :class:`Curvature` holds bounds that are true at every model; a
certificate may rest on them. :func:`measured_smoothness` is an estimate at one model; step sizes
may rest on it, since a safeguard watches them, but no proof does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from equifed.arrays import Losses, Vector, Weights
from equifed.clients import Clients, MissingClients
from equifed.local import LocalSGD
from equifed.streams import Stream

if TYPE_CHECKING:
    from torch import nn

    from equifed.engines.flat_model import FlatModel

EIGENVALUE_WORK = 2e10
"""Most operations to spend on exact eigenvalues; beyond it, bounds that cost one pass."""

MOST_CLIENTS = 5000
"""Beyond this many clients their data are not looked at one by one."""

STEEPEST = {"squared": 2.0, "binary_logistic": 0.25, "cross_entropy": 0.5, "hinge": math.inf}
"""Largest second derivative of each convex loss in its outputs."""


@dataclass(frozen=True, eq=False)
class Curvature:
    """Bounds on the Hessians of the client losses that hold at every model.

    Parameters
    ----------
    smoothness, strong_convexity : array, shape (N,)
        L_i and mu_i with mu_i I <= Hess f_i <= L_i I; L_i may be infinite, mu_i zero.
    tight : bool
        Whether some model attains the smoothness, so that it makes good step sizes.
    """

    smoothness: Losses
    strong_convexity: Losses
    tight: bool = False

    def modulus(self, weights: Weights) -> float:
        r"""Return a strong-convexity modulus of the weighted loss; one above zero means something.

        .. math:: \mu(w) = \sum_{w_i > 0} w_i \mu_i - \sum_{w_i < 0} |w_i| L_i

        >>> bounds = Curvature(np.array([4.0, 4.0]), np.array([1.0, 1.0]))
        >>> bounds.modulus(np.array([0.5, 0.5])), bounds.modulus(np.array([1.25, -0.25]))
        (1.0, 0.25)
        """
        up, down = np.maximum(weights, 0.0), np.maximum(-weights, 0.0)
        lost = float(down[down > 0] @ self.smoothness[down > 0])
        return float(up @ self.strong_convexity) - lost

    def least_modulus(self, l1_norm: float) -> float:
        """Return a lower bound of mu(w) over all w that sum to one with |w|_1 <= ``l1_norm``.

        The positive parts of such w sum to (l1_norm + 1) / 2, the negative ones to
        (l1_norm - 1) / 2 (SCAFF-PD-IA, Lemma 7).
        """
        up, down = (l1_norm + 1) / 2, (l1_norm - 1) / 2
        least = float(self.strong_convexity.min())
        return up * least - (down * float(self.smoothness.max()) if down > 0 else 0.0)


@runtime_checkable
class HoldsInputs(Protocol):
    """An engine that has the clients' samples at hand."""

    def inputs_of(self, client: int) -> Vector:
        """Return the training inputs of a client of the federation."""
        ...


def known_curvature(clients: Clients) -> Curvature | str:
    r"""Return what is certain about the clients' curvature, or why nothing is.

    For a linear model and a convex loss the Hessian of :math:`f_i` lies between
    :math:`\text{l2}\, I` and :math:`(s\, \lambda_{\max}(A_i^\top A_i / m_i) + \text{l2})\, I`,
    s being the largest second derivative of the loss; the squared loss has the eigenvalues of
    :math:`2 A_i^\top A_i / m_i + \text{l2}\, I` themselves. Without the samples at hand (a real
    federation), or with too many clients to look at each, only the lower bound l2 is known.
    Needs no exchange.
    """
    model: FlatModel | None = getattr(clients, "model", None)
    if model is None:
        return "the engine does not say what the model is"
    layer = linear_layer(model.module)
    if layer is None:
        return "the model is not linear, so its losses need not be convex"
    loss = getattr(model.loss, "__name__", "?")
    if loss not in STEEPEST or getattr(model.loss, "__module__", "") != "equifed.losses":
        return f"nothing is known about the loss {loss}; state strong_convexity yourself"
    n = len(clients.names)
    if not isinstance(clients, HoldsInputs) or n > MOST_CLIENTS:
        return Curvature(np.full(n, math.inf), np.full(n, model.l2))
    quadratic = loss == "squared"
    ends = [_eigenvalues(clients.inputs_of(i), layer.bias is not None, n) for i in range(n)]
    least, largest = np.array([e[0] for e in ends]), np.array([e[1] for e in ends])
    smoothness = STEEPEST[loss] * largest + model.l2
    exact = all(e[2] for e in ends)
    convexity = np.full(n, model.l2) + (2.0 * least if quadratic else 0.0)
    return Curvature(smoothness, convexity, tight=exact and loss in ("squared", "binary_logistic"))


def linear_layer(module: nn.Module) -> nn.Linear | None:
    """Return the one linear layer of a model that is linear in its parameters, else None."""
    from torch import nn

    parts = list(module.children()) if isinstance(module, nn.Sequential) else [module]
    layers = [part for part in parts if not isinstance(part, nn.Flatten | nn.Identity)]
    only = layers[0] if len(layers) == 1 else None
    return only if isinstance(only, nn.Linear) else None


def _eigenvalues(inputs: Vector, bias: bool, clients: int) -> tuple[float, float, bool]:
    """Return bounds on the eigenvalues of A'A / m, and whether they are its ends."""
    import torch

    a = inputs.detach().to("cpu", torch.float64).reshape(len(inputs), -1)
    if bias:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    m, d = a.shape
    if clients * min(m, d) ** 2 * (min(m, d) + max(m, d)) > EIGENVALUE_WORK:
        return 0.0, float(a.square().sum()) / m, False  # the trace
    gram = a.T @ a if d <= m else a @ a.T
    values = torch.linalg.eigvalsh(gram / m)
    rounding = 1e-13 * float(values[-1])  # eigvalsh may be off by this: stay on the safe side
    least = max(0.0, float(values[0]) - rounding) if d <= m else 0.0
    return least, float(values[-1]) + rounding, True


def hessian_product(
    clients: Clients,
    x: Vector,
    weights: Weights,
    direction: Vector,
    stream: Stream,
    batch: int | None = None,
) -> Vector:
    r"""Return :math:`\sum_i w_i \nabla^2 f_i(x)\, v` from two exchanges of weighted gradients.

    .. math:: \frac{g(x + h v) - g(x - h v)}{2 h}, \qquad g = \textstyle\sum_i w_i \nabla f_i,
              \quad h |v| = \epsilon^{1/3} (1 + |x|)

    Exact up to rounding for quadratics. Otherwise about 1e-9 relative in float64 and 1e-4 in
    float32. ``batch`` uses one minibatch, the same at both points.
    """
    import torch

    length = float(torch.linalg.vector_norm(direction))
    if length == 0:
        return torch.zeros_like(direction)
    h = torch.finfo(x.dtype).eps ** (1 / 3) * (1 + float(torch.linalg.vector_norm(x))) / length
    ahead = clients.value_and_gradient(x + h * direction, stream, batch)[1].weighted_sum(weights)
    behind = clients.value_and_gradient(x - h * direction, stream, batch)[1].weighted_sum(weights)
    product: Vector = (ahead - behind) / (2 * h)
    return product


def measured_smoothness(clients: Clients, x: Vector, stream: Stream, probe: int = 32) -> float:
    r"""Estimate the largest Hessian eigenvalue, in size, of any client's loss at x.

    Corrected local steps are a power iteration that every client does by itself: with control
    :math:`c_i = \nabla f_i(x)` and a common small target v the displacement obeys
    :math:`e \leftarrow (I - \eta \nabla^2 f_i)\, e + \eta v`, so for :math:`\eta L_i > 2` it grows
    by :math:`\eta L_i - 1` a step. Two calls, of J and J + 1 steps, show by how much, and only
    squared norms reach the server. A power iteration on the average Hessian comes first, to know
    which :math:`\eta` to try.

    Costs 7 exchanges for the average and 2 for each try, mostly two tries. The estimate is low by
    a few percent, in float32 by up to some tens; it is local, and no bound.

    Parameters
    ----------
    probe : int
        Clients to ask at most, evenly spaced.
    """
    if len(clients.index) > probe:
        clients = clients.subset(
            clients.index[np.linspace(0, len(clients.index) - 1, probe, dtype=int)]
        )
    rough = _average_smoothness(clients, x, stream)
    if rough == 0:
        return 0.0
    rate = 3 / rough
    for attempt in range(8):
        growth = _growth(clients, x, rate, rough, stream.at("try", attempt))
        if growth is None:
            rate /= 3  # moved too far to count as one Hessian
        elif growth < 1.6:
            rate *= 2  # too little to tell the largest eigenvalue from the others
        else:
            return max(rough, (1 + growth) / rate)
    return 2 * rough


def _average_smoothness(clients: Clients, x: Vector, stream: Stream) -> float:
    """Return |H v| / |v| after two power iterations on the average Hessian: a lower bound."""
    import torch

    uniform = np.full(len(clients.index), 1 / len(clients.index))
    v = _direction(x, stream)
    for _ in range(3):
        product = hessian_product(clients, x, uniform, v, stream.at("product"))
        length = float(torch.linalg.vector_norm(product))
        if length == 0:
            return 0.0
        v = product / length
    return length


def _growth(clients: Clients, x: Vector, rate: float, rough: float, stream: Stream) -> float | None:
    """Return by how much the displacement grew in the last step; None if it went too far."""
    import torch

    steps, first, limit = (16, 1e-8, 0.1) if x.dtype == torch.float64 else (8, 1e-3, 1.0)
    scale = 1 / math.sqrt(rough)  # over which a loss of order one changes its curvature
    target = _direction(x, stream) * (first * scale / rate)
    _, control = clients.value_and_gradient(x, stream.at("gradient"))
    lengths = []
    try:
        for more in (0, 1):
            work = LocalSGD(lr=rate, steps=steps + more)
            moved = clients.local_steps(x, work, stream.at("local"), control=control, target=target)
            lengths.append(np.sqrt(moved.displacement.squared_norms()))
    except MissingClients:
        return None
    if lengths[1].max() > limit * scale:
        return None
    return float((lengths[1] / np.maximum(lengths[0], 1e-300)).max())


def _direction(x: Vector, stream: Stream) -> Vector:
    """Return a random unit vector."""
    import torch

    drawn = stream.at("direction").generator().standard_normal(x.numel())
    v = torch.as_tensor(drawn, dtype=x.dtype, device=x.device)
    unit: Vector = v / torch.linalg.vector_norm(v)
    return unit
