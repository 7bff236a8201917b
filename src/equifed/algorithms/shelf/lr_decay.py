"""Paced: any algorithm whose local steps warm up and decay over the rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from equifed.algorithms.around import WeightedWrapper, WrapperState, unwrap
from equifed.contract import AnyAlgorithm, Clients, Info, LocalSGD, Stream, Vector


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, and the rounds so far."""

    rounds: int = 0


@dataclass(frozen=True)
class Paced(WeightedWrapper):
    r"""Multiplies the step size of local work by a factor that depends on the round.

    .. math:: \text{lr}_t = \text{lr} \cdot \min(1, t / \text{warmup})
              \cdot \max(\text{decay}^{s}, \text{floor}), \qquad
              s = \text{every} \Bigl\lfloor \frac{t - 1}{\text{every}} \Bigr\rfloor,
              \quad t = 1, 2, \dots

    It needs no horizon: a run that goes on later takes the same steps. What follows from the step
    size (q-FedAvg's constant L) follows the factor, too. Server steps stay as they are.

    Parameters
    ----------
    algorithm : Algorithm
        Any with local work ``local`` and no schedule of its own (SCAFF-PD has one: ``steps``);
        other wrappers may be inside or outside.
    warmup : int
        Rounds until the full step size.
    decay : float
        Factor per round, in (0, 1]; 0.999 is common for networks.
    floor : float
        Least part of the step size that decay leaves, in [0, 1].
    every : int
        Rounds between two changes by decay. A GPU replays rounds of equal step size, so 50 or 100
        are much faster there.

    Examples
    --------
    >>> from equifed.algorithms.fedavg import FedAvg
    >>> paced = Paced(FedAvg(LocalSGD(lr=1.0, steps=1)), warmup=2, decay=0.5, floor=0.2)
    >>> [paced.factor(t) for t in (1, 2, 3, 4)]
    [0.5, 0.5, 0.25, 0.2]
    >>> stairs = Paced(FedAvg(LocalSGD(lr=1.0, steps=1)), decay=0.5, every=2)
    >>> [stairs.factor(t) for t in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.25, 0.25, 0.0625]
    """

    algorithm: AnyAlgorithm
    warmup: int = 0
    decay: float = 1.0
    floor: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0 rounds, got {self.warmup}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}; 1 is no decay.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {self.floor}.")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 round, got {self.every}.")
        core = unwrap(self.algorithm)
        if hasattr(core, "steps") or not isinstance(getattr(core, "local", None), LocalSGD):
            raise ValueError(
                f"Paced changes the step size of local work; that of {type(core).__name__} is not "
                "its own but follows its schedule (steps). Give it another schedule instead."
            )

    def factor(self, t: int) -> float:
        """Return what the step size of round t is multiplied by."""
        warm = min(1.0, t / self.warmup) if self.warmup else 1.0
        since = t - 1 - (t - 1) % self.every
        return float(warm * max(self.decay**since, self.floor))

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round with its own step size."""
        t = state.rounds + 1
        inner, info = _scaled(self.algorithm, self.factor(t)).round(state.inner, clients, stream)
        return State(inner, t), info


def _scaled(algorithm: Any, factor: float) -> Any:
    """Return the algorithm with the step size of its local work multiplied."""
    inner = getattr(algorithm, "algorithm", None)
    if inner is not None:
        return replace(algorithm, algorithm=_scaled(inner, factor))
    lr = max(factor * algorithm.local.lr, 1e-300)  # decay without a floor underflows in the end
    return replace(algorithm, local=replace(algorithm.local, lr=lr))
