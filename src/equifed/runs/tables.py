"""The tables of a configuration file: which there are, and the settings of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from equifed.algorithms.guard import Guard
from equifed.contract.own import OwnL2, OwnSteps
from equifed.data.split import Holdout
from equifed.training.given_out import GiveOut
from equifed.training.missing import MissingPolicy
from equifed.training.stopping import SplitName, StopWhen


@dataclass(frozen=True)
class DataSettings:
    """Settings that every data set has."""

    holdout: Holdout = field(default_factory=Holdout)


MOST_THREADS = 1024
"""Beyond it the thread library ends the process for want of memory."""


@dataclass(frozen=True)
class FrozenFeatures:
    """``[model.features]``: the model sees what a frozen module makes of the samples.

    ``of`` is the folder of a trained run, or ``package.module:Name`` for a module of your own,
    pretrained; ``layer`` and ``chunk`` are as for :func:`equifed.features`. What was made once is
    kept in ``EQUIFED_CACHE`` unless ``cache`` is false.
    """

    of: str
    layer: str | None = None
    chunk: int = 1024
    cache: bool = True

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 sample, got {self.chunk}.")


@dataclass(frozen=True)
class ModelSettings:
    """Settings that every model has; loss ``auto`` is cross-entropy for classes, else squared.

    ``init = "auto"`` draws named models afresh and lets own code (``module:Name``) start as it is.
    ``class_weights`` are as for :func:`equifed.models.losses.weigh_classes`.
    ``own``, ``own_l2`` and ``own_steps`` are as for :func:`equifed.simulate`.
    """

    loss: str = "auto"
    l2: float = 0.0
    penalise: Literal["all", "weights"] = "all"
    init: Literal["auto", "fresh", "own"] = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    class_weights: str | dict[str, float] | None = None
    own: str | tuple[str, ...] | None = None
    own_l2: OwnL2 | None = None
    own_steps: OwnSteps = "auto"
    features: FrozenFeatures | None = None

    def __post_init__(self) -> None:
        if not self.l2 >= 0:
            raise ValueError(f"l2 must be at least 0, got {self.l2}.")
        if isinstance(self.class_weights, str) and self.class_weights != "balanced":
            raise ValueError(
                f"class_weights must be 'balanced' or a table of weights, got "
                f"{self.class_weights!r}."
            )

    def resolve_init(self, name: str) -> Literal["fresh", "own"]:
        """Return how a model of this name starts."""
        if self.init == "auto":
            return "own" if ":" in name else "fresh"
        return self.init


@dataclass(frozen=True)
class Evaluate:
    """How often to evaluate, on which splits, and which metrics beside loss and accuracy (or MSE).

    Parameters
    ----------
    every : int
        Rounds from one evaluation to the next.
    splits : sequence of str
        On which samples; splits that the data lack are skipped.
    metrics : sequence of str
        Names (``equifed list metrics``), or ``module:function`` of your own.
    """

    every: int = 1
    splits: tuple[SplitName, ...] = ("train", "validation", "test")
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}.")


@dataclass(frozen=True)
class Plain:
    """The settings outside the tables.

    Parameters
    ----------
    rounds : int
        How many rounds at most.
    seed : int
        Of every draw: the model's start, who takes part, the minibatches.
    threads : int, optional
        Processor threads of torch; the same number gives the same bits.
    give_out : str
        Which model the run ends with, as for :func:`equifed.train`.
    """

    rounds: int
    seed: int = 0
    threads: int | None = None
    give_out: GiveOut = "auto"
    with_alone: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}.")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads must lie in 1..{MOST_THREADS}, got {self.threads}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in 0..2^63 - 1, got {self.seed}.")


CHOSEN: dict[str, tuple[str, type | None]] = {
    "data": ("data", DataSettings),
    "model": ("models", ModelSettings),
    "algorithm": ("algorithms", None),
    "engine": ("engines", None),
}
"""Tables with a name: their section of the catalogue, and the settings that all of it share."""

RECORDS: dict[str, type] = {
    "evaluate": Evaluate,
    "stop": StopWhen,
    "missing": MissingPolicy,
    "guard": Guard,
}
"""Tables without a name."""
