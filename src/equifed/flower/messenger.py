"""Asking the clients that take part, and reading what they answer."""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import MissingClients, Traffic, check_index
from equifed.contract.streams import Stream
from equifed.flower.mailbox import Answers, Check, Mailbox
from equifed.flower.members import Members
from equifed.flower.secure.ledger import Ledger, Sum
from equifed.flower.secure.masking import to_keys
from equifed.flower.secure.session import (
    FRACTION_BITS,
    Boxes,
    Digests,
    Published,
    Words,
    WrongSecret,
    digest_secret,
    from_fixed,
    from_hex,
    majority,
    open_sum,
    to_hex,
)
from equifed.flower.wire import (
    Reply,
    Request,
    Sent,
    WireError,
    digest_tensor,
    expect_number,
    expect_vector,
    find_round,
)
from equifed.models.losses import LOSSES

Requests = dict[int, Request]
Ask = Callable[[Requests, Check], Answers]


class Messenger:
    """Writes the requests to clients ``index`` and reads their replies.

    Every exchange is tagged with its round, phase and try and may be repeated without harm. Without
    ``hidden`` sums clients send their vectors.
    """

    def __init__(
        self, mailbox: Mailbox, members: Members, hidden: SecureSums | None = None
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
        self.before = 0  # rounds of this run that were played for other candidates

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
        address = stream.address
        if find_round(address):
            address = ("round", find_round(address) + self.before, *address[2:])
        where = "/".join(str(word) for word in address) or op
        tries = self._tries.get(where, 0)
        self._tries[where] = tries + 1
        self._rounds[0] = max(self._rounds[0], find_round(stream.address))
        common = {
            "seed": stream.seed,
            "address": list(address),
            "round": find_round(address),
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
        about = str(self.common.get("candidate", ""))
        round = self.round and self.round + self.before
        return Sum(kind, digest_tensor(x), round, row, about)

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


# -- sums that hide their terms: the server's side -------------------------------------------------


def _read_total(words: Words, ledger: Ledger) -> NDArray[np.float64]:
    """Return what a sum stands for, with a note where it is noise: one masked vector was wrong."""
    total, largest = from_fixed(words), 2.0 ** (63 - FRACTION_BITS)
    if float(np.abs(total).max(initial=0.0)) > largest / 8:
        ledger.notes.append(
            f"a sum that was opened has numbers near {largest:.2g}, the largest there are: "
            "a client's masked vector was wrong or damaged; the masks hide whose. Do not trust "
            "the model from here on; start again from the one of a round before"
        )
    return total


@dataclass
class _Prepared:
    """An epoch as the server knows it; ``accused`` has whose boxes did not open, by holder."""

    name: str
    parties: dict[int, Published]
    digests: dict[int, Digests]
    accused: dict[int, set[int]]
    slot: int = 0


Read = TypeVar("Read")


@dataclass
class SecureSums:
    """Double masking with secret sharing; see ``session`` for the protocol, what it withstands."""

    slots: int = 16  # sums that one exchange of keys and one of shares prepare
    ledger: Ledger = field(default_factory=Ledger)
    _epoch: _Prepared | None = None

    def total(
        self,
        messenger: Messenger,
        requests: Requests,
        weights: Weights,
        part: str,
        ask: Ask,
        size: int | None = None,
    ) -> NDArray[np.float64]:
        """Return the sum, or raise :class:`MissingClients`."""
        epoch = self._epoch
        if epoch is None or set(epoch.parties) != set(requests) or epoch.slot >= self.slots:
            epoch = self._epoch = self._prepare(messenger)
        slot, epoch.slot = epoch.slot, epoch.slot + 1
        table = {"name": epoch.name, "slots": self.slots, "slot": slot}
        row = to_keys(dict(zip(requests, weights, strict=True)))
        for request in requests.values():
            request.args["mask"] = {**table, "weights": row, "part": part}

        def check(i: int, reply: Reply) -> None:
            expect_vector(reply.arrays, "masked", size or messenger.model.size, "uint64")

        replies = ask(requests, check).complete(messenger.members.names)
        masked = {i: replies[i].arrays["masked"] for i in sorted(replies)}
        shares = self._unmask(messenger, epoch, table)
        try:
            words = open_sum(masked, shares, slot, epoch.parties)
        except WrongSecret as wrong:
            self._epoch = None
            raise MissingClients({wrong.client: str(wrong)}, messenger.members.names) from wrong
        return _read_total(words, self.ledger)

    def _prepare(self, messenger: Messenger) -> _Prepared:
        """Take steps 1 and 2: keys, then shares, which every holder looks at."""
        everybody = set(messenger.index.tolist())
        table: dict[str, Any] = {"name": secrets.token_hex(8), "slots": self.slots}

        def read_keys(i: int, told: dict[str, Any]) -> tuple[dict[str, Any], Published]:
            keys = Published.from_dict(told)
            if len(keys.masking) != self.slots:
                raise WireError("sent a wrong number of keys")
            return told, keys

        def read_shares(i: int, told: dict[str, Any]) -> tuple[Boxes, Digests]:
            boxes, digests = (from_hex(told[name], dict, list) for name in ("boxes", "digests"))
            counts = {*map(len, boxes.values()), *map(len, digests.values())}
            if (set(boxes), set(digests), counts) != (everybody - {i}, everybody, {self.slots}):
                raise WireError("sent shares for the wrong clients")
            return boxes, digests

        def read_bad(i: int, told: dict[str, Any]) -> set[int]:
            bad = {int(j) for j in told["bad"]}
            if not bad <= everybody - {i}:
                raise WireError("complained about clients that it was not asked about")
            return bad

        keys = _take_step(messenger, "keys", table, read_keys)[0]
        parties = {str(i): keys[i][0] for i in sorted(keys)}
        shares = _take_step(messenger, "shares", {**table, "parties": parties}, read_shares)[0]

        def relay(i: int) -> dict[str, Any]:
            boxes, digests = (
                {j: told[k][i] for j, told in shares.items() if j != i} for k in (0, 1)
            )
            return {"boxes": to_hex(boxes), "digests": to_hex(digests)}

        accused = _take_step(messenger, "boxes", table, read_bad, relay)[0]
        self._blame(messenger, accused)
        published = {i: keys[i][1] for i in sorted(keys)}
        return _Prepared(table["name"], published, {i: d for i, (_, d) in shares.items()}, accused)

    def _blame(self, messenger: Messenger, accused: dict[int, set[int]]) -> None:
        """Name those whose boxes most holders cannot open, else those who cannot open most."""
        names, others = messenger.members.names, len(accused) - 1
        by = {j: [i for i, bad in accused.items() if j in bad] for j in accused}
        wrong = {
            j: f"sent shares of its keys that {len(holders)} of {others} cannot open"
            for j, holders in by.items()
            if len(holders) > others / 2
        } or {
            i: f"says that the shares of {len(bad)} of {others} others do not open"
            for i, bad in accused.items()
            if len(bad) > others / 2
        }
        if wrong:
            raise MissingClients(wrong, names)
        self.ledger.notes += [
            f"{names[j]} sent {names[i]} a share that does not open, or {names[i]} says so"
            for j, holders in by.items()
            for i in holders
        ]

    def _unmask(
        self, messenger: Messenger, epoch: _Prepared, table: dict[str, Any]
    ) -> dict[int, dict[int, bytes]]:
        """Take step 4; it needs a majority, not everybody."""
        names, everybody = messenger.members.names, set(epoch.parties)

        def read_shares(i: int, told: dict[str, Any]) -> dict[int, bytes]:
            shares: dict[int, bytes] = from_hex(told["shares"], dict)
            if set(shares) != everybody - epoch.accused[i]:
                raise WireError("sent shares of the wrong clients")
            for j, share in shares.items():
                if digest_secret(share) != epoch.digests[j][i][table["slot"]]:
                    raise WireError(f"sent a wrong share of {names[j]}")
            return shares

        shares, answers = _take_step(messenger, "unmask", table, read_shares, partial=True)
        if min(sum(j in own for own in shares.values()) for j in everybody) < majority(
            len(everybody)
        ):
            raise MissingClients({i: f.reason for i, f in answers.failures.items()}, names)
        return shares


def _take_step(
    messenger: Messenger,
    op: str,
    table: dict[str, Any],
    read: Callable[[int, dict[str, Any]], Read],
    more: Callable[[int], dict[str, Any]] = lambda i: {},
    partial: bool = False,
) -> tuple[dict[int, Read], Answers]:
    """Ask for a step, which ``more`` says more about to a client; ``read`` refuses wrong answers.

    All answer, or :class:`MissingClients` is raised, but where a part is of use.
    """
    where, found = Stream(0, (table["name"], table.get("slot", op))), dict[int, Read]()
    requests = messenger.write_requests(op, where, {}, {})
    for i, request in requests.items():
        request.args["mask"] = {**table, **more(i)}

    def check(i: int, reply: Reply) -> None:
        try:
            found[i] = read(i, reply.numbers)
        except WireError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError):
            raise WireError("sent data that are neither keys nor shares") from None

    answers = messenger.mailbox.ask(requests, check, partial)
    if not partial:
        answers.complete(messenger.members.names)
    return found, answers
