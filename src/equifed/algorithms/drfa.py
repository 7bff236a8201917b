"""DRFA: clients drawn by their weights, local steps, and a dual step at a random snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from equifed.algorithms.absence import call_roll
from equifed.contract import Clients, Index, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE, ask_clients, running_mean
from equifed.contract.algorithm import Federated, Info
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives import DualStep, Euclidean, SaddleObjective, WorstCase


@dataclass(frozen=True)
class State:
    """Model and weights, and their means so far (that of the local iterates only if wanted)."""

    x: Vector
    weights: Weights
    rounds: int = 0
    mean_x: Vector | None = None
    mean_weights: Weights | None = None
    losses: Losses | None = None  # the last known ones, where absent clients need them
    away: Index | None = None  # rounds since each client's last answer
    bend: Vector | None = None  # how far snapshots lie off the straight way, where some were absent


@dataclass(frozen=True)
class DRFA(Federated):
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
    onto W: the ball of ``local.radius``, or any set by ``local.onto``.

    ``ascent="full"`` is the alternative of Section 5.2: in place of lines 12 to 16,
    :math:`\lambda \leftarrow \mathrm{prox}(\lambda + \gamma\, l(w), \gamma)` with the losses of all
    clients, in full, at the model that the round began with. The paper takes a gradient step in the
    penalty too (``dual=ProjectedGradient()``); the default treats it exactly.

    Absent clients are not drawn, and their v is their last known loss (:mod:`.absence`). A run
    records lambda, the mean of the weights drawn.

    Parameters
    ----------
    local : LocalSGD
        tau steps of size eta; 10 of size 0.1 in the paper's experiments (Section 6).
    dual_step : float
        gamma; 0.008 in the paper's experiments. For T local steps in all Theorem 1 wants T^(-5/8),
        with tau = T^(1/4) / sqrt(m) and eta = 1 / (4 L sqrt(T)).
    objective, dual
        Set and penalty of the weights; their steps, Euclidean as in the paper or entropic.
    clients_per_round : int, optional
        m. None lets every client take part: weights lambda in place of draws, and v_i = f_i(w').
    output : {"last", "average"}
        Model and weights to give out: the last, or the means of all local iterates and of the
        weights, w-hat and lambda-hat (those of Theorem 1).
    ascent : {"snapshot", "full"}
        Which losses lead the dual step.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.DRFA(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    local: LocalSGD = DEFAULT_WORK
    dual_step: float = 0.008
    objective: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    clients_per_round: int | None = None
    output: Literal["last", "average"] = "last"
    ascent: Literal["snapshot", "full"] = "snapshot"
    dual: DualStep = Euclidean()  # noqa: RUF009 - a frozen value
    patience: int = PATIENCE

    allowed: ClassVar = {"ascent": ("snapshot", "full")}
    equal_steps: ClassVar = True

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        m, full = self.clients_per_round, self.ascent == "full"
        asked = ask_clients(clients, None if full else m, stream)  # line 13: U
        roll = call_roll(self, state, asked)
        everyone, lambda_s = roll.over(clients), roll.weights
        mix = lambda_s / self.objective.total(lambda_s)  # lambda, or its shares of a free sum
        chosen, share = everyone.draw(mix, m, stream)  # line 2: D
        work, part = self._work(stream)  # line 3
        moved = chosen.local_steps(state.x, work, stream.at("local"))  # lines 4-10
        x = state.x - moved.displacement.step(share)  # line 11
        at, bend = everyone.snapshot(moved, share, (state.x, x), part, state.bend)  # line 12: w'
        batch_size = None if full else self.local.batch_size
        losses, v = roll.estimate(clients.index, at, stream.at("losses"), batch_size)  # 14, 15
        step = self.dual_step * (1 if full else int(moved.steps.max()))
        weights = self.dual.ascend(roll.objective, lambda_s, v, step)  # line 16
        s, mean_x = state.rounds + 1, None  # what Theorem 1 speaks of: the means of both
        if moved.average is not None:
            mean_x = running_mean(state.mean_x, moved.average.weighted_sum(share), s)
        means = mean_x, running_mean(state.mean_weights, lambda_s, s)
        info = Info(lambda_s, index=chosen.index, notes=roll.notes)
        return State(x, weights, s, *means, losses, roll.away, bend), info

    def _work(self, stream: Stream) -> tuple[LocalSGD, float]:
        """Return the local work of this round, and which part of it leads to the snapshot w'."""
        work = self.local.work(average=self.output == "average")
        if self.ascent == "full" or work.steps is None:
            return work, 0.0
        t = int(stream.at("snapshot").generator().integers(1, work.steps + 1))
        return work.work(snapshot=t), t / work.steps

    def weights(self, state: State) -> Weights:
        """Return the last weights, or the mean of those of all rounds (lambda-hat)."""
        mean = state.mean_weights if self.output == "average" else None
        return state.weights if mean is None else mean
