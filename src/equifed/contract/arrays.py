"""Names for the arrays that travel through the library, with their shapes.

Everything the server decides about clients (losses, weights, norms) is a NumPy array in float64,
whatever the model's precision: n numbers are cheap, and exact dual steps need them. Everything of
the model's size is a flat torch tensor in the model's dtype on the model's device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Losses: TypeAlias = NDArray[np.float64]
"""One loss per client, shape (n,)."""

Weights: TypeAlias = NDArray[np.float64]
"""One weight per client, shape (n,); sums to one, may be negative for relative fairness."""

Index: TypeAlias = NDArray[np.int64]
"""Positions of clients in the federation, shape (m,), without repeats."""

if TYPE_CHECKING:
    Vector: TypeAlias = torch.Tensor
    """A model, a gradient or an update, flattened, shape (d,)."""
else:
    Vector = "torch.Tensor"
