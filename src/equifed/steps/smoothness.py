"""How curved the client losses are, measured through the contract.

Two kinds of numbers, kept apart. ``clients.curvature()`` answers with bounds that are true at every
model; a certificate may rest on them. :func:`measured_smoothness` is an estimate at one model; step
sizes may rest on it, since a safeguard watches them, but no proof does.
"""

from __future__ import annotations

import math

import numpy as np

from equifed.contract import Clients, LocalSGD, MissingClients, Stream, Vector, Weights


def hessian_product(
    clients: Clients,
    x: Vector,
    weights: Weights,
    direction: Vector,
    stream: Stream,
    batch_size: int | None = None,
) -> Vector:
    r"""Return :math:`\sum_i w_i \nabla^2 f_i(x)\, v` from two exchanges of weighted gradients.

    .. math:: \frac{g(x + h v) - g(x - h v)}{2 h}, \qquad g = \textstyle\sum_i w_i \nabla f_i,
              \quad h |v| = \epsilon^{1/3} (1 + |x|)

    Exact up to rounding for quadratics. Otherwise about 1e-9 relative in float64 and 1e-4 in
    float32. ``batch_size`` uses one minibatch, the same at both points.
    """
    import torch

    length = float(torch.linalg.vector_norm(direction))
    if length == 0:
        return torch.zeros_like(direction)
    h = torch.finfo(x.dtype).eps ** (1 / 3) * (1 + float(torch.linalg.vector_norm(x))) / length
    ahead = clients.value_and_gradient(x + h * direction, stream, batch_size)[1].weighted_sum(
        weights
    )
    behind = clients.value_and_gradient(x - h * direction, stream, batch_size)[1].weighted_sum(
        weights
    )
    product: Vector = (ahead - behind) / (2 * h)
    return product


def measured_smoothness(clients: Clients, x: Vector, stream: Stream, probe: int = 32) -> float:
    r"""Estimate the largest Hessian eigenvalue, in size, of any client's loss at x.

    Corrected local steps are a power iteration that every client does by itself: with control
    :math:`c_i = \nabla f_i(x)` and a common small target v the displacement obeys
    :math:`e \leftarrow (I - \eta \nabla^2 f_i)\, e + \eta v`, so for :math:`\eta L_i > 2` it grows
    by :math:`\eta L_i - 1` a step. Two calls, of J and J + 1 steps, show by how much, and only
    squared norms reach the server. A power iteration on the average Hessian comes first, to know
    which :math:`\eta` to try; where sums are hidden, a bound from losses and lengths of gradients
    takes its place, for sums of gradients so near to those of a round could be subtracted.

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
    hidden = clients.hides_sums
    rough = (_least_smoothness if hidden else _average_smoothness)(clients, x, stream)
    if rough == 0:
        return 0.0
    rate = 3 / rough
    for attempt in range(16 if hidden else 8):
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


def _least_smoothness(clients: Clients, x: Vector, stream: Stream) -> float:
    """Return a lower bound from numbers alone: losses f >= 0 have |f'|^2 <= 2 L f."""
    losses, gradients = clients.value_and_gradient(x, stream.at("product"))
    return float((gradients.squared_norms() / (2 * np.maximum(losses, 1e-300))).max())


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
