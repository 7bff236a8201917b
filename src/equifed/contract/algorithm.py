"""What an algorithm is: a state, and a round that maps it to the next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from equifed.contract.arrays import Index, Losses, Vector, Weights, check_settings
from equifed.contract.clients import Clients
from equifed.contract.curvature import Curvature, CurvatureSum
from equifed.contract.streams import Stream

S = TypeVar("S")

COMMON = {
    "dual_step": "(0, inf)", "server_lr": "(0, inf)", "participation": "(0, 1]",
    "patience": "[1, inf]", "clients_per_round": "[1, inf]", "output": ("last", "average"),
}  # fmt: skip
"""What settings of these names may be in every algorithm."""

Touch = tuple[int, str, str]
"""A client, the kind of event ("guard": touched, "watch": seen only), and what was found."""


@dataclass(frozen=True, eq=False)
class Proof:
    """What a round hands out so that training can certify its model.

    All of it is about one model ``x``, all samples of all clients, and one objective. The training
    loop compares it with what the clients themselves answered, and makes the number: whoever
    changes losses or sums on the way to the algorithm loses the proof.

    Parameters
    ----------
    x : Vector
        The model that the round started from.
    losses, weights : array, shape (N,)
        The clients' losses at x, and feasible weights of ``objective``.
    gradient : Vector
        The sum of the clients' gradients at x by these weights.
    objective : SaddleObjective
        What is minimised.
    curvature : Curvature, optional
        What the user states of the losses, where the clients do not know it.
    bound : Bound, optional
        Another way in which the round found a value below which the objective never falls.
    final : bool
        Whether the objective is the one that the run is about (SCAFF-PD-IA starts with another).

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.FairNewton(ef.objectives.ChiSquare(rho=0.1))
    >>> state = fair.init(clients, clients.initial(Stream(0)))
    >>> state, info = fair.round(state, clients, Stream(0).at("round", 1))
    >>> info.proof.losses.round(2), info.proof.weights.round(1)
    (array([1.1, 1.1, 1.1]), array([0.3, 0.3, 0.4]))
    """

    x: Vector
    losses: Losses
    weights: Weights
    gradient: Vector
    objective: Any
    curvature: Curvature | None = None
    bound: Bound | None = None
    final: bool = True


@dataclass(frozen=True, eq=False)
class Bound:
    """A value that the objective never falls below, and the clients' answers that it rests on."""

    lower: float
    weights: Weights
    gradient: Vector
    summed: CurvatureSum


@dataclass(frozen=True)
class Info:
    """What a round reports: weights, numbers, notes, a proof.

    Parameters
    ----------
    weights : array, shape (N,)
        Weight that each client of the federation had in the round's update.
    losses : array, shape (N,), optional
        Client losses at the round's starting point, where the algorithm asked for them; the last
        known ones for clients that took no part.
    objective : float, optional
        Value of the objective at these losses.
    index : array of int, optional
        Clients that took part; None means all.
    numbers : dict of float
        Anything else worth a column, such as step sizes.
    notes : tuple of str
        What a reader of the run should know; each is recorded once, as an event.
    proof : Proof or str, optional
        What a certificate of the starting point is made of, or why there is none.
    touches : tuple of Touch
        What a guard did to clients, or what it would have done.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> fair = ef.AFL()
    >>> state = fair.init(clients, clients.initial(Stream(0)))
    >>> state, info = fair.round(state, clients, Stream(0).at("round", 1))
    >>> info.losses.round(2), info.weights.round(2)
    (array([1.1, 1.1, 1.1]), array([0.33, 0.33, 0.33]))
    """

    weights: Weights
    losses: Losses | None = None
    objective: float | None = None
    index: Index | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    proof: Proof | str | None = None
    touches: tuple[Touch, ...] = ()


class Algorithm(Protocol[S]):
    """State in, state out: a frozen dataclass with the model ``x``, sufficient to go on from.

    Nothing in the algorithm changes: the same state, clients and stream give the same result twice.
    """

    def init(self, clients: Clients, x: Vector) -> S:
        """Return the state before the first round."""

    def round(self, state: S, clients: Clients, stream: Stream) -> tuple[S, Info]:
        """Return the state after one round, and what there is to tell."""

    def model(self, state: S) -> Vector:
        """Return the model that training would give out now."""


AnyAlgorithm = Algorithm[Any]


class Federated:
    """Base class of algorithms: checks common settings and returns the last model.

    ``one_sum`` says that uniformly sampled clients move the model by one sum, which is told the
    weights of all (``vectors.step``): :class:`equifed.Remembering` may go around it. ``allowed``
    are the intervals or words of its own settings, ``equal_steps`` that all clients take as many.

    >>> import equifed as ef
    >>> ef.FedAvg(participation=2.0)
    Traceback (most recent call last):
    ValueError: FedAvg participation must lie in (0, 1], got 2.0.
    """

    one_sum: ClassVar[bool] = False
    allowed: ClassVar[dict[str, Any]] = {}
    equal_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given, who = vars(self), type(self).__name__
        check_settings(self, **{k: v for k, v in (COMMON | self.allowed).items() if k in given})
        if self.equal_steps and given["local"].steps is None:
            raise ValueError(f"{who} needs local.steps, the same number for every client.")
        if "dual" in given:
            given["dual"].check(given["objective"], who)

    def model(self, state: Any) -> Vector:
        """Return the last model, or the mean that the state keeps."""
        mean: Vector | None = getattr(state, "mean_x", None)
        return state.x if mean is None else mean


@runtime_checkable
class Wrappable(Protocol):
    """An algorithm that is usually run inside wrappers."""

    def wrapped(self) -> AnyAlgorithm:
        """Return the algorithm as training runs it."""


def as_run(algorithm: AnyAlgorithm, n: int | None = None) -> AnyAlgorithm:
    """Return an algorithm as training runs it, with what a default puts around it.

    What depends on the number ``n`` of clients is settled if that is given.
    """
    ran = algorithm.wrapped() if isinstance(algorithm, Wrappable) else algorithm
    return ran if n is None else _settle(ran, n)


def _settle(algorithm: Any, n: int) -> Any:
    """Return an algorithm for n clients, whatever is in it or around it."""
    inner = getattr(algorithm, "algorithm", None)
    if inner is not None and (settled := _settle(inner, n)) is not inner:
        algorithm = replace(algorithm, algorithm=settled)
    return algorithm.among(n) if hasattr(algorithm, "among") else algorithm


def layers(algorithm: Any) -> list[Any]:
    """Return an algorithm and all that are inside it, the outermost first."""
    inner = getattr(algorithm, "algorithm", None)
    return [algorithm, *(() if inner is None else layers(inner))]


@runtime_checkable
class GivesWeights(Protocol):
    """An algorithm that gives out weights of its own beside its model, such as means of both."""

    def weights(self, state: Any) -> Weights | None:
        """Return the weights that belong to ``model(state)``; None: the last ones."""
