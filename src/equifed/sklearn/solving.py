"""Newton's method, and from the parameters of an estimator to module, algorithm and stop rule."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn
from typing_extensions import override

from equifed.algorithms.around import unwrap
from equifed.contract.algorithm import AnyAlgorithm, Info, Proof
from equifed.contract.arrays import ClientVectors, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.streams import Stream
from equifed.engines.simulate import Simulated
from equifed.models.architectures import build
from equifed.models.curvature import linear_layer
from equifed.models.losses import Weighted, binary_logistic, cross_entropy
from equifed.models.newton import inverse_root
from equifed.objectives.base import SaddleObjective, check_saddle
from equifed.runs.build import resolve_algorithm
from equifed.runs.catalogue import SECTIONS
from equifed.runs.schema import Checker, choose, settings
from equifed.steps.dual_step import step_exactly
from equifed.training.history import History

Array = NDArray[Any]
Loss = Callable[[Tensor, Tensor], Tensor]
NUMBER = float | int | np.floating | np.integer
LINEAR = ("linear", "logistic")
"""Models with an intercept that can be left out."""
MOST_PARAMETERS = 2000
"""Of a model that Newton's method is for: its matrix takes 32 MB, its inverse some seconds."""
ARMIJO = 1e-4
"""Share of the decrease that the model of the objective promises and a step must keep."""
SHORTEST = 2.0**-40
"""Steps shorter than this are not tried: rounding decides about them."""
DUAL_STEPS = 5000
"""Most steps of the inner problem, which costs no exchange."""


@dataclass(frozen=True)
class State:
    """Model and weights."""

    x: Vector
    weights: Weights


@dataclass(frozen=True)
class Newton:
    r"""Newton's method on :math:`\min_x \max_{\lambda \in \Lambda} F(x, \lambda)`.

    .. math::

       H &= \textstyle\sum_i \lambda_i \nabla^2 f_i(x), \qquad G = (\nabla f_1(x), \ldots) \\
       \lambda &\leftarrow \arg\max_{\lambda \in \Lambda}\ \langle \lambda, l\rangle - \psi(\lambda)
                 - \tfrac12 |G \lambda|^2_{H^{-1}} \\
       x &\leftarrow x - t H^{-1} G \lambda

    The second line is the dual of :math:`\min_\Delta \Phi(l + G^\top \Delta) + \frac12
    \Delta^\top H \Delta` and has one variable per client; t is halved until the objective falls.
    With the average it is Newton's method (IRLS for logistic regression), which is as quick on
    features of very different scales. It asks for a d x d matrix and every client's gradient, so it
    is for data in one place and models of some hundred parameters; a federation that may not show
    these runs SCAFF-PD. Directions in which nothing is known (H is zero) are left alone.

    ``numbers`` of a round: ``decrement`` = the length of the step in the norm of H and of what the
    weights could still gain, zero at the solution; ``step`` = t, 0 if rounding allows no step.

    Parameters
    ----------
    objective : SaddleObjective
        With weights that are never negative and sum to one.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("synthetic-regression", samples=50), "linear", l2=1e-3)
    >>> history = ef.train(Newton(ef.objectives.ChiSquare(rho=0.1)), clients, rounds=15)
    >>> history.rounds[-1].numbers["decrement"] < 1e-3
    True
    """

    objective: SaddleObjective

    def __post_init__(self) -> None:
        check_saddle(self.objective, "Newton's method")
        if not self.objective.l1_norm(2) <= 1 + 1e-9:
            raise ValueError(
                "Newton's method needs weights >= 0 that sum to one, which "
                f"{self.objective!r} does not promise; use SCAFF-PD."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one step."""
        if len(clients.index) < len(clients.names):
            raise ValueError("Newton's method needs an answer of every client; use SCAFF-PD.")
        x = state.x
        losses, gradients = clients.value_and_gradient(x, stream.at("gradient"))
        summed = clients.curvature_sum(x, state.weights, "full")
        if isinstance(summed, str):
            raise ValueError(f"Newton's method needs second derivatives: {summed}; use SCAFF-PD.")
        root = inverse_root(summed.dense(len(x)).to(x.dtype))
        weights = self._weights(losses, gradients, root, state.weights)
        gradient = gradients.weighted_sum(weights)
        inside = root.T @ gradient
        direction, length = root @ inside, float(inside @ inside)
        value = self.objective.value(losses)
        slack = value - float(weights @ losses) + self.objective.penalty(weights)
        slack = slack if slack > 8 * np.finfo(np.float64).eps * abs(value) else 0.0
        promised = slack + 0.5 * length
        t = self._step(clients, x, direction, value, promised, stream)
        numbers = {"decrement": float(np.sqrt(2 * promised)), "step": t}
        proof = Proof(x, losses, weights, gradient, self.objective)
        info = Info(weights, losses, value, numbers=numbers, proof=proof)
        return State(x - t * direction if t else x, weights), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def _weights(
        self, losses: Losses, gradients: ClientVectors, root: Vector, start: Weights
    ) -> Weights:
        """Return the weights of the second line."""
        n = len(losses)
        inside = torch.stack([gradients.weighted_sum(row) for row in np.eye(n)]) @ root
        coupling = (inside @ inside.T).cpu().numpy()
        if n == 1 or not coupling.any():
            return start if n == 1 else self.objective.weights(losses)
        return step_exactly(self.objective, losses, coupling, start, 1.0, 0.0, DUAL_STEPS)[0]

    def _step(
        self, clients: Clients, x: Vector, direction: Vector, value: float, promised: float,
        stream: Stream,
    ) -> float:  # fmt: skip
        """Return how far to go: 1, 1/2, 1/4, ... until the objective falls as promised."""
        t, rounding = 1.0, 8 * np.finfo(np.float64).eps * abs(value)
        while t > SHORTEST and promised > 0:
            try:
                there = self.objective.value(clients.losses(x - t * direction, stream.at("step")))
                if there <= value - ARMIJO * t * promised + rounding:
                    return t
            except MissingClients:  # too far: the numbers overflowed
                pass
            t /= 2
        return 0.0


@dataclass(frozen=True)
class SampleWeighted(Weighted):
    """A loss whose targets have a last column: what the sample counts."""

    base: Loss
    labels: bool  # the other column is a class
    __name__: ClassVar[str] = "with sample weights"

    @override
    def counts(self, targets: Tensor) -> Tensor:
        return targets[:, -1]

    @override
    def values(self, targets: Tensor) -> Tensor:
        return targets[:, 0].long() if self.labels else targets[:, :-1]


@dataclass(frozen=True)
class StopAtDecrement:
    """Stop when Newton's step, relative to the root of the objective, is short, or none is left."""

    tol: float
    proof: ClassVar[bool] = False

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        left = relative_decrement(history)
        if left is None:
            return None
        if left <= self.tol:
            return f"the step that is left is {left:.2g} of the root of the objective"
        if history.rounds[-1].numbers["step"] == 0:
            return "no step lowers the objective any further in this precision"
        return None


def relative_decrement(history: History) -> float | None:
    """Return the last step of Newton's method over the root of the objective; None without one."""
    last, first = history.rounds[-1], history.rounds[0]
    if "decrement" not in last.numbers or last.objective is None or first.objective is None:
        return None
    scale = max(abs(last.objective), 1e-8 * abs(first.objective))  # a perfect fit has no loss left
    found = last.numbers["decrement"]
    return found / math.sqrt(scale) if scale > 0 else 0.0


def warn_if_unfinished(
    history: History, algorithm: AnyAlgorithm, engine: Simulated, tol: float
) -> None:
    """Warn where training ended before it had reached its tolerance."""
    left = relative_decrement(history)
    if left is None:
        left = _estimate_gap(history, algorithm, engine, tol) or 0.0
        reason = f"the objective can still fall by about {left:.2g}"
    else:
        tol = 1e5 * tol if history.rounds[-1].numbers["step"] == 0 else tol  # of one that is stuck
        reason = f"the step that is left is {left:.2g} of the root of the objective"
    if left > tol:
        cure = "give more rounds, a larger tol, or features of similar scales (StandardScaler)"
        rounds = f"Training ended after {len(history.rounds)} rounds"
        message = f"{rounds} before it converged: {reason}; {cure}."
        warnings.warn(message, ConvergenceWarning, stacklevel=4)


def _estimate_gap(
    history: History, algorithm: AnyAlgorithm, engine: Simulated, tol: float
) -> float | None:
    """Return a certificate that is good enough, else what a step of Newton's method gains."""
    proof, objective = history.certificate(), getattr(unwrap(algorithm), "objective", None)
    gap = proof["gap"] if isinstance(proof, dict) else None
    solves = history.parameters is not None and _solves(engine, objective)
    if (gap is not None and gap <= tol) or not solves or history.parameters is None:
        return gap
    weights = history.weights[history.rounds[-1].round]
    state = State(engine.flatten(history.parameters), weights)
    _, info = Newton(objective).round(state, engine, Stream(0))  # type: ignore[arg-type]
    return info.numbers["decrement"] ** 2 / 2


def _solves(engine: Simulated, objective: object) -> bool:
    """Tell whether Newton's method is for this model and objective."""
    model, n = engine.model, len(engine.names)
    linear = linear_layer(model.module, model.input_dimensions) is not None
    positive = isinstance(objective, SaddleObjective) and objective.l1_norm(n) <= 1 + 1e-9
    known = not (engine.remembers_own() or engine.adds_noise())
    small = model.size <= MOST_PARAMETERS and known
    return linear and positive and small


def check_parameters(l2: Any, rounds: Any, tol: Any) -> None:
    """Refuse numbers that mean nothing; by scikit-learn's custom only when fitting."""
    if isinstance(l2, bool) or not isinstance(l2, NUMBER) or not 0 <= l2 < math.inf:
        raise ValueError(f"l2 must be a number of at least 0, got {l2!r}.")
    if isinstance(rounds, bool) or not isinstance(rounds, int | np.integer) or rounds < 1:
        raise ValueError(f"rounds must be a whole number of at least 1, got {rounds!r}.")
    if isinstance(tol, bool) or not isinstance(tol, NUMBER) or not 0 < tol < math.inf:
        raise ValueError(f"tol must be a number above 0, got {tol!r}.")


def build_module(
    model: str | nn.Module, features: int, outputs: int, fit_intercept: bool
) -> nn.Module:
    """Return the module that a model stands for."""
    if isinstance(model, str) and model in LINEAR:
        return build(model, (features,), outputs, bias=bool(fit_intercept))
    if not fit_intercept:
        raise ValueError(f"fit_intercept=False is for the models {' and '.join(LINEAR)} alone.")
    if isinstance(model, str):
        return build(model, (features,), outputs)
    if isinstance(model, nn.Module):
        return model
    raise ValueError(f"model is a name or a torch module, got {model!r:.60}.")


def choose_scores(model: str | nn.Module, X: Array, classes: int) -> tuple[Loss, int]:
    """Return loss and outputs for so many classes: one for two, unless a module gives both."""
    outputs = 1 if classes == 2 else classes
    if isinstance(model, nn.Module):
        with torch.no_grad():
            outputs = copy.deepcopy(model).double().eval()(torch.tensor(X[:2]))[0].numel()
        if outputs != classes and (outputs, classes) != (1, 2):
            raise ValueError(f"The module gives {outputs} scores for {classes} classes.")
    return (binary_logistic if outputs == 1 else cross_entropy), outputs


def build_algorithm(
    algorithm: str | Mapping[str, Any] | AnyAlgorithm, objective: Any, engine: Simulated,
    sizes: Array, seed: int,
) -> AnyAlgorithm:  # fmt: skip
    """Return the algorithm with its objective, for these clients."""
    counts: list[Any] = np.asarray(sizes).tolist()
    plain = isinstance(objective, str) and objective == "average"
    if not isinstance(algorithm, str | Mapping):
        if not plain:
            raise ValueError(
                "An algorithm that is an object has an objective of its own: leave out "
                f"objective={objective!r:.60}, or give the algorithm by name."
            )
        return algorithm
    if algorithm == "auto":
        made = _build_objective(objective, counts)
        if _solves(engine, made):
            return Newton(made)
        linear = not isinstance(engine.curvature(), str)
        algorithm = "fair-newton" if linear and made.l1_norm(2) <= 1 + 1e-9 else "scaff-pd"
    table = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    takes = "objective" in settings(SECTIONS["algorithms"][table.get("name", "")].load())
    if not takes and not plain:
        raise ValueError(
            f"The algorithm {table['name']} has no objective to choose; leave out "
            f"objective={objective!r:.60}, or take scaff-pd."
        )
    named = isinstance(objective, str | Mapping)
    if takes:
        table = {"objective": objective if named else "average", **table}
    built: Any = resolve_algorithm(table, engine, seed, counts)
    return built if named else replace(built, objective=objective)  # type: ignore[no-any-return]


def _build_objective(objective: Any, counts: list[int]) -> SaddleObjective:
    if isinstance(objective, str | Mapping):
        checker = Checker()
        resolved = checker.choice("objectives", objective, "objective")
        checker.raise_problems()
        objective = choose("objectives", resolved, "objective", counts)
    if not isinstance(objective, SaddleObjective):
        raise ValueError(
            f"objective must be one whose weights are a maximum, as average, cvar or chi-square, "
            f"got {objective!r:.80}; for others give an algorithm by name."
        )
    return objective
