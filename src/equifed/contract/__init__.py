"""What an algorithm may see: arrays, streams, local work, clients."""

from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.evaluation import Evaluation
from equifed.contract.streams import Stream

__all__ = [
    "AnyAlgorithm",
    "Clients",
    "Evaluation",
    "Index",
    "Info",
    "Losses",
    "MissingClients",
    "Stream",
    "Vector",
    "Weights",
]
