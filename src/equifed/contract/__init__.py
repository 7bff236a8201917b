"""What an algorithm may see: arrays, streams, local work, clients.

Others may rely on the names in ``__all__``; those imported as themselves are for our own folders.
"""

from equifed.contract.algorithm import AnyAlgorithm, Federated, Info, Proof
from equifed.contract.arrays import BlockMatrix as BlockMatrix
from equifed.contract.arrays import ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients, Moved
from equifed.contract.clients import Traffic as Traffic
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import SPLITS as SPLITS
from equifed.contract.evaluation import Evaluation
from equifed.contract.local import DEFAULT_WORK as DEFAULT_WORK
from equifed.contract.local import LocalSGD
from equifed.contract.local import LocalWork as LocalWork
from equifed.contract.local import OwnL2 as OwnL2
from equifed.contract.local import OwnSteps as OwnSteps
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView as ClientsView

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
