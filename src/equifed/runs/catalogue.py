"""Names become objects here and nowhere else; ``make names`` writes what follows from this list.

An entry names a constructor by its address (``package.module:Name``), imported when needed; its
signature is the list of its settings. In a configuration an address may also stand for code of your
own: a file beside the configuration comes first, loaded by its path under a name of its own (a
neighbour is imported relatively, ``from . import neighbour``), an installed module second.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from equifed.data.split import RENAMED

OWN = "equifed_own_"  # how the names of modules begin that were loaded by their path


class UnknownName(ValueError):
    """A name that is not in the catalogue; the message lists those that are."""


class CodeError(ValueError):
    """Code of one's own that cannot be used: what was tried, and what to do."""


@dataclass(frozen=True)
class Entry:
    """A constructor by address, what it is in one line, and where it comes from."""

    address: str
    summary: str
    paper: str = ""

    def load(self) -> Callable[..., Any]:
        """Import the constructor."""
        constructor: Callable[..., Any] = load_address(self.address)
        return constructor

    def describe(self) -> str:
        """Say what it is and where it comes from."""
        return f"{self.summary} ({self.paper})" if self.paper else self.summary


@dataclass(frozen=True)
class Section:
    """One kind of thing that a configuration names."""

    title: str  # what one entry is called, in messages
    entries: Callable[[], Mapping[str, Entry]]
    given: tuple[str, ...] = ()  # arguments that the program supplies: they are not settings
    code: bool = True  # whether the address of your code is accepted beside the names
    provides: tuple[str, ...] = ()  # attributes that everything of this kind has

    def __getitem__(self, name: str) -> Entry:
        entries = self.entries()
        if name in entries:
            return entries[name]
        if self.code and ":" in name:
            return Entry(name, "")
        more = ", or your own code as package.module:Name" if self.code else ""
        raise UnknownName(unknown(self.title, name, entries) + more)

    def lack(self, made: object) -> str | None:
        """Say what an object lacks to be of this kind, if anything."""
        missing = [name for name in self.provides if not hasattr(made, name)]
        if not missing:
            return None
        article = "an" if self.title[0] in "aeiou" else "a"
        return (
            f"gives a {type(made).__name__}, which has no {', '.join(missing)}; {article} "
            f"{self.title} has {', '.join(self.provides)}"
        )


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """Return the message about a name that does not exist.

    >>> unknown("objective", "cvra", ["average", "cvar"])
    "there is no objective 'cvra' (did you mean 'cvar'?); choose from average, cvar"
    """
    allowed = list(allowed)
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    if RENAMED.get(name) in allowed:
        hint = f" (it is called {RENAMED[name]!r} now)"
    choice = f"choose from {', '.join(allowed)}" if allowed else "there are none here"
    return f"there is no {what} {name!r}{hint}; {choice}"


# -- addresses --------------------------------------------------------------------------------


def address_of(function: Callable[..., Any]) -> str:
    """Return the address of a class or function; with its file if it was loaded by path."""
    module = function.__module__
    home = str(sys.modules[module].__file__) if module.startswith(OWN) else module
    return f"{home}:{function.__qualname__}"


def locate_address(address: str, folder: Path | None) -> str:
    """Return the address with the path of its file, if that lies beside the configuration."""
    home, _, name = address.rpartition(":")
    if home.endswith(".py"):
        return f"{os.path.abspath((folder or Path()) / Path(home).expanduser())}:{name}"
    beside = next((file for file in _candidates(home, folder) if file.is_file()), None)
    return address if beside is None else f"{os.path.abspath(beside)}:{name}"


def _candidates(module: str, folder: Path | None) -> tuple[Path, ...]:
    if folder is None or not module:
        return ()
    path = folder.joinpath(*module.split("."))
    return path.with_name(path.name + ".py"), path / "__init__.py"


def load_address(address: str, folder: Path | None = None) -> Any:
    """Import what an address names; ``folder`` only tells the message where it was looked for."""
    home, _, name = address.rpartition(":")
    try:
        module = _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except Exception as error:  # whatever the code does when it is loaded
        reason = f"{type(error).__name__}: {error}"
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if home.endswith(".py"):
            cure = "update its path" if isinstance(error, FileNotFoundError) else "correct the file"
            why = f"cannot be loaded ({reason}); {cure}"
        elif absent is None or not f"{home}.".startswith(f"{absent}."):
            why = f"cannot be loaded from the installed module ({reason}); correct it"
        else:
            beside = " or ".join(map(str, _candidates(home, folder)))
            why = (
                f"is not found: there is {f'no file {beside} and ' if beside else ''}no installed "
                f"module {home}; put the file beside the configuration file, or install its package"
            )
        raise CodeError(f"{address} {why}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise CodeError(f"in {home} {unknown('name', name, names)}") from None


def source_file(address: str) -> str:
    """Return the file that an address was loaded from, once it is."""
    home = address.rpartition(":")[0]
    return home if home.endswith(".py") else str(sys.modules[home].__file__)


def _load_file(path: Path) -> ModuleType:
    """Load a module by its path, under a name by which a checkpoint's classes are found again."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    root, parts = path.parent, [] if path.name == "__init__.py" else [path.stem]
    while (root / "__init__.py").is_file():  # in a package, as part of it
        root, parts = root.parent, [root.name, *parts]
    space = OWN + hashlib.sha256(str(root).encode()).hexdigest()[:12]
    if space not in sys.modules:
        package = ModuleType(space, f"Code in {root}.")
        package.__path__ = [str(root)]
        sys.modules[space] = package
    importlib.invalidate_caches()  # the file may be newer than the last look into its folder
    return importlib.import_module(".".join((space, *parts)))


# -- the lists --------------------------------------------------------------------------------

ALGORITHMS = {
    "fedavg": Entry("equifed.algorithms.fedavg:FedAvg",
        "local steps, then the average", "McMahan et al. 2017"),
    "fedprox": Entry("equifed.algorithms.fedavg:fedprox",
        "FedAvg with a penalty on the distance from the server's model", "Li et al. 2020"),
    "private-fedavg": Entry("equifed.privacy.fedavg:PrivateFedAvg",
        "FedAvg with differential privacy of clients: clipped updates, noise at the server",
        "McMahan et al. 2018"),
    "scaffold": Entry("equifed.algorithms.scaffold:Scaffold",
        "local steps corrected for client drift, then the average", "Karimireddy et al. 2020"),
    "afl": Entry("equifed.algorithms.afl:AFL",
        "descent in the model, projected ascent in the client weights", "Mohri et al. 2019"),
    "drfa": Entry("equifed.algorithms.drfa:DRFA",
        "clients drawn by their weights, dual step at a random snapshot", "Deng et al. 2020"),
    "rfedfair": Entry("equifed.algorithms.rfedfair:RFedFair",
        "local steps on a smoothed hinge of losses above a shared threshold", "RC-FL, Algorithm 1"),
    "q-fedavg": Entry("equifed.algorithms.qfedavg:QFedAvg",
        "updates weighted by powers of the losses", "Li et al. 2020"),
    "q-fedsgd": Entry("equifed.algorithms.qfedavg:qfedsgd",
        "q-FedAvg with one gradient step", "Li et al. 2020"),
    "delta-fl": Entry("equifed.algorithms.delta_fl:DeltaFL",
        "only the sampled clients with the largest losses train", "Pillutla et al. 2021"),
    "agnostic-fedavg": Entry("equifed.algorithms.afl:AgnosticFedAvg",
        "local steps, and multiplicative updates of the client weights", "Ro et al. 2021"),
    "tilted-erm": Entry("equifed.algorithms.shelf.reweighted:tilted_erm",
        "clients weighted by the exponential of their losses", "Li et al. 2021"),
    "reweighted": Entry("equifed.algorithms.shelf.reweighted:Reweighted",
        "FedAvg whose averaging weights come from an objective"),
    "propfair": Entry("equifed.algorithms.shelf.reweighted:propfair",
        "clients weighted by 1 / (M - loss): proportional fairness", "Zhang et al. 2022"),
    "semi-vred": Entry("equifed.algorithms.shelf.reweighted:semi_vred",
        "mean loss plus the semi-variance of the losses", "Semi-VRed"),
    "fedeba": Entry("equifed.algorithms.shelf.reweighted:FedEBA",
        "maximum-entropy weights, updates aligned with all clients", "Wang et al. 2023"),
    "feddyn": Entry("equifed.algorithms.shelf.feddyn:FedDyn",
        "local steps with a dynamic penalty that removes client drift", "Acar et al. 2021"),
    "drdm": Entry("equifed.algorithms.shelf.feddyn:DRDM",
        "DRFA's dual steps with FedDyn's local steps", "DRDM"),
    "aaggff": Entry("equifed.algorithms.shelf.online_weights:AAggFF",
        "weights by online learning from the losses", "Hahn et al. 2024"),
    "feddg-ga": Entry("equifed.algorithms.shelf.online_weights:FedDGGA",
        "weights follow the gap between the shared model and the clients' own, on held-out data",
        "Zhang et al. 2023"),
    "fedmgda": Entry("equifed.algorithms.shelf.gradient_conflicts:FedMGDA",
        "the shortest combination of the normalised updates", "Hu et al. 2022"),
    "upgrad": Entry("equifed.algorithms.shelf.gradient_conflicts:UPGrad",
        "the mean of the updates, each projected to conflict with none", "Quinton and Rey 2024"),
    "fedfv": Entry("equifed.algorithms.shelf.gradient_conflicts:FedFV",
        "conflicting updates are projected, in the order of the losses", "Wang et al. 2021"),
    "scaff-pd": Entry("equifed.algorithms.scaff_pd:ScaffPD",
        "accelerated primal-dual steps with bias-corrected local steps", "Yu et al. 2023"),
    "fair-newton": Entry("equifed.algorithms.fair_newton:FairNewton",
        "second-order steps for linear models and heads; proves its optimum in a few rounds"),
    "scaff-pd-ia": Entry("equifed.algorithms.scaff_pd_ia:ScaffPDIA",
        "SCAFF-PD for relative fairness; phi given or chosen by training", "Nakakita et al. 2024"),
    "certified": Entry("equifed.algorithms.around:Certified",
        "wraps any algorithm: every round bounds its distance to the optimum"),
    "safeguarded": Entry("equifed.algorithms.safeguarded:Safeguarded",
        "wraps SCAFF-PD or SCAFF-PD-IA: undoes automatic steps that were too large"),
    "scaled": Entry("equifed.algorithms.scaled:Scaled",
        "wraps first-order methods on linear models: columns equally steep or uncorrelated"),
    "accelerated": Entry("equifed.algorithms.accelerated:Accelerated",
        "wraps SCAFF-PD with automatic steps: Anderson acceleration, checked by its certificate",
        "Walker and Ni 2011"),
    "averaged": Entry("equifed.algorithms.around:Averaged",
        "wraps any algorithm: returns a mean of its last models", "Shamir and Zhang 2013"),
    "remembering": Entry("equifed.algorithms.remembering:Remembering",
        "wraps methods that sample clients: others count with their last answer", "Gu et al. 2021"),
    "server-optimised": Entry("equifed.algorithms.server_optimised:ServerOptimised",
        "wraps any algorithm: server steps by momentum, Adagrad, Adam, Yogi", "Reddi et al. 2021"),
    "normalised": Entry("equifed.algorithms.shelf.local_work:Normalised",
        "wraps methods with plain local steps: updates divided by their number of steps",
        "Wang et al. 2020 (FedNova)"),
    "paced": Entry("equifed.algorithms.shelf.local_work:Paced",
        "wraps any algorithm: local steps decay over the rounds"),
    "centred-clipping": Entry("equifed.algorithms.shelf.centred_clipping:CentredClipping",
        "wraps FedAvg: clips updates against dishonest clients; unusual honest ones lose "
        "influence, too",
        "Karimireddy et al. 2021"),
    "guarded": Entry("equifed.algorithms.guard:Guarded",
        "wraps any algorithm: bounds what a client gains by false claims"),
}  # fmt: skip

# Algorithms that add to another one, which they need
WRAPPERS = (
    "certified", "safeguarded", "scaled", "accelerated", "averaged", "remembering",
    "server-optimised", "normalised", "paced", "centred-clipping", "guarded",
)  # fmt: skip
# Those that need inner products of updates, which a real federation does not give
NEED_GRAM = ("fedmgda", "upgrad", "fedfv")
# Those that minimise no function of the client losses
NO_OBJECTIVE = (*NEED_GRAM, "aaggff", "feddg-ga")

OBJECTIVES = {
    "average": Entry("equifed.objectives:Average", "mean client loss, uniform or by a prior"),
    "worst-case": Entry("equifed.objectives:WorstCase", "largest client loss", "Mohri et al. 2019"),
    "cvar": Entry("equifed.objectives:CVaR",
        "mean loss of the worst-served fraction of clients", "Rockafellar and Uryasev 2000"),
    "chi-square": Entry("equifed.objectives:ChiSquare",
        "any other objective with weights pulled towards equal ones", "Yu et al. 2023, (3.3)"),
    "mean-variance": Entry("equifed.objectives:mean_variance",
        "mean loss plus its variance, as chi-square", "VRed"),
    "kl": Entry("equifed.objectives:KL",
        "worst case minus a KL divergence from a prior", "Deng et al. 2020"),
    "l1-distance": Entry("equifed.objectives:L1Distance",
        "worst case minus an l1 distance", "Deng et al. 2020"),
    "l2-distance": Entry("equifed.objectives:L2Distance",
        "worst case minus an l2 distance", "Deng et al. 2020"),
    "lp-distance": Entry("equifed.objectives:LpDistance",
        "worst case minus a power of a distance", "Deng et al. 2020"),
    "transport": Entry("equifed.objectives:Transport",
        "worst case minus a transport cost", "Deng et al. 2020"),
    "heterogeneous-cvar": Entry("equifed.objectives:HeterogeneousCVaR",
        "CVaR with a tail for each client", "RC-FL"),
    "excess-risk": Entry("equifed.objectives:ExcessRisk",
        "any other objective, applied to losses minus those of the clients' own models",
        "Agarwal and Zhang 2022"),
    "relative-fairness": Entry("equifed.objectives:RelativeFairness",
        "ratio of high to low losses", "SCAFF-PD-IA"),
    "q-fair": Entry("equifed.objectives:QFair", "sum of powers of the losses", "Li et al. 2020"),
    "proportional": Entry("equifed.objectives:Proportional",
        "product of the gains M - loss (Nash bargaining)", "Zhang et al. 2022"),
    "tilted": Entry("equifed.objectives:Tilted",
        "log of the mean exponential of the losses", "Li et al. 2021"),
}  # fmt: skip

SCHEDULES = {
    "auto": Entry("equifed.steps.automatic:AutoSteps",
        "measured, adapted and safeguarded; no tuning"),
    "constant": Entry("equifed.steps.schedules:ConstantSteps",
        "the same step sizes in every round"),
    "theory-accelerated": Entry("equifed.steps.schedules:AcceleratedSteps",
        "strongly convex losses, any penalty", "Yu et al. 2023, Condition 5.1"),
    "theory-linear": Entry("equifed.steps.schedules:LinearRateSteps",
        "strongly convex losses, strongly convex penalty", "Yu et al. 2023, Condition 5.2"),
    "theory-signed-weights": Entry("equifed.steps.schedules:SignedWeightSteps",
        "strongly convex losses, weights that may be negative", "Nakakita et al., Assumption 8"),
}  # fmt: skip

DUAL_STEPS = {
    "euclidean": Entry("equifed.objectives:Euclidean", "projected (proximal) ascent"),
    "gradient": Entry("equifed.objectives:ProjectedGradient",
        "projected ascent, the penalty by its gradient"),
    "entropic": Entry("equifed.objectives:Entropic", "mirror ascent: multiplicative weights"),
}  # fmt: skip

ENGINES = {
    "auto": Entry("equifed.engines.simulate:simulate", "stacked, or loop where that is faster"),
    "stacked": Entry("equifed.engines.stacked.clients:StackedClients", "many clients at once"),
    "loop": Entry("equifed.engines.loop:LoopClients",
        "one client after the other, over all cores; the reference"),
    "distributed": Entry("equifed.engines.distributed:DistributedClients",
        "stacked on every process of a group"),
}  # fmt: skip

TRACKERS = {
    "tensorboard": Entry("equifed.training.trackers:tensorboard", "event files in the run folder"),
    "mlflow": Entry("equifed.training.trackers:mlflow",
        "a run on the tracking server that MLflow is set to"),
    "wandb": Entry("equifed.training.trackers:wandb", "a run of Weights & Biases"),
}  # fmt: skip

YOUR_DATA = {
    "table": Entry("equifed.datasets.registry:table",
        "your own CSV or Parquet file, one row a sample"),
    "arrays": Entry("equifed.datasets.pooled:arrays", "your own .npz file, divided by a partition"),
    "mapped": Entry("equifed.data.mapped:open_federation",
        "a folder that a FederationWriter wrote"),
}  # fmt: skip

MEANINGS = {  # what the metrics are
    "accuracy": "the fraction of samples that were answered correctly",
    "mse": "the mean squared error",
    "loss": "the mean of the losses",
    "balanced_accuracy": "the mean over the client's classes of the fraction answered correctly",
    "recall": "which fraction of the positive samples were found",
    "precision": "which fraction of the samples that were predicted positive are",
    "f1": "the harmonic mean of recall and precision",
    "auroc": "how often a positive sample is ranked before a negative one, ties counting half",
    "brier": "the mean squared distance of the probabilities from the truth",
    "rmse": "the root of the mean squared error; of several targets the mean of their roots",
    "mae": "the mean absolute error",
    "r2": "which fraction of the variance of the client's targets is explained",
}


@functools.cache
def _listed(address: str) -> dict[str, Entry]:
    """Return entries for constructors by name, described by the first line of their docstrings."""
    made = load_address(address).items()
    told = {name: (inspect.getdoc(one) or "").partition("\n")[0].rstrip(".") for name, one in made}
    return {name: Entry(address_of(one), told[name]) for name, one in made}


@functools.cache
def _metrics() -> dict[str, Entry]:
    from equifed.metrics.metric import METRICS

    return {name: Entry("equifed.metrics.metric:find_metric", MEANINGS[name]) for name in METRICS}


def _partitions() -> dict[str, Entry]:
    told = "thin out some clients of another partition"
    uneven = Entry("equifed.data.partitions:Imbalance", told, "Yu et al. 2023, Section 6.2")
    return {**_listed("equifed.data.partitions:PARTITIONS"), "imbalance": uneven}


@functools.cache
def _data() -> dict[str, Entry]:
    from equifed.datasets.registry import DATASETS

    known = {name: Entry(address_of(d.loader), d.description) for name, d in DATASETS.items()}
    return known | YOUR_DATA


SECTIONS = {
    "data": Section("data set", _data, provides=("names", "train", "classes")),
    "partitions": Section("partition", _partitions, provides=("assign",)),
    "algorithms": Section("algorithm", lambda: ALGORITHMS, provides=("init", "round", "model")),
    "objectives": Section("objective", lambda: OBJECTIVES, provides=("value", "weights")),
    "schedules": Section("schedule", lambda: SCHEDULES, provides=("start", "next")),
    "dual_steps": Section("dual step", lambda: DUAL_STEPS, provides=("ascend",)),
    "engines": Section(
        "engine", lambda: ENGINES, code=False,
        given=("data", "model", "loss", "class_weights", "l2", "penalise", "dtype", "engine", "own",
               "own_l2", "own_steps", "privacy"),
    ),
    "models": Section(
        "model", lambda: _listed("equifed.models.architectures:MODELS"),
        given=("input_shape", "outputs"), provides=("forward", "parameters"),
    ),
    "losses": Section(
        "loss", lambda: _listed("equifed.models.losses:LOSSES"), given=("outputs", "targets")
    ),
    "metrics": Section(
        "metric", _metrics, given=("name", "y", "predicted", "score", "probability", "losses")
    ),
    "trackers": Section("tracker", lambda: TRACKERS, given=("folder", "config"), code=False),
}  # fmt: skip

# Types of constructor arguments, by name, and the section that holds what satisfies them
KINDS = {
    **dict.fromkeys(
        ("Objective", "SaddleObjective", "SymmetricSet", "CappedSet", "Average"), "objectives"
    ),
    "Schedule": "schedules", "DualStep": "dual_steps", "Partition": "partitions",
    "Algorithm": "algorithms",
}  # fmt: skip


def name_of(section: str, value: object) -> str:
    """Return the name under which a section constructs objects like ``value``, or its address."""
    kind = type(value)
    for name, entry in SECTIONS[section].entries().items():
        if entry.address.endswith(f":{kind.__name__}") and entry.load() is kind:
            return name
    return address_of(kind)
