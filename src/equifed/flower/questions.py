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

from equifed.contract.arrays import ClientVectors, Losses, Vector, Weights
from equifed.contract.clients import MissingClients
from equifed.contract.curvature import (
    Curvature,
    CurvatureSum,
    Form,
    Inexactness,
    check_curvature,
)
from equifed.contract.streams import Stream
from equifed.engines.base import products_of_rows
from equifed.engines.own import JOINT
from equifed.flower.budget import MOMENTS
from equifed.flower.mailbox import HEADER_SHARE, Answers, Check
from equifed.flower.members import ROOM
from equifed.flower.messenger import Messenger, Requests
from equifed.flower.secure.ledger import Sum
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

FAR = 1e6
"""A trace so many times that of the median client is nobody's curvature."""


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
        only the sum can be.
        """
        like = self.members.engine.curvature_sum(x, np.ones(1), form, thin)
        if isinstance(like, str):
            return like
        check_sum_weights(weights, len(self.index))
        if self.adds_noise():
            return self._sum_noised(x, weights, form, thin)
        size = pack_blocks(like.blocks, thin is not None and form == "blocks").numel()
        self._make_room(size)
        arrays = {"x": pack_tensor(x)}
        if thin is not None:
            arrays["thin"] = pack_tensor(thin.to(x.dtype))
        by = thin if form == "blocks" else None  # what a product that is not symmetric has in it
        stream = Stream(0, ("round", self.round, f"curvature {form}"))
        requests = self.write_requests("curvature", stream, {"form": form}, arrays)
        if self.hidden is None:
            total: Tensor | str = self._sum_clear(requests, weights, like, by)
        else:
            total = self._sum_hidden(requests, self.describe_sum("curvature", x, weights), like, by)
        if isinstance(total, str):
            return total
        return replace(like, blocks=total, penalty=like.penalty * float(weights.sum()))

    def _sum_noised(
        self, x: Vector, weights: Weights, form: Form, thin: Vector | None
    ) -> CurvatureSum | str:
        """Return the sum of what sites with a privacy budget say, in whatever form from one."""
        hellos = [self.members.hellos[i] for i in self.index.tolist()]
        if open_ones := [hello.name for hello in hellos if not hello.noised]:
            told = "some sites have a privacy budget, so curvature is sent with noise"
            return f"{told}, but {open_ones[0]!r} has none"
        stream = Stream(0, ("round", self.round, f"curvature {form}"))
        requests = self.write_requests("curvature", stream, {"form": "mean"}, {"x": pack_tensor(x)})
        shape = torch.Size((1, *[find_places(self.model).shape[1]] * 2))
        size = shape[-1] * (shape[-1] + 1) // 2
        self._make_room(size)

        def check(i: int, reply: Reply) -> None:
            told = expect_number("deviation", reply.numbers.get("deviation"), least=0.0)
            self.deviations[i] = told  # the same in all rounds
            if self.hidden is None:
                expect_vector(reply.arrays, "curvature", size, self.dtype)

        if self.hidden is None:
            replies = self.ask(requests, check)
            rows = [replies[i].arrays["curvature"] for i in self.index.tolist()]
            packed: Tensor | str = torch.as_tensor(weights @ np.stack(rows).astype(np.float64))
        else:  # of the same vectors in every round, whatever the model
            wanted = replace(self.describe_sum("curvature", x, weights), model=MOMENTS)
            packed = self._open(requests, wanted, size, check)
        if isinstance(packed, str):
            return packed
        block = unpack_blocks(packed.to(self.model.device), shape, thin=False)[0]
        deviations = weights * [self.deviations[i] for i in self.index.tolist()]
        return settle_sum(self.model, weights, block, deviations.tolist(), form, thin)

    def _open(
        self, requests: Requests, wanted: Sum, size: int, also: Check | None, fresh: bool = False
    ) -> Tensor | str:
        """Open a hidden sum of curvature, or take what those opened before come nearest to it."""
        reason = self.ledger.refuse(wanted)
        packed = None if fresh else self.ledger.stand_in(wanted, size)
        if reason is None:

            def ask(requests: Requests, check: Check) -> Answers:
                def both(i: int, reply: Reply) -> None:
                    check(i, reply)
                    if also is not None:
                        also(i, reply)

                return self.mailbox.ask(requests, both)

            return self.open_sum(wanted, requests, "curvature", ask, size)
        if packed is None:
            return f"the sum of the clients' curvature cannot be opened: {reason}"
        self.ledger.notes.append(f"{reason}: the curvature is that of the sum opened before")
        return packed

    def _make_room(self, size: int) -> None:
        """Let replies have so many numbers."""
        room = 8 * size + ROOM + HEADER_SHARE * len(self.members.names)
        self.mailbox.largest = max(self.mailbox.largest, room)

    def _sum_clear(
        self, requests: Requests, weights: Weights, like: CurvatureSum, thin: Vector | None
    ) -> Tensor:
        size = pack_blocks(like.blocks, thin is not None).numel()

        def read(reply: Reply) -> Tensor:
            packed = torch.as_tensor(reply.arrays["curvature"].copy(), device=self.model.device)
            return unpack_blocks(packed, like.blocks.shape, thin is not None)

        def check(i: int, reply: Reply) -> None:
            expect_vector(reply.arrays, "curvature", size, self.dtype)
            wrong = check_curvature(read(reply), thin=thin)
            if wrong is not None:
                raise WireError(wrong)

        replies = self.ask(requests, check)
        blocks = [read(replies[i]).double() for i in self.index.tolist()]
        self._refuse_far(torch.stack([_trace(one, thin) for one in blocks]))
        return sum((float(w) * b for w, b in zip(weights, blocks, strict=True)), like.blocks * 0)

    def _sum_hidden(
        self, requests: Requests, wanted: Sum, like: CurvatureSum, thin: Vector | None
    ) -> Tensor | str:
        size = pack_blocks(like.blocks, thin is not None).numel()
        packed = self._open(requests, wanted, size, None, fresh=thin is not None)
        if isinstance(packed, str):
            return packed
        total = unpack_blocks(packed, like.blocks.shape, thin is not None)
        wrong = check_curvature(total + _rounding(total), thin=thin)
        return (
            total if wrong is None else f"a client sent an invalid curvature: the sum's {wrong[4:]}"
        )

    def _refuse_far(self, traces: Tensor) -> None:
        """Name those whose curvature is absurdly large beside the others'."""
        usual = float(traces.sort().values[(len(traces) - 1) // 2])
        far = traces > FAR * usual if usual > 0 and len(traces) > 2 else traces < 0
        if far.any():
            found = {
                int(self.index[k]): f"trace of its curvature is {float(traces[k]):.3g}, that of "
                f"the median client {usual:.3g}"
                for k in torch.nonzero(far).flatten().tolist()
            }
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
        engine = self.members.engine
        if self.adds_noise():
            return NOISED
        if engine.own is None:
            return None
        if engine.remembers_own():
            return JOINT
        errors = self._own_errors.get(digest_tensor(x))
        if errors is None:
            return "the sites have not said how exact their own parts are at this model"
        return Inexactness(errors[:, 0], errors[:, 1])

    def keep_errors(self, x: Vector, replies: dict[int, Reply]) -> None:
        """Remember what the sites said with their gradients at x."""
        engine = self.members.engine
        if engine.own is not None and not (engine.remembers_own() or self.adds_noise()):
            errors: Losses = np.full((len(self.members.names), 2), np.inf)
            for i, reply in replies.items():
                errors[i] = reply.numbers["own_error"]
            self._own_errors.clear()
            self._own_errors[digest_tensor(x)] = errors

    def check_error(self, reply: Reply) -> None:
        """Refuse a statement about own parts that is none."""
        engine = self.members.engine
        if engine.own is not None and not (engine.remembers_own() or self.adds_noise()):
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
