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
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn
from typing_extensions import override

from equifed.algorithms.around import unwrap
from equifed.algorithms.fair_newton import FairNewton
from equifed.contract import AnyAlgorithm, Stream
from equifed.engines.simulate import Simulated
from equifed.models.architectures import build
from equifed.models.curvature import linear_layer
from equifed.models.losses import Weighted, binary_logistic, cross_entropy
from equifed.objectives.base import SaddleObjective
from equifed.runs.build import resolve_algorithm
from equifed.runs.catalogue import SECTIONS
from equifed.runs.schema import choose, resolve_choice, settings
from equifed.steps.metric import WHOLE
from equifed.training.history import History

Array = NDArray[Any]
Loss = Callable[[Tensor, Tensor], Tensor]
LINEAR = ("linear", "logistic")  # models with an intercept that can be left out
STUCK = 1e-5  # a decrement that rounding alone may leave
# Rounds of one objective after which rounding alone moves it, and relative rounding
STILL, EPSILON = 5, 1e-15


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
    """Stop when FairNewton's step, relative to the root of the objective, is short, or stuck."""

    tol: float
    proof: ClassVar[bool] = False

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        left = relative_decrement(history)
        if left is None:
            return None
        if left <= self.tol:
            return f"the step that is left is {left:.2g} of the root of the objective"
        values = np.array([r.objective for r in history.rounds[-STILL:]], dtype=np.float64)
        if len(values) == STILL and np.ptp(values) <= EPSILON * abs(values[-1]):
            return "no step lowers the objective any further in this precision"
        return None


def relative_decrement(history: History) -> float | None:
    """Return the last step of FairNewton over the root of the objective; None without one."""
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
    if left is not None:
        tol = max(tol, STUCK)
        reason = f"the step that is left is {left:.2g} of the root of the objective"
    else:
        proof = history.certificate()
        objective: Any = getattr(unwrap(algorithm), "objective", None)
        left = proof["gap"] if isinstance(proof, dict) else None
        if (left is None or left > tol) and _solves(engine, objective):
            # no certificate that is good enough: what a step of FairNewton gains
            solver = FairNewton(objective, "full")
            state = solver.init(engine, engine.flatten(history.parameters or {}))
            state = replace(state, weights=history.weights[history.rounds[-1].round])
            info = solver.round(state, engine, Stream(0))[1]
            left = info.numbers["decrement"] ** 2 / 2
        reason = f"the objective can still fall by about {left or 0.0:.2g}"
    if (left or 0.0) > tol:
        cure = "give more rounds, a larger tol, or features of similar scales (StandardScaler)"
        rounds = f"Training ended after {len(history.rounds)} rounds"
        message = f"{rounds} before it converged: {reason}; {cure}."
        warnings.warn(message, ConvergenceWarning, stacklevel=4)


def _solves(engine: Simulated, objective: Any) -> bool:
    """Tell whether FairNewton is for this model and objective."""
    linear = linear_layer(engine.model.module, engine.model.input_dimensions) is not None
    positive = isinstance(objective, SaddleObjective) and objective.l1_norm(2) <= 1 + 1e-9
    known = not (engine.remembers_own() or engine.adds_noise())
    return linear and positive and engine.model.size <= WHOLE["full"] and known


def build_module(
    model: str | nn.Module, features: int, outputs: int, fit_intercept: bool
) -> nn.Module:
    """Return the module that a model stands for."""
    linear = isinstance(model, str) and model in LINEAR
    if not (fit_intercept or linear):
        raise ValueError(f"fit_intercept=False is for the models {' and '.join(LINEAR)} alone.")
    if isinstance(model, str):
        params = {"bias": bool(fit_intercept)} if linear else {}
        return build(model, (features,), outputs, **params)
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
            return FairNewton(made, "full")
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
        resolved = resolve_choice("objectives", objective, "objective")
        objective = choose("objectives", resolved, "objective", counts)
    if not isinstance(objective, SaddleObjective):
        raise ValueError(
            f"objective must be one whose weights are a maximum, as average, cvar or chi-square, "
            f"got {objective!r:.80}; for others give an algorithm by name."
        )
    return objective
