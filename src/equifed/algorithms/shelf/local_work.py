"""Paced and Normalised: any algorithm of plain local steps, whose lengths they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import WeightedWrapper, WrapperState, change_core, unwrap
from equifed.algorithms.remembering import refuse_memory
from equifed.contract import AnyAlgorithm, Clients, Info, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.arrays import BlockMatrix, ClientVectors, Index, check_settings
from equifed.contract.clients import Moved
from equifed.contract.views import ClientsView, VectorsView


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, and the rounds so far."""

    rounds: int = 0


class _AroundLocalWork(WeightedWrapper):
    """A wrapper that refuses an algorithm without local work of its own."""

    def _check_local(self) -> None:
        core = unwrap(self.algorithm)
        if hasattr(core, "steps") or not isinstance(getattr(core, "local", None), LocalSGD):
            name = type(core).__name__
            raise ValueError(
                f"{type(self).__name__} changes plain local steps; the step size of {name} is not "
                "its own but follows its schedule (steps). Run it without."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))


@dataclass(frozen=True)
class Paced(_AroundLocalWork):
    r"""Multiplies the step size of local work by a factor that depends on the round.

    .. math:: \text{lr}_t = \text{lr} \cdot \text{decay}^{s}, \qquad
              s = \text{every} \Bigl\lfloor \frac{t - 1}{\text{every}} \Bigr\rfloor,
              \quad t = 1, 2, \dots

    What follows from the step size (q-FedAvg's constant L) follows the factor, too.

    Parameters
    ----------
    algorithm : Algorithm
        Any with local work ``local`` and no schedule of its own (SCAFF-PD has one: ``steps``).
    decay : float
        Factor per round, in (0, 1]; 0.999 is common for networks.
    every : int
        Rounds between two changes: 50 or 100 on a GPU, which replays rounds of equal step size.

    Examples
    --------
    >>> from equifed.algorithms.fedavg import FedAvg
    >>> stairs = Paced(FedAvg(LocalSGD(lr=1.0, steps=1)), decay=0.5, every=2)
    >>> [stairs.factor(t) for t in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.25, 0.25, 0.0625]
    """

    algorithm: AnyAlgorithm
    decay: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        check_settings(self, "1 means no decay", decay="(0, 1]")
        check_settings(self, every="[1, inf]")
        self._check_local()

    def factor(self, t: int) -> float:
        """Return what the step size of round t is multiplied by."""
        return float(self.decay ** (t - 1 - (t - 1) % self.every))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round with its own step size."""
        t = state.rounds + 1
        lr = max(self.factor(t) * unwrap(self.algorithm).local.lr, 1e-300)  # type: ignore[attr-defined]
        paced = change_core(
            self.algorithm, lambda core: replace(core, local=replace(core.local, lr=lr))
        )
        inner, info = paced.round(state.inner, clients, stream)
        return State(inner, t), info


@dataclass(frozen=True)
class Normalised(_AroundLocalWork):
    r"""FedNova (Wang et al. 2020): updates count as if all clients took the same number of steps.

    .. math:: x - u_i \;\to\; \frac{\bar a}{a_i} (x - u_i)

    :math:`a_i` is the number of a client's steps, with a proximal term
    :math:`(1 - (1 - \text{lr}\,\mu)^{J_i})/(\text{lr}\,\mu)`, and :math:`\bar a` the mean by
    samples over those who take part. It needs local steps without corrections, snapshots or
    thresholds: SCAFFOLD, SCAFF-PD, FedDyn, DRFA and rFedFair are refused.

    Parameters
    ----------
    algorithm : Algorithm
        Any with local work ``local``, wrapped or not.

    References
    ----------
    Wang, Liu, Liang, Joshi, Poor. "Tackling the objective inconsistency problem in heterogeneous
    federated optimization." NeurIPS 2020.

    Examples
    --------
    >>> import equifed as ef
    >>> data = {"large": ([[1.0]] * 90, [1.0] * 90), "small": ([[1.0]] * 10, [0.0] * 10)}
    >>> clients = ef.simulate(ef.Federation.from_clients(data), "linear")
    >>> plain = ef.FedAvg(ef.LocalSGD(lr=0.01, epochs=1, batch_size=10), weighting="uniform")
    >>> for one in plain, ef.Normalised(plain):  # the mean of what the clients want is 0.5
    ...     history = ef.train(one, clients, rounds=100)
    ...     print(round(sum(float(p.sum()) for p in history.parameters.values()), 1))
    0.9
    0.5
    """

    algorithm: AnyAlgorithm

    def __post_init__(self) -> None:
        self._check_local()
        refuse_memory(self.algorithm, "Normalised scales")

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round with normalised updates."""
        view = _Scaling(clients, type(unwrap(self.algorithm)).__name__)
        inner, info = self.algorithm.round(state.inner, view, stream)
        return State(inner, state.rounds + 1), info


class _Scaled(VectorsView):
    """Vectors times a number each."""

    factors: Losses

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        return add(weights * self.factors)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        return self.behind.squared_norms(scale) * self.factors**2


class _Scaling(ClientsView):
    """Clients whose displacements are scaled."""

    def __init__(self, behind: Clients, who: str) -> None:
        super().__init__(behind)
        self._who = who

    @override
    def local_steps(
        self, x: Vector, local: LocalSGD, stream: Stream, *, control: ClientVectors | None = None,
        **more: Any,
    ) -> Moved:  # fmt: skip
        work = local.work()
        if control is not None or work.results != ("displacement",) or work.hinge is not None:
            raise ValueError(
                f"Normalised scales plain local steps, but those of {self._who} have a correction, "
                "a threshold or results beside the model. Run it without."
            )
        moved = self.behind.local_steps(x, work, stream)
        scaled = _Scaled(moved.displacement, self, "displacement", x)
        length = path_lengths(moved.steps, work)
        scaled.factors = np.average(length, weights=self.sizes) / length
        return replace(moved, displacement=scaled)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        found = super().inner_products(vectors, multiply)
        if isinstance(found, str) or not isinstance(vectors, _Scaled):
            return found
        return found * np.outer(vectors.factors, vectors.factors)


def path_lengths(steps: Index, work: LocalSGD) -> Losses:
    """Return what all steps of a client count together: their number, less with a proximal term.

    >>> path_lengths(np.array([2, 3]), LocalSGD(lr=0.5, steps=1, proximal=1.0))
    array([1.5 , 1.75])
    """
    shrink = work.lr * work.proximal
    return np.asarray((1 - (1 - shrink) ** steps) / shrink if shrink else steps, dtype=np.float64)
