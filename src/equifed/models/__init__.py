"""Modules, losses, flat parameters, tangent features."""

from equifed.models.architectures import build
from equifed.models.tangent import convexify

__all__ = ["build", "convexify"]
