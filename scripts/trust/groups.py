"""What liars in a group cost, and what a guard leaves of the fair gain: for scripts.trust.liars.

The liars are of one mind: all claim twice the largest honest loss, and all reverse their vectors,
or make them 3.9 usual lengths long besides, or all send the reversed mean of the honest ones, as
long as the longest of them. The last lie is a reversed vector without a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from scripts.trust.federations import ALGORITHMS, WORK, draw_federation
from typing_extensions import override

from equifed.algorithms.afl import AFL
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.guard import Guarded
from equifed.algorithms.guard_limits import Guard
from equifed.contract import Clients, Federated, Info, Stream, Vector
from equifed.contract.arrays import BlockMatrix, Losses, Weights
from equifed.contract.views import ITERATES, ClientsView, VectorsView
from equifed.engines.simulate import simulate
from equifed.objectives import ChiSquare
from equifed.objectives.capped import with_cap
from equifed.training.loop import train

Lie = Literal["reversed", "long", "collusion", "no claim"]
LIES: tuple[Lie, ...] = ("reversed", "long", "collusion", "no claim")
LIARS = {1: (7,), 4: (3, 7, 11, 15)}
HARD = {0: (), 2: (2, 13), 6: (0, 2, 5, 9, 13, 17)}
ROUNDS, LENGTH = 30, 3.9
MOST = {(4, "collusion"): 10}


class GroupVectors(VectorsView):
    """Client vectors, some of which are what a group agreed on."""

    def _split(self) -> tuple[Weights, Weights]:
        lies = np.isin(self.clients.index, self.clients.liars).astype(float)
        return lies, 1 - lies

    def _ways(self, weights: Weights) -> Vector:
        """Return a true sum of steps; a model's step is the way to it."""
        total = self.behind.weighted_sum(weights)
        return total - float(weights.sum()) * self.x if self.kind in ITERATES else total

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        lies, honest = self._split()
        said = self._ways(weights * honest)
        if self.clients.lie == "collusion":
            mean = self._ways(honest / honest.sum())
            long = np.sqrt((self.behind.squared_norms() * honest).max())
            way = -mean * (long / max(float(mean.norm()), 1e-300))
            said = said + float((weights * lies).sum()) * way
        else:
            said = said - self._ways(weights * lies * self._times())
        return said + float(weights.sum()) * self.x if self.kind in ITERATES else said

    def _times(self) -> Losses:
        """Return by what the liars make their reversed vectors longer."""
        lengths = np.sqrt(self.behind.squared_norms())
        if self.clients.lie != "long":
            return np.ones(len(lengths))
        usual = float(np.median(lengths[self._split()[1] == 1]))
        return LENGTH * usual / np.maximum(lengths, 1e-300)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        squares, (lies, honest) = self.behind.squared_norms(scale), self._split()
        if self.clients.lie == "collusion":
            return np.where(lies == 1, (squares * honest).max(), squares)
        return np.where(lies == 1, squares * self._times() ** 2, squares)


class GroupClients(ClientsView):
    """Clients some of whom lie together."""

    Vectors = GroupVectors

    def __init__(self, behind: Clients, liars: Sequence[int], lie: Lie) -> None:
        super().__init__(behind)
        self.liars, self.lie = np.array(liars), lie

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        lies = np.isin(self.index, self.liars)
        if self.lie == "no claim" or what != "loss" or lies.all():
            return numbers
        return np.where(lies, 2 * numbers[~lies].max(), numbers)


# -- rivals: rules that look at single vectors, under the average ----------------------------------

Rule = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


def trimmed_mean(rows: torch.Tensor, f: int, _: torch.Tensor) -> torch.Tensor:
    """Return the mean of each coordinate without its f smallest and f largest values."""
    return rows.sort(dim=0).values[f : len(rows) - f].mean(dim=0)


def median(rows: torch.Tensor, f: int, _: torch.Tensor) -> torch.Tensor:
    """Return the median of each coordinate."""
    return rows.quantile(0.5, dim=0)


def multi_krum(rows: torch.Tensor, f: int, _: torch.Tensor) -> torch.Tensor:
    """Return the mean of the n - f rows that are nearest to their n - f - 2 neighbours."""
    n = len(rows)
    near = torch.cdist(rows, rows).square().sort(dim=1).values[:, 1 : n - f - 1]
    return rows[near.sum(dim=1).argsort()[: n - f]].mean(dim=0)


def centred_clipping(rows: torch.Tensor, f: int, centre: torch.Tensor) -> torch.Tensor:
    """Return the mean of rows cut at their median distance from the last step."""
    ways = rows - centre
    lengths = ways.norm(dim=1, keepdim=True)
    return centre + (ways * (lengths.median() / lengths.clamp_min(1e-300)).clamp(max=1)).mean(dim=0)


RIVALS: dict[str, Rule] = {
    "trimmed mean": trimmed_mean,
    "median": median,
    "multi-Krum": multi_krum,
    "centred clipping": centred_clipping,
}


@dataclass(frozen=True)
class RivalState:
    """The model and the last step."""

    x: Vector
    last: Vector


@dataclass(frozen=True)
class Rival(Federated):
    """FedAvg with equal weights whose mean of updates is a robust one."""

    rule: str
    f: int

    def init(self, clients: Clients, x: Vector) -> RivalState:
        """Return the state before the first round."""
        return RivalState(x, torch.zeros_like(x))

    def round(self, state: RivalState, clients: Clients, stream: Stream) -> tuple[RivalState, Info]:
        """Return the state after one round."""
        moved = clients.local_steps(state.x, WORK, stream.at("local")).displacement
        n = len(clients.index)
        rows = torch.stack([moved.weighted_sum(one) for one in np.eye(n)])
        step = RIVALS[self.rule](rows, self.f, state.last)
        return RivalState(state.x - step, step), Info(np.full(n, 1 / n))


# -- what it costs ---------------------------------------------------------------------------------


def train_group(
    algorithm: Any, seed: int, f: int, lie: Lie | None = None, hard: int = 0, l2: float = 1e-2,
    rounds: int = ROUNDS,
) -> Losses:  # fmt: skip
    """Return the test accuracies, in points, of the clients that are honest in any case.

    The last model is taken: without guards the one with the smallest certified gap would be an
    early one, because a lie makes later gaps worse, and with guards no touched round has a gap.
    """
    federation = draw_federation(seed, hard=HARD[hard])
    clients: Clients = simulate(federation, "logistic", l2=l2, dtype=torch.float64)
    if lie is not None:
        clients = GroupClients(clients, LIARS[f], lie)
    given: dict[str, Any] = {"rounds": rounds, "seed": seed, "every": rounds, "give_out": "last"}
    record = train(algorithm, clients, evaluate=("test",), **given).last("accuracy", "test")
    assert record is not None
    return 100 * np.delete(record.values, LIARS[f])


def guard_against(name: str, f: int) -> Any:
    """Return a rule or a guarded algorithm of the table that is to bear f dishonest clients."""
    return Rival(name, f) if name in RIVALS else Guarded(ALGORITHMS[name], Guard(dishonest=f))


Lost = dict[tuple[str, int, Lie], tuple[float, ...]]


def measure_group(name: str, seeds: Sequence[int], rounds: int = ROUNDS) -> Lost:
    """Return the points lost without a guard and with it, by algorithm, liars and lie."""
    torch.set_num_threads(1)
    found: Lost = {}
    for f in LIARS:
        guarded = guard_against(name, f)
        modes = [guarded] if name in RIVALS else [ALGORITHMS[name], guarded]

        def mean_worst(lie: Lie | None, modes: Any = modes, f: int = f) -> Losses:
            runs = [
                [train_group(one, s, f, lie, rounds=rounds).min() for s in seeds] for one in modes
            ]
            return np.mean(runs, axis=1)

        honest = mean_worst(None)
        found |= {(name, f, lie): tuple(honest - mean_worst(lie)) for lie in LIES}
        for lie in LIES:
            shown = " / ".join(f"{points:.1f}" for points in found[name, f, lie])
            print(f"{name:20s} {f} {lie:10s} {shown}", flush=True)
    return found


FAIR: dict[str, Any] = {
    "AFL, chi-square": AFL(WORK, 0.5, objective=ChiSquare(0.1, scale=1.0)),
    "SCAFF-PD, chi-square": ALGORITHMS["scaff-pd chi-square"],
    "AFL, worst case": AFL(WORK, 0.2),
    "SCAFF-PD, worst case": ALGORITHMS["scaff-pd"],
}
CASES = ((1, 2), (4, 2), (4, 6))
Gains = dict[tuple[str, int, int], tuple[Losses, ...]]


def measure_gain(name: str, seeds: Sequence[int]) -> Gains:
    """Return the gain over FedAvg by dishonest and hard clients: three ways to train.

    They are: without a guard, with it, and with the cap alone, which no bound on lengths can
    exceed. The gain is that of the client that is served worst, and of the hard ones on average.
    """
    torch.set_num_threads(1)
    found: Gains = {}
    for f, hard in CASES:

        def measure(algorithm: Any, f: int = f, hard: int = hard) -> Losses:
            runs = [np.sort(train_group(algorithm, s, f, None, hard, 1e-3)) for s in seeds]
            return np.mean([(run[0], run[:hard].mean()) for run in runs], axis=0)

        fair, guard, average = FAIR[name], Guard(dishonest=f), measure(FedAvg(WORK))
        capped = replace(fair, objective=with_cap(fair.objective, guard.share(20)))
        ways = fair, Guarded(fair, guard), capped
        found[name, f, hard] = tuple(measure(one) - average for one in ways)
    return found


def write_groups(lost: Lost) -> str:
    """Return a Markdown table: algorithms by liars and lies, each "off / on"."""
    names, columns = dict.fromkeys(k[0] for k in lost), dict.fromkeys(k[1:] for k in lost)
    head = [f"{f}, {lie}" for f, lie in columns]
    rows = [
        [name, *(" / ".join(f"{v + 0.0:.1f}" for v in lost[name, *column]) for column in columns)]
        for name in names
    ]
    return write_table([["liars, lie", *head], *rows])


def write_gains(gains: Gains) -> str:
    """Return a Markdown table of the gains that a guard leaves."""
    names = dict.fromkeys(k[0] for k in gains)

    def cell(ways: tuple[Losses, ...], k: int) -> str:
        free, guarded, capped = (way[k] for way in ways)
        return f"{guarded:.1f} ({capped:.1f}) of {free:.1f}"

    rows = [[n, *(cell(gains[n, *c], k) for c in CASES for k in (0, 1))] for n in names]
    head = [f"f = {f}, {hard} hard: {who}" for f, hard in CASES for who in ("worst", "hard ones")]
    return write_table([["", *head], *rows])


def write_table(rows: list[list[str]]) -> str:
    """Return a Markdown table of rows, the first of which is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find_excess(lost: Lost) -> list[str]:
    """Return where a guarded algorithm loses more than the figure allows."""
    return [
        f"{name}, {f} liars, {lie}: {values[-1]:.1f} points lost"
        for (name, f, lie), values in lost.items()
        if name not in RIVALS and not values[-1] <= MOST.get((f, lie), 3 if f == 1 else 7)
    ]
