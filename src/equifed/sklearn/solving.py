"""From the parameters of an estimator to module, algorithm and stop rule."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from equifed.algorithms.around import unwrap
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.streams import Stream
from equifed.engines.simulate import Simulated
from equifed.models.architectures import build
from equifed.models.curvature import linear_layer
from equifed.models.losses import binary_logistic, cross_entropy
from equifed.objectives.base import SaddleObjective
from equifed.runs.build import resolve_algorithm
from equifed.runs.catalogue import SECTIONS
from equifed.runs.schema import Checker, choose, settings
from equifed.sklearn.newton import Newton, State
from equifed.sklearn.rows import Array
from equifed.training.history import History

Loss = Callable[[Tensor, Tensor], Tensor]
NUMBER = float | int | np.floating | np.integer
LINEAR = ("linear", "logistic")
"""Models with an intercept that can be left out."""
MOST_PARAMETERS = 2000
"""Of a model that Newton's method is for: its matrix takes 32 MB, its inverse some seconds."""


@dataclass(frozen=True)
class SampleWeighted:
    """A loss whose targets have a last column: what the sample counts.

    >>> from equifed.models.losses import squared
    >>> SampleWeighted(squared, False)(torch.zeros(1, 1), torch.tensor([[3.0, 2.0]]))
    tensor([18.])
    """

    loss: Loss
    labels: bool  # the other column is a class
    __name__: ClassVar[str] = "with sample weights"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted loss of each sample."""
        values = targets[:, 0].long() if self.labels else targets[:, :-1]
        return targets[:, -1] * self.loss(outputs, values)


@dataclass(frozen=True)
class StopAtDecrement:
    """Stop Newton's method when the step that is left is as short as wanted, or none can be taken.

    The step is measured by the Hessian, relative to the root of the objective.
    """

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
    left, last = relative_decrement(history), history.rounds[-1]
    if left is None:
        missing = _estimate_gap(history, algorithm, engine, tol)
        if missing is not None and missing > tol:
            _warn(len(history.rounds), f"the objective can still fall by about {missing:.2g}")
        return
    stuck = last.numbers["step"] == 0
    if left > (1e5 * tol if stuck else tol):
        _warn(
            len(history.rounds), f"the step that is left is {left:.2g} of the root of the objective"
        )


def _estimate_gap(
    history: History, algorithm: AnyAlgorithm, engine: Simulated, tol: float
) -> float | None:
    """Return a certificate that is good enough, else what a step of Newton's method gains."""
    proof, objective = history.certificate(), getattr(unwrap(algorithm), "objective", None)
    if isinstance(proof, dict) and proof["gap"] <= tol:
        return proof["gap"]
    if history.parameters is None or not _solves(engine, objective):
        return proof["gap"] if isinstance(proof, dict) else None
    weights = history.weights[history.rounds[-1].round]
    state = State(engine.flatten(history.parameters), weights)
    _, info = Newton(objective).round(state, engine, Stream(0))  # type: ignore[arg-type]
    return info.numbers["decrement"] ** 2 / 2


def _solves(engine: Simulated, objective: object) -> bool:
    """Tell whether Newton's method is for this model and objective."""
    model, n = engine.model, len(engine.names)
    linear = linear_layer(model.module, model.input_dimensions) is not None
    positive = isinstance(objective, SaddleObjective) and objective.l1_norm(n) <= 1 + 1e-9
    small = model.size <= MOST_PARAMETERS and not engine.remembers_own()
    return linear and positive and small


def _warn(rounds: int, reason: str) -> None:
    cure = "give more rounds, a larger tol, or features of similar scales (StandardScaler)"
    message = f"Training ended after {rounds} rounds before it converged: {reason}; {cure}."
    warnings.warn(message, ConvergenceWarning, stacklevel=4)


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
    algorithm: str | Mapping[str, Any] | AnyAlgorithm,
    objective: str | Mapping[str, Any] | SaddleObjective,
    engine: Simulated,
    sizes: Array,
    seed: int,
) -> AnyAlgorithm:
    """Return the algorithm with its objective, for these clients."""
    counts: list[Any] = np.asarray(sizes).tolist()
    if not isinstance(algorithm, str | Mapping):
        if not isinstance(objective, str) or objective != "average":
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
    return _build_named(algorithm, objective, engine, counts, seed)


def _build_named(
    algorithm: str | Mapping[str, Any],
    objective: Any,
    engine: Simulated,
    counts: list[int],
    seed: int,
) -> AnyAlgorithm:
    """Return an algorithm of the catalogue, with a measured local step where it has one."""
    table = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    takes = "objective" in settings(SECTIONS["algorithms"][table.get("name", "")].load())
    plain = isinstance(objective, str) and objective == "average"
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
    if not isinstance(objective, str | Mapping):
        made = objective
    else:
        checker = Checker()
        resolved = checker.choice("objectives", objective, "objective")
        checker.raise_problems()
        made = choose("objectives", resolved, "objective", counts)
    if not isinstance(made, SaddleObjective):
        raise ValueError(
            f"objective must be one whose weights are a maximum, as average, cvar or chi-square, "
            f"got {made!r:.80}; for others give an algorithm by name."
        )
    return made
