"""Scaled: any first-order algorithm, in coordinates in which no column is steeper than others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from typing_extensions import override

from equifed.algorithms.around import WeightedWrapper, WrapperState, unwrap
from equifed.contract import AnyAlgorithm, Clients, Info, Losses, Proof, Stream, Vector, Weights
from equifed.contract.arrays import BlockMatrix, ClientVectors, Index, check_settings
from equifed.contract.clients import Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form, Inexactness
from equifed.contract.local import LocalSGD
from equifed.contract.views import ClientsView, VectorsView
from equifed.steps.metric import BLOCKS, factor_blocks
from equifed.steps.schedules import epsilon

Columns = Literal["equal", "uncorrelated"]

# Curvature of a column, relative to the largest, that it has at least; and what is added to that of
# every direction, relative to its columns', so that none is flat
LEAST, LIFT = 1e-12, 1e-10

# Vectors that grow where a coordinate is made smaller; models and steps shrink
STEEP = ("gradient", "mean_gradient", "memory")

HIDDEN = 2.0**-30  # what the rounding of a hidden sum may be


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Coordinates y with x = R y; the metric is P = R^-T R^-1."""

    root: BlockMatrix  # R

    @cached_property
    def back(self) -> BlockMatrix:
        """R^-1, which makes models and steps in y of those in x."""
        return replace(self.root, blocks=torch.linalg.inv(self.root.blocks))

    @cached_property
    def slope(self) -> BlockMatrix:
        """R', which makes gradients in y of those in x."""
        return replace(self.root, blocks=self.root.blocks.mT)

    @cached_property
    def slope_back(self) -> BlockMatrix:
        """R^-T, which makes gradients in x of those in y."""
        return replace(self.root, blocks=self.back.blocks.mT)

    @cached_property
    def gradient_metric(self) -> BlockMatrix:
        """P^-1 = R R': gradients g in x have the squared length g' P^-1 g in y."""
        return replace(self.root, blocks=self.root.blocks @ self.root.blocks.mT)

    @cached_property
    def step_metric(self) -> BlockMatrix:
        """P: steps s in x have the squared length s' P s in y."""
        return replace(self.root, blocks=self.back.blocks.mT @ self.back.blocks)

    @cached_property
    def span(self) -> tuple[float, float]:
        """The least and the largest eigenvalue of P^-1."""
        values = torch.linalg.eigvalsh(self.gradient_metric.blocks)
        return float(values.min()), float(values.max())


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, whose model is y; coordinates are None before the first round."""

    coordinates: Coordinates | None = None

    @property
    @override
    def x(self) -> Vector:
        return self.seen(self.inner.x)

    def seen(self, y: Vector) -> Vector:
        """Return a model in the coordinates of the data."""
        return y if self.coordinates is None else self.coordinates.root.multiply(y)

    @override
    def outward(self, core: Any) -> Any:
        return replace(core, x=self.seen(core.x))

    @override
    def inward(self, core: Any) -> Any:
        known = self.coordinates
        return core if known is None else replace(core, x=known.back.multiply(core.x))


@dataclass(frozen=True)
class Scaled(WeightedWrapper):
    r"""Runs an algorithm in coordinates in which the data's columns are equally steep.

    .. math:: x = R\,y, \qquad R^{-\top} R^{-1} = P \approx \frac1n \sum_i \nabla^2 f_i(0),
              \qquad \tilde f_i(y) = f_i(R\,y)

    The gradient of :math:`\tilde f_i` is :math:`R^\top \nabla f_i`, so a step is
    :math:`x \leftarrow x - \tau P^{-1} \sum_i \lambda_i \nabla f_i(x)`, and local steps are
    :math:`u \leftarrow u - \eta P^{-1} (\nabla f_i(u) - c_i + c)`. The algorithm sees the functions
    :math:`\tilde f_i` and nothing of P. Certificates are about x: sums of gradients transform back.

    P is one weighted sum, asked for once before the first round; hidden sums carry it. With
    ``columns="equal"`` it is the diagonal, which helps where columns differ in scale. With
    ``"uncorrelated"`` it is one matrix for each output (a bound of the Hessian where softmax mixes
    outputs), and :math:`R = D^{-1/2} C^{-\top}`, where :math:`D = \mathrm{diag}\,P` and
    :math:`C C^\top = D^{-1/2} P D^{-1/2} + \varepsilon I`: collinear columns are told apart, flat
    directions stay as flat as :math:`\varepsilon = 10^{-10}` (ten roundings in single precision).
    It cannot mend that clients differ. :class:`FairNewton` forms P again as weights change.

    Parameters
    ----------
    algorithm : Algorithm
        Any that takes first-order steps, without ``local.radius`` or ``local.onto``.
    columns : {"equal", "uncorrelated"}
        Equally steep, or uncorrelated as well, which sends q (q + 1)/2 numbers for an output of q
        parameters once to the server, and to clients in every round.

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
    columns: Columns = "equal"

    def __post_init__(self) -> None:
        check_settings(self, columns=get_args(Columns))
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
        known, inner = state.coordinates, state.inner
        if known is None:
            known = self._find_coordinates(clients, state.x)
            inner = self.algorithm.init(_Scaling(clients, known), known.back.multiply(state.x))
        after, info = self.algorithm.round(inner, _Scaling(clients, known), stream)
        proof = info.proof
        if isinstance(proof, Proof):
            stated = "curvature was stated inside Scaled; put Certified around it"
            x, gradient = known.root.multiply(proof.x), known.slope_back.multiply(proof.gradient)
            back = replace(proof, x=x, gradient=gradient, bound=None)
            proof = back if proof.curvature is None else stated
        return State(after, known), replace(info, proof=proof)

    def model(self, state: State) -> Vector:
        """Return the algorithm's model in the coordinates of the data."""
        return state.seen(self.algorithm.model(state.inner))

    def _find_coordinates(self, clients: Clients, x: Vector) -> Coordinates:
        """Return the coordinates, or refuse clients whose second derivatives are not known."""
        found = self._sum_curvature(clients, x)
        if isinstance(found, str):
            name = type(unwrap(self.algorithm)).__name__
            raise ValueError(f"Scaled cannot run here: {found}. Use {name} without it.")
        rounding = HIDDEN if clients.hides_sums else 0.0
        if self.columns == "uncorrelated":
            return Coordinates(_decorrelate(found, rounding, epsilon(x)))
        diagonal = found.blocks.new_zeros(len(x))
        diagonal[found.places] = found.blocks.expand(len(found.places), -1)
        every = torch.arange(len(x), device=x.device)[:, None]
        return Coordinates(BlockMatrix(_steepness(diagonal, rounding)[:, None, None], every))

    def _sum_curvature(self, clients: Clients, x: Vector) -> CurvatureSum | str:
        """Return the mean of the clients' curvature at 0, or why there is none."""
        equal, zero = np.full(len(clients.index), 1 / len(clients.index)), torch.zeros_like(x)
        if self.columns == "equal":
            return clients.curvature_sum(zero, equal, "diagonal")
        if len(x) ** 2 > BLOCKS:
            shape = clients.curvature_sum(zero, equal, "diagonal")
            if isinstance(shape, str):
                return shape
            outputs, size = shape.blocks.shape
            if outputs * size**2 > BLOCKS:
                return (
                    f"uncorrelated columns need {outputs} x {size} x {size} numbers, "
                    f"{8 * outputs * size**2 / 1e9:.1f} GB, more than {8 * BLOCKS / 1e9:.1f} GB; "
                    'columns="equal" needs a vector'
                )
        return clients.curvature_sum(zero, equal, "blocks")


def _steepness(diagonal: Vector, rounding: float) -> Vector:
    """Return by what columns are multiplied so that they are equally steep."""
    least = max(LEAST * float(diagonal.max()), rounding, 1e-300)
    return diagonal.clamp(min=least).rsqrt()


def _decorrelate(found: CurvatureSum, rounding: float, precision: float) -> BlockMatrix:
    """Return R with R' P R = 1, but for directions that are flat."""
    blocks = found.blocks
    if bool((blocks == blocks[:1]).all()):  # classes at 0
        blocks = blocks[:1]
    steep = _steepness(blocks.diagonal(dim1=-2, dim2=-1), rounding)
    related = steep[:, :, None] * blocks * steep[:, None, :]
    related.diagonal(dim1=-2, dim2=-1).fill_(1.0).add_(rounding * steep.square())
    factor = factor_blocks(related, max(LIFT, 10 * precision))
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    root = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
    return BlockMatrix(steep[:, :, None] * root, found.places)


class _ScaledVectors(VectorsView):
    """Vectors in y."""

    clients: _Scaling

    @property
    def matrix(self) -> BlockMatrix:
        """What makes them of those in x."""
        known = self.clients.coordinates
        return known.slope if self.kind in STEEP else known.back

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        return self.matrix.multiply(add(weights))

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        return self.matrix.multiply(self.behind.weighted_difference(old.behind, weights))

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        assert scale is None, "coordinates are scaled once"
        known = self.clients.coordinates
        metric = known.gradient_metric if self.kind in STEEP else known.step_metric
        return self.behind.squared_norms(metric)


class _Scaling(ClientsView):
    """Clients whose losses are functions of y."""

    Vectors = _ScaledVectors

    def __init__(self, behind: Clients, coordinates: Coordinates) -> None:
        super().__init__(behind)
        self.coordinates = coordinates

    @override
    def local_steps(
        self, x: Vector, local: LocalSGD, stream: Stream, *, target: Vector | None = None,
        **more: Any,
    ) -> Moved:  # fmt: skip
        known = self.coordinates
        work = local.work(scale=known.gradient_metric)
        back = None if target is None else known.slope_back.multiply(target)
        return super().local_steps(known.root.multiply(x), work, stream, target=back, **more)

    @override
    def initial(self, stream: Stream) -> Vector:
        return self.coordinates.back.multiply(self.behind.initial(stream))

    @override
    def flatten(self, model: Any) -> Vector:
        return self.coordinates.back.multiply(self.behind.flatten(model))

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
        matrix = vectors.matrix
        return super().inner_products(vectors, lambda rows: multiply(matrix.multiply(rows)))

    @override
    def curvature(self) -> Curvature | str:
        found, (least, most) = self.behind.curvature(), self.coordinates.span
        if isinstance(found, str):
            return found
        bounds = most * found.smoothness, least * found.strong_convexity
        return Curvature(*bounds, lowest=found.lowest)

    @override
    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        return "the coordinates are scaled"

    @override
    def inexactness(self, x: Vector) -> Inexactness | str | None:
        found = self.behind.inexactness(self.coordinates.root.multiply(x))
        if not isinstance(found, Inexactness):
            return found
        return replace(found, gradients=self.coordinates.span[1] ** 0.5 * found.gradients)


def _in_data(name: str) -> Any:
    """Return a verb or question about the model in the coordinates of the data."""
    method = getattr(ClientsView, name)

    def ask(self: _Scaling, x: Vector, *given: Any, **named: Any) -> Any:
        return method(self, self.coordinates.root.multiply(x), *given, **named)

    return ask


for _name in ("losses", "value_and_gradient", "parameters", "evaluate", "describe", "predictor",
              "own_parts", "evaluate_shared"):  # fmt: skip
    setattr(_Scaling, _name, _in_data(_name))
