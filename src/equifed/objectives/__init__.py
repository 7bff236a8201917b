"""Objectives: what is minimised, as a function of the client losses, and its exact dual step."""

from equifed.objectives.average import Average
from equifed.objectives.base import CappedSet, Objective, SaddleObjective, SymmetricSet
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import CVaR
from equifed.objectives.distance1 import Distance1
from equifed.objectives.distance2 import Distance2
from equifed.objectives.dual_steps import DualStep, Entropic, Euclidean
from equifed.objectives.heterogeneous_cvar import HeterogeneousCVaR
from equifed.objectives.kl import KL
from equifed.objectives.q_fair import QFair
from equifed.objectives.relative_fairness import RelativeFairness
from equifed.objectives.tilted import Tilted
from equifed.objectives.transport import Transport
from equifed.objectives.worst_case import WorstCase

__all__ = [
    "KL",
    "Average",
    "CVaR",
    "CappedSet",
    "ChiSquare",
    "Distance1",
    "Distance2",
    "DualStep",
    "Entropic",
    "Euclidean",
    "HeterogeneousCVaR",
    "Objective",
    "QFair",
    "RelativeFairness",
    "SaddleObjective",
    "SymmetricSet",
    "Tilted",
    "Transport",
    "WorstCase",
]
