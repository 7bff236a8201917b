"""What the server can answer about clients from what they say: second derivatives, own parts.

Curvature comes as packed matrices, summed in clear or hidden, and checked. Own parts are on the
sites' disks. A site begins with the own part of the model that the run draws, and keeps the one
that its local steps of a round ended with. A round starts from that of an earlier round, so that a
round may be repeated and a run resumed. A site whose answer was lost keeps what it trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract import (
    ClientVectors,
    Curvature,
    Losses,
    MissingClients,
    Stream,
    Vector,
    Weights,
)
from equifed.contract.curvature import CurvatureSum, Form, Inexactness, check_curvature
from equifed.engines.base import products_of_rows
from equifed.engines.own import JOINT
from equifed.flower.mailbox import HEADER_SHARE, Answers, Check
from equifed.flower.members import ROOM
from equifed.flower.messenger import Messenger, Requests
from equifed.flower.secure.ledger import Sum
from equifed.flower.site import MOMENTS
from equifed.flower.vectors import FlowerVectors
from equifed.flower.wire import (
    Reply,
    WireError,
    digest_tensor,
    expect_number,
    expect_vector,
    pack_blocks,
    pack_tensor,
    unpack_blocks,
)
from equifed.models.curvature import check_sum_weights, find_places, known_curvature
from equifed.privacy.clients import NOISED, describe_noised_own, settle_sum

FAR = 1e6  # a trace so many times that of the median client is nobody's curvature


class FlowerQuestions(Messenger):
    """Questions of the contract that the server answers from what clients say."""

    deviations: dict[int, float]
    _own_errors: dict[str, NDArray[np.float64]]
    _own_rounds: dict[str, int]

    def curvature(self) -> Curvature | str:
        """Return bounds on the curvature, or why none are known; every client is asked once.

        Of those who decline or are silent nothing is known but the penalty.
        """
        known = known_curvature(self.model, n := len(self.members.names))
        if self.members.engine.remembers_own() or isinstance(known, str):
            return JOINT if self.members.engine.remembers_own() else known
        asked = [i for i in range(n) if i not in self.bounds]
        if asked:
            everybody = self.subset(asked)
            stream, args = Stream(0, ("bounds",)), {"clients": n}
            requests = everybody.write_requests("bounds", stream, args, {})
            replies = self.mailbox.ask(requests, _check_bounds, partial=True).replies
            self.bounds.update({i: replies[i].numbers if i in replies else {} for i in asked})
        given = [self.bounds[i] for i in range(n)]
        largest = np.array([float(one.get("smoothness", np.inf)) for one in given])
        least = [float(one.get("strong_convexity", 0.0)) for one in given]
        tight = all(one.get("tight", False) for one in given)
        return Curvature(largest, np.maximum(known.strong_convexity, least), tight, known.lowest)

    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        """Return the weighted sum of the clients' Hessians at x, or why there is none.

        In clear every client's matrix is checked, and one that is none names its sender; hidden,
        only the sum can be. Sites with a privacy budget send one block, noised, for whatever form.
        """
        like = self.members.engine.curvature_sum(x, np.ones(1), form, thin)
        if isinstance(like, str):
            return like
        check_sum_weights(weights, len(self.index))
        noised, hellos = self.adds_noise(), [self.members.hellos[i] for i in self.index.tolist()]
        open_ones = [hello.name for hello in hellos if noised and not hello.noised]
        if open_ones:
            told = "some sites have a privacy budget, so curvature is sent with noise"
            return f"{told}, but {open_ones[0]!r} has none"
        wanted, arrays = self.describe_sum("curvature", x, weights), {"x": pack_tensor(x)}
        by = thin if form == "blocks" else None  # what a product that is not symmetric has in it
        shape = like.blocks.shape
        if noised:  # of the same vectors in every round, whatever the model
            wanted, by = replace(wanted, model=MOMENTS), None
            shape = torch.Size((1, *[find_places(self.model).shape[1]] * 2))
        elif thin is not None:
            arrays["thin"] = pack_tensor(thin.to(x.dtype))
        stream = Stream(0, ("round", self.round, f"curvature {form}"))
        args = {"form": "mean" if noised else form}
        requests = self.write_requests("curvature", stream, args, arrays)
        blocks = self._sum_blocks(requests, wanted, shape, by)
        if isinstance(blocks, str):
            return blocks
        if noised:
            deviations = weights * [self.deviations[i] for i in self.index.tolist()]
            return settle_sum(self.model, weights, blocks[0], deviations.tolist(), form, thin)
        return replace(like, blocks=blocks, penalty=like.penalty * float(weights.sum()))

    def _sum_blocks(
        self, requests: Requests, wanted: Sum, shape: torch.Size, thin: Vector | None
    ) -> Tensor | str:
        """Return the sum of the clients' matrices, each checked in clear, the sum where hidden."""
        noised, size = self.adds_noise(), pack_blocks(torch.empty(shape), thin is not None).numel()
        room = 8 * size + ROOM + HEADER_SHARE * len(self.members.names)
        self.mailbox.largest = max(self.mailbox.largest, room)

        def read(reply: Reply) -> Tensor:
            packed = torch.as_tensor(reply.arrays["curvature"].copy(), device=self.model.device)
            return unpack_blocks(packed, shape, thin is not None)

        def check(i: int, reply: Reply) -> None:
            if noised:  # the same in all rounds
                told = reply.numbers.get("deviation")
                self.deviations[i] = expect_number("deviation", told, least=0.0)
            if self.hidden is None:
                expect_vector(reply.arrays, "curvature", size, self.dtype)
                wrong = None if noised else check_curvature(read(reply), thin=thin)
                if wrong is not None:
                    raise WireError(wrong)

        if self.hidden is not None:
            packed = self._open(requests, wanted, size, thin is not None, check)
            if isinstance(packed, str):
                return packed
            total = unpack_blocks(packed.to(self.model.device), shape, thin is not None)
            wrong = None if noised else check_curvature(total + _rounding(total), thin=thin)
            told = f"a client sent an invalid curvature: the sum's {(wrong or '')[4:]}"
            return total if wrong is None else told
        replies = self.ask(requests, check)
        blocks = [read(replies[i]).double() for i in self.index.tolist()]
        if not noised:
            self._refuse_far(torch.stack([_trace(one, thin) for one in blocks]))
        terms = zip(wanted.row[self.index].tolist(), blocks, strict=True)
        return sum((w * one for w, one in terms), torch.zeros_like(blocks[0]))

    def _open(
        self, requests: Requests, wanted: Sum, size: int, fresh: bool, also: Check
    ) -> Tensor | str:
        """Open a hidden sum of curvature, or take what those opened before come nearest to it."""
        reason = self.ledger.refuse(wanted)
        packed = None if fresh else self.ledger.stand_in(wanted, size)
        if reason is None:

            def ask(requests: Requests, check: Check) -> Answers:
                def both(i: int, reply: Reply) -> None:
                    check(i, reply)
                    also(i, reply)

                return self.mailbox.ask(requests, both)

            return self.open_sum(wanted, requests, "curvature", ask, size)
        if packed is None:
            return f"the sum of the clients' curvature cannot be opened: {reason}"
        self.ledger.notes.append(f"{reason}: the curvature is that of the sum opened before")
        return packed

    def _refuse_far(self, traces: Tensor) -> None:
        """Name those whose curvature is absurdly large beside the others'."""
        usual = float(traces.sort().values[(len(traces) - 1) // 2])
        far = traces > FAR * usual if usual > 0 and len(traces) > 2 else traces < 0
        found = {
            int(self.index[k]): f"trace of its curvature is {float(traces[k]):.3g}, that of the "
            f"median client {usual:.3g}"
            for k in torch.nonzero(far).flatten().tolist()
        }
        if found:
            raise MissingClients(found, self.members.names)

    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        """Return <v_i, P^-1 v_j>, where the server has the vectors anyway."""
        if self.hidden is not None:
            return "sums are hidden from the server, and so are the clients' vectors"
        assert isinstance(vectors, FlowerVectors)
        return products_of_rows(vectors.recall(), multiply)

    # -- own parts ---------------------------------------------------------------------------------

    def describe_own(self) -> str | None:
        """Say what the own parts are, how they are found, and where; None: there are none."""
        engine = self.members.engine
        told = describe_noised_own(engine) if self.adds_noise() else engine.describe_own()
        return None if told is None else f"{told}, which stay at the sites"

    def adds_noise(self) -> bool:
        """Tell whether answers of any site carry noise for privacy."""
        return any(hello.noised for hello in self.members.hellos)

    def warn_of_own(self) -> str | None:
        """Return None: which classes a site has is not known here."""
        return None

    def inexactness(self, x: Vector) -> Inexactness | str | None:
        """Return how far answers at x may be off, as the sites said with their gradients."""
        if self.adds_noise():
            return NOISED
        if not self._tells_errors():
            return None if self.members.engine.own is None else JOINT
        errors = self._own_errors.get(digest_tensor(x))
        if errors is None:
            return "the sites have not said how exact their own parts are at this model"
        return Inexactness(errors[:, 0], errors[:, 1])

    def _tells_errors(self) -> bool:
        """Tell whether sites find own parts numerically, at each model, and say how exactly."""
        engine = self.members.engine
        return engine.own is not None and not (engine.remembers_own() or self.adds_noise())

    def keep_errors(self, x: Vector, replies: dict[int, Reply]) -> None:
        """Remember what the sites said with their gradients at x."""
        if self._tells_errors():
            errors: Losses = np.full((len(self.members.names), 2), np.inf)
            for i, reply in replies.items():
                errors[i] = reply.numbers["own_error"]
            self._own_errors.clear()  # which all subsets share
            self._own_errors[digest_tensor(x)] = errors

    def check_error(self, reply: Reply) -> None:
        """Refuse a statement about own parts that is none."""
        if self._tells_errors():
            told = reply.numbers.get("own_error")
            both = told if isinstance(told, list) and len(told) == 2 else [None, None]
            for name, value in zip(("loss", "gradient"), both, strict=True):
                expect_number(f"error of the {name}", value, least=0.0)

    def keeps_own(self) -> bool:
        """Tell whether sites keep own parts from round to round; under a budget they all do."""
        engine = self.members.engine
        return engine.remembers_own() or (engine.own is not None and self.adds_noise())

    def round_of(self, x: Vector) -> int:
        """Return the round whose own parts belong to a model: the one it was first measured in."""
        digest = digest_tensor(x)
        return self._own_rounds.setdefault(digest, self.round)


def _check_bounds(i: int, reply: Reply) -> None:
    """Refuse bounds that no curvature has; a client may know none."""
    if reply.numbers:
        least = expect_number("strong_convexity", reply.numbers.get("strong_convexity"), least=0.0)
        expect_number("smoothness", reply.numbers.get("smoothness"), least=least)


def _trace(blocks: Tensor, thin: Vector | None) -> Tensor:
    if blocks.dim() == 2:
        return blocks.sum()
    square = blocks if thin is None else thin.to(blocks).T @ blocks
    return square.diagonal(dim1=-2, dim2=-1).sum()


def _rounding(total: Tensor) -> Tensor:
    """Return what a hidden sum's rounding may take from the eigenvalues of a matrix."""
    if total.dim() == 2 or total.shape[-1] != total.shape[-2]:
        return torch.zeros_like(total)
    q = total.shape[-1]
    return q * 2.0**-30 * torch.eye(q, dtype=total.dtype, device=total.device).expand_as(total)
