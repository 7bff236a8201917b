# Written by `make names` from the catalogue and equifed/__init__.py.

from equifed import data as data
from equifed import metrics as metrics
from equifed import objectives as objectives
from equifed import steps as steps
from equifed import testing as testing
from equifed.algorithms.afl import AFL as AFL
from equifed.algorithms.agnostic_fedavg import AgnosticFedAvg as AgnosticFedAvg
from equifed.algorithms.averaged import Averaged as Averaged
from equifed.algorithms.certified import Certified as Certified
from equifed.algorithms.delta_fl import DeltaFL as DeltaFL
from equifed.algorithms.drfa import DRFA as DRFA
from equifed.algorithms.fedavg import FedAvg as FedAvg
from equifed.algorithms.fedavg import fedprox as fedprox
from equifed.algorithms.guard_view import Guard as Guard
from equifed.algorithms.guarded import Guarded as Guarded
from equifed.algorithms.qfedavg import QFedAvg as QFedAvg
from equifed.algorithms.qfedavg import qfedsgd as qfedsgd
from equifed.algorithms.remembering import Remembering as Remembering
from equifed.algorithms.rfedfair import RFedFair as RFedFair
from equifed.algorithms.safeguarded import Safeguarded as Safeguarded
from equifed.algorithms.scaff_pd import ScaffPD as ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA as ScaffPDIA
from equifed.algorithms.scaffold import Scaffold as Scaffold
from equifed.algorithms.tilted import TiltedERM as TiltedERM
from equifed.contract.local import LocalSGD as LocalSGD
from equifed.data.federation import Federation as Federation
from equifed.datasets.registry import load as load
from equifed.engines.simulate import simulate as simulate
from equifed.report.page import write_report as write_report
from equifed.runs.alone import alone as alone
from equifed.runs.run import resume as resume
from equifed.runs.run import run as run
from equifed.runs.trained import load_predictor as load_predictor
from equifed.training.history import History as History
from equifed.training.loop import Callback as Callback
from equifed.training.loop import train as train
from equifed.training.missing import MissingPolicy as MissingPolicy
from equifed.training.stopping import StopWhen as StopWhen

__version__: str
