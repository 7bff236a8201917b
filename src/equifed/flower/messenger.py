"""Asking the clients that take part, and reading what they answer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import Traffic, check_index
from equifed.contract.streams import Stream
from equifed.flower.mailbox import Answers, Check, Mailbox
from equifed.flower.matrices import digest_tensor
from equifed.flower.members import Members
from equifed.flower.secure.ledger import Ledger, Sum
from equifed.flower.wire import Reply, Request, Sent, expect_number, expect_vector, find_round
from equifed.models.losses import LOSSES

Requests = dict[int, Request]
Ask = Callable[[Requests, Check], Answers]


class HiddenSums(Protocol):
    """A way to sum what clients keep without seeing the terms, and what was opened so far."""

    ledger: Ledger

    def total(
        self,
        messenger: Messenger,
        requests: Requests,
        weights: Weights,
        part: str,
        ask: Ask,
        size: int | None = None,
    ) -> NDArray[np.float64]:
        """Return sum_i weights_i v_i, where ``requests`` make clients compute or recall v_i.

        They are ``size`` long, or as long as the model.
        """


class Messenger:
    """Writes the requests to clients ``index`` and reads their replies.

    Every exchange is tagged with its round, phase and try and may be repeated without harm. Without
    ``hidden`` sums clients send their vectors.
    """

    def __init__(
        self, mailbox: Mailbox, members: Members, hidden: HiddenSums | None = None
    ) -> None:
        self.mailbox, self.members, self.hidden = mailbox, members, hidden
        self.traffic: Traffic = mailbox.traffic
        self._index: Index = np.arange(len(members.names))
        self.model = members.engine.model
        self.pins: dict[int, str] = {}
        self.bounds: dict[int, dict[str, Any]] = {}  # what each client said of its curvature
        self._tries: dict[str, int] = {}
        self._rounds = [0]  # the one of the last requests; all subsets share it
        self.common: dict[str, Any] = {}  # what every request says

    @property
    def round(self) -> int:
        """The round that the last requests belong to."""
        return self._rounds[0]

    @property
    def dtype(self) -> str:
        """Precision of the model."""
        return str(self.model.dtype)[6:]

    @property
    def least_loss(self) -> float:
        """What no loss can be below: the losses that we know are not negative."""
        task = self.members.task
        known = task.loss in ("auto", *LOSSES) and task.l2 >= 0
        return -float(np.finfo(self.dtype).eps) if known else -math.inf

    @property
    def index(self) -> Index:
        """Positions in the federation of those that take part."""
        return self._index

    def subset(self, index: Iterable[int] | Index) -> Self:
        """Return the same for clients ``index``: positions in the federation."""
        part = copy.copy(self)
        part._index = check_index(index, len(self.members.names))
        return part

    def locate(self, client: int) -> int:
        """Return where a client of the federation stands among those that take part."""
        return int((self.index == client).argmax())

    def write_requests(
        self, op: str, stream: Stream, args: dict[str, Any], arrays: Sent
    ) -> Requests:
        """Return one tagged request for each client that takes part."""
        where = "/".join(str(word) for word in stream.address) or op
        tries = self._tries.get(where, 0)
        self._tries[where] = tries + 1
        self._rounds[0] = max(self._rounds[0], find_round(stream.address))
        common = {
            "seed": stream.seed,
            "address": list(stream.address),
            "round": find_round(stream.address),
        }
        run, tag = self.members.run, f"{where}#{tries}"
        requests = {}
        for i in self.index.tolist():
            pins = [self.pins[i]] if i in self.pins else []
            own = {**common, **self.common, **args, "pins": pins}
            requests[i] = Request(op, run, tag, i, own, dict(arrays))
        return requests

    def ask(self, requests: Requests, check: Check) -> dict[int, Reply]:
        """Return the replies of all, or raise :class:`equifed.contract.clients.MissingClients`."""
        return self.mailbox.ask(requests, check).complete(self.members.names)

    def read_numbers(self, replies: dict[int, Reply], name: str) -> Losses:
        """Return one number of every reply, in the order of the clients."""
        return np.array([float(replies[i].numbers[name]) for i in self.index.tolist()])

    def read_rows(self, replies: dict[int, Reply], name: str) -> Tensor:
        """Return one array of every reply, in the order of the clients."""
        rows = [torch.as_tensor(np.array(replies[i].arrays[name])) for i in self.index.tolist()]
        return torch.stack(rows).to(self.model.device)

    def check_vector(self, reply: Reply, name: str, what: str = "squared length") -> None:
        """Refuse a vector of another kind, or one that is not finite."""
        vector = expect_vector(reply.arrays, name, self.model.size, self.dtype)
        # Where a square overflows the vector is as unusable as one that holds an infinity.
        with np.errstate(over="ignore", invalid="ignore"):
            expect_number(what, float(np.square(vector.astype(np.float64)).sum()), self.dtype)

    def check_loss(self, i: int, reply: Reply) -> None:
        """Refuse a loss that a client cannot have got."""
        expect_number("loss", reply.numbers.get("loss"), self.dtype, self.least_loss)

    def check_norm(self, i: int, reply: Reply) -> None:
        """Refuse a squared length that a client cannot have got."""
        expect_number("squared norm", reply.numbers.get("norm"), self.dtype, 0.0)

    def describe_sum(self, kind: str, x: Tensor, weights: Weights) -> Sum:
        """Return what a sum over these clients at model x is to the ledger."""
        row = np.zeros(len(self.members.names))
        row[self.index] = weights
        return Sum(kind, digest_tensor(x), self.round, row)

    def open_sum(
        self,
        wanted: Sum,
        requests: Requests,
        part: str = "vector",
        ask: Ask | None = None,
        size: int | None = None,
    ) -> Tensor:
        """Return a weighted sum of what clients compute or keep, and write down that it is open."""
        assert self.hidden is not None
        weights, ask = wanted.row[self.index], ask or self.mailbox.ask
        found = self.hidden.total(self, requests, weights, part, ask, size)
        total = torch.as_tensor(found).to(self.model.device)
        total = total if size is not None else total.to(self.model.dtype)
        self.ledger.add(wanted, total)
        return total

    @property
    def ledger(self) -> Ledger:
        """What was opened of hidden sums."""
        assert self.hidden is not None
        return self.hidden.ledger

    def take_notes(self) -> list[tuple[str, str]]:
        """Return what hidden sums have to say about the last round."""
        notes = [] if self.hidden is None else self.hidden.ledger.take_notes()
        return [("stale", note) for note in notes]
