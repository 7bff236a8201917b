"""The contract between algorithms and engines: four verbs, and questions that may be declined.

A verb either answers for every client it was asked about or raises :class:`MissingClients`; nobody
is averaged away. The training loop then repeats the round with ``clients.subset(those left)``, and
an algorithm sees who takes part in ``clients.index``, absent or not sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from equifed.contract.arrays import ClientVectors, Index, Losses, Vector, Weights, multiply_rows
from equifed.contract.curvature import Curvature, CurvatureSum, Form, Inexactness
from equifed.contract.evaluation import SPLITS, Details, Evaluation, SampleMetric
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream

T = TypeVar("T")

NO_OWN = "these clients have no own parts here"
NO_MEMORY = "these clients keep no vectors from round to round; use an algorithm without a memory"


@dataclass(frozen=True)
class Moved:
    """The result of one call of ``local_steps``.

    Parameters
    ----------
    displacement : ClientVectors
        x - u_i, from the server's model to where the client ended.
    steps : array of int, shape (n,)
        Local steps each client took.
    snapshot, average, mean_gradient, multiplier : ClientVectors, optional
        The iterate after ``snapshot`` steps, the mean of the iterates, the mean of the plain
        gradients, the correction of the next round; each present if the local work asked for it.
    thresholds : array, shape (n,), optional
        Where each client's copy of the hinge's threshold ended.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> x = clients.initial(Stream(0))
    >>> moved = clients.local_steps(x, ef.LocalSGD(lr=0.1, steps=5), Stream(0))
    >>> moved.steps, moved.displacement.squared_norms().round(1)
    (array([5, 5, 5]), array([0.9, 1.1, 0.9]))
    """

    displacement: ClientVectors
    steps: Index
    snapshot: ClientVectors | None = None
    average: ClientVectors | None = None
    mean_gradient: ClientVectors | None = None
    multiplier: ClientVectors | None = None
    thresholds: Losses | None = None


class Group(Protocol):
    """The processes that share a run; every method is called by all of them.

    What could differ (the clock, a file) is settled by the first one, who alone writes.
    """

    rank: int
    size: int

    def from_first(self, text: str) -> str:
        """Return the first process's text in all of them."""

    def wait(self) -> None:
        """Return when all processes have come here."""


class Clients(ABC):
    """The clients that take part, as an engine presents them.

    An engine implements what is abstract: who takes part, what a model is, and the four verbs. The
    questions after them decline by default; an engine answers those that it can.
    ``equifed.testing.check_engine`` checks all of it against the loop engine.

    Attributes
    ----------
    traffic : Traffic
        Ledger shared by all subsets of one engine.
    engine : str
        Its name in the catalogue.
    choice : str, optional
        Why this engine, where it was chosen by measuring.
    model : FlatModel, optional
        Module and loss, where the engine holds them: for runs, not for algorithms.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic")
    >>> x = clients.initial(Stream(0))
    >>> clients.subset([0, 2]).losses(x, Stream(0)).round(2)  # log 3: nothing is known of 3 classes
    array([1.1, 1.1])
    """

    traffic: Traffic
    engine: str = ""
    choice: str | None = None
    model: Any = None

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of all clients of the federation, taking part or not."""

    @property
    @abstractmethod
    def index(self) -> Index:
        """Positions in ``names`` of those that take part, increasing; per-client arrays follow."""

    @property
    @abstractmethod
    def sizes(self) -> Index:
        """Training samples of those that take part."""

    @abstractmethod
    def initial(self, stream: Stream) -> Vector:
        """Return a freshly initialised model."""

    @abstractmethod
    def flatten(self, model: Any) -> Vector:
        """Return a vector, a module or its parameters by name as the vector that algorithms see."""

    @abstractmethod
    def parameters(self, x: Vector) -> dict[str, Vector]:
        """Return the model's parameters by name and in their shapes."""

    # -- the four verbs ---------------------------------------------------------------------------

    @abstractmethod
    def losses(self, x: Vector, stream: Stream, batch_size: int | None = None) -> Losses:
        """Return f_i(x) on all of each client's samples, or on one minibatch."""

    @abstractmethod
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return f_i(x) and a handle for the gradients at the shared model x, in one exchange."""

    @abstractmethod
    def local_steps(
        self,
        x: Vector,
        local: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        """Let every client do ``local.work()`` from x; ``slopes`` are the hinge's factors, (n,).

        ``control`` and ``target`` are the SCAFFOLD-type correction (both or none). Vectors that are
        not finite raise MissingClients here, or, where a GPU still computes them, at first use.
        """

    @abstractmethod
    def subset(self, index: Iterable[int] | Index) -> Self:
        """Return the same engine restricted to clients ``index``: positions in ``names``."""

    def require_finite(self, values: Losses, what: str) -> Losses:
        """Return numbers of those who take part; MissingClients names those without a number."""
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            reasons = {int(self.index[k]): f"{what} is {values[k]}" for k in bad}
            raise MissingClients(reasons, self.names)
        return values

    # -- memories of an algorithm -----------------------------------------------------------------

    def can_remember(self) -> bool:
        """Tell whether clients keep vectors from round to round: an engine with the next two."""
        return type(self).remember is not Clients.remember

    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        """Return what clients ``index`` keep of a memory of all clients; zeros if it is None."""
        raise TypeError(NO_MEMORY)

    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        """Return the memory of all clients after those in ``index`` replaced their vector."""
        raise TypeError(NO_MEMORY)

    # -- questions of algorithms ------------------------------------------------------------------

    @property
    def hides_sums(self) -> bool:
        """Whether the server sees sums of the clients' vectors alone."""
        return False

    def adds_noise(self) -> bool:
        """Tell whether answers carry noise for privacy, so that two of them are no slope."""
        return False

    def expect(self, algorithm: Any, rounds: int, stream: Stream, done: int = 0) -> str | None:
        """Hear what will run, before its first question, and say what it costs in privacy.

        ``done`` rounds were played before.
        """
        return None

    def account(self) -> list[dict[str, Any]]:
        """Return what clients under privacy have spent, a ledger each; none without privacy."""
        return []

    def curvature(self) -> Curvature | str:
        """Return bounds on the curvature of all clients' losses, or why none are known."""
        return "this engine knows no bounds on the curvature"

    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        """Return the sum of the clients' Hessians at x by ``weights`` >= 0, or why there is none.

        One exchange. ``thin`` of shape (q, r) asks for the product of every block with it alone,
        or, in the form "projected", with it on both sides.
        """
        return "this engine does not add up second derivatives"

    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        """Return <v_i, P^-1 v_j> for all pairs of clients, shape (n, n), or why they stay unknown.

        ``multiply`` makes them of the rows of a matrix. Where sums are hidden, nobody may see this.
        """
        return "this engine does not show inner products of vectors"

    def inexactness(self, x: Vector) -> Inexactness | str | None:
        """Return how far answers at x may be off; None if not at all, a reason if unknown."""
        return None

    # -- questions of training --------------------------------------------------------------------

    def evaluate(
        self, x: Vector, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        """Return what x is worth to all clients; splits that nobody has are left out."""
        return []

    def describe(self, x: Vector, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        """Return limits, groups and calibration on one split; None: no samples of it are known."""
        return None

    def feature_scales(self) -> Losses | str | None:
        """Return every feature's deviation; None: no vectors; a reason: not here."""
        return "the samples are not here"

    def predictor(self, x: Vector) -> Any:
        """Return what predicts for new samples with the model x (a ``Predictor``), or a reason."""
        return "the module is not here"

    def origin(self) -> dict[str, Any]:
        """Return model, loss, precision, and name, checksum, source and preparation of the data."""
        return {}

    def take_notes(self) -> list[tuple[str, str]]:
        """Return kind and reason of the events to tell of the rounds since the last call."""
        return []

    def group(self) -> Group | None:
        """Return the processes that share these clients; None: this one has them alone."""
        return None

    # -- own parts: parameters that every client keeps for itself ---------------------------------

    def describe_own(self) -> str | None:
        """Say what the own parts are and how they are found; None: there are none."""
        return None

    def warn_of_own(self) -> str | None:
        """Say for which clients own parts rest on their penalty alone; None: for nobody."""
        return None

    def remembers_own(self) -> bool:
        """Tell whether a state must hold own parts: x alone does not give them."""
        return False

    def needs_all_samples(self) -> bool:
        """Tell whether losses are those of all samples, so that minibatches are refused."""
        return False

    def own_parts(self, x: Vector) -> Vector | None:
        """Return the own part that every client uses with x, (N, p); None: there are none here."""
        return None

    def with_own(self, own: Vector) -> Self:
        """Return the same clients with these own parts, one row per client of the federation."""
        raise TypeError(NO_OWN)

    def own_after(self) -> Vector:
        """Return all own parts after the last local steps; who took none keeps its own."""
        raise TypeError(NO_OWN)

    def own_parameters(self, own: Vector) -> dict[str, Vector]:
        """Return own parts by the parameters' names, in their shapes, clients first."""
        raise TypeError(NO_OWN)

    def evaluate_shared(self, x: Vector, splits: Sequence[str]) -> list[Evaluation]:
        """Return the per-client numbers of x with the mean of all own parts, for everybody."""
        return []


def inner_products(
    clients: Clients,
    vectors: ClientVectors,
    who: str,
    multiply: Callable[[Vector], Vector] = multiply_rows,
) -> Losses:
    """Return the matrix of <v_i, v_j>, or refuse for an algorithm where an engine declines.

    It gives the vectors up to a rotation, so a federation that hides vectors declines.
    """
    found = clients.inner_products(vectors, multiply)
    if isinstance(found, str):
        raise TypeError(
            f"{who} needs the inner products of the clients' updates, which "
            f"{type(clients).__name__} does not give: {found}. Use another algorithm here, or the "
            "loop or stacked engine."
        )
    return found


class MissingClients(RuntimeError):
    """Clients that did not give a usable answer.

    Parameters
    ----------
    reasons : dict
        Position of each such client in the federation, and what was wrong with its answer.
    names : sequence of str
        Names of all clients.

    Examples
    --------
    >>> raise MissingClients({1: "its loss is nan"}, names=("north", "south"))
    Traceback (most recent call last):
    equifed.contract.clients.MissingClients: 1 client(s) missing: south: its loss is nan
    """

    def __init__(self, reasons: dict[int, str], names: Sequence[str]) -> None:
        self.reasons = dict(sorted(reasons.items()))
        self.names = names
        listed = [f"{names[i]}: {reason}" for i, reason in self.reasons.items()]
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        super().__init__(f"{len(listed)} client(s) missing: " + "; ".join(listed[:5]) + more)


def ask_those_present(clients: Clients, ask: Callable[[Clients], T]) -> T:
    """Ask, and ask again without those who give no usable answer, until the others all do."""
    while True:
        try:
            return ask(clients)
        except MissingClients as lost:
            left = [int(i) for i in clients.index if int(i) not in lost.reasons]
            if not left:
                raise
            clients = clients.subset(left)


@dataclass
class Traffic:
    """Bytes that went over the wire per client, or would have; a loss costs eight.

    >>> ledger = Traffic(2)
    >>> ledger.record(np.array([1]), down=40, up=8)
    >>> ledger.totals()
    (1, 8, 40)
    """

    clients: int
    exchanges: int = 0
    up: Index = field(init=False)
    down: Index = field(init=False)

    def __post_init__(self) -> None:
        self.up = np.zeros(self.clients, dtype=np.int64)
        self.down = np.zeros(self.clients, dtype=np.int64)

    def record(self, index: Index, *, down: int, up: int) -> None:
        """Book one exchange with clients ``index``: bytes down to each and up from each."""
        self.exchanges += 1
        self.down[index] += down
        self.up[index] += up

    def totals(self) -> tuple[int, int, int]:
        """Return exchanges, bytes up and bytes down so far."""
        return self.exchanges, int(self.up.sum()), int(self.down.sum())


def check_index(index: Iterable[int] | Index, n: int) -> Index:
    """Return a sorted index of clients without repeats, or raise."""
    out: Index = np.asarray(index, dtype=np.int64)
    if out.ndim != 1 or len(out) == 0:
        raise ValueError(f"A subset of clients needs at least one position, got shape {out.shape}.")
    if out.min() < 0 or out.max() >= n:
        raise ValueError(f"Client positions must lie in 0..{n - 1}, got {out.min()}..{out.max()}.")
    ordered = np.unique(out)
    if len(ordered) != len(out):
        raise ValueError(
            "A subset of clients has no repeats; give a client a larger weight instead."
        )
    return ordered
