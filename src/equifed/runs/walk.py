r"""A walk from objective to objective, each run from where the last one ended.

The strength t of fairness goes from 0, the average, to 1, the worst case. In between the weights
pay the chi-square penalty

.. math:: \rho(t) = s\,\frac{1 - t}{t}

with s the standard deviation of the clients' losses at the average's solution, so that t has no
unit: at t = 1/2 a client whose loss is one deviation above the mean weighs about twice as much.

Every run starts at the model of the run before it. FairNewton goes on from its answers, weights
and metric, too (:mod:`equifed.algorithms.continued`), and reach the worst case by way of a
fourth and a sixteenth of the last penalty, each with a metric of its own: without any penalty,
weights jump from client to client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from equifed.algorithms.continued import Continued, Heard, Trail
from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.clients import Clients
from equifed.objectives.base import SaddleObjective
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import Average, WorstCase
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.stopping import StopAtGap
from equifed.training.tables import RoundRecord, describe_value

WAY = (4, 16)
"""What the last penalty is divided by on the way to the worst case."""


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
