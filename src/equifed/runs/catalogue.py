"""Names become objects here and nowhere else.

An entry names a constructor and says in one line what it is; the constructor's signature is the
list of its settings, so a new algorithm, objective or schedule needs one line in this file and
nothing else. Constructors are given by address (``package.module:name``) and imported when needed.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


class UnknownName(ValueError):
    """A name that is not in the catalogue; the message lists those that are."""


@dataclass(frozen=True)
class Entry:
    """A constructor by address, what it is in one line, and where it comes from."""

    address: str
    summary: str
    paper: str = ""

    def load(self) -> Callable[..., Any]:
        """Import the constructor.

        >>> Entry("equifed.contract.local:LocalSGD", "local work").load()
        <class 'equifed.contract.local.LocalSGD'>
        """
        module, _, name = self.address.partition(":")
        constructor: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return constructor


ALGORITHMS = {
    "fedavg": Entry(
        "equifed.algorithms.fedavg:FedAvg", "local steps, then the average", "McMahan et al. 2017"
    ),
    "fedprox": Entry(
        "equifed.algorithms.fedavg:fedprox",
        "FedAvg whose clients pay for leaving the server's model",
        "Li et al. 2020",
    ),
    "scaffold": Entry(
        "equifed.algorithms.scaffold:Scaffold",
        "local steps corrected for client drift, then the average",
        "Karimireddy et al. 2020",
    ),
    "afl": Entry(
        "equifed.algorithms.afl:AFL",
        "descent in the model, projected ascent in the client weights",
        "Mohri et al. 2019",
    ),
    "drfa": Entry(
        "equifed.algorithms.drfa:DRFA",
        "clients drawn by their weights, dual step at a random snapshot",
        "Deng et al. 2020",
    ),
    "rfedfair": Entry(
        "equifed.algorithms.rfedfair:RFedFair",
        "local steps on a smoothed hinge of the loss above a shared threshold",
        "RC-FL, Algorithm 1",
    ),
    "q-fedavg": Entry(
        "equifed.algorithms.qfedavg:QFedAvg",
        "clients with larger losses move the model further",
        "Li et al. 2019",
    ),
    "q-fedsgd": Entry(
        "equifed.algorithms.qfedavg:qfedsgd", "q-FedAvg with one gradient step", "Li et al. 2019"
    ),
    "delta-fl": Entry(
        "equifed.algorithms.delta_fl:DeltaFL",
        "only the sampled clients with the largest losses train",
        "Pillutla et al. 2021",
    ),
    "agnostic-fedavg": Entry(
        "equifed.algorithms.agnostic_fedavg:AgnosticFedAvg",
        "local steps, and multiplicative updates of the client weights",
        "Ro et al. 2021",
    ),
    "tilted-erm": Entry(
        "equifed.algorithms.tilted:TiltedERM",
        "clients weighted by the exponential of their losses",
        "Li et al. 2020a",
    ),
    "scaff-pd": Entry(
        "equifed.algorithms.scaff_pd:ScaffPD",
        "accelerated primal-dual steps with bias-corrected local steps",
        "Yu et al. 2023",
    ),
    "scaff-pd-ia": Entry(
        "equifed.algorithms.scaff_pd_ia:ScaffPDIA",
        "SCAFF-PD for relative fairness; phi given or chosen after a first training",
        "Nakakita et al., relative fairness",
    ),
}

OBJECTIVES = {
    "average": Entry("equifed.objectives:Average", "mean client loss, uniform or by a prior"),
    "worst-case": Entry("equifed.objectives:WorstCase", "largest client loss", "Mohri et al. 2019"),
    "cvar": Entry(
        "equifed.objectives:CVaR",
        "mean loss of the worst-served fraction of clients",
        "Rockafellar and Uryasev 2000",
    ),
    "chi-square": Entry(
        "equifed.objectives:ChiSquare",
        "any other objective, its weights pulled towards equal ones",
        "Yu et al. 2023, (3.3)",
    ),
    "kl": Entry(
        "equifed.objectives:KL", "worst case less a KL divergence from a prior", "Deng et al. 2020"
    ),
    "l1-distance": Entry(
        "equifed.objectives:L1Distance", "worst case less an l1 distance", "Deng et al. 2020"
    ),
    "l2-distance": Entry(
        "equifed.objectives:L2Distance", "worst case less an l2 distance", "Deng et al. 2020"
    ),
    "lp-distance": Entry(
        "equifed.objectives:LpDistance", "worst case less a power of a distance", "Deng et al. 2020"
    ),
    "transport": Entry(
        "equifed.objectives:Transport", "worst case less a transport cost", "Deng et al. 2020"
    ),
    "heterogeneous-cvar": Entry(
        "equifed.objectives:HeterogeneousCVaR", "CVaR with a tail for each client", "RC-FL"
    ),
    "relative-fairness": Entry(
        "equifed.objectives:RelativeFairness", "high losses against low ones", "SCAFF-PD-IA"
    ),
    "q-fair": Entry("equifed.objectives:QFair", "sum of powers of the losses", "Li et al. 2020"),
    "proportional": Entry(
        "equifed.objectives:Proportional",
        "product of what clients gain over a bad loss (Nash)",
        "Zhang et al. 2022",
    ),
    "tilted": Entry(
        "equifed.objectives:Tilted", "log of the mean exponential of the losses", "Li et al. 2021"
    ),
}

SCHEDULES = {
    "auto": Entry(
        "equifed.steps.automatic:AutoSteps", "measured, adapted and safeguarded; no tuning"
    ),
    "constant": Entry(
        "equifed.steps.schedules:ConstantSteps", "the same step sizes in every round"
    ),
    "given": Entry("equifed.steps.schedules:GivenSteps", "step sizes listed round by round"),
    "theory-accelerated": Entry(
        "equifed.steps.schedules:AcceleratedSteps",
        "strongly convex losses, any penalty",
        "Yu et al. 2023, Condition 5.1",
    ),
    "theory-linear": Entry(
        "equifed.steps.schedules:LinearRateSteps",
        "strongly convex losses, strongly convex penalty",
        "Yu et al. 2023, Condition 5.2",
    ),
    "theory-signed-weights": Entry(
        "equifed.steps.schedules:SignedWeightSteps",
        "strongly convex losses, weights that may be negative",
        "Nakakita et al., Assumption 8",
    ),
}

DUAL_STEPS = {
    "euclidean": Entry("equifed.objectives:Euclidean", "projected (proximal) ascent"),
    "gradient": Entry(
        "equifed.objectives:ProjectedGradient", "projected ascent, the penalty by its gradient"
    ),
    "entropic": Entry("equifed.objectives:Entropic", "mirror ascent: multiplicative weights"),
}

ENGINES = {
    "auto": Entry("equifed.engines.simulate:simulate", "stacked wherever the module allows it"),
    "stacked": Entry("equifed.engines.stacked.clients:StackedClients", "many clients at once"),
    "loop": Entry("equifed.engines.loop:LoopClients", "one client at a time; the reference"),
    "distributed": Entry(
        "equifed.engines.distributed.clients:DistributedClients",
        "stacked on every process of a group",
    ),
}


TRACKERS = {
    "tensorboard": Entry("equifed.training.trackers:tensorboard", "event files in the run folder"),
    "mlflow": Entry(
        "equifed.training.trackers:mlflow", "a run on the tracking server that MLflow is set to"
    ),
}


@dataclass(frozen=True)
class Section:
    """One kind of thing that a configuration names.

    Parameters
    ----------
    title : str
        What one entry is called, for messages.
    entries : callable
        Returns the entries by name; called when needed.
    given : tuple of str
        Constructor arguments that the program supplies, so that they are no settings.
    importable : bool
        Whether ``package.module:name`` is accepted beside the names.
    """

    title: str
    entries: Callable[[], Mapping[str, Entry]]
    given: tuple[str, ...] = ()
    importable: bool = False

    def __getitem__(self, name: str) -> Entry:
        entries = self.entries()
        if name in entries:
            return entries[name]
        if self.importable and ":" in name:
            return Entry(name, "")
        raise UnknownName(unknown(self.title, name, entries))


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """Return the message about a name that does not exist.

    >>> unknown("objective", "cvra", ["average", "cvar"])
    "there is no objective 'cvra' (did you mean 'cvar'?); choose from average, cvar"
    """
    allowed = list(allowed)
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"there is no {what} {name!r}{hint}; choose from {', '.join(allowed)}"


def _models() -> dict[str, Entry]:
    from equifed.models.architectures import MODELS

    return {name: documented(builder) for name, builder in MODELS.items()}


def _losses() -> dict[str, Entry]:
    from equifed.models.losses import LOSSES

    return {name: documented(function) for name, function in LOSSES.items()}


def _data() -> dict[str, Entry]:
    from equifed.datasets.registry import DATASETS

    own = {
        "table": Entry("equifed.runs.run:table", "your own CSV or Parquet file, one row a sample"),
        "arrays": Entry(
            "equifed.datasets.pooled:arrays", "your own .npz file, divided by a partition"
        ),
    }
    known = {k: replace(documented(d.loader), summary=d.description) for k, d in DATASETS.items()}
    return {**known, **own}


def _partitions() -> dict[str, Entry]:
    from equifed.data.partitions import PARTITIONS, Imbalance

    kinds = {**PARTITIONS, "imbalance": Imbalance}
    return {name: documented(kind) for name, kind in kinds.items()}


def documented(function: Callable[..., Any]) -> Entry:
    """Return an entry for a function, described by the first line of its docstring."""
    summary = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
    return Entry(f"{function.__module__}:{function.__qualname__}", summary)


SECTIONS = {
    "data": Section("data set", _data),
    "partitions": Section("partition", _partitions),
    "algorithms": Section("algorithm", lambda: ALGORITHMS),
    "objectives": Section("objective", lambda: OBJECTIVES),
    "schedules": Section("schedule", lambda: SCHEDULES),
    "dual_steps": Section("dual step", lambda: DUAL_STEPS),
    "engines": Section(
        "engine", lambda: ENGINES, given=("data", "model", "loss", "l2", "dtype", "engine")
    ),
    "models": Section("model", _models, given=("input_shape", "outputs"), importable=True),
    "losses": Section("loss", _losses, given=("outputs", "targets")),
    "trackers": Section("tracker", lambda: TRACKERS, given=("folder", "config")),
}

KINDS = {
    "Objective": "objectives",
    "SaddleObjective": "objectives",
    "SymmetricSet": "objectives",
    "CappedSet": "objectives",
    "Schedule": "schedules",
    "Average": "objectives",
    "DualStep": "dual_steps",
    "Partition": "partitions",
}
"""Types of constructor arguments, by name, and the section that holds what satisfies them."""


def name_of(section: str, value: object) -> str:
    """Return the name under which a section constructs objects like ``value``.

    >>> from equifed.objectives import CVaR
    >>> name_of("objectives", CVaR(0.5))
    'cvar'
    """
    kind = type(value).__name__
    for name, entry in SECTIONS[section].entries().items():
        if entry.address.endswith(f":{kind}") and entry.load() is type(value):
            return name
    raise UnknownName(unknown(section[:-1], type(value).__name__, SECTIONS[section].entries()))
