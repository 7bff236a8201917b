"""Simulated clients that keep their rows private: every answer about rows is that of a site.

What a simulation is told of test rows is its own: a real federation would pay for it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self  # noqa: F401 - of inherited settings

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.algorithms import DRFA, FairNewton, FedAvg, Safeguarded, Scaffold, ScaffPD
from equifed.contract import ClientVectors, Curvature, Evaluation, Index, Losses, Stream, Weights
from equifed.contract.algorithm import layers
from equifed.contract.curvature import CurvatureSum, Form
from equifed.contract.evaluation import SPLITS, Details, SampleMetric
from equifed.contract.local import LocalSGD, LocalWork
from equifed.data import Federation
from equifed.engines.base import TorchClients
from equifed.engines.loop import LoopClients, Result, walk_client
from equifed.engines.ordered_sums import DenseVectors, to_numpy
from equifed.models.curvature import check_sum_weights, find_places
from equifed.models.flat import FlatModel, as_data
from equifed.models.losses import DERIVATIVES, SampleLoss
from equifed.objectives import Average, ChiSquare
from equifed.privacy.ledger import Bounds, Entry, Ledger, Planned, Unit  # noqa: F401
from equifed.privacy.noise import Noise, make_noise
from equifed.privacy.site import PrivateSite, Unanswered, linear_loss, refuse
from equifed.training import History
from equifed.training.events import PRIVACY

# Eigenvalues of summed curvature are at least so many times root(q) of the noise's deviation
FLOOR = 4.0
NOISED = "what clients answer carries noise for privacy, so nothing is proved about their rows"
# Answers per round of the algorithms that are known; "steps" are times J, moments are told once
ASKED: dict[type, Callable[[Any], dict[str, int]]] = {
    FairNewton: lambda core: {"moments": 1, "losses": 1, "gradients": 1},
    FedAvg: lambda core: {"steps": 1},
    Scaffold: lambda core: (
        {"steps": 1} | ({} if core.variates == "stored" else {"losses": 1, "gradients": 1})
    ),
    ScaffPD: lambda core: {
        "losses": 1 + (core.gradient_batch_size != core.loss_batch_size), "gradients": 1, "steps": 1
    },
    DRFA: lambda core: {"losses": 1, "steps": 1},
}  # fmt: skip
ONE_STEP = LocalSGD(lr=1.0, steps=1)


def count_questions(algorithm: Any, rounds: int, sizes: Index) -> list[Planned]:
    """Return what every client with so many rows is asked, or refuse the algorithm."""
    *around, core = layers(algorithm)
    strange = [part for part in around if type(part) is not Safeguarded]  # which asks nothing
    reasons = {
        f"{', '.join(type(part).__name__ for part in strange)} needs answers that the privacy "
        "budget does not plan for; leave it out.": strange,
        f"{type(core).__name__} has no private version or no plan of its cost; under privacy use "
        f"{', '.join(known.__name__ for known in ASKED)}.": type(core) not in ASKED,
    }
    refuse(reasons)
    asked = Counter(ASKED[type(core)](core))
    objective, local = getattr(core, "objective", None), getattr(core, "local", ONE_STEP)
    idle = objective is None or type(objective) is Average
    extra = objective is not None and math.isinf(objective.l1_norm(len(sizes)))
    given = asked["moments"], rounds * asked["losses"] + extra, rounds * asked["gradients"]
    steps = rounds * asked["steps"] * local.steps_for(sizes)
    shares = [min(1.0, (local.batch_size or size) / max(size, 1)) for size in sizes.tolist()]
    pairs = zip(steps.tolist(), shares, strict=True)
    return [Planned(*given, count, q, idle) for count, q in pairs]


class PrivateClients(LoopClients):
    """Clients of which each is a :class:`PrivateSite`; a second run spends the same ledgers."""

    def __init__(
        self, data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", *,
        privacy: Bounds, **given: Any,
    ) -> None:  # fmt: skip
        prepared = data.preparation is not None and privacy.preparation == "refused"
        twice, several = given.get("own_steps") == "alternating", data.layout is not None
        reasons = {
            "These data were prepared with scales and categories read from their rows, outside the "
            "budget. If these are public, set Privacy(preparation='public'), or equifed fit "
            "--public-preparation.": prepared,
            "own_steps='alternating' steps twice, one time unpaid; use 'joint'.": twice,
            "Privacy clips the length of a sample, so samples must be single arrays.": several,
        }
        refuse(reasons)
        super().__init__(data, model, loss, **given)
        PrivateSite.check(privacy, self.model)
        self.privacy, budget = privacy, (privacy.epsilon, privacy.delta)
        self.ledgers = [Ledger(*budget, unit=privacy.unit, name=name) for name in self.names]
        self._sites: list[PrivateSite] = []  # made when it is known what will be asked
        self._lent = ""  # what is known of a plan of whoever lent the sites

    @override
    def adds_noise(self) -> bool:
        return True

    @override
    def account(self) -> list[dict[str, Any]]:
        return [ledger.to_dict() for ledger in self.ledgers]

    @override
    def expect(self, algorithm: Any, rounds: int, stream: Stream, done: int = 0) -> str:
        privacy = self.privacy
        if self._lent:
            return self._lent
        if rounds > privacy.rounds:
            raise ValueError(
                f"rounds={rounds}, but the privacy budget is split over {privacy.rounds}: say "
                f"Privacy(rounds={rounds})."
            )
        plan = count_questions(algorithm, privacy.rounds, self._sizes)
        if linear_loss(self.model) == "squared":  # all follows from moments
            plan = [Planned(moments=1)] * len(plan)
        steps: Any = getattr(getattr(algorithm, "algorithm", algorithm), "steps", None)
        measured = hasattr(steps, "smoothness") and steps.smoothness is None
        measured = measured and any(one.steps for one in plan) and isinstance(self.curvature(), str)
        reasons = {
            f"Secret noise of the first {done} rounds cannot be drawn again, so what they told "
            "would be told twice; start the run anew.": done and privacy.secret,
            "Automatic step sizes measure the clients' smoothness, which has no share of the "
            "budget; give steps=AutoSteps(smoothness=...) or ConstantSteps(...).": measured,
        }
        refuse(reasons)
        self._sites = []
        for i, (ledger, planned) in enumerate(zip(self.ledgers, plan, strict=True)):
            noise = make_noise(stream.at("privacy", i), privacy.secret)
            self._sites.append(self.make_site(i, ledger, noise, planned))
            for kind, count in planned.counts().items():  # what rounds before a resumed one told
                if told := 0 if kind == "moments" else count * done // privacy.rounds:
                    self._sites[i].enter(kind, told)
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in privacy.split(plan[0]).items())
        free = "Evaluation on test rows is the simulation's own and costs nothing here."
        return f"{privacy.describe()} ({parts} of mu^2). {free}"

    def make_site(
        self, i: int, ledger: Ledger, noise: Noise, planned: Planned, split: str = "train",
        like: PrivateSite | None = None,
    ) -> PrivateSite:  # fmt: skip
        """Return what answers about one client's rows of a split; ``like`` told their moments."""
        model, rows = self.model, getattr(self._federation, split).client(i)
        x, y = (as_data(part, model.dtype, model.device) for part in rows)
        own_l2 = None if self.own is None else self.own.strength(int(self._sizes[i]))
        site = PrivateSite(self.privacy, ledger, model, x, y, noise, planned, own_l2)
        if like is not None:  # the same moments, whichever of both is asked first
            site._told, site._sigmas = like._told, like._sigmas
        return site

    def answer_as(self, sites: Sequence[PrivateSite], told: str) -> None:
        """Answer as these sites do, of whose plan ``told`` says what is to be known."""
        self._sites, self._lent, self.ledgers = list(sites), told, [s.ledger for s in sites]

    def site(self, k: int) -> PrivateSite:
        """Return the site of the k-th client that takes part."""
        told = "run ef.train, or call clients.expect(algorithm, rounds, stream)"
        refuse({f"Privacy needs the whole plan before the first round: {told}.": not self._sites})
        return self._sites[int(self.index[k])]

    @override
    def remembers_own(self) -> bool:
        return self.own is not None

    @override
    def rows_of_own(self, x: Tensor) -> Tensor:
        rows = [torch.cat([x, own]) for own in self.own_rows.start]
        if self._sites:
            rows = [site.uncentre(row) for site, row in zip(self._sites, rows, strict=True)]
        return torch.stack(rows)[:, len(x) :]

    def _with_own(self, x: Tensor, k: int) -> Tensor:
        return x if self.own is None else torch.cat([x, self.own_rows.start[self.index[k]]])

    @override
    def describe_own(self) -> str | None:
        return describe_noised_own(self)

    @override
    def find_one_class(self) -> list[str]:
        return []  # who these are is an answer about rows

    @override
    def evaluate_shared(self, x: Tensor, splits: Sequence[str]) -> list[Evaluation]:
        return super().evaluate_shared(x, [split for split in splits if split == "test"])

    @override
    def measure_losses(self, x: Tensor, stream: Stream, batch_size: int | None) -> Tensor:
        each = range(len(self.index))
        return x.new_tensor([self.site(k).losses(self._with_own(x, k)) for k in each])

    @override
    def differentiate(
        self, x: Tensor, stream: Stream, batch_size: int | None
    ) -> tuple[Losses, ClientVectors]:
        losses = self.require_finite(to_numpy(self.measure_losses(x, stream, None)), "loss")
        sites = [self.site(k) for k in range(len(self.index))]
        rows = [site.gradient(self._with_own(x, k)) for k, site in enumerate(sites)]
        shared, pulls = torch.stack(rows).tensor_split([self.model.size], dim=1)
        if all(site.settles for site in sites):
            three = zip(sites, self.own_rows.start[self.index], pulls, strict=True)
            ends = [site.move_own(own, pull, "gradients") for site, own, pull in three]
            self.own_rows.put(self.index, torch.stack(ends))
        return losses, DenseVectors(shared)

    @override
    def _map(self, function: Callable[[Self, int], Result]) -> list[Result]:
        return [function(self, k) for k in range(len(self.index))]  # one after the other

    @override
    def _walk(
        self, x: Tensor, work: LocalWork, stream: Stream, k: int, steps: int,
        correction: Tensor | None, slope: float | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        hinge = "Steps on a smoothed hinge need the loss in every step, which has no price."
        refuse({hinge: work.hinge is not None})
        site, start, nothing = self.site(k), self._with_own(x, k)[len(x) :], x.new_zeros(())
        ask, own = site.step_gradients(steps, work.batch_size), start

        def gradient(u: Tensor, _: int) -> tuple[Tensor, Tensor]:
            nonlocal own
            shared, pull = ask(torch.cat([u, own])).tensor_split([len(u)])
            own = site.move_own(own, pull, "steps", work.lr)
            return nothing, shared

        found = walk_client(x, work, steps, gradient, correction, size=len(x))
        if self.own is not None:  # LoopClients keeps where it ends
            found["displacement"] = torch.cat([found["displacement"], start - own])
        return found

    @override
    def curvature(self) -> Curvature | str:
        known = linear_loss(self.model) is not None  # also with an own bias
        return self.find_curvature() if known else super().curvature()

    @override
    def find_curvature(self) -> Curvature:
        """Return bounds that follow from what is declared."""
        loss, l2, ones = linear_loss(self.model), self.model.l2, np.ones(len(self.names))
        convex = 0.0 if self.model.penalised is not None else l2
        bend = math.inf if loss is None else DERIVATIVES[loss].steepest
        steep = bend * (self.privacy.rows**2 + 1) + l2
        return Curvature(steep * ones, convex * ones, loss is not None, lowest=0.0)

    @override
    def curvature_sum(
        self, x: Tensor, weights: Weights, form: Form = "blocks", thin: Tensor | None = None
    ) -> CurvatureSum | str:
        """Return it from the noised moments, of which every client tells once."""
        if linear_loss(self.model) is None:
            return "the model is not linear, or its loss has no known second derivative"
        check_sum_weights(weights, len(self.index))
        pairs = [(w, self.site(k)) for k, w in enumerate(weights)]
        total = torch.stack([w * site.hessian() for w, site in pairs]).sum(dim=0)
        deviations = [w * site.hessian_noise() for w, site in pairs]
        return settle_sum(self.model, weights, total, deviations, form, thin)

    @override
    def inexactness(self, x: Tensor) -> str:
        return NOISED

    @override
    def evaluate(
        self, x: Tensor, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        for split in splits:
            if split != "test" and getattr(self._federation, split) is not None:
                raise Unanswered(
                    f"Evaluation on {split} rows is an answer about them that has no share of the "
                    "budget; evaluate=['test'] is the simulation's own."
                )
        return super().evaluate(x, splits, metrics)

    @override
    def describe(self, x: Tensor, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        return super().describe(x, split, metrics) if split == "test" else None

    @override
    def feature_scales(self) -> None:
        """Return None: they are answers about rows, which have no share of the budget."""

    @override
    def origin(self) -> dict[str, Any]:
        """Return it without checksums: whoever knows all rows but one could find that one."""
        told = super().origin() | {"privacy": self.privacy.to_dict()}
        kept = {key: told["data"][key] for key in ("name", "preparation") if key in told["data"]}
        return told | {"data": kept}


def describe_noised_own(clients: TorchClients) -> str | None:
    """Say what own parts are and how they are found, if there are any."""
    own, how = clients.own, "moved by its own noised gradients alone"
    size = f"{clients.model.own_size} numbers per client"
    return None if own is None else f"own part {', '.join(own.names)}, {how}; {own.penalty}; {size}"


def settle_sum(
    model: FlatModel, weights: Weights, total: Tensor, deviations: Sequence[float], form: Form,
    thin: Tensor | None,
) -> CurvatureSum:  # fmt: skip
    """Return a sum of noised Hessians, one block for all outputs, safely positive, penalised."""
    floor = FLOOR * math.sqrt(len(total)) * float(np.linalg.norm(deviations))
    values, axes = torch.linalg.eigh(total)
    places, penalty = find_places(model), model.l2 * float(weights.sum())
    ridge = penalty * model.pull(total.new_ones(model.size))[places[0]]
    total = (axes * values.clamp(min=floor)) @ axes.T + ridge.diag()
    total = (total + total.T) / 2
    if form == "diagonal":
        total = total.diagonal()
    elif thin is not None:
        left, right = thin.to(total).T, total @ thin.to(total)
        total = left @ right if form == "projected" else right
    common = penalty if model.penalised is None else 0.0
    return CurvatureSum(total[None], places, common, exact=False, constant=True)


@dataclass(frozen=True)
class Privacy(Bounds):
    r"""Differential privacy of every row of a client: bounds that are declared, and a budget.

    Whatever a client says of its rows is clipped row by row and gets Gaussian noise before it
    leaves, so neither the server nor another client is trusted; a ledger refuses what exceeds the
    budget. An answer with sensitivity D and noise of deviation sigma costs :math:`(D/\sigma)^2` of
    :math:`\mu^2`, which follows from epsilon and delta. A kind with the share s of it, asked n
    times, has :math:`\sigma = D \sqrt{n/s} / \mu`. Moments and losses have a third of the share of
    gradients and of local steps, and a tenth of that where losses decide nothing.

    Parameters
    ----------
    epsilon, delta : float
        The budget: what may be published. Delta should be far below one over the rows of a client.
    rows : float
        Longer rows of inputs, or of what one trained linear layer gets, are scaled down to this.
    loss : float
        Losses of single rows are clipped to [0, loss], targets of a squared loss to its root.
    rounds : int
        Rounds over which the budget is split; runs may have fewer.
    unit, most_rows
        Whose rows are protected: one ``"record"``, or up to ``most_rows`` of one ``"person"``.
    gradient : float, optional
        The same of gradients of single rows; linear models with our smooth losses need none.
    preparation : {"refused", "public"}
        Scales and categories of a table are read off its rows, which nobody pays for: such data
        are refused unless you declare what they were prepared with to be public.
    secret : bool
        Whether noise comes from the operating system, for models that are published, or from the
        run's seed, with which anybody can take it away.

    Examples
    --------
    >>> import equifed as ef
    >>> privacy = ef.Privacy(epsilon=3.0, rows=8.0, loss=3.0, rounds=10)
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", privacy=privacy)
    >>> history = ef.train(ef.Scaffold(), clients, rounds=10)
    >>> [event["reason"] for event in history.events if event["event"] == "privacy"]
    ['publish epsilon 3 at delta 1e-05 for every record; ... lists what was spent']
    """

    def make_clients(self, data: Federation, *given: Any, **named: Any) -> PrivateClients:
        """Return simulated clients that answer under these bounds."""
        return PrivateClients(data, *given, privacy=self, **named)


def plan_answers(
    bounds: Bounds, algorithm: str, rows: Sequence[int], *, steps: int = 10,
    batch_size: int | None = None, fair: bool = True,
) -> list[list[Entry]]:  # fmt: skip
    """Return what sites of so many rows would answer, by a logistic model with a bias."""
    local = LocalSGD(lr=0.1, steps=steps, batch_size=batch_size)
    objective = ChiSquare(1.0) if fair else Average()
    made: dict[str, Any] = {
        "fair-newton": FairNewton(objective), "fedavg": FedAvg(local), "scaffold": Scaffold(local),
        "scaff-pd": ScaffPD(objective, local), "drfa": DRFA(local, objective=objective),
    }  # fmt: skip
    if algorithm not in made:
        raise ValueError(f"algorithm must be one of {', '.join(made)}, got {algorithm!r}.")
    reach, found = bounds.reach(), list[list[Entry]]()
    planned = count_questions(made[algorithm], bounds.rounds, np.array(rows))
    for m, one in zip(rows, planned, strict=True):
        asked = one.counts().items()
        found.append([bounds.price(kind, one, reach[kind], m, steps=n) for kind, n in asked])
    return found


def read_ledgers(path: Path) -> list[Ledger]:
    """Return the ledgers of a site's file, or of a finished run."""
    if not path.is_dir():
        try:
            return [Ledger.from_dict(json.loads(path.read_text(encoding="utf-8")))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a privacy ledger ({error}).") from error
    ends = [e for e in History.load(path, model=False).events if e["event"] == PRIVACY]
    if ends:
        return [Ledger.from_dict(told) for told in ends[-1]["ledgers"]]
    raise ValueError(
        f"{path} records no privacy: its clients answered without noise, or it is not finished. "
        "Give the folder of a private run, or a site's ledger file."
    )
