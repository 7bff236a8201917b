"""Names become objects here and nowhere else.

An entry names a constructor and says in one line what it is; the constructor's signature is the
list of its settings. This is the only list: the public names, the tables of the README, ``equifed
list`` and the conformance cases follow from it (``make names`` writes what has to be written).
Constructors are given by address (``package.module:Name``) and imported when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from equifed.runs.addresses import (
    Entry,
    Section,
    UnknownName,
    address_of,
    describe_constructor,
    unknown,
)

__all__ = ["KINDS", "SECTIONS", "Entry", "Section", "UnknownName", "name_of", "unknown"]

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
        "Li et al. 2020",
    ),
    "q-fedsgd": Entry(
        "equifed.algorithms.qfedavg:qfedsgd", "q-FedAvg with one gradient step", "Li et al. 2020"
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
        "equifed.algorithms.reweighted:tilted_erm",
        "clients weighted by the exponential of their losses",
        "Li et al. 2021",
    ),
    "reweighted": Entry(
        "equifed.algorithms.reweighted:Reweighted",
        "local steps, then a mean by the weights that any objective gives the losses",
    ),
    "propfair": Entry(
        "equifed.algorithms.reweighted:propfair",
        "clients weighted by one over what their loss lacks to a bad one",
        "Zhang et al. 2022",
    ),
    "semi-vred": Entry(
        "equifed.algorithms.reweighted:semi_vred",
        "mean loss plus the semi-variance of the losses",
        "Semi-VRed",
    ),
    "fedeba": Entry(
        "equifed.algorithms.shelf.fedeba:FedEBA",
        "weights of maximal entropy, local steps aligned where losses differ much",
        "FedEBA+",
    ),
    "feddyn": Entry(
        "equifed.algorithms.shelf.feddyn:FedDyn",
        "local losses tilted until every client's optimum is the shared one",
        "Acar et al. 2021",
    ),
    "drdm": Entry(
        "equifed.algorithms.shelf.feddyn:DRDM",
        "DRFA's dual steps with FedDyn's local steps",
        "DRDM",
    ),
    "aaggff": Entry(
        "equifed.algorithms.shelf.aaggff:AAggFF",
        "weights by an online learner that bets on large losses",
        "Hahn et al. 2024",
    ),
    "feddg-ga": Entry(
        "equifed.algorithms.shelf.feddg_ga:FedDGGA",
        "weights follow the gap between the shared model and the clients' own, on held-out data",
        "Zhang et al. 2023",
    ),
    "fedmgda": Entry(
        "equifed.algorithms.shelf.gradient_conflicts:FedMGDA",
        "the shortest combination of the normalised updates",
        "Hu et al. 2022",
    ),
    "upgrad": Entry(
        "equifed.algorithms.shelf.gradient_conflicts:UPGrad",
        "the mean of the updates, each freed of its conflicts with all others",
        "Quinton and Rey 2024",
    ),
    "fedfv": Entry(
        "equifed.algorithms.shelf.gradient_conflicts:FedFV",
        "conflicts between updates taken out in the order of the losses",
        "Wang et al. 2021",
    ),
    "scaff-pd": Entry(
        "equifed.algorithms.scaff_pd:ScaffPD",
        "accelerated primal-dual steps with bias-corrected local steps",
        "Yu et al. 2023",
    ),
    "fair-newton": Entry(
        "equifed.algorithms.fair_newton:FairNewton",
        "second-order steps for linear models and heads; proves its optimum in a few rounds",
    ),
    "scaff-pd-ia": Entry(
        "equifed.algorithms.scaff_pd_ia:ScaffPDIA",
        "SCAFF-PD for relative fairness; phi given or chosen after a first training",
        "Nakakita et al. 2024",
    ),
    "certified": Entry(
        "equifed.algorithms.around:Certified",
        "any of these; its rounds prove how far they are from the optimum",
    ),
    "safeguarded": Entry(
        "equifed.algorithms.safeguarded:Safeguarded",
        "SCAFF-PD or SCAFF-PD-IA; goes back where its automatic steps were too bold",
    ),
    "accelerated": Entry(
        "equifed.algorithms.accelerated:Accelerated",
        "SCAFF-PD with automatic steps; jumps ahead as far as its proofs allow",
        "Walker and Ni 2011",
    ),
    "averaged": Entry(
        "equifed.algorithms.around:Averaged",
        "any of these; gives out a mean of its last models",
        "Shamir and Zhang 2013",
    ),
    "server-optimised": Entry(
        "equifed.algorithms.server_optimised:ServerOptimised",
        "any of these; the server steps by momentum, Adagrad, Adam or Yogi",
        "Reddi et al. 2021",
    ),
    "normalised": Entry(
        "equifed.algorithms.shelf.normalised:Normalised",
        "any of plain local steps; updates divided by their number of steps or their length",
        "Wang et al. 2020 (FedNova)",
    ),
    "paced": Entry(
        "equifed.algorithms.shelf.lr_decay:Paced",
        "any of these; local steps warm up and decay over the rounds",
    ),
    "guarded": Entry(
        "equifed.algorithms.guard:Guarded",
        "any of these; no client leads the others by what it claims",
    ),
}

WRAPPERS = (
    "certified", "safeguarded", "accelerated", "averaged", "server-optimised", "normalised",
    "paced", "guarded",
)  # fmt: skip
"""Algorithms that add to another one, which they need."""

NEED_GRAM = ("fedmgda", "upgrad", "fedfv")
"""Algorithms that need inner products of updates, which a real federation does not give."""

NO_OBJECTIVE = (*NEED_GRAM, "aaggff", "feddg-ga")
"""Algorithms that minimise no function of the client losses."""

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
    "mean-variance": Entry(
        "equifed.objectives:mean_variance", "mean loss plus its variance, as chi-square", "VRed"
    ),
    "kl": Entry(
        "equifed.objectives:KL", "worst case minus a KL divergence from a prior", "Deng et al. 2020"
    ),
    "l1-distance": Entry(
        "equifed.objectives:L1Distance", "worst case minus an l1 distance", "Deng et al. 2020"
    ),
    "l2-distance": Entry(
        "equifed.objectives:L2Distance", "worst case minus an l2 distance", "Deng et al. 2020"
    ),
    "lp-distance": Entry(
        "equifed.objectives:LpDistance",
        "worst case minus a power of a distance",
        "Deng et al. 2020",
    ),
    "transport": Entry(
        "equifed.objectives:Transport", "worst case minus a transport cost", "Deng et al. 2020"
    ),
    "heterogeneous-cvar": Entry(
        "equifed.objectives:HeterogeneousCVaR", "CVaR with a tail for each client", "RC-FL"
    ),
    "excess-risk": Entry(
        "equifed.objectives:ExcessRisk",
        "any other objective, of losses above those of the clients' own models",
        "Agarwal and Zhang 2022",
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
    "auto": Entry("equifed.engines.simulate:simulate", "stacked, or loop where that is faster"),
    "stacked": Entry("equifed.engines.stacked.clients:StackedClients", "many clients at once"),
    "loop": Entry(
        "equifed.engines.loop:LoopClients",
        "each client by itself, on a core of its own; the reference",
    ),
    "distributed": Entry(
        "equifed.engines.distributed:DistributedClients",
        "stacked on every process of a group",
    ),
}


TRACKERS = {
    "tensorboard": Entry("equifed.training.trackers:tensorboard", "event files in the run folder"),
    "mlflow": Entry(
        "equifed.training.trackers:mlflow", "a run on the tracking server that MLflow is set to"
    ),
}


MEANINGS = {
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
"""What the metrics are."""


def _described(constructors: Mapping[str, Callable[..., Any]]) -> dict[str, Entry]:
    return {name: describe_constructor(function) for name, function in constructors.items()}


@cache
def _models() -> dict[str, Entry]:
    from equifed.models.architectures import MODELS

    return _described(MODELS)


@cache
def _losses() -> dict[str, Entry]:
    from equifed.models.losses import LOSSES

    return _described(LOSSES)


@cache
def _metrics() -> dict[str, Entry]:
    from equifed.metrics.metric import METRICS

    return {name: Entry("equifed.metrics.metric:find_metric", MEANINGS[name]) for name in METRICS}


@cache
def _partitions() -> dict[str, Entry]:
    from equifed.data.partitions import PARTITIONS, Imbalance

    return _described({**PARTITIONS, "imbalance": Imbalance})


@cache
def _data() -> dict[str, Entry]:
    from equifed.datasets.registry import DATASETS

    known = _described({name: data.loader for name, data in DATASETS.items()})
    return {
        **{name: replace(known[name], summary=DATASETS[name].description) for name in known},
        "table": Entry(
            "equifed.datasets.registry:table", "your own CSV or Parquet file, one row a sample"
        ),
        "arrays": Entry(
            "equifed.datasets.pooled:arrays", "your own .npz file, divided by a partition"
        ),
        "mapped": Entry(
            "equifed.data.mapped:open_federation", "a folder that a FederationWriter wrote"
        ),
    }


SECTIONS = {
    "data": Section("data set", _data, provides=("names", "train", "classes")),
    "partitions": Section("partition", _partitions, provides=("assign",)),
    "algorithms": Section("algorithm", lambda: ALGORITHMS, provides=("init", "round", "model")),
    "objectives": Section("objective", lambda: OBJECTIVES, provides=("value", "weights")),
    "schedules": Section("schedule", lambda: SCHEDULES, provides=("start", "next")),
    "dual_steps": Section("dual step", lambda: DUAL_STEPS, provides=("ascend",)),
    "engines": Section(
        "engine",
        lambda: ENGINES,
        given=(
            "data",
            "model",
            "loss",
            "class_weights",
            "l2",
            "penalise",
            "dtype",
            "engine",
            "own",
            "own_l2",
            "own_steps",
        ),
        code=False,
    ),
    "models": Section(
        "model", _models, given=("input_shape", "outputs"), provides=("forward", "parameters")
    ),
    "losses": Section("loss", _losses, given=("outputs", "targets")),
    "metrics": Section(
        "metric", _metrics, given=("name", "y", "predicted", "score", "probability", "losses")
    ),
    "trackers": Section("tracker", lambda: TRACKERS, given=("folder", "config"), code=False),
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
    "Algorithm": "algorithms",
}
"""Types of constructor arguments, by name, and the section that holds what satisfies them."""


def name_of(section: str, value: object) -> str:
    """Return the name under which a section constructs objects like ``value``, or its address.

    >>> from equifed.objectives import CVaR
    >>> name_of("objectives", CVaR(0.5))
    'cvar'
    """
    kind = type(value)
    for name, entry in SECTIONS[section].entries().items():
        if entry.address.endswith(f":{kind.__name__}") and entry.load() is kind:
            return name
    return address_of(kind)
