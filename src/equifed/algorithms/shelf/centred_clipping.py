"""CentredClipping: FedAvg that dishonest clients hardly move, and that hears no hard client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import WeightedWrapper, WrapperState, unwrap
from equifed.algorithms.remembering import refuse_memory
from equifed.contract import AnyAlgorithm, Clients, Info, Stream, Vector, Weights
from equifed.contract.arrays import check_settings
from equifed.contract.clients import inner_products
from equifed.contract.views import ClientsView, VectorsView


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, and the sum of the round before; None before the first."""

    centre: Vector | None = None


@dataclass(frozen=True)
class CentredClipping(WeightedWrapper):
    r"""Byzantine-robust FedAvg: updates enter cut at a distance from the round before.

    .. math:: c \leftarrow c + \sum_i p_i\, (d_i - c)
              \min\Bigl(1, \frac{\text{radius} \cdot u}{|d_i - c|}\Bigr),
              \qquad u = \operatorname{median}_i |d_i - c|

    with :math:`d_i` the updates, :math:`p_i` their weights and c what moved the model before, zero
    at first (Karimireddy et al. 2021, Algorithm 2 with one pass; a radius in medians is ours). A
    client, whatever it sends, moves the model by :math:`p_i` times the usual distance.

    It is **not fair**: a hard client's update is far from the others, too, and is cut as a liar's
    is, which takes what a fair objective gains. Use :class:`equifed.Guarded` where hard clients
    are to be heard.

    Parameters
    ----------
    algorithm : Algorithm
        :class:`.FedAvg` or FedProx. ``weighting="uniform"`` keeps who claims many samples at 1/N.
    radius : float
        In medians of the distances.

    Examples
    --------
    >>> from equifed.algorithms.fedavg import FedAvg
    >>> CentredClipping(FedAvg(weighting="uniform")).radius
    1.0

    References
    ----------
    Karimireddy, He, Jaggi. "Learning from history for Byzantine robust optimization." ICML 2021.
    """

    algorithm: AnyAlgorithm
    radius: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self, radius="(0, inf)")
        refuse_memory(self.algorithm, "CentredClipping cuts")
        core: Any = unwrap(self.algorithm)
        if not (getattr(core, "averages", False) and getattr(core, "one_sum", False)):
            raise ValueError(
                f"CentredClipping is for FedAvg and FedProx: {type(core).__name__} moves the model "
                "by more than one mean of updates, or by weights that follow the losses, which it "
                "would make useless. Use Guarded around it."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round; ``clipped`` is the share of updates that were cut."""
        view = _Clipping(clients, state.centre, self.radius)
        inner, info = self.algorithm.round(state.inner, view, stream)
        (step, clipped), numbers = view.found[-1], info.numbers
        return State(inner, step), replace(info, numbers={**numbers, "clipped": clipped})


class _Clipped(VectorsView):
    """Updates cut at a distance from a centre."""

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        if self.kind != "displacement":
            return add(weights)
        centre, view = self.clients.centre, self.clients

        def products(rows: Vector) -> Vector:
            ways = (rows if centre is None else rows - centre).double().contiguous()
            return ways @ ways.T

        seen = inner_products(view.behind, self.behind, "CentredClipping", products)
        squares = np.diag(seen)
        lengths = np.sqrt(np.maximum(squares, 0.0))
        most = view.radius * float(np.quantile(lengths, 0.5, method="lower"))
        kept = np.divide(most, lengths, out=np.ones(len(lengths)), where=lengths > most)
        step = add(weights * kept)
        if centre is not None:
            step = step + float((weights * (1 - kept)).sum()) * centre
        view.found.append((step, float((kept < 1).mean())))
        return step


class _Clipping(ClientsView):
    """Clients whose updates are cut; ``found`` has the sums, and the shares that were cut."""

    Vectors = _Clipped

    def __init__(self, behind: Clients, centre: Vector | None, radius: float) -> None:
        super().__init__(behind)
        self.centre, self.radius = centre, radius
        self.found: list[tuple[Vector, float]] = []
