"""A walk from objective to objective, each run from where the last one ended.

Every run starts at the model of the run before it. FairNewton goes on from its answers, weights
and metric, too (:class:`Continued`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from equifed.algorithms.fair_newton import FairNewton, State
from equifed.contract.algorithm import Info, Proof
from equifed.contract.arrays import ClientVectors, Losses, Vector
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView
from equifed.objectives.base import SaddleObjective
from equifed.steps.certificate import Certificate, certificate
from equifed.training.final_model import StopWhen
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.tables import describe_value
from equifed.training.units import with_scale


class Heard(ClientsView):
    """Clients that are not asked twice at one model; keeps what a run leaves the next one."""

    x: Vector | None = None  # the last model at which all clients were asked
    answers: tuple[Losses, ClientVectors] | None = None
    state: State | None = None

    def knows(self, x: Vector) -> bool:
        """Tell whether the answers are those at this model."""
        return self.x is not None and bool((self.x == x).all())

    @override
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        if batch_size is not None or len(self.index) < len(self.names):
            return super().value_and_gradient(x, stream, batch_size)
        if self.answers is None or not self.knows(x):
            self.x, self.answers = x, super().value_and_gradient(x, stream)
        return self.answers


@dataclass(frozen=True)
class Continued:
    """FairNewton that begins with what a run for a near objective left, and ends once proved."""

    # What the clients answered at the last model of one run are the first answers of the next: the
    # proof of one objective and the step towards the next are one round, of no further exchange.
    # The metric is kept and corrected by the last step; it is summed anew in the second round of a
    # run, if there is one, or at once (``fresh``) where weights are known to turn much.
    algorithm: FairNewton
    gap: float
    heard: Heard = field(repr=False)
    fresh: bool = False

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round, with weights and metric of the run before."""
        state, last = self.algorithm.init(clients, x), self.heard.state
        if last is None or last.sizes is None or not self.heard.knows(x):
            return state
        nearest = self.algorithm.objective.prox(last.weights, 1e-14)  # in the new set
        # The last step was for another objective: it is not judged, nor is the metric by it.
        sizes = replace(last.sizes, value=math.inf, gain=0.0, faster=float(self.fresh))
        return replace(state, weights=nearest, losses=last.losses, sizes=sizes)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round, or the same one where it is near enough."""
        sizes, after, told, info = state.sizes, state, {}, None
        if sizes is not None and len(clients.index) == len(clients.names):
            told = {"continued": 1.0} if sizes.value == math.inf else {}
            info = self._look(state, clients, stream)
        if info is None:
            after, info = self.algorithm.round(state, clients, stream)
        self.heard.state = after
        return after, replace(info, numbers=info.numbers | told)

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def _look(self, state: State, clients: Clients, stream: Stream) -> Info | None:
        """Return what the weights of the last step prove, if that is enough."""
        assert state.sizes is not None
        losses, gradients = clients.value_and_gradient(state.x, stream.at("gradient"))
        objective, weights = self.algorithm.objective, state.weights
        known, value = clients.curvature(), objective.value(losses)
        gradient = gradients.weighted_sum(weights)
        if isinstance(known, str):
            return None
        found = certificate(objective, known, losses, weights, gradient)
        if not isinstance(found, Certificate) or not found.gap <= self.gap * abs(value):
            return None
        proof = Proof(state.x, losses, weights, gradient, objective)
        numbers = state.sizes.numbers()
        return Info(weights, losses, value, clients.index, numbers=numbers, proof=proof)


class Walk:
    """Runs of one algorithm for one objective after the other, each from the last one's model."""

    def __init__(
        self, algorithm: Any, clients: Clients, gap: float, options: dict[str, Any]
    ) -> None:
        self.algorithm, self.gap, self.options = algorithm, gap, options
        self.clients = Heard(clients) if isinstance(algorithm, FairNewton) else clients
        self.x: Any = None
        self.scale: float | None = None  # of strengths; measured by the first run that needs it

    def train(self, objective: SaddleObjective, fresh: bool = False, **options: Any) -> History:
        """Return the run for the next objective, beginning with a fresh metric if wanted."""
        algorithm = replace(self.algorithm, objective=objective)
        if self.scale is not None:
            algorithm = with_scale(algorithm, self.scale)
        run = algorithm
        if isinstance(self.clients, Heard):
            run = Continued(algorithm, self.gap, self.clients, fresh)
        stop = StopWhen(at_relative_gap=self.gap)
        history = train(run, self.clients, x=self.x, stop=stop, **self.options, **options)
        history.provenance["algorithm"] = describe_value(algorithm)
        self.x = history.parameters
        measured = [event["scale"] for event in history.events if event["event"] == "scale"]
        self.scale = measured[0] if measured else self.scale
        return history
