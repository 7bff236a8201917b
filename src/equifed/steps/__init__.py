"""How long the steps are, and how far from the optimum a model is."""

from equifed.steps.automatic import AutoSteps
from equifed.steps.schedules import (
    AcceleratedSteps,
    ConstantSteps,
    LinearRateSteps,
    SignedWeightSteps,
)

__all__ = ["AcceleratedSteps", "AutoSteps", "ConstantSteps", "LinearRateSteps", "SignedWeightSteps"]
