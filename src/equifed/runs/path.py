r"""A walk from objective to objective, each run from where the last one ended.

The strength t of fairness goes from 0, the average, to 1, the worst case. In between the weights
pay the chi-square penalty

.. math:: \rho(t) = s\,\frac{1 - t}{t}

with s the standard deviation of the clients' losses at the average's solution, so that t has no
unit: at t = 1/2 a client whose loss is one deviation above the mean weighs about twice as much.

Every run starts at the model of the run before it. FairNewton goes on from its answers, weights
and metric, too (:class:`Continued`), and reaches the worst case by way of a fourth and a sixteenth
of the last penalty, each with a metric of its own: without any penalty, weights jump from client to
client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import Average, WorstCase
from equifed.steps.certificate import Certificate, certificate
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.stopping import StopAtGap
from equifed.training.tables import RoundRecord, describe_value

WAY = (4, 16)
"""What the last penalty is divided by on the way to the worst case."""


@dataclass
class Trail:
    """What the last round of a walk leaves to the next run.

    The algorithm's state, the last model at which all clients were asked, and their answers.
    """

    state: State | None = None
    x: Vector | None = None
    answers: tuple[Losses, ClientVectors] | None = None

    def leads_to(self, x: Vector) -> bool:
        """Tell whether the answers are those at this model."""
        return self.state is not None and self.x is not None and bool((self.x == x).all())


class Heard(ClientsView):
    """Clients that are not asked again for what is on the trail."""

    def __init__(self, behind: Clients, trail: Trail) -> None:
        super().__init__(behind)
        self.trail = trail

    @override
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        everybody = batch_size is None and len(self.index) == len(self.names)
        trail = self.trail
        known = everybody and trail.x is not None and bool((trail.x == x).all())
        if known and trail.answers is not None:
            return trail.answers
        answers = super().value_and_gradient(x, stream, batch_size)
        if everybody:
            trail.x, trail.answers = x, answers
        return answers


@dataclass(frozen=True)
class Continued:
    """FairNewton that begins with what a run for a near objective left, and ends when it is proved.

    The path of the solutions, objective after objective, is followed by one step each wherever the
    steps are good enough:

    * What the clients answered at the last model of one run are the first answers of the next one
      (:class:`Heard` around the clients): proof of one objective and step towards the next are one
      round. The next run's first record has a number ``continued``, and costs no exchange unless
      the metric has its turn.
    * Where the weights of the last step prove that the objective is within ``gap`` of its minimum,
      a round asks for no metric and takes no step.
    * The metric is kept, too, and corrected by the last step. It is summed anew in the second round
      of a run, if it comes to that: the step in the old one was not good enough then. Where weights
      are known to turn much, ``fresh`` has it summed at once, for one exchange.

    Parameters
    ----------
    algorithm : FairNewton
        For the next objective.
    gap : float
        What is to be proved, relative to the objective.
    trail : Trail
        From the run before; an empty one begins a walk.
    fresh : bool
        Whether to begin with a new metric.
    """

    algorithm: FairNewton
    gap: float
    trail: Trail = field(default_factory=Trail)
    fresh: bool = False

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round, with weights and metric of the trail."""
        state, last = self.algorithm.init(clients, x), self.trail.state
        if last is None or last.sizes is None or not self.trail.leads_to(x):
            return state
        nearest = self.algorithm.objective.prox(last.weights, 1e-14)  # in the new set
        # The last step was for another objective: it is not judged, nor is the metric by it.
        sizes = replace(last.sizes, value=math.inf, gain=0.0, faster=float(self.fresh))
        return replace(state, weights=nearest, losses=last.losses, sizes=sizes)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round, or the same one where it is near enough."""
        sizes, told = state.sizes, {}
        if sizes is not None and len(clients.index) == len(clients.names):
            told = {"continued": 1.0} if sizes.value == math.inf else {}
            info = self._look(state, clients, stream)
            if info is not None:
                self.trail.state = state
                return state, replace(info, numbers=sizes.numbers() | told)
        after, info = self.algorithm.round(state, clients, stream)
        self.trail.state = after
        return after, replace(info, numbers=info.numbers | told)

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def _look(self, state: State, clients: Clients, stream: Stream) -> Info | None:
        """Return what the weights of the last step prove, if that is enough."""
        losses, gradients = clients.value_and_gradient(state.x, stream.at("gradient"))
        objective: Any = self.algorithm.objective
        known, value = clients.curvature(), objective.value(losses)
        gradient, weights = gradients.weighted_sum(state.weights), state.weights
        if isinstance(known, str):
            return None
        found = certificate(objective, known, losses, weights, gradient)
        if not isinstance(found, Certificate) or not found.gap <= self.gap * abs(value):
            return None
        proof = Proof(state.x, losses, weights, gradient, objective)
        return Info(weights, losses, value, clients.index, proof=proof)


@dataclass
class Walk:
    """Runs of one algorithm for one objective after the other.

    Parameters
    ----------
    algorithm : Algorithm
        One with an objective, which is replaced.
    clients : Clients
        On whom.
    gap : float
        Where a run ends: its objective is certified to be within this fraction of its minimum.
    options : dict
        Of every run, as :func:`equifed.train` takes them.
    """

    algorithm: Any
    clients: Clients
    gap: float
    options: dict[str, Any]
    x: Any = None
    proved: bool = False
    trail: Trail = field(default_factory=Trail)

    def train(self, objective: SaddleObjective, fresh: bool = False, **options: Any) -> History:
        """Return the run for the next objective, beginning with a fresh metric if wanted."""
        changed = replace(self.algorithm, objective=objective)
        run, clients = changed, self.clients
        if isinstance(changed, FairNewton):
            run = Continued(changed, self.gap, self.trail, fresh)
            clients = Heard(clients, self.trail)
        stop = StopAtGap(self.gap, relative=True)
        history = train(run, clients, x=self.x, stop=stop, **self.options, **options)
        history.provenance["algorithm"] = describe_value(changed)
        self.x, self.proved = history.parameters, isinstance(history.certificate(), dict)
        return history

    def pass_by(self, objectives: Sequence[SaddleObjective]) -> tuple[RoundRecord, ...]:
        """Return the rounds for objectives on the way; without a proof they would not end early."""
        found: list[RoundRecord] = []
        for objective in objectives if self.proved and self.trail.state is not None else ():
            found += self.train(objective, fresh=True, progress=False).rounds
        return tuple(found)


def objective_of_strength(strength: float, spread: float) -> SaddleObjective:
    """Return the objective of a strength, where losses have this spread; see the module."""
    if strength == 0:
        return Average()
    if strength == 1 or spread == 0:
        return WorstCase()
    return ChiSquare(rho=spread * (1 - strength) / strength)


def objectives_between(last: SaddleObjective | None, new: SaddleObjective) -> list[SaddleObjective]:
    """Return what leads from one objective to the next: smaller penalties before there are none."""
    if not (isinstance(last, ChiSquare) and isinstance(new, WorstCase)):
        return []
    return [replace(last, rho=last.rho / part) for part in WAY]
