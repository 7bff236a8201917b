"""What goes around any algorithm: proofs where it has none, and means of its models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from equifed.algorithms.absence import over_members, rounds_of_patience
from equifed.contract import AnyAlgorithm, Clients, Curvature, Info, Proof, Stream, Vector, Weights
from equifed.contract.algorithm import GivesWeights, as_run, layers
from equifed.contract.arrays import check_settings
from equifed.objectives import Average, SaddleObjective
from equifed.steps.schedules import share_of_latest


@dataclass(frozen=True)
class WrapperState:
    """The state of the algorithm inside; wrappers add what they remember."""

    inner: Any

    @property
    def x(self) -> Vector:
        """The model, from which the next round starts."""
        return self.inner.x  # type: ignore[no-any-return]

    def outward(self, core: Any) -> Any:
        """Return the state of the algorithm inside all wrappers as wrappers outside see it."""
        return core

    def inward(self, core: Any) -> Any:
        """Return such a state as those inside have it."""
        return core


class Wrapper:
    """An algorithm around another one, whose model it gives out."""

    algorithm: AnyAlgorithm

    def wrapped(self) -> Any:
        """Return it around the algorithm as training runs that."""
        return replace(cast(Any, self), algorithm=as_run(self.algorithm))

    def model(self, state: Any) -> Vector:
        """Return the algorithm's model."""
        return self.algorithm.model(state.inner)


class WeightedWrapper(Wrapper):
    """The same, giving out the algorithm's weights, too."""

    def weights(self, state: Any) -> Weights | None:
        """Return the weights that the algorithm gives out, if it does."""
        inner = self.algorithm
        return inner.weights(state.inner) if isinstance(inner, GivesWeights) else None


def unwrap(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """Return the algorithm inside all wrappers."""
    core: AnyAlgorithm = layers(algorithm)[-1]
    return core


def change_core(algorithm: Any, change: Callable[[Any], Any]) -> Any:
    """Return the wrappers with another algorithm inside."""
    inner = getattr(algorithm, "algorithm", None)
    if inner is None:
        return change(algorithm)
    return replace(algorithm, algorithm=change_core(inner, change))


def inner_state(state: Any) -> Any:
    """Return the state of the algorithm inside all wrappers."""
    return state.outward(inner_state(state.inner)) if hasattr(state, "inner") else state


def with_inner_state(state: Any, inner: Any) -> Any:
    """Return the wrappers' state with another state of the algorithm inside."""
    if not hasattr(state, "inner"):
        return inner
    return replace(state, inner=with_inner_state(state.inner, state.inward(inner)))


def check_sizes(state: Any, algorithm: AnyAlgorithm, who: str) -> None:
    """Refuse an algorithm without step sizes in its state."""
    if not hasattr(inner_state(state), "sizes"):
        name = type(unwrap(algorithm)).__name__
        raise ValueError(
            f"{who} looks at step sizes, and {name} has none in its state; it is for SCAFF-PD and "
            "SCAFF-PD-IA."
        )


def change_state(state: Any, **changes: Any) -> Any:
    """Return the wrappers' state with changes of the state of the algorithm inside."""
    return with_inner_state(state, replace(inner_state(state), **changes))


def objective_at(algorithm: AnyAlgorithm, state: Any, weights: Weights) -> SaddleObjective | None:
    """Return what an algorithm minimises in a state; None where that has no dual step.

    An algorithm whose objective changes has a method ``objective_at``, one that minimises the
    average by fixed weights says ``averages``. Clients that are away for good are left out.
    """
    core: Any = unwrap(algorithm)
    inner = inner_state(state)
    objective = getattr(core, "objective", None)
    if hasattr(core, "objective_at"):
        objective = core.objective_at(inner)
    elif getattr(core, "averages", False):
        objective = Average(prior=tuple(map(float, weights)))
    if not isinstance(objective, SaddleObjective) or objective.unfit is not None:
        return None
    away = getattr(inner, "away", None)
    if away is not None:
        objective, _ = over_members(objective, away, rounds_of_patience(core, len(away)))
    return objective


@dataclass(frozen=True)
class CertifiedState(WrapperState):
    """The algorithm's state, and the rounds so far."""

    round: int = 0


@dataclass(frozen=True)
class Certified(Wrapper):
    """Lets training certify rounds that prove nothing by themselves.

    Training certifies rounds that hear losses and gradients of all samples without this wrapper. It
    is for losses whose curvature the clients do not know, and for other rounds (FedAvg, AFL,
    minibatches). Numbers given here are taken on trust.

    Parameters
    ----------
    algorithm : Algorithm
        What to certify; one that minimises an objective with a dual step, or an average.
    strong_convexity : float, optional
        mu of every client's loss, L2 penalty included.
    smoothness : float, optional
        L of every client's loss; wanted when weights may be negative.
    every : int, optional
        Where rounds tell no full gradient: evaluate all samples every so many rounds, at the price
        of one more exchange, and certify that model.

    Examples
    --------
    >>> import equifed as ef
    >>> data = {"north": ([[0.0], [1.0]], [0.0, 1.0]), "south": ([[0.0], [1.0]], [0.0, 3.0])}
    >>> clients = ef.simulate(ef.Federation.from_clients(data), "linear", l2=0.1)
    >>> plain = ef.FedAvg(ef.LocalSGD(lr=0.5, steps=1))
    >>> history = ef.train(ef.Certified(plain, every=50), clients, rounds=100)
    >>> history.given_out.gap < 1e-3  # proved, though FedAvg's rounds hear no gradients
    True
    """

    algorithm: AnyAlgorithm
    strong_convexity: float | None = None
    smoothness: float | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        positive = dict.fromkeys(("strong_convexity", "smoothness", "every"), "(0, inf]")
        check_settings(self, "leave it out instead", **positive)

    def init(self, clients: Clients, x: Vector) -> CertifiedState:
        """Return the state before the first round."""
        return CertifiedState(self.algorithm.init(clients, x))

    def round(
        self, state: CertifiedState, clients: Clients, stream: Stream
    ) -> tuple[CertifiedState, Info]:
        """Return the state after one round of the algorithm, and what it proves."""
        inner, info = self.algorithm.round(state.inner, clients, stream)
        proof = info.proof
        if not isinstance(proof, Proof) and self.every is not None:
            asks = state.round % self.every == 0
            proof = self._ask(state, inner, info, clients, stream) if asks else None
        if isinstance(proof, Proof):
            proof = replace(proof, curvature=self._stated(clients))
        elif self.every is None:
            proof = "its rounds see no losses and gradients of all samples; set every"
        return CertifiedState(inner, state.round + 1), replace(info, proof=proof)

    def _stated(self, clients: Clients) -> Curvature | None:
        """Return what is certain together with what is stated about the clients' curvature."""
        if self.strong_convexity is None and self.smoothness is None:
            return None
        known, n = clients.curvature(), len(clients.names)
        if isinstance(known, str):
            known = Curvature(np.full(n, math.inf), np.zeros(n))
        least = max(float(known.strong_convexity.min()), self.strong_convexity or 0.0)
        largest = min(float(known.smoothness.max()), self.smoothness or math.inf)
        return Curvature(np.full(n, largest), np.full(n, least), known.tight, known.lowest)

    def _ask(
        self, state: CertifiedState, inner: Any, info: Info, clients: Clients, stream: Stream
    ) -> Proof | str:
        """Ask everybody for losses and gradients of all samples at the round's first model."""
        asked = clients.index if info.index is None else info.index
        if min(len(clients.index), len(asked)) < len(clients.names):
            return "not all clients took part"
        objective = objective_at(self.algorithm, inner, info.weights)
        if objective is None:
            name = type(unwrap(self.algorithm)).__name__
            return f"the objective of {name} has no dual step, which a certificate needs"
        losses, vectors = clients.value_and_gradient(state.x, stream.at("certificate"))
        if not vectors.allows(info.weights):
            return "the sum of the gradients, beside that of the round, would show too much"
        gradient = vectors.weighted_sum(info.weights)
        return Proof(state.x, losses, info.weights, gradient, objective)


@dataclass(frozen=True)
class AveragedState(WrapperState):
    """The algorithm's state, the mean model, the mean weights, and how many they are of.

    ``count`` is the sum of all rounds' weights in the mean over the last one's.
    """

    mean: Vector
    weights: Weights | None = None  # None before the first round
    count: float = 0.0


@dataclass(frozen=True)
class Averaged(Wrapper):
    r"""Returns a mean of the models, in which later ones count more.

    .. math:: \bar x_t = \Bigl(1 - \frac{\eta + 1}{t + \eta}\Bigr) \bar x_{t-1}
              + \frac{\eta + 1}{t + \eta}\, x_t, \qquad
              \bar\lambda_t \text{ likewise}

    (polynomial-decay averaging, Shamir and Zhang 2013, Section 4). Round s counts about as
    :math:`s^\eta`: all rounds alike for :math:`\eta = 0`, those of the last half about 94 % for
    :math:`\eta = 3`. It takes out the noise of absent clients and minibatches.

    ``decay="ergodic"`` is the mean that SCAFF-PD's and SCAFF-PD-IA's proofs speak of:

    .. math:: \bar x = \frac{\sum_r t_r x^{r+1}}{\sum_r t_r}, \quad
              \bar\lambda = \frac{\sum_r t_r \lambda^{r+1}}{\sum_r t_r}, \qquad
              t_0 = 1, \quad t_{r+1} = t_r / \theta_{r+1}

    with the extrapolation :math:`\theta` of each round: for the papers' schedules
    :math:`t_r = \sigma_r / \sigma_0`. (SCAFF-PD prints :math:`x^r` in (E.40), SCAFF-PD-IA
    :math:`\theta^{r+1}`, which its sum is over.)

    Parameters
    ----------
    algorithm : Algorithm
        Any; other wrappers may be inside or outside.
    decay : float or "ergodic"
        :math:`\eta`, at least 0; or the weights above, for SCAFF-PD and SCAFF-PD-IA.

    References
    ----------
    SCAFF-PD, appendix, (E.22), (E.34), (E.40); SCAFF-PD-IA, Appendix G.4.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> noisy = ef.DeltaFL(level=0.5)  # its model swings between the clients
    >>> for one in noisy, ef.Averaged(noisy):
    ...     history = ef.train(one, clients, rounds=40, evaluate=["test"], every=40)
    ...     print(min(history.per_client().values()) > 0.3)
    False
    True
    """

    algorithm: AnyAlgorithm
    decay: float | Literal["ergodic"] = 3.0

    def __post_init__(self) -> None:
        decay = cast(Any, self.decay)
        if decay != "ergodic" and (isinstance(decay, str) or not decay >= 0):
            raise ValueError(
                f'decay must be at least 0 or "ergodic", got {self.decay!r}; 0 is the plain mean.'
            )

    def init(self, clients: Clients, x: Vector) -> AveragedState:
        """Return the state before the first round."""
        inner = self.algorithm.init(clients, x)
        if self.decay == "ergodic":
            check_sizes(inner, self.algorithm, "The ergodic mean")
        return AveragedState(inner, x)

    def round(
        self, state: AveragedState, clients: Clients, stream: Stream
    ) -> tuple[AveragedState, Info]:
        """Return the state after one round of the algorithm, which counts in the mean."""
        inner, info = self.algorithm.round(state.inner, clients, stream)
        t, decay = state.count + 1, self.decay
        if decay == "ergodic":
            sizes = inner_state(state.inner).sizes  # None before the first round, which counts 1
            t, decay = 1 + state.count * (sizes.extrapolation if sizes else 1.0), 0.0
        share = share_of_latest(t, decay)
        last = info.weights if state.weights is None else state.weights
        mean = state.mean + share * (inner.x - state.mean)
        return AveragedState(inner, mean, last + share * (info.weights - last), t), info

    def model(self, state: AveragedState) -> Vector:
        """Return the mean model."""
        return state.mean
