"""Simulated clients that keep their rows private: every answer about rows is that of a site.

Noise comes from the run's stream, so that runs can be repeated. What a simulation is told of test
rows is its own and no client's answer: a real federation would pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self  # noqa: F401 - of inherited settings

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.arrays import ClientVectors, Losses, Weights
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.evaluation import SPLITS, Details, Evaluation, SampleMetric
from equifed.contract.local import LocalWork
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.base import TorchClients
from equifed.engines.loop import LoopClients, Result, walk_client
from equifed.engines.ordered_sums import DenseVectors, to_numpy
from equifed.models.curvature import check_sum_weights, find_places
from equifed.models.flat import FlatModel, as_data
from equifed.models.losses import SampleLoss
from equifed.privacy.budget import Bounds, Planned
from equifed.privacy.ledger import Ledger, Unit  # noqa: F401
from equifed.privacy.noise import Noise, make_noise
from equifed.privacy.plan import count_questions
from equifed.privacy.site import BEND, PrivateSite, Unanswered, linear_loss

FLOOR = 4.0
"""Eigenvalues of summed curvature are at least so many times root(q) of the noise's deviation."""

UNPAID = "Evaluation on test rows is the simulation's own and costs nothing here."
NOISED = "what clients answer carries noise for privacy, so nothing is proved about their rows"


class PrivateClients(LoopClients):
    """Clients of which each is a :class:`PrivateSite`; see :func:`equifed.simulate`.

    Ledgers are those of these clients: a second run on them goes on spending the same budget.
    """

    def __init__(
        self, data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", *,
        privacy: Bounds, **given: Any,
    ) -> None:  # fmt: skip
        why = None
        if data.preparation is not None and privacy.preparation == "refused":
            why = (
                "These data were prepared with scales and categories read from their "
                "rows, outside the budget. If these are public, set Privacy(preparation='public'), "
                "or equifed fit --public-preparation."
            )
        elif given.get("own_steps") == "alternating":
            why = "own_steps='alternating' steps twice, one time unpaid; use 'joint'."
        elif data.layout is not None:
            why = "Privacy clips the length of a sample, so samples must be single arrays."
        if why is not None:
            raise Unanswered(why)
        super().__init__(data, model, loss, **given)
        PrivateSite.check(privacy, self.model)
        self.privacy = privacy
        budget = privacy.epsilon, privacy.delta
        self.ledgers = [Ledger(*budget, unit=privacy.unit, name=name) for name in self.names]
        self._sites: list[PrivateSite] = []  # made when it is known what will be asked
        self._lent = ""

    @override
    def adds_noise(self) -> bool:
        return True

    @override
    def account(self) -> list[dict[str, Any]]:
        return [ledger.to_dict() for ledger in self.ledgers]

    @override
    def expect(self, algorithm: Any, rounds: int, stream: Stream, done: int = 0) -> str:
        privacy = self.privacy
        if self._lent:  # planned by whoever lent the sites
            return self._lent
        if rounds > privacy.rounds:
            raise ValueError(
                f"rounds={rounds}, but the privacy budget is split over {privacy.rounds}: say "
                f"Privacy(rounds={rounds})."
            )
        if done and privacy.secret:
            raise Unanswered(
                f"Secret noise of the first {done} rounds cannot be drawn again, so what they told "
                "would be told twice; start the run anew."
            )
        plan = count_questions(algorithm, privacy.rounds, self._sizes)
        if linear_loss(self.model) == "squared":  # all follows from moments
            plan = [Planned(moments=1)] * len(plan)
        steps: Any = getattr(getattr(algorithm, "algorithm", algorithm), "steps", None)
        measured = hasattr(steps, "smoothness") and steps.smoothness is None
        if measured and any(one.steps for one in plan) and isinstance(self.curvature(), str):
            raise Unanswered(
                "Automatic step sizes measure the clients' smoothness, which has no share of the "
                "budget; give steps=AutoSteps(smoothness=...) or ConstantSteps(...)."
            )
        self._sites = [
            self.make_site(i, ledger, make_noise(stream.at("privacy", i), privacy.secret), planned)
            for i, (ledger, planned) in enumerate(zip(self.ledgers, plan, strict=True))
        ]
        for site, planned in zip(self._sites, plan, strict=True):
            for kind, count in planned.counts().items():  # what rounds before a resumed one told
                if told := 0 if kind == "moments" else count * done // privacy.rounds:
                    rows = round(planned.q * site.size) if kind == "steps" else None
                    site.enter(kind, told, rows)
        shares = privacy.split(plan[0]).items()
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares)
        return f"{privacy.describe()} ({parts} of mu^2). {UNPAID}"

    def make_site(
        self, i: int, ledger: Ledger, noise: Noise, planned: Planned, split: str = "train",
        like: PrivateSite | None = None,
    ) -> PrivateSite:  # fmt: skip
        """Return what answers about one client's rows of a split; ``like`` told their moments."""
        given = getattr(self._federation, split).client(i)
        x, y = (as_data(part, self.model.dtype, self.model.device) for part in given)
        own_l2 = None if self.own is None else self.own.strength(int(self._sizes[i]))
        site = PrivateSite(self.privacy, ledger, self.model, x, y, noise, planned, own_l2)
        if like is not None:
            site.share_moments(like)
        return site

    def answer_as(self, sites: Sequence[PrivateSite], told: str) -> None:
        """Answer as these sites do, of whose plan ``told`` says what is to be known."""
        self._sites, self._lent, self.ledgers = list(sites), told, [s.ledger for s in sites]

    def site(self, k: int) -> PrivateSite:
        """Return the site of the k-th client that takes part."""
        if not self._sites:
            raise Unanswered(
                "Clients under privacy must know the whole plan before the first round: "
                "run ef.train, or call clients.expect(algorithm, rounds, stream)."
            )
        return self._sites[int(self.index[k])]

    # -- own parts: kept at the site, moved by what they are told with noise ----------------------

    @override
    def remembers_own(self) -> bool:
        return self.own is not None

    @override
    def rows_of_own(self, x: Tensor) -> Tensor:
        rows = self.own_rows.start
        if not self._sites:
            return rows
        pairs = zip(self._sites, rows, strict=True)
        return torch.stack([site.uncentre(torch.cat([x, own]))[len(x) :] for site, own in pairs])

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

    # -- the verbs --------------------------------------------------------------------------------

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
        if work.hinge is not None:
            raise Unanswered(
                "Steps on a smoothed hinge need the loss in every step, which the budget cannot "
                "account for."
            )
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

    # -- second derivatives -----------------------------------------------------------------------

    @override
    def curvature(self) -> Curvature | str:
        linear = linear_loss(self.model) is not None  # also with an own bias
        return self.find_curvature() if linear else super().curvature()

    @override
    def find_curvature(self) -> Curvature:
        """Return bounds that follow from what is declared."""
        n, loss, l2 = len(self.names), linear_loss(self.model), self.model.l2
        convex = 0.0 if self.model.penalised is not None else l2
        steep = math.inf if loss is None else BEND[loss] * (self.privacy.rows**2 + 1) + l2
        return Curvature(np.full(n, steep), np.full(n, convex), loss is not None, lowest=0.0)

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

    # -- questions of training --------------------------------------------------------------------

    @override
    def evaluate(
        self, x: Tensor, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        known = [split for split in splits if getattr(self._federation, split) is not None]
        if asked := [split for split in known if split != "test"]:
            raise Unanswered(
                f"Evaluation on {asked[0]} rows is an answer about them that has no share of the "
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
    if (own := clients.own) is None:
        return None
    told = f"own part {', '.join(own.names)}, moved by its own noised gradients alone"
    return f"{told}; {own.penalty}; {clients.model.own_size} numbers per client"


def settle_sum(
    model: FlatModel, weights: Weights, total: Tensor, deviations: Sequence[float], form: Form,
    thin: Tensor | None,
) -> CurvatureSum:  # fmt: skip
    """Return a sum of noised Hessians, one block for all outputs, as one that is safely positive.

    ``deviations`` are those of the terms' noise; the penalty is added here.
    """
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
    leaves, so neither the server nor another client is trusted. A ledger counts the answers; one
    that would exceed the budget is refused.

    An answer with sensitivity D and noise of deviation sigma costs :math:`(D/\sigma)^2` of
    :math:`\mu^2`, which follows from epsilon and delta. A kind of answer with the share s of it,
    asked n times, has :math:`\sigma = D \sqrt{n/s} / \mu`. The moments' and the losses' shares are
    a third of those of gradients and of local steps, and a tenth of the losses' where losses decide
    nothing; kinds that are not asked have none.

    Parameters
    ----------
    epsilon, delta : float
        The budget: what may be published. Delta should be far below one over the rows of a client.
    rows : float
        Longer rows of inputs are scaled down to this length. Where one linear layer is trained,
        rows are what it is applied to.
    loss : float
        Losses of single rows are clipped to [0, loss]. The targets of a squared loss are clipped
        to a length of at most its root.
    rounds : int
        Rounds over which the budget is split; runs may have fewer.
    unit : {"record", "person"}
        Whose rows are protected: one row, or up to ``most_rows`` of one person.
    gradient : float, optional
        Longer gradients of single rows are scaled down to this length. Linear models with
        cross-entropy, logistic or squared losses need none; others do.
    most_rows : int
        Rows that one person has at most; ``keep_together`` tells persons.
    preparation : {"refused", "public"}
        Scales, fill-ins and categories of a table are read off its rows, which nobody pays for:
        such data are refused unless you declare what they were prepared with to be public.
    secret : bool
        Whether noise comes from the operating system, for models that are published. Else it is
        that of the run's seed, so that runs can be repeated; whoever knows the seed can take it
        away.

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
