"""Matrices in messages: blocks of second derivatives, and the metric of local steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import BlockMatrix
from equifed.flower.wire import Sent, WireError, digest_model, pack


def pack_tensor(vector: Tensor) -> Any:
    """Return a vector ready to be sent to many clients."""
    return pack(vector.detach().to("cpu").contiguous().numpy())


def digest_tensor(vector: Tensor) -> str:
    """Return a digest of a model, as clients compute it of what they are sent."""
    return digest_model(pack_tensor(vector).data)


def pack_blocks(blocks: Tensor, thin: bool) -> Tensor:
    """Return blocks as one vector: of symmetric ones the upper triangle alone.

    >>> pack_blocks(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]), thin=False)
    tensor([1., 2., 3.])
    """
    if thin or blocks.dim() == 2:
        return blocks.reshape(-1)
    q = blocks.shape[-1]
    rows, columns = torch.triu_indices(q, q, device=blocks.device)
    return blocks[:, rows, columns].reshape(-1)


def unpack_blocks(vector: Tensor, shape: torch.Size, thin: bool) -> Tensor:
    """Return the blocks that :func:`pack_blocks` made a vector of."""
    if thin or len(shape) == 2:
        return vector.reshape(shape)
    q = shape[-1]
    rows, columns = torch.triu_indices(q, q, device=vector.device)
    blocks, upper = vector.new_zeros(shape), vector.reshape(shape[0], -1)
    blocks[:, rows, columns], blocks[:, columns, rows] = upper, upper
    return blocks


def pack_metric(metric: BlockMatrix | None) -> dict[str, Any]:
    """Return a symmetric matrix as arrays of a request; none where there is no matrix."""
    if metric is None:
        return {}
    packed = pack_blocks(metric.blocks.double(), thin=False)
    return {"metric": pack_tensor(packed), "places": pack_tensor(metric.places)}


def read_metric(arrays: Sent, size: int) -> BlockMatrix | None:
    """Return the matrix of a request, for models of ``size`` numbers, or None."""
    if "metric" not in arrays:
        return None
    packed, places = (np.asarray(arrays.get(name)) for name in ("metric", "places"))
    if packed.dtype != np.float64 or packed.ndim != 1 or not np.isfinite(packed).all():
        raise WireError("the metric is no vector of finite numbers in double precision")
    if places.dtype != np.int64 or places.ndim != 2 or places.size == 0:
        raise WireError("the metric does not say where its blocks lie")
    if places.min() < 0 or places.max() >= size or len(np.unique(places)) < places.size:
        raise WireError(f"the metric's blocks do not lie in a model of {size} numbers, or overlap")
    k, q = places.shape
    blocks = next((b for b in (1, k) if b * q * (q + 1) == 2 * packed.size), None)
    if blocks is None:
        raise WireError(f"the metric has {packed.size} numbers for {k} blocks of {q} x {q}")
    shape = torch.Size((blocks, q, q))
    return BlockMatrix(
        unpack_blocks(torch.as_tensor(packed.copy()), shape, thin=False),
        torch.as_tensor(places.copy()),
    )
