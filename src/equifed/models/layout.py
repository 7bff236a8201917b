"""How images lie in memory: convolutions on a CPU are faster with channels last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def put_channels_last(images: Tensor) -> Tensor:
    """Return the same images (batch, channels, height, width), the channels of a pixel together.

    >>> put_channels_last(torch.zeros(5, 3, 8, 8)).stride()
    (192, 1, 24, 3)
    """
    return images.to(memory_format=torch.channels_last)


def gains_from_channels_last(
    module: nn.Module, x: Tensor, images: Tensor, outputs: Callable[[Tensor, Tensor], Tensor]
) -> bool:
    """Tell whether to put channels last: single precision on a CPU, and the module takes it.

    Modules that look at their images through ``view`` do not; they are tried on a few samples.
    """
    real = images.dim() == 4 and images.dtype == x.dtype == torch.float32
    if not real or x.device.type != "cpu":
        return False
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return False
    x = x.detach().requires_grad_()
    try:
        with torch.enable_grad():
            found = outputs(x, put_channels_last(images))
            torch.autograd.grad(found.sum(), x)
            plain = outputs(x, images)
    except RuntimeError:
        return False
    return torch.allclose(found, plain, rtol=1e-3, atol=1e-5, equal_nan=True)
