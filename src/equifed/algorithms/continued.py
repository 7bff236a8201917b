"""Continued: an algorithm that goes on where one with a near objective has ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

from equifed.algorithms.attendance import take_attendance
from equifed.algorithms.certified import Certified
from equifed.algorithms.certified import State as CertifiedState
from equifed.algorithms.wrapper import inner_state, unwrap, with_inner_state
from equifed.contract.algorithm import AnyAlgorithm, GivesWeights, Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors
from equifed.contract.streams import Stream
from equifed.steps.metric_sizes import MetricSizes


class Trail:
    """What the last round of a walk leaves to the next run.

    Attributes
    ----------
    state : Any
        State of the algorithm inside all wrappers.
    x, answers : Vector, (Losses, ClientVectors)
        The last model at which everybody was asked, and the answers.
    """

    def __init__(self) -> None:
        self.state: Any = None
        self.x: Vector | None = None
        self.answers: tuple[Losses, ClientVectors] | None = None

    def leads_to(self, x: Vector) -> bool:
        """Tell whether the answers are those at this model, and a metric is known."""
        return self.has_metric and self.x is not None and bool((self.x == x).all())

    @property
    def has_metric(self) -> bool:
        """Whether the last round was a step in a metric."""
        return isinstance(getattr(self.state, "sizes", None), MetricSizes)


@dataclass(frozen=True)
class Continued:
    """Rounds in a metric that go on from those of a near objective, and end where it is proved.

    The path of the solutions, objective after objective, is followed by one step each wherever the
    steps are good enough:

    * What the clients answered at the last model of one run are the first answers of the next one:
      proof of one objective and step towards the next are one round. The next run's first record
      has a number ``continued`` and costs no exchange, unless bounds of the metric have their turn.
    * Where the weights of the last step prove that the objective is within ``gap`` of its minimum,
      a round asks for no metric and takes no step.
    * The metric is kept, too, and corrected by the last step. It is summed anew in the second round
      of a run, if it comes to that: the step in the old one was not good enough then. Where weights
      are known to turn much, ``fresh`` has it summed at once, for one exchange.

    Rounds without a metric, or without somebody, are the algorithm's own. This is no algorithm for
    itself: every run writes what the next one needs into the trail.

    Parameters
    ----------
    algorithm : Algorithm
        As training runs it.
    gap : float
        What is to be proved, relative to the objective.
    trail : Trail
        From the run before; an empty one begins a walk.
    fresh : bool
        Whether to begin with a new metric.
    """

    algorithm: AnyAlgorithm
    gap: float
    trail: Trail = field(default_factory=Trail)
    fresh: bool = False

    def init(self, clients: Clients, x: Vector) -> Any:
        """Return the state before the first round, with weights and metric of the trail."""
        state, last = self.algorithm.init(clients, x), self.trail.state
        if not self.trail.leads_to(x):
            return state
        core: Any = unwrap(self.algorithm)
        nearest = core.objective.prox(last.weights, 1e-14)  # in the new set
        # The last step was for another objective: it is not judged, nor is the metric by it.
        sizes = replace(last.sizes, value=math.inf, gain=0.0, faster=float(self.fresh))
        inner = replace(inner_state(state), weights=nearest, losses=last.losses, sizes=sizes)
        return with_inner_state(state, inner)

    def round(self, state: Any, clients: Clients, stream: Stream) -> tuple[Any, Info]:
        """Return the state after one round, or the same one where it is near enough."""
        trail, inner = self.trail, inner_state(state)
        sizes = getattr(inner, "sizes", None)
        if not isinstance(sizes, MetricSizes) or len(clients.index) < len(clients.names):
            return self._go_on(state, clients, stream)
        heard = cast(Clients, _Heard(clients, trail))
        look = Certified(_Look(self.algorithm))
        _, info = look.round(CertifiedState(inner), heard, stream)
        told = {"continued": 1.0} if sizes.value == math.inf else {}
        if info.objective and info.numbers.get("gap", math.inf) <= self.gap * abs(info.objective):
            trail.state = inner
            return state, replace(info, numbers=sizes.numbers() | info.numbers | told)
        after, info = self._go_on(state, heard, stream)
        return after, replace(info, numbers=info.numbers | told)

    def model(self, state: Any) -> Vector:
        """Return the algorithm's model."""
        return self.algorithm.model(state)

    def weights(self, state: Any) -> Weights | None:
        """Return the weights that the algorithm gives out, if it does."""
        inner = self.algorithm
        return inner.weights(state) if isinstance(inner, GivesWeights) else None

    def _go_on(self, state: Any, clients: Clients, stream: Stream) -> tuple[Any, Info]:
        """Return the state after a round of the algorithm's own."""
        after, info = self.algorithm.round(state, clients, stream)
        self.trail.state = inner_state(after)
        return after, info


@dataclass(frozen=True)
class _Look:
    """A round of an algorithm that only listens: its weights are those of the last step."""

    algorithm: AnyAlgorithm

    def init(self, clients: Clients, x: Vector) -> Any:
        return inner_state(self.algorithm.init(clients, x))

    def round(self, state: Any, clients: Clients, stream: Stream) -> tuple[Any, Info]:
        losses, gradients = clients.value_and_gradient(state.x, stream.at("gradient"))
        roll = take_attendance(unwrap(self.algorithm), state, clients)
        gradient = gradients.weighted_sum(roll.weights)
        value, index = roll.objective.value(losses), clients.index
        return state, Info(roll.weights, losses, value, index, gradient=gradient)

    def model(self, state: Any) -> Vector:
        return state.x  # type: ignore[no-any-return]


class _Heard:
    """All clients in one round, who are not asked again for what is on the trail."""

    def __init__(self, clients: Clients, trail: Trail) -> None:
        self._clients, self._trail = clients, trail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return losses and gradients at x."""
        assert batch_size is None  # rounds in a metric are on all samples
        trail = self._trail
        if trail.answers is None or not trail.leads_to(x):
            trail.x, trail.answers = x, self._clients.value_and_gradient(x, stream)
        return trail.answers
