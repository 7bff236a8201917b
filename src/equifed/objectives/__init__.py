"""Objectives: what is minimised, as a function of the client losses, and its exact dual step."""

from equifed.objectives.average import Average
from equifed.objectives.base import CappedSet, Objective, SaddleObjective, SymmetricSet
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import CVaR
from equifed.objectives.worst_case import WorstCase

__all__ = [
    "Average",
    "CVaR",
    "CappedSet",
    "ChiSquare",
    "Objective",
    "SaddleObjective",
    "SymmetricSet",
    "WorstCase",
]
