"""What an objective is: a function of the client losses, and its exact dual step.

Objectives are frozen values that hold no data: the number of clients n is the length of the
losses, of the point, or of the prior that was given. Arrays are NumPy in float64, whatever the
model's precision. A new objective derives from one of the classes here and adds what is its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import wraps
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.projections import Permutahedron, project_capped_simplex, tilt

ARGUMENTS = {"value": "losses", "weights": "losses", "penalty": "weights", "prox": "point"}
"""Methods of objectives, and the vector that each takes: one finite number per client."""


def _check_first(method: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """Return a method that checks what it is given."""

    @wraps(method)
    def checked(self: Objective, *given: Any, **named: Any) -> Any:
        values, *step = given or (named.pop(argument),)
        more = {name: check_step(value) for name, value in named.items()}
        return method(self, check_vector(values, argument), *map(check_step, step), **more)

    return checked


class Objective(ABC):
    """A function of the losses that training minimises.

    Losses are minimised, weights maximise. ``weights`` is a (sub)gradient of ``value``, so that a
    gradient step of the objective is a gradient step of the weighted sum of client losses. What a
    subclass writes is asked with vectors of finite numbers and steps >= 0 alone: others are refused
    before.

    >>> class SumOfSquares(Objective):
    ...     def value(self, losses):
    ...         return float(losses @ losses) / 2
    ...     def weights(self, losses):
    ...         return losses
    >>> SumOfSquares().value(np.array([3.0, 4.0]))
    12.5
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for method in ARGUMENTS.keys() & vars(cls).keys():
            setattr(cls, method, _check_first(vars(cls)[method], ARGUMENTS[method]))

    @abstractmethod
    def value(self, losses: Losses) -> float:
        """Return Phi(l), which the server minimises; nondecreasing in every loss unless signed."""

    @abstractmethod
    def weights(self, losses: Losses) -> Weights:
        """Return a (sub)gradient of Phi at ``losses``; equal losses are treated alike."""


class SaddleObjective(Objective):
    """An objective of the form Phi(l) = max over w in W of <w, l> - psi(w).

    ``weights`` is the maximiser. The defaults are those of a set W within the simplex that holds
    the uniform weights, without a penalty psi and without an entropic step.

    >>> from equifed.objectives import CVaR
    >>> worst_half, losses = CVaR(tail=0.5), np.array([1.0, 2.0, 3.0, 4.0])
    >>> worst_half.value(losses), worst_half.weights(losses)
    (3.5, array([0. , 0. , 0.5, 0.5]))
    """

    @abstractmethod
    def prox(self, point: Weights, step: float) -> Weights:
        """Return argmin over w in W of step * psi(w) + |w - point|^2 / 2, exactly."""

    @override
    def value(self, losses: Losses) -> float:
        weights = self.weights(losses)
        return float(weights @ losses) - self.penalty(weights)

    def penalty(self, weights: Weights) -> float:
        """Return psi(w), finite for every w in W; membership of W is not checked."""
        return 0.0

    def start(self, n: int) -> Weights:
        """Return a feasible first dual point for n clients: uniform, or the prior."""
        return np.full(n, 1.0 / n)

    def strong_convexity(self, n: int) -> float:
        """Return the modulus mu_lambda of psi in the Euclidean norm; 0 where it has none."""
        return 0.0

    def l1_norm(self, n: int) -> float:
        """Return |W|_1 = max over w in W of |w|_1.

        1 on the simplex, more for signed weights; infinite where the sum of the weights is free
        (:class:`FreeSum`).
        """
        return 1.0

    def total(self, weights: Weights) -> float:
        """Return the sum of the weights where it is free, and 1 where it is 1.

        Algorithms step along the client losses by ``weights / total``, so that their steps of the
        model are as long on every set.
        """
        free = np.isinf(self.l1_norm(weights.size))
        return (float(weights.sum()) or 1.0) if free else 1.0

    def penalty_gradient(self, weights: Weights) -> Weights:
        """Return the gradient of psi, for penalties that have one everywhere on W."""
        if type(self).penalty is SaddleObjective.penalty:
            return np.zeros_like(weights)
        raise ValueError(f"the penalty of {self!r} has no gradient everywhere; use its prox.")

    @property
    def is_smooth(self) -> bool:
        """Whether psi has a gradient everywhere on W: it is zero, or its gradient is written."""
        mine, here = type(self), SaddleObjective
        return mine.penalty is here.penalty or mine.penalty_gradient is not here.penalty_gradient

    @property
    def is_entropic(self) -> bool:
        """Whether the objective has an entropic step (:meth:`mirror`)."""
        return type(self).mirror is not SaddleObjective.mirror

    @property
    def unfit(self) -> str | None:
        """Why this is no maximum over weights for some of its settings; mostly None."""
        return None

    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        """Return argmax over w in W of step (<w, losses> - psi(w)) - KL(w, weights), or refuse."""
        raise ValueError(
            f"{type(self).__name__} has no exact entropic step, which needs weights >= 0 "
            "under caps and no penalty but KL or chi-square; use the Euclidean step."
        )


class SymmetricSet(SaddleObjective):
    """A set W that is a translated permutahedron, with psi = 0; can enter relative fairness.

    >>> from equifed.objectives import CVaR, RelativeFairness
    >>> losses = np.array([1.0, 2.0, 4.0])
    >>> RelativeFairness(phi=0.5, upper=CVaR(tail=0.3), lower=CVaR(tail=0.3)).value(losses)
    7.0
    """

    @abstractmethod
    def permutahedron(self, n: int) -> Permutahedron:
        """Return W for n clients."""

    @override
    def value(self, losses: Losses) -> float:
        return self.permutahedron(losses.size).value(losses)

    @override
    def weights(self, losses: Losses) -> Weights:
        return self.permutahedron(losses.size).maximiser(losses)

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self.permutahedron(point.size).project(point)


class CappedSet(SaddleObjective):
    """A set W = {0 <= w_i <= caps_i, sum of w = 1}, with psi = 0; has entropic steps.

    >>> from equifed.objectives import CVaR
    >>> CVaR(tail=0.5).caps(4)  # no client has more than half of the weight
    array([0.5, 0.5, 0.5, 0.5])
    """

    @abstractmethod
    def caps(self, n: int) -> Weights:
        """Return the largest weight that each client may get."""

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return project_capped_simplex(point, self.caps(point.size))

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        return tilt(weights, losses, step, self.caps(weights.size))


class FreeSum(SaddleObjective):
    """A set W of weights >= 0 whose sum is free: a sum over clients of functions of their losses.

    Weights are marginal prices of the losses. Algorithms divide them by their ``total`` where they
    stand for a mix of clients (local steps, draws).

    >>> from equifed.objectives import QFair
    >>> QFair(q=1.0).weights(np.array([1.0, 2.0, 3.0]))  # prices of the losses
    array([1., 2., 3.])
    """

    @override
    def l1_norm(self, n: int) -> float:
        return float("inf")


class WithPrior(SaddleObjective):
    """An objective with a ``prior``, which is where the weights start.

    Frozen dataclasses that derive from it have it among their fields: positive numbers, one per
    client, that are normalised to sum one; None is uniform.
    """

    prior: tuple[float, ...] | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prior", check_numbers(self.prior, self._named))

    @override
    def start(self, n: int) -> Weights:
        return normalise(self.prior, n, self._named)

    @property
    def _named(self) -> str:
        return f"{type(self).__name__} prior"


class Relative:
    """What has a strength in the unit of the loss, given as a multiple of ``scale``, a field.

    None is 1, until a run begins: it takes the federation's loss scale instead, the mean loss of
    the clients under a model without features, and records it. So the same strength means the same
    in every unit of the loss. ``scale=1.0`` is the unit of the loss itself, as in the papers.

    >>> from equifed.objectives import KL
    >>> losses = np.array([1.0, 2.0])
    >>> euros, cents = KL(strength=0.5, scale=1.0), KL(strength=0.5, scale=100.0)
    >>> bool(np.allclose(euros.weights(losses), cents.weights(100 * losses)))
    True
    """

    scale: float | None

    @property
    def unit(self) -> float:
        """The loss that counts as one."""
        return 1.0 if self.scale is None else self.scale

    @property
    def lacks_scale(self) -> bool:
        """Whether there is a strength and nothing that it is a multiple of."""
        return self.scale is None and getattr(self, "rho", 1.0) != 0


class PriorPenalty(Relative, WithPrior):
    """A penalty psi on the simplex that charges ``strength``, a field, for leaving the prior.

    >>> from equifed.objectives import KL
    >>> KL(strength=1.0, prior=(3.0, 1.0)).weights(np.zeros(2))
    array([0.75, 0.25])
    """

    strength: float

    def __post_init__(self) -> None:
        check_settings(self, strength="(0, inf)", scale="(0, inf)")
        super().__post_init__()

    @property
    def price(self) -> float:
        """The strength in the unit of the loss."""
        return self.strength * self.unit


def _ask_inner(name: str) -> Any:
    """Return a method that asks the objective underneath."""

    def ask(self: Adapted, *given: Any, **named: Any) -> Any:
        return methodcaller(name, *given, **named)(self.inner)

    return ask


class Adapted(SaddleObjective):
    """An objective made from another saddle objective, which answers what is not overridden."""

    base: Any

    @property
    def inner(self) -> SaddleObjective:
        """The objective underneath: ``base``, a field, if nothing else is written."""
        return self.base  # type: ignore[no-any-return]

    weights: Any = _ask_inner("weights")
    penalty: Any = _ask_inner("penalty")
    prox: Any = _ask_inner("prox")
    penalty_gradient: Any = _ask_inner("penalty_gradient")
    start: Any = _ask_inner("start")
    strong_convexity: Any = _ask_inner("strong_convexity")
    l1_norm: Any = _ask_inner("l1_norm")
    is_smooth: Any = property(attrgetter("inner.is_smooth"))
    is_entropic: Any = property(attrgetter("inner.is_entropic"))
    unfit: Any = property(attrgetter("inner.unfit"))

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        if not self.is_entropic:
            return super().mirror(weights, losses, step)  # refuses, by this objective's name
        return self.inner.mirror(weights, losses, step)


_SHOWN = 5


def check_vector(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return ``values`` as a float64 vector, or say at which positions they are not numbers.

    >>> check_vector([1.0, float("nan"), 3.0], "losses")
    Traceback (most recent call last):
    ...
    ValueError: losses must be finite, got nan at position 1; leave those clients out.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a vector, one number per client, got {array.shape}.")
    if not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array))
        seen = ", ".join(f"{array[i]} at position {i}" for i in bad[:_SHOWN])
        more = f" and {bad.size - _SHOWN} more" if bad.size > _SHOWN else ""
        raise ValueError(f"{name} must be finite, got {seen}{more}; leave those clients out.")
    return array


def check_saddle(objective: object, who: str) -> None:
    """Refuse an objective that has no weights to step on, by its name and with the cure.

    >>> from equifed.objectives import Tilted
    >>> check_saddle(Tilted(-1.0), "AFL")
    Traceback (most recent call last):
    ...
    ValueError: AFL cannot minimise Tilted(tilt=-1.0, prior=None, scale=None): a negative tilt
    favours small losses, which is not a maximum over weights; use the algorithm tilted-erm.
    """
    if not isinstance(objective, SaddleObjective):
        raise ValueError(
            f"{who} needs an objective that is a maximum over weights (a SaddleObjective), got "
            f"{objective!r}."
        )
    if objective.unfit is not None:
        raise ValueError(f"{who} cannot minimise {objective!r}: {objective.unfit}.")


def check_step(step: float) -> float:
    """Return ``step`` if it is a finite number >= 0."""
    if not 0 <= step < np.inf:
        raise ValueError(f"step must be a finite number >= 0, got {step}.")
    return float(step)


def check_numbers(
    numbers: Iterable[float] | None, name: str, *, zeros: bool = False
) -> tuple[float, ...] | None:
    """Return ``numbers`` as a tuple of finite positive numbers (None stays None)."""
    if numbers is None:
        return None
    array = check_vector(list(numbers), name)
    if (array < 0).any() or (not zeros and (array == 0).any()) or not array.any():
        raise ValueError(
            f"{name} needs {'nonnegative' if zeros else 'positive'} numbers, one per client, "
            f"got a smallest of {array.min():g} and a largest of {array.max():g}."
        )
    return tuple(float(a) for a in array)


def normalise(numbers: tuple[float, ...] | None, n: int, name: str) -> Weights:
    """Return ``numbers`` normalised to sum one; the uniform distribution for None."""
    if numbers is None:
        return np.full(n, 1.0 / n)
    share = check_length(numbers, n, name) / max(numbers)  # first: sums of 1e308 overflow
    return np.asarray(share / share.sum())


def check_length(numbers: tuple[float, ...], n: int, name: str) -> NDArray[np.float64]:
    """Return the numbers of n clients, or refuse more or fewer."""
    if len(numbers) != n:
        raise ValueError(f"{name}: {len(numbers)} entries for {n} clients; give one per client.")
    return np.asarray(numbers, dtype=np.float64)
