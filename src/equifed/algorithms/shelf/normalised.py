"""Normalised: any algorithm of plain local steps whose updates count by direction alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import WeightedWrapper, WrapperState, unwrap
from equifed.contract import AnyAlgorithm, Clients, Info, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.arrays import ClientVectors
from equifed.contract.clients import Moved
from equifed.contract.views import ClientsView, VectorsView

By = Literal["steps", "length"]


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state."""


@dataclass(frozen=True)
class Normalised(WeightedWrapper):
    r"""Scales what comes of local steps before the algorithm sums it.

    .. math:: x - u_i \;\to\; s_i (x - u_i), \qquad
              s_i = \frac{\bar a}{a_i} \ (\text{steps}), \qquad
              s_i = \frac{\mathrm{median}_j |x - u_j|}{|x - u_i|} \ (\text{length})

    By steps this is FedNova (Wang et al. 2020): :math:`a_i` is the number of a client's steps, with
    a proximal term :math:`(1 - (1 - \text{lr}\,\mu)^{J_i})/(\text{lr}\,\mu)`, and
    :math:`\bar a` the mean by samples over those who take part. Clients with more samples take more
    steps in a pass and would pull the solution towards themselves. By length it is the
    normalisation of FedMGDA+.

    It needs local steps without corrections, snapshots or thresholds: SCAFFOLD, SCAFF-PD, FedDyn,
    DRFA and rFedFair are refused, where a part of what clients send would stay as it is.

    Parameters
    ----------
    algorithm : Algorithm
        Any with local work ``local``, wrapped or not.
    by : {"steps", "length"}
        What updates are divided by. Lengths cost a question where sums are hidden, and are the
        clients' word there.

    References
    ----------
    Wang, Liu, Liang, Joshi, Poor. "Tackling the objective inconsistency problem in heterogeneous
    federated optimization." NeurIPS 2020.
    """

    algorithm: AnyAlgorithm
    by: By = "steps"

    def __post_init__(self) -> None:
        if self.by not in ("steps", "length"):
            raise ValueError(f"Normalised divides by 'steps' or 'length', got {self.by!r}.")
        core = unwrap(self.algorithm)
        if hasattr(core, "steps") or not isinstance(getattr(core, "local", None), LocalSGD):
            raise ValueError(
                f"Normalised scales plain local steps; {type(core).__name__} has none, or divides "
                "by their number itself. Run it without."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round with normalised updates."""
        view = _Scaling(clients, self.by, type(unwrap(self.algorithm)).__name__)
        inner, info = self.algorithm.round(state.inner, view, stream)
        return State(inner), info


class _Scaled(VectorsView):
    """Vectors times a number each."""

    factors: Losses

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        return add(weights * self.factors)

    @override
    def squared_norms(self) -> Losses:
        return self.behind.squared_norms() * self.factors**2


class _Scaling(ClientsView):
    """Clients whose displacements are scaled."""

    def __init__(self, behind: Clients, by: By, who: str) -> None:
        super().__init__(behind)
        self._by, self._who = by, who

    @override
    def local_steps(
        self, x: Vector, local: LocalSGD, stream: Stream, *, control: ClientVectors | None = None,
        target: Vector | None = None, slopes: Weights | None = None,
    ) -> Moved:  # fmt: skip
        work = local.work()
        if control is not None or work.results != ("displacement",) or work.hinge is not None:
            raise ValueError(
                f"Normalised scales plain local steps, but those of {self._who} have a correction, "
                "a threshold or results beside the model. Run it without."
            )
        moved = self.behind.local_steps(x, work, stream)
        scaled = _Scaled(moved.displacement, self, "displacement", x)
        if self._by == "steps":
            length = path_lengths(moved.steps, work)
            scaled.factors = np.average(length, weights=self.sizes) / length
        else:
            norms = np.sqrt(moved.displacement.squared_norms())
            scaled.factors = np.median(norms) / np.where(norms > 0, norms, 1.0)
        return replace(moved, displacement=scaled)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        found = super().inner_products(vectors, multiply)
        if isinstance(found, str) or not isinstance(vectors, _Scaled):
            return found
        return found * np.outer(vectors.factors, vectors.factors)


def path_lengths(steps: Any, work: LocalSGD) -> Losses:
    """Return what all steps of a client count together: their number, less with a proximal term.

    >>> path_lengths(np.array([2, 3]), LocalSGD(lr=0.5, steps=1, proximal=1.0))
    array([1.5 , 1.75])
    """
    shrink = work.lr * work.proximal
    return np.asarray((1 - (1 - shrink) ** steps) / shrink if shrink else steps, dtype=np.float64)
