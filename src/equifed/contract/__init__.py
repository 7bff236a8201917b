"""What an algorithm may see: arrays, streams, local work, clients."""

from equifed.contract.algorithm import AnyAlgorithm, Federated, Info, Proof
from equifed.contract.arrays import ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients, Moved
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import Evaluation
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream

__all__ = [
    "AnyAlgorithm",
    "ClientVectors",
    "Clients",
    "Curvature",
    "Evaluation",
    "Federated",
    "Index",
    "Info",
    "LocalSGD",
    "Losses",
    "MissingClients",
    "Moved",
    "Proof",
    "Stream",
    "Vector",
    "Weights",
]
