"""Accelerated: rounds that look back at the last ones and jump ahead, as far as proofs allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.algorithms.around import (
    Wrapper,
    WrapperState,
    check_sizes,
    inner_state,
    with_inner_state,
)
from equifed.contract import AnyAlgorithm, Clients, Curvature, Info, Proof, Stream, Vector
from equifed.contract.arrays import check_settings
from equifed.steps.certificate import find_feasible, gap_of_round

# The proved gap has grown, and a jump is taken back, where it is this many times the last one
WORSE = 3.0

LONGEST = 64  # rounds without a jump after many that were taken back, one after the other

# What is added to the squared differences of residuals, relative to them: they may be alike
RIDGE = 1e-10

Rows = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class State(WrapperState):
    """The algorithm's state, and the last rounds."""

    points: Rows | None = None  # (m, d + 2n): model, weights and last losses before each of them
    images: Rows | None = None  # the same after each
    plain: Any = None  # the innermost state without the jump that has just been made, if one was
    gap: float | None = None  # what the last round proved
    wait: int = 0  # rounds until the next jump
    pause: int = 1  # how many there are after the next one that is taken back
    curvature: Curvature | str | None = None  # of the losses, or why unknown; None before round 1


@dataclass(frozen=True)
class Accelerated(Wrapper):
    r"""Anderson acceleration of primal-dual rounds, switched by the certified gap.

    A round is a map G of z = (model, weights, last losses). With the residuals f = G(z) - z of the
    last rounds, in the norm :math:`|x|^2/\tau + |\lambda|^2/\sigma` of primal-dual methods,

    .. math::

       \gamma = \arg\min_\gamma \bigl|f_k - \textstyle\sum_j \gamma_j (f_{j+1} - f_j)\bigr|^2,
       \qquad
       z_{k+1} = G(z_k) - \textstyle\sum_j \gamma_j \bigl(G(z_{j+1}) - G(z_j)\bigr)

    and the weights are put back into their set: for quadratic losses and weights inside their set
    this is GMRES (Walker and Ni 2011). A set's edges make it lead astray until the active ones are
    found (Zhang, O'Donoghue and Boyd 2020). So the next round's proof judges a jump: where its gap
    is more than three times the one before, training goes on from where it would have been, and
    jumps pause for 1, 2, 4, ... rounds. No client is asked for anything more.

    It is for SCAFF-PD with automatic steps where FairNewton cannot run (hidden sums, guards):
    ``python -m benchmarks.auto_steps --brief`` has rounds with and without. Rounds are left alone,
    to the bit, where they prove nothing (minibatches, absent clients, networks), or have step sizes
    that somebody chose, signed weights or weights without a fixed sum.

    Parameters
    ----------
    algorithm : Algorithm
        SCAFF-PD; training puts :class:`Safeguarded` around it.
    memory : int
        Differences of rounds that are looked back at.

    References
    ----------
    Walker, Ni. "Anderson acceleration for fixed-point iterations." SIAM J. Numer. Anal. 2011.
    Zhang, O'Donoghue, Boyd. "Globally convergent type-I Anderson acceleration for nonsmooth
    fixed-point iterations." SIAM J. Optim. 2020.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.Accelerated(ef.ScaffPD(ef.objectives.ChiSquare(rho=0.1)))
    >>> history = ef.train(fair, clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; without it: 0.65
    0.7
    """

    algorithm: AnyAlgorithm
    memory: int = 5

    def __post_init__(self) -> None:
        check_settings(self, memory="[1, inf]")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        inner = self.algorithm.init(clients, x)
        check_sizes(inner, self.algorithm, "Accelerated")
        return State(inner)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round, and after a jump where there is one."""
        inner, info = self.algorithm.round(state.inner, clients, stream)
        known = clients.curvature() if state.curvature is None else state.curvature
        before, after = inner_state(state.inner), inner_state(inner)
        gap, here = gap_of_round(info, known), State(inner, pause=state.pause, curvature=known)
        if gap is None or not self._may_jump(before, after, info):
            return here, info
        here = replace(here, gap=gap, wait=state.wait)
        if state.gap is not None and not gap <= WORSE * state.gap:  # forget the last rounds
            if state.plain is None:
                return here, info
            back, longer = with_inner_state(inner, state.plain), min(2 * state.pause, LONGEST)
            return replace(here, inner=back, gap=state.gap, wait=state.pause, pause=longer), info
        points = _remember(state.points, before, self.memory)
        images = _remember(state.images, after, self.memory)
        pause = state.pause if state.plain is None else 1
        here = replace(here, points=points, images=images, wait=max(0, state.wait - 1), pause=pause)
        if state.wait == 0 and len(points) >= 3:
            jumped = self._jump(points, images, after, info)
            if jumped is not None:
                here = replace(here, inner=with_inner_state(inner, jumped), plain=after)
        return here, info

    def _may_jump(self, before: Any, after: Any, info: Info) -> bool:
        """Tell whether a round was a map of what it began with, with sizes that may be judged."""
        sizes, old = after.sizes, before.sizes
        if before.losses is None or old is None or sizes.halved() is None:
            return False
        assert isinstance(info.proof, Proof)
        same = sizes.halvings == old.halvings and info.proof.final
        return same and bool(info.proof.objective.l1_norm(len(after.weights)) <= 1 + 1e-9)

    def _jump(self, points: Rows, images: Rows, after: Any, info: Info) -> Any | None:
        """Return the innermost state from where the last rounds seem to lead, or None."""
        d, n = len(after.x), len(after.weights)
        scale = np.r_[np.full(d, after.sizes.primal), np.full(n, after.sizes.dual)]
        residuals = (images - points)[:, : d + n] / np.sqrt(scale)
        changes = np.diff(residuals, axis=0)
        gram = changes @ changes.T
        gram[np.diag_indices_from(gram)] += RIDGE * np.trace(gram) + 1e-300
        gamma = np.linalg.solve(gram, changes @ residuals[-1])
        z = images[-1] - gamma @ np.diff(images, axis=0)
        if not np.isfinite(z).all():
            return None
        x, weights, losses = np.split(z, [d, d + n])
        assert isinstance(info.proof, Proof)
        weights = find_feasible(info.proof.objective, weights, info.proof.losses)
        return replace(after, x=after.x.new_tensor(x), weights=weights, losses=losses)


def _remember(rows: Rows | None, state: Any, memory: int) -> Rows:
    """Return the last rows with one more, of a state."""
    x = state.x.detach().cpu().double().numpy()
    new = np.concatenate([x, state.weights, state.losses])[None]
    return new if rows is None else np.concatenate([rows, new])[-memory - 1 :]
