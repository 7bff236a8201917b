"""What an algorithm may see: arrays, streams, local work, clients."""

from equifed.contract.algorithm import AnyAlgorithm, Federated, Info, Proof
from equifed.contract.arrays import BlockMatrix, ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients, Moved, Traffic
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import SPLITS, Evaluation
from equifed.contract.local import DEFAULT_WORK, LocalSGD, LocalWork, OwnL2, OwnSteps
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView

__all__ = [
    "DEFAULT_WORK",
    "SPLITS",
    "AnyAlgorithm",
    "BlockMatrix",
    "ClientVectors",
    "Clients",
    "ClientsView",
    "Curvature",
    "Evaluation",
    "Federated",
    "Index",
    "Info",
    "LocalSGD",
    "LocalWork",
    "Losses",
    "MissingClients",
    "Moved",
    "OwnL2",
    "OwnSteps",
    "Proof",
    "Stream",
    "Traffic",
    "Vector",
    "Weights",
]
