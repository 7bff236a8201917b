"""The contract between algorithms and engines: four verbs, and handles for what clients keep.

An algorithm sees the clients through :class:`Clients` alone. Per-client numbers (losses) come back
as NumPy arrays; per-client vectors (gradients, updates) stay behind a :class:`ClientVectors` handle
that gives out weighted sums and norms, never a single client's vector. That is what lets one
algorithm file run in one process, on many, and on a federation whose server must not see an
individual vector.

A verb either answers for every client it was asked about or raises :class:`MissingClients`; nobody
is averaged away. The training loop then repeats the round with ``clients.subset(those left)``, and
an algorithm sees who takes part in ``clients.index``: absent clients and clients that were not
sampled are the same thing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.evaluation import SPLITS, Evaluation, SampleMetric
from equifed.contract.group import Group
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream


class ClientVectors(Protocol):
    """One vector per client, kept where it is: shape (n, d) in thought only."""

    def weighted_sum(self, weights: Weights) -> Vector:
        """Return sum_i weights_i v_i, summed in the order of the clients."""
        ...

    def squared_norms(self) -> Losses:
        """Return |v_i|^2 for every client."""
        ...


def weighted_difference(new: ClientVectors, old: ClientVectors, weights: Weights) -> Vector:
    """Return sum_i weights_i (new_i - old_i); as one sum where sums are hidden."""
    ask = getattr(new, "weighted_difference", None)
    if ask is not None:
        return ask(old, weights)  # type: ignore[no-any-return]
    return new.weighted_sum(weights) - old.weighted_sum(weights)


def may_sum(vectors: ClientVectors, weights: Weights) -> bool:
    """Tell whether a sum that is not needed may be asked for: it may show too much where hidden."""
    ask = getattr(vectors, "allows", None)
    return ask is None or bool(ask(weights))


def hides_sums(clients: Clients) -> bool:
    """Tell whether the server sees sums of the clients' vectors alone."""
    return getattr(clients, "hidden", None) is not None


@dataclass(frozen=True)
class Moved:
    """What came of one call of ``local_steps``.

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
    """

    displacement: ClientVectors
    steps: Index
    snapshot: ClientVectors | None = None
    average: ClientVectors | None = None
    mean_gradient: ClientVectors | None = None
    multiplier: ClientVectors | None = None
    thresholds: Losses | None = None


class Clients(Protocol):
    """The clients that take part, as an engine presents them.

    Attributes
    ----------
    names : sequence of str
        Names of all clients of the federation, taking part or not.
    index : array of int, shape (n,)
        Positions in ``names`` of those that take part here, increasing. All per-client arrays below
        follow it.
    sizes : array of int, shape (n,)
        Training samples of those that take part.
    traffic : Traffic
        Ledger shared by all subsets of one engine.
    """

    traffic: Traffic

    @property
    def names(self) -> Sequence[str]:
        """Names of all clients of the federation."""
        ...

    @property
    def index(self) -> Index:
        """Positions of those that take part."""
        ...

    @property
    def sizes(self) -> Index:
        """Training samples of those that take part."""
        ...

    def initial(self, stream: Stream) -> Vector:
        """Return a freshly initialised model."""
        ...

    def flatten(self, model: Any) -> Vector:
        """Return a vector, a module or its parameters by name as the vector that algorithms see."""
        ...

    def parameters(self, x: Vector) -> dict[str, Vector]:
        """Return the model's parameters by name and in their shapes."""
        ...

    def losses(self, x: Vector, stream: Stream, batch_size: int | None = None) -> Losses:
        """Return f_i(x) on all of each client's samples, or on one minibatch."""
        ...

    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return f_i(x) and a handle for the gradients at the shared model x, in one exchange."""
        ...

    def local_steps(
        self,
        x: Vector,
        work: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        """Let every client do ``work`` from x.

        ``control`` and ``target`` are the SCAFFOLD-type correction (both or none); ``slopes`` are
        the factors of the hinge, one per client.
        """
        ...

    def evaluate(
        self, x: Vector, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        """Return what the model is worth to all clients; splits that nobody has are left out.

        ``metrics`` are measured beside what engines measure anyway.
        """
        ...

    def curvature(self) -> Curvature | str:
        """Return bounds on the curvature of all clients' losses, or why none are known."""
        ...

    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        """Return the sum of the clients' Hessians at x by ``weights`` >= 0, or why there is none.

        One exchange. ``thin`` of shape (q, r) asks for the product of every block with it alone.
        """
        ...

    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        """Return <v_i, P^-1 v_j> for all pairs of clients, shape (n, n), or why they stay unknown.

        ``multiply`` makes them of the rows v of a matrix. Where sums are hidden, nobody may see
        this.
        """
        ...

    def group(self) -> Group | None:
        """Return the processes that share these clients; None: this one has them alone."""
        ...

    def subset(self, index: Index) -> Clients:
        """Return the same engine restricted to clients ``index``: positions in ``names``."""
        ...

    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        """Return what clients ``index`` keep of a memory of all clients; zeros if it is None."""
        ...

    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        """Return the memory of all clients after those in ``index`` replaced their vector."""
        ...


@runtime_checkable
class KnowsNotes(Protocol):
    """Clients that have something to say about how a round was answered."""

    def take_notes(self) -> list[str]:
        """Return what was noted since the last call."""
        ...


class MissingClients(RuntimeError):
    """Clients that did not give a usable answer.

    Parameters
    ----------
    reasons : dict
        Position of each such client in the federation, and what was wrong with its answer.
    names : sequence of str
        Names of all clients.
    """

    def __init__(self, reasons: dict[int, str], names: Sequence[str]) -> None:
        self.reasons = dict(sorted(reasons.items()))
        self.names = names
        listed = [f"{names[i]}: {reason}" for i, reason in self.reasons.items()]
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        super().__init__(f"{len(listed)} client(s) missing: " + "; ".join(listed[:5]) + more)


@dataclass
class Traffic:
    """What went over the wire, or would have: engines write it, the training loop reads it.

    ``up`` and ``down`` count bytes per client of the federation; a model float costs its dtype's
    width, a loss eight.

    >>> ledger = Traffic(2)
    >>> ledger.record(np.array([1]), down=40, up=8)
    >>> ledger.exchanges, ledger.up.tolist(), ledger.down.tolist()
    (1, [0, 8], [0, 40])
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
