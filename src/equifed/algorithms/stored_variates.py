"""StoredVariates: SCAFF-PD whose control variates are kept by the clients, for networks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from equifed.algorithms.guarded import Guarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.wrapper import WeightedWrapper, WrapperState, unwrap
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors, Moved
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView
from equifed.steps.automatic import AutoSteps


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, and the clients' variates (None: zero)."""

    variates: ClientVectors | None = None


@dataclass(frozen=True)
class StoredVariates(WeightedWrapper):
    r"""SCAFF-PD whose :math:`c_i` are the means of last round's gradients, and count in part.

    .. math::

       u_i &\leftarrow u_i - \eta\,(g_i(u_i) + a\,(c - c_i)) \quad J \text{ times} \\
       c_i &\leftarrow \frac1J \sum_{j < J} g_i(u_{i,j}) \quad \text{along these steps}

    (SCAFFOLD's option II) in the place of a gradient of all samples, which is dear. A client that
    was never there has :math:`c_i = 0`, one that is away keeps its own.

    **Why in part.** Such variates remember. Near x, where the client's curvature in some direction
    is h,

    .. math:: c_i^+ = (1 - b)\, \nabla f_i(x) + a\, b\, (c_i - c), \qquad
              b = 1 - \frac1J \sum_{j < J} (1 - \eta h)^j,

    so that a deviation :math:`c_i - c` is multiplied by a b in every round, whatever the other
    clients do. With a = 1 that is stable for :math:`\eta h < 2` alone (J even; 2.96 for J = 5).
    FedAvg and gradients at x (``ScaffPD`` by itself) have no such memory. Networks are trained
    with steps beyond that bound for a single client's sharpest directions, where the average over
    clients holds the model: there FedAvg is at its best and whole stored variates diverge, also
    with gradients of all samples. It is no matter of noise.

    Parameters
    ----------
    algorithm : ScaffPD
        With ``metric="none"``, and steps that are not automatic. Wrappers go around this one.
    correction : float
        a, in [0, 1]: 1 is SCAFFOLD's, 0 leaves the local steps as FedAvg's.

    References
    ----------
    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. "SCAFFOLD: Stochastic controlled averaging for
    federated learning." ICML 2020.
    """

    algorithm: AnyAlgorithm
    correction: float = 0.3

    def __post_init__(self) -> None:
        inner: Any = self._core()
        if not isinstance(inner, ScaffPD):
            bare = unwrap(inner) is inner
            raise ValueError(
                "StoredVariates keeps the variates of SCAFF-PD, got "
                f"{type(unwrap(inner)).__name__}"
                f"{'' if bare else ' inside a wrapper; wrappers go around StoredVariates'}."
            )
        if inner.metric != "none" or isinstance(inner.steps, AutoSteps):
            raise ValueError(
                "Automatic steps and metrics need gradients at the model, which stored variates "
                'are not: give ScaffPD metric="none" and steps=ConstantSteps(...), say.'
            )
        if inner.local.correction != 1:
            raise ValueError(
                f"StoredVariates sets local.correction, got {inner.local.correction} there as well;"
                " leave that one out."
            )
        replace(inner.local, correction=self.correction)  # refuses what is no part of one

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after a round of the algorithm, and the new variates."""
        core: Any = self._core()
        core = replace(core, local=replace(core.local, correction=self.correction))
        if isinstance(self.algorithm, Guarded):
            core = replace(self.algorithm, algorithm=core)
        view = _Keeping(clients, state.variates)
        inner, info = core.round(state.inner, view, stream)
        return State(inner, view.kept[-1]), replace(info, gradient=None)  # c is none

    def _core(self) -> AnyAlgorithm:
        """Return the algorithm inside a guard, which training puts around the core."""
        return self.algorithm.algorithm if isinstance(self.algorithm, Guarded) else self.algorithm


class _Keeping(ClientsView):
    """Clients whose gradients are their stored variates, and whose local steps make new ones."""

    def __init__(self, behind: Clients, stored: ClientVectors | None) -> None:
        super().__init__(behind)
        self.kept = [stored]  # shared by subsets; the last one is the newest

    @override
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        losses = self.losses(x, stream, batch_size)
        return losses, self.remembered(self.kept[0], self.index)

    @override
    def local_steps(
        self, x: Vector, work: LocalSGD, stream: Stream, *, control: ClientVectors | None = None,
        target: Vector | None = None, slopes: Weights | None = None,
    ) -> Moved:  # fmt: skip
        work = replace(work, mean_gradient=True)
        moved = super().local_steps(x, work, stream, control=control, target=target, slopes=slopes)
        assert moved.mean_gradient is not None
        self.kept.append(self.remember(self.kept[0], self.index, moved.mean_gradient))
        return moved
