"""Modules by name, losses, flat parameters, what is known of curvature, tangent features."""

from equifed.models.architectures import MODELS, build, initialise
from equifed.models.checks import to_group_norm
from equifed.models.features import convexify
from equifed.models.losses import LOSSES, loss_by_name, outputs_for, predicted_classes

__all__ = [
    "LOSSES",
    "MODELS",
    "build",
    "convexify",
    "initialise",
    "loss_by_name",
    "outputs_for",
    "predicted_classes",
    "to_group_norm",
]
