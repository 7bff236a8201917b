"""Simulated clients that keep their rows private: every answer about rows is that of a site.

Noise comes from the run's stream, so that runs can be repeated. What a simulation is told of test
rows is its own and no client's answer: a real federation would pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal  # noqa: F401 - of inherited settings

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
from equifed.engines.loop import LoopClients, walk_client
from equifed.engines.ordered_sums import DenseVectors, InProcessVectors, to_numpy
from equifed.models.curvature import check_sum_weights, find_places
from equifed.models.flat import FlatModel
from equifed.models.losses import SampleLoss
from equifed.privacy.budget import Bounds, Planned
from equifed.privacy.ledger import Ledger, Unit  # noqa: F401
from equifed.privacy.noise import Noise, make_noise
from equifed.privacy.plan import count_questions
from equifed.privacy.site import BEND, PrivateSite, Unanswered, linear_loss

FLOOR = 4.0
"""Eigenvalues of summed curvature are at least so many times root(q) of the noise's deviation."""

NOISED = "what clients answer carries noise for privacy, so nothing is proved about their rows"


class PrivateClients(LoopClients):
    """Clients of which each is a :class:`PrivateSite`; see :func:`equifed.simulate`.

    Ledgers are those of these clients: a second run on them goes on spending the same budget.
    """

    def __init__(
        self, data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", *,
        privacy: Bounds, **given: Any,
    ) -> None:  # fmt: skip
        if data.preparation is not None and privacy.preparation == "refused":
            raise Unanswered(
                "These data were prepared with scales and categories read from their "
                "rows, outside the budget. If these are public, set Privacy(preparation='public'), "
                "or equifed fit --public-preparation."
            )
        if given.get("own_steps") == "alternating":
            raise Unanswered("own_steps='alternating' steps twice, one time unpaid; use 'joint'.")
        if data.layout is not None:
            raise Unanswered(
                "Privacy clips the length of a sample, so samples must be single arrays."
            )
        super().__init__(data, model, loss, **given)
        PrivateSite.check(privacy, self.model)
        self.privacy = privacy
        budget = privacy.epsilon, privacy.delta
        self.ledgers = [Ledger(*budget, unit=privacy.unit, name=name) for name in self.names]
        self._sites: list[PrivateSite] = []  # made when it is known what will be asked

    @override
    def adds_noise(self) -> bool:
        return True

    @override
    def account(self) -> list[dict[str, Any]]:
        return [ledger.to_dict() for ledger in self.ledgers]

    @override
    def expect(self, algorithm: Any, rounds: int, stream: Stream, done: int = 0) -> str:
        privacy = self.privacy
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
        if any(one.steps for one in plan) and isinstance(self.curvature(), str):
            self._refuse_measuring(algorithm)
        self._sites.clear()
        for i, planned in enumerate(plan):
            noise = make_noise(stream.at("privacy", i), privacy.secret)
            self._sites.append(self._make_site(i, self.ledgers[i], noise, planned))
        self._repeat(plan, done)
        return self.describe_privacy()

    def _refuse_measuring(self, algorithm: Any) -> None:
        """Refuse step sizes that would be measured, at a price that nobody planned."""
        steps: Any = getattr(getattr(algorithm, "algorithm", algorithm), "steps", None)
        if hasattr(steps, "smoothness") and steps.smoothness is None:
            raise Unanswered(
                "Automatic step sizes measure the clients' smoothness, which has no share of the "
                "budget; give steps=AutoSteps(smoothness=...) or ConstantSteps(...)."
            )

    def _repeat(self, plan: Sequence[Planned], done: int) -> None:
        """Enter what the rounds before a resumed one have told, with the same noise."""
        for site, planned in zip(self._sites, plan, strict=True):
            for kind, count in planned.counts().items():
                told = 0 if kind == "moments" else count * done // self.privacy.rounds
                if told:
                    site.enter(
                        kind, told, round(planned.q * site.size) if kind == "steps" else None
                    )

    def answer_as(self, ledger: Ledger, noise: Noise, planned: Planned) -> None:
        """Let the only client answer at a real site: with its own ledger, noise and plan."""
        self.ledgers, self._sites = [ledger], [self._make_site(0, ledger, noise, planned)]

    def _make_site(self, i: int, ledger: Ledger, noise: Noise, planned: Planned) -> PrivateSite:
        rows = slice(int(self._offsets[i]), int(self._offsets[i + 1]))
        own_l2 = None if self.own is None else self.own.strength(int(self._sizes[i]))
        given = self._inputs[rows], self._targets[rows], noise, planned, own_l2
        return PrivateSite(self.privacy, ledger, self.model, *given)

    def describe_privacy(self) -> str:
        """Say what is protected, by what budget, and how it is split."""
        privacy, first = self.privacy, self._sites[0]
        parts = (f"{kind} {share:.0%}" for kind, share in privacy.split(first.planned).items())
        whose = "every row" if privacy.unit == "record" else "every person"
        return (
            f"Privacy: {whose} of a client has epsilon {privacy.epsilon:g} at delta "
            f"{privacy.delta:g} by noise added at the client ({', '.join(parts)} of mu^2). "
            "Evaluation on test rows is the simulation's own and costs nothing here."
        )

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
            moved = [site.move_own(own, pull, "gradients") for site, own, pull in three]
            self.own_rows.put(self.index, torch.stack(moved))
        return losses, DenseVectors(shared)

    @override
    def move(
        self, x: Tensor, work: LocalWork, stream: Stream, control: InProcessVectors | None,
        target: Tensor | None, slopes: Weights | None,
    ) -> tuple[Mapping[str, ClientVectors], Losses | None]:  # fmt: skip
        if work.hinge is not None:
            raise Unanswered(
                "Steps on a smoothed hinge need the loss in every step, which the budget cannot "
                "account for."
            )
        rows = None if control is None else control.dense()
        walks = []
        for k, steps in enumerate(work.steps_for(self.sizes).tolist()):
            correction = None
            if rows is not None and target is not None:
                correction = work.correction * (target - rows[k])
            walks.append(self._walk_privately(x, work, k, steps, correction))
        made = {kind: torch.stack([walk[kind] for walk in walks]) for kind in work.results}
        if self.own is not None:
            self.own_rows.put(self.index, torch.stack([walk["own"] for walk in walks]))
        lengths = to_numpy(made["displacement"].square().sum(dim=1))
        self.require_finite(lengths, "squared length of the local update")
        return {kind: DenseVectors(matrix) for kind, matrix in made.items()}, None

    def _walk_privately(
        self, x: Tensor, work: LocalWork, k: int, steps: int, correction: Tensor | None
    ) -> dict[str, Tensor]:
        site, own, nothing = self.site(k), self._with_own(x, k)[len(x) :], x.new_zeros(())
        ask = site.step_gradients(steps, work.batch_size)

        def gradient(u: Tensor, _: int) -> tuple[Tensor, Tensor]:
            nonlocal own
            shared, pull = ask(torch.cat([u, own])).tensor_split([len(u)])
            own = site.move_own(own, pull, "steps", work.lr)
            return nothing, shared

        found = walk_client(x, work, steps, gradient, correction, size=self.model.size)
        return found | {"own": own}

    # -- second derivatives -----------------------------------------------------------------------

    @override
    def curvature(self) -> Curvature | str:
        linear = linear_loss(self.model) is not None  # also with an own bias
        return self.find_curvature() if linear else super().curvature()

    @override
    def find_curvature(self) -> Curvature:
        """Return bounds that follow from what is declared."""
        n, loss = len(self.names), linear_loss(self.model)
        convex = 0.0 if self.model.penalised is not None else self.model.l2
        steep = math.inf
        if loss is not None:
            steep = BEND[loss] * (self.privacy.rows**2 + 1) + self.model.l2
        return Curvature(np.full(n, steep), np.full(n, convex), loss is not None, lowest=0.0)

    @override
    def curvature_sum(
        self, x: Tensor, weights: Weights, form: Form = "blocks", thin: Tensor | None = None
    ) -> CurvatureSum | str:
        """Return it from the noised moments, of which every client tells once."""
        if linear_loss(self.model) is None:
            return "the model is not linear, or its loss has no known second derivative"
        check_sum_weights(weights, len(self.index))
        sites = [self.site(k) for k in range(len(self.index))]
        blocks = [w * site.hessian() for w, site in zip(weights, sites, strict=True)]
        deviations = [w * site.hessian_noise() for w, site in zip(weights, sites, strict=True)]
        return settle_sum(
            self.model, weights, torch.stack(blocks).sum(dim=0), deviations, form, thin
        )

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
    common = penalty if model.penalised is None else 0.0
    shown = _show(total, form, thin)
    return CurvatureSum(shown[None], places, common, exact=False, constant=True)


def _show(matrix: Tensor, form: Form, thin: Tensor | None) -> Tensor:
    """Return a Hessian's block in the form that was asked for."""
    if form == "diagonal":
        return matrix.diagonal()
    if thin is None:
        return matrix
    product = matrix @ thin.to(matrix)
    return thin.to(matrix).T @ product if form == "projected" else product


@dataclass(frozen=True)
class Privacy(Bounds):
    r"""Differential privacy of every row of a client: bounds that are declared, and a budget.

    Whatever a client says of its rows is clipped row by row and gets Gaussian noise before it
    leaves, so neither the server nor another client is trusted. A ledger
    (``equifed.privacy.ledger.Ledger``) counts the answers; one that would exceed the budget is
    refused.

    An answer with sensitivity D and noise of deviation sigma costs :math:`(D/\sigma)^2` of
    :math:`\mu^2`, which follows from epsilon and delta. A kind of answer with the share s of it,
    asked n times, has :math:`\sigma = D \sqrt{n/s} / \mu`. By default the moments' and the losses'
    shares are a third of those of gradients and of local steps, and a tenth of the losses' where
    losses decide nothing; kinds that are not asked have none.

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
