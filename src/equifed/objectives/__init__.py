"""Objectives: what is minimised, as a function of the client losses, and its exact dual step."""

from equifed.objectives.average import Average
from equifed.objectives.base import (
    CappedSet,
    FreeSum,
    Objective,
    PriorPenalty,
    SaddleObjective,
    SymmetricSet,
)
from equifed.objectives.chi_square import ChiSquare, mean_variance
from equifed.objectives.cvar import CVaR, HeterogeneousCVaR
from equifed.objectives.distances import L1Distance, L2Distance
from equifed.objectives.dual_steps import DualStep, Entropic, Euclidean, ProjectedGradient
from equifed.objectives.excess import ExcessRisk
from equifed.objectives.kl import KL
from equifed.objectives.lp_distance import LpDistance
from equifed.objectives.proportional import Proportional
from equifed.objectives.q_fair import QFair
from equifed.objectives.relative_fairness import IntegratedSet, RelativeFairness
from equifed.objectives.semi_variance import SemiVariance
from equifed.objectives.tilted import Tilted
from equifed.objectives.transport import Transport
from equifed.objectives.worst_case import WorstCase

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
    "RelativeFairness",
    "SaddleObjective",
    "SemiVariance",
    "SymmetricSet",
    "Tilted",
    "Transport",
    "WorstCase",
    "mean_variance",
]
