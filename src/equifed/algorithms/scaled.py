"""Scaled: any first-order algorithm, in coordinates in which no column is steeper than others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from equifed.algorithms.around import WeightedWrapper, WrapperState, unwrap
from equifed.contract import AnyAlgorithm, Clients, Info, Losses, Proof, Stream, Vector, Weights
from equifed.contract.arrays import ClientVectors, Index
from equifed.contract.clients import Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form, Inexactness
from equifed.contract.local import LocalSGD
from equifed.contract.views import ClientsView, VectorsView

LEAST = 1e-12
"""Curvature of a coordinate, relative to the largest, below which it counts as that."""

STEEP = ("gradient", "mean_gradient", "memory")
"""Vectors that grow where a coordinate is made smaller; models and steps shrink."""

HIDDEN = 2.0**-30
"""What the rounding of a hidden sum may be."""


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, whose model is y, and r with x = r y; None before the first round."""

    root: Vector | None = None

    @property
    @override
    def x(self) -> Vector:
        return self.inner.x if self.root is None else self.root * self.inner.x  # type: ignore[no-any-return]

    @override
    def outward(self, core: Any) -> Any:
        return core if self.root is None else replace(core, x=self.root * core.x)

    @override
    def inward(self, core: Any) -> Any:
        return core if self.root is None else replace(core, x=core.x / self.root)


@dataclass(frozen=True)
class Scaled(WeightedWrapper):
    r"""Runs an algorithm in coordinates in which all columns of the data are equally steep.

    .. math:: y = D^{1/2} x, \qquad D = \mathrm{diag}\Bigl(\tfrac1n \sum_i \nabla^2 f_i(0)\Bigr),
              \qquad \tilde f_i(y) = f_i(D^{-1/2} y)

    so a step is :math:`x \leftarrow x - \tau D^{-1} \sum_i \lambda_i \nabla f_i(x)`, and clients
    take their local steps in the same metric. D is one vector, for linear models the mean squares
    of the features plus the L2 penalty, summed once before the first round; hidden sums carry it.
    The algorithm sees the functions :math:`\tilde f_i` and nothing of D: automatic step sizes
    measure their smoothness. Certificates are about x, because sums of gradients transform back.

    It helps where columns differ in scale (units, rare categories), not where they are collinear:
    no diagonal does. :class:`FairNewton` is for those, where sums are not hidden.

    Parameters
    ----------
    algorithm : Algorithm
        Any that takes first-order steps, without ``local.radius`` or ``local.onto``.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.ScaffPD(ef.objectives.ChiSquare(rho=0.1))
    >>> plain, scaled = (ef.train(a, clients, rounds=20) for a in (fair, ef.Scaled(fair)))
    >>> scaled.rounds[-1].objective < plain.rounds[-1].objective
    True
    """

    algorithm: AnyAlgorithm

    def __post_init__(self) -> None:
        core: Any = unwrap(self.algorithm)
        local = getattr(core, "local", None)
        if local is not None and (local.radius is not None or local.onto is not None):
            raise ValueError(
                f"{type(core).__name__} projects models, to the nearest point in the coordinates "
                "of the data; leave local.radius and local.onto out, or use it without Scaled."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm in y."""
        root, inner = state.root, state.inner
        if root is None:
            root = self._find_root(clients, state.x)
            inner = self.algorithm.init(_Scaling(clients, root), state.x / root)
        after, info = self.algorithm.round(inner, _Scaling(clients, root), stream)
        proof = info.proof
        if isinstance(proof, Proof):
            known = "curvature was stated inside Scaled; put Certified around it"
            back = replace(proof, x=root * proof.x, gradient=proof.gradient / root, bound=None)
            proof = back if proof.curvature is None else known
        return State(after, root), replace(info, proof=proof)

    def model(self, state: State) -> Vector:
        """Return the algorithm's model in the coordinates of the data."""
        found = self.algorithm.model(state.inner)
        return found if state.root is None else state.root * found

    def _find_root(self, clients: Clients, x: Vector) -> Vector:
        """Return D^(-1/2), or refuse clients whose second derivatives are not known."""
        equal = np.full(len(clients.index), 1 / len(clients.index))
        found = clients.curvature_sum(torch.zeros_like(x), equal, "diagonal")
        if isinstance(found, str):
            name = type(unwrap(self.algorithm)).__name__
            raise ValueError(f"Scaled cannot run here: {found}. Use {name} without it.")
        diagonal = found.blocks.new_zeros(len(x))
        diagonal[found.places] = found.blocks.expand(len(found.places), -1)
        least = max(LEAST * float(diagonal.max()), HIDDEN if clients.hides_sums else 0.0)
        root: Vector = diagonal.clamp(min=max(least, 1e-300)).rsqrt().to(x.dtype)
        return root


class _ScaledVectors(VectorsView):
    """Vectors in y: gradients are multiplied by r, models and steps are divided."""

    clients: _Scaling

    @property
    def factor(self) -> Vector:
        """By what each coordinate is multiplied."""
        return self.clients.root if self.kind in STEEP else 1 / self.clients.root

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        return self.factor * add(weights)

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        return self.factor * self.behind.weighted_difference(old.behind, weights)

    @override
    def squared_norms(self, scale: Vector | None = None) -> Losses:
        squares = self.factor.square()
        return self.behind.squared_norms(squares if scale is None else scale * squares)


class _Scaling(ClientsView):
    """Clients whose losses are functions of y."""

    Vectors = _ScaledVectors

    def __init__(self, behind: Clients, root: Vector) -> None:
        super().__init__(behind)
        self.root = root

    @override
    def local_steps(
        self,
        x: Vector,
        local: LocalSGD,
        stream: Stream,
        *,
        target: Vector | None = None,
        **more: Any,
    ) -> Moved:
        work = local.work(scale=tuple(self.root.double().square().tolist()))
        back = None if target is None else target / self.root
        return super().local_steps(self.root * x, work, stream, target=back, **more)

    @override
    def initial(self, stream: Stream) -> Vector:
        return self.behind.initial(stream) / self.root

    @override
    def flatten(self, model: Any) -> Vector:
        return self.behind.flatten(model) / self.root

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        if isinstance(vectors, _ScaledVectors) and vectors.kind not in STEEP:
            raise ValueError(f"In scaled coordinates no {vectors.kind} is remembered.")
        return super().remember(memory, index, vectors)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        assert isinstance(vectors, _ScaledVectors)
        factor = vectors.factor
        return super().inner_products(vectors, lambda rows: multiply(rows * factor))

    @override
    def curvature(self) -> Curvature | str:
        found, scale = self.behind.curvature(), self.root.double().square()
        if isinstance(found, str):
            return found
        least, most = (float(v) for v in (scale.min(), scale.max()))
        bounds = most * found.smoothness, least * found.strong_convexity
        return Curvature(*bounds, lowest=found.lowest)

    @override
    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        return "the coordinates are scaled"

    @override
    def hessian(self, x: Vector, weights: Weights) -> Vector | str:
        found = self.behind.hessian(self.root * x, weights)
        return found if isinstance(found, str) else self.root[:, None] * found * self.root

    @override
    def inexactness(self, x: Vector) -> Inexactness | str | None:
        found = self.behind.inexactness(self.root * x)
        if not isinstance(found, Inexactness):
            return found
        return replace(found, gradients=float(self.root.max()) * found.gradients)


def _in_data(name: str) -> Any:
    """Return a verb or question about the model in the coordinates of the data."""
    method = getattr(ClientsView, name)

    def ask(self: _Scaling, x: Vector, *given: Any, **named: Any) -> Any:
        return method(self, self.root * x, *given, **named)

    return ask


for _name in ("losses", "value_and_gradient", "parameters", "evaluate", "describe", "predictor",
              "own_parts", "evaluate_shared"):  # fmt: skip
    setattr(_Scaling, _name, _in_data(_name))
