"""Algorithms: a state, and a round that maps it to the next; one file each."""

from equifed.algorithms.accelerated import Accelerated
from equifed.algorithms.afl import AFL, AgnosticFedAvg
from equifed.algorithms.around import Averaged, Certified
from equifed.algorithms.delta_fl import DeltaFL
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.fedavg import FedAvg, client_weights, fedprox
from equifed.algorithms.guard import Guarded
from equifed.algorithms.qfedavg import QFedAvg, qfedsgd
from equifed.algorithms.remembering import Remembering
from equifed.algorithms.rfedfair import RFedFair
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA
from equifed.algorithms.scaffold import Scaffold
from equifed.algorithms.scaled import Scaled
from equifed.algorithms.server_optimised import ServerOptimised
from equifed.algorithms.shelf.centred_clipping import CentredClipping
from equifed.algorithms.shelf.feddyn import DRDM, FedDyn
from equifed.algorithms.shelf.gradient_conflicts import FedFV, FedMGDA, UPGrad
from equifed.algorithms.shelf.local_work import Normalised, Paced
from equifed.algorithms.shelf.online_weights import AAggFF, FedDGGA
from equifed.algorithms.shelf.reweighted import FedEBA, Reweighted, propfair, semi_vred, tilted_erm
from equifed.algorithms.theory import drfa_by_theory, rfedfair_by_theory
from equifed.contract import AnyAlgorithm, Info
from equifed.contract.algorithm import Algorithm
from equifed.steps.automatic import with_measured_step

__all__ = [
    "AFL",
    "DRDM",
    "DRFA",
    "AAggFF",
    "Accelerated",
    "AgnosticFedAvg",
    "Algorithm",
    "AnyAlgorithm",
    "Averaged",
    "CentredClipping",
    "Certified",
    "DeltaFL",
    "FairNewton",
    "FedAvg",
    "FedDGGA",
    "FedDyn",
    "FedEBA",
    "FedFV",
    "FedMGDA",
    "Guarded",
    "Info",
    "Normalised",
    "Paced",
    "QFedAvg",
    "RFedFair",
    "Remembering",
    "Reweighted",
    "Safeguarded",
    "ScaffPD",
    "ScaffPDIA",
    "Scaffold",
    "Scaled",
    "ServerOptimised",
    "UPGrad",
    "client_weights",
    "drfa_by_theory",
    "fedprox",
    "propfair",
    "qfedsgd",
    "rfedfair_by_theory",
    "semi_vred",
    "tilted_erm",
    "with_measured_step",
]
