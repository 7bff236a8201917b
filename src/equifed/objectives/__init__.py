"""Objectives: what is minimised, as a function of the client losses, and its exact dual step."""

from equifed.objectives.base import (
    CappedSet,
    FreeSum,
    Objective,
    PriorPenalty,
    Relative,
    SaddleObjective,
    SymmetricSet,
)
from equifed.objectives.chi_square import ChiSquare, SemiVariance, mean_variance
from equifed.objectives.cvar import Average, CVaR, HeterogeneousCVaR, WorstCase
from equifed.objectives.distances import L1Distance, L2Distance, LpDistance
from equifed.objectives.dual_steps import DualStep, Entropic, Euclidean, ProjectedGradient
from equifed.objectives.excess import ExcessRisk
from equifed.objectives.free_sums import Proportional, QFair
from equifed.objectives.generalisation import (
    integrated_bound,
    largest_skewness,
    limit_skewness,
    rc_fl_bound,
    rc_fl_bound_by_client,
    skewness,
    weighted_massart,
)
from equifed.objectives.kl import KL, Tilted
from equifed.objectives.relative_fairness import IntegratedSet, RelativeFairness
from equifed.objectives.transport import Transport

__all__ = [
    "KL",
    "Average",
    "CVaR",
    "CappedSet",
    "ChiSquare",
    "DualStep",
    "Entropic",
    "Euclidean",
    "ExcessRisk",
    "FreeSum",
    "HeterogeneousCVaR",
    "IntegratedSet",
    "L1Distance",
    "L2Distance",
    "LpDistance",
    "Objective",
    "PriorPenalty",
    "ProjectedGradient",
    "Proportional",
    "QFair",
    "Relative",
    "RelativeFairness",
    "SaddleObjective",
    "SemiVariance",
    "SymmetricSet",
    "Tilted",
    "Transport",
    "WorstCase",
    "integrated_bound",
    "largest_skewness",
    "limit_skewness",
    "mean_variance",
    "rc_fl_bound",
    "rc_fl_bound_by_client",
    "skewness",
    "weighted_massart",
]
