"""DRFA: clients drawn by their weights, local steps, and a dual step at a random snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from equifed.algorithms.fedavg import DEFAULT_WORK
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, Moved
from equifed.contract.local import LocalSGD
from equifed.contract.participation import (
    carry_over,
    check_draws,
    draw_clients,
    running_mean,
    scale_to_present,
)
from equifed.contract.streams import Stream
from equifed.objectives.base import SaddleObjective
from equifed.objectives.dual_steps import DualStep, Euclidean
from equifed.objectives.worst_case import WorstCase


@dataclass(frozen=True)
class State:
    """Model and weights, and their means so far (that of the local iterates only if wanted)."""

    x: Vector
    weights: Weights
    rounds: int = 0
    mean_x: Vector | None = None
    mean_weights: Weights | None = None


@dataclass(frozen=True)
class DRFA:
    r"""Distributionally robust federated averaging (Deng et al. 2020), Algorithms 1 and 2.

    .. math::

       D &\sim \lambda \ (m \text{ draws}), \quad t' \sim \{1, \dots, \tau\}
              && \text{lines 2, 3} \\
       w_i &\leftarrow \Pi(w_i - \eta\, g_i(w_i)) \quad \tau \text{ times from } w_i = w
              && \text{lines 6-9} \\
       w &\leftarrow \tfrac1m \textstyle\sum_{i \in D} w_i^{(\tau)}, \quad
       w' = \tfrac1m \sum_{i \in D} w_i^{(t')} && \text{lines 11, 12} \\
       v_i &= \tfrac{N}{m} f_i(w') \text{ for } i \in U, \text{ else } 0
              && \text{lines 13-15} \\
       \lambda &\leftarrow \mathrm{prox}(\lambda + \tau\gamma v, \tau\gamma)
              && \text{line 16; Algorithm 2, line 5}

    U is a uniform sample of m clients without repeats. Without a penalty the last line is DRFA's
    projection, with one it is DRFA-Prox (where a minus sign is lost in print). :math:`\Pi` projects
    onto the ball of ``local.radius``.

    ``ascent="full"`` is the alternative of Section 5.2: in place of lines 12 to 16,
    :math:`\lambda \leftarrow \mathrm{prox}(\lambda + \gamma\, l(w), \gamma)` with the losses of all
    clients, in full, at the model that the round began with. The paper takes a gradient step in the
    penalty too, which ``dual=ProjectedGradient()`` does; the default treats it exactly: the same
    fixed points, and no bound on the step.

    Absent clients are not drawn, and their v is the mean loss of those asked, so they neither gain
    nor lose. A run records lambda, which is the mean of the weights that are drawn.

    Parameters
    ----------
    local : LocalSGD
        tau steps of size eta; 10 of size 0.1 in the paper's experiments (Section 6).
    dual_step : float
        gamma; 0.008 in the paper's experiments. Theorem 1 wants T^(-5/8) for T local steps in all.
    objective : SaddleObjective
        Set and penalty of the weights.
    clients_per_round : int, optional
        m. None lets every client take part: weights lambda in place of draws, and v_i = f_i(w').
    output : {"last", "average"}
        Model and weights to give out: the last, or the means of all local iterates and of the
        weights, w-hat and lambda-hat (those of Theorem 1).
    ascent : {"snapshot", "full"}
        Which losses lead the dual step.
    dual : DualStep
        Euclidean as in the paper, by gradients as in its Section 5.2, or entropic.
    """

    local: LocalSGD = DEFAULT_WORK
    dual_step: float = 0.008
    objective: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    clients_per_round: int | None = None
    output: Literal["last", "average"] = "last"
    ascent: Literal["snapshot", "full"] = "snapshot"
    dual: DualStep = Euclidean()  # noqa: RUF009 - a frozen value

    def __post_init__(self) -> None:
        if self.local.steps is None:
            raise ValueError("DRFA needs local.steps: tau is the same for every client.")
        self.dual.check(self.objective, "DRFA")
        if not self.dual_step > 0:
            raise ValueError(f"DRFA dual_step must be positive, got {self.dual_step}.")
        check_draws("DRFA", self.clients_per_round, self.output)
        if self.ascent not in ("snapshot", "full"):
            raise ValueError(f"DRFA ascent is 'snapshot' or 'full', got {self.ascent!r}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        m, lambda_s = self.clients_per_round, state.weights
        mix = lambda_s / self.objective.total(lambda_s)  # lambda, or its shares of a free sum
        chosen, share = clients, scale_to_present(mix, clients.index)
        if m is not None:
            chosen, share = draw_clients(clients, mix, m, stream)  # line 2
        moved = chosen.local_steps(state.x, self._work(stream), stream.at("local"))  # lines 3-10
        x = state.x - moved.displacement.weighted_sum(share)  # line 11
        v, step = self._ascent(state.x, moved, share, clients, stream)  # lines 12-15
        weights = self.dual.ascend(self.objective, lambda_s, v, step)  # line 16
        s, mean_x = state.rounds + 1, None  # what Theorem 1 speaks of: the means of both
        if moved.average is not None:
            mean_x = running_mean(state.mean_x, moved.average.weighted_sum(share), s)
        mean_weights = running_mean(state.mean_weights, lambda_s, s)
        info = Info(lambda_s, index=chosen.index)
        return State(x, weights, s, mean_x, mean_weights), info

    def _work(self, stream: Stream) -> LocalSGD:
        """Return the local work of this round, with its snapshot index t'."""
        work = replace(self.local, average=self.output == "average")
        if self.ascent == "full" or work.steps is None:
            return work
        t = stream.at("snapshot").generator().integers(1, work.steps + 1)  # line 3
        return replace(work, snapshot=int(t))

    def _ascent(
        self, x: Vector, moved: Moved, share: Weights, clients: Clients, stream: Stream
    ) -> tuple[Losses, float]:
        """Return v, which stands for the losses of all clients, and the step along it."""
        n, here = len(clients.names), clients.index
        if moved.snapshot is None or self.local.steps is None:
            losses = clients.losses(x, stream.at("losses"))
            return carry_over(None, here, losses, n), self.dual_step
        at = moved.snapshot.weighted_sum(share)  # line 12
        m = len(here) if self.clients_per_round is None else min(self.clients_per_round, len(here))
        asked = np.sort(stream.at("asked").generator().choice(here, size=m, replace=False))  # 13
        seen = clients.subset(asked).losses(at, stream.at("losses"), self.local.batch_size)  # 14
        v = np.full(n, seen.mean())  # those who are away
        v[here] = 0
        v[asked] = len(here) / m * seen  # line 15
        return v, self.local.steps * self.dual_step

    def model(self, state: State) -> Vector:
        """Return the last model, or the mean of all local iterates (w-hat)."""
        return state.x if state.mean_x is None else state.mean_x

    def weights(self, state: State) -> Weights:
        """Return the last weights, or the mean of those of all rounds (lambda-hat)."""
        mean = state.mean_weights if self.output == "average" else None
        return state.weights if mean is None else mean
