"""Weighted sums whose terms the server does not see: the messages around masks and sessions.

Clients multiply by their weight, which is public, before masking.

* :class:`PairSums` (``privacy="sums"``): pairwise masks alone, with the keys of the hello. One
  exchange a sum, nothing to unmask; but the masks of a client that does not answer are not removed,
  so the sum is lost and the round is repeated without it. If the late vector then arrives after
  all, the server could subtract the two sums and see it.
* :class:`SecureSums` (``privacy="secure"``): own masks and secret sharing besides (see
  ``session``). Two exchanges a sum and two more for every ``slots`` sums; a late vector stays
  hidden, and a client may vanish between its vector and the unmasking.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.arrays import Weights
from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.flower.mailbox import Check
from equifed.flower.messenger import Ask, HiddenSums, Messenger, Requests
from equifed.flower.secure.ledger import Ledger, PrivacyError
from equifed.flower.secure.masks import FRACTION_BITS, Words, from_fixed, sum_words
from equifed.flower.secure.session import Published, majority, open_sum
from equifed.flower.wire import Reply, WireError, expect_vector

T = TypeVar("T")


@dataclass
class PairSums(HiddenSums):
    """Pairwise masks with the keys of the hello; see the module's text."""

    bits: int = FRACTION_BITS
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    number: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    @override
    def total(
        self, messenger: Messenger, requests: Requests, weights: Weights, part: str, ask: Ask
    ) -> NDArray[np.float64]:
        table = {
            "scheme": "pairs",
            "name": f"{self.session}/{self.number // 64}",
            "slot": self.number % 64,
            "parties": {str(i): messenger.members.keys[i].hex() for i in requests},
            "bits": self.bits,
        }
        self.number += 1
        masked = _collect(messenger, requests, weights, part, ask, table)
        return from_fixed(sum_words(masked.values()), self.bits)


@dataclass
class _Prepared:
    """An epoch as the server knows it."""

    name: str
    parties: dict[int, Published]
    boxes: dict[int, dict[int, list[bytes]]]
    slot: int = 0


@dataclass
class SecureSums(HiddenSums):
    """Double masking with secret sharing; see ``session`` for the protocol, what it withstands.

    Parameters
    ----------
    bits : int
        Bits after the point.
    slots : int
        Sums that one exchange of keys and one of shares prepare.
    """

    bits: int = FRACTION_BITS
    slots: int = 16
    ledger: Ledger = field(default_factory=Ledger)
    _epoch: _Prepared | None = None

    @override
    def total(
        self, messenger: Messenger, requests: Requests, weights: Weights, part: str, ask: Ask
    ) -> NDArray[np.float64]:
        epoch = self._epoch
        if epoch is None or set(epoch.parties) != set(requests) or epoch.slot >= self.slots:
            epoch = self._epoch = self._prepare(messenger)
        slot, epoch.slot = epoch.slot, epoch.slot + 1
        table = {**self._table(epoch.name), "slot": slot}
        masked = _collect(messenger, requests, weights, part, ask, table)
        shares = self._unmask(messenger, epoch, table)
        return from_fixed(open_sum(masked, shares, epoch.name, slot, epoch.parties), self.bits)

    def _table(self, name: str) -> dict[str, Any]:
        return {"scheme": "secure", "name": name, "slots": self.slots, "bits": self.bits}

    def _prepare(self, messenger: Messenger) -> _Prepared:
        """Take steps 1 and 2: keys, then shares."""
        table = self._table(secrets.token_hex(8))

        def check_keys(i: int, reply: Reply) -> None:
            if len(_read(_read_keys, reply).masking) != self.slots:
                raise WireError("sent another number of keys than asked for")

        replies = _take_step(messenger, "keys", table, check_keys)
        told = {str(i): reply.numbers for i, reply in sorted(replies.items())}
        parties = {i: _read_keys(reply) for i, reply in sorted(replies.items())}

        def check_boxes(i: int, reply: Reply) -> None:
            boxes = _read(_read_boxes, reply)
            counts = {len(box) for box in boxes.values()}
            if set(boxes) != set(parties) - {i} or counts != {self.slots}:
                raise WireError("sent shares for others than asked for")

        replies = _take_step(messenger, "shares", {**table, "parties": told}, check_boxes)
        boxes = {i: _read_boxes(reply) for i, reply in replies.items()}
        return _Prepared(table["name"], parties, boxes)

    def _unmask(
        self, messenger: Messenger, epoch: _Prepared, table: dict[str, Any]
    ) -> dict[int, dict[int, bytes]]:
        """Take step 4; it needs a majority, not everybody.

        Raises
        ------
        MissingClients
            If too few are left to open the sum.
        """
        slot, everybody = table["slot"], sorted(epoch.parties)
        requests = messenger.write_requests("unmask", Stream(0, (epoch.name, slot)), {}, {})
        for i, request in requests.items():
            boxes = {str(j): epoch.boxes[j][i][slot].hex() for j in everybody if j != i}
            request.args["mask"] = {**table, "arrived": everybody, "boxes": boxes}

        def check(i: int, reply: Reply) -> None:
            if set(_read(_read_shares, reply)) != set(everybody):
                raise WireError("sent shares of others than asked for")

        answers = messenger.mailbox.ask(requests, check, partial=True)
        if len(answers.replies) < majority(len(everybody)):
            reasons = {i: failure.reason for i, failure in answers.failures.items()}
            raise MissingClients(reasons, messenger.members.names)
        return {i: _read_shares(reply) for i, reply in answers.replies.items()}


def _take_step(
    messenger: Messenger, op: str, table: dict[str, Any], check: Check
) -> dict[int, Reply]:
    where = Stream(0, (table["name"], op))
    return messenger.ask(messenger.write_requests(op, where, {"mask": table}, {}), check)


def _collect(
    messenger: Messenger,
    requests: Requests,
    weights: Weights,
    part: str,
    ask: Ask,
    table: dict[str, Any],
) -> dict[int, Words]:
    """Ask every client for its scaled and masked vector; all of them, or MissingClients."""
    if np.count_nonzero(weights) < 2:
        raise PrivacyError(
            "This sum would be one client's vector, because no other client has any weight. Use an "
            "objective with a cap on the weights (CVaR, or a chi-square penalty), let more clients "
            "take part, or give up hidden sums with privacy = 'none'."
        )
    for k, request in enumerate(requests.values()):
        request.args["mask"] = {**table, "weight": float(weights[k]), "part": part}

    def check(i: int, reply: Reply) -> None:
        expect_vector(reply.arrays, "masked", messenger.model.size, "uint64")

    replies = ask(requests, check).complete(messenger.members.names)
    return {i: replies[i].arrays["masked"] for i in sorted(replies)}


def _read(reader: Callable[[Reply], T], reply: Reply) -> T:
    """Return what a reader makes of a reply, or raise :class:`WireError`."""
    try:
        return reader(reply)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise WireError("sent something else than keys or shares") from None


def _read_keys(reply: Reply) -> Published:
    return Published.from_dict(reply.numbers)


def _read_boxes(reply: Reply) -> dict[int, list[bytes]]:
    boxes = reply.numbers["boxes"].items()
    return {int(j): [bytes.fromhex(box) for box in listed] for j, listed in boxes}


def _read_shares(reply: Reply) -> dict[int, bytes]:
    return {int(j): bytes.fromhex(share) for j, share in reply.numbers["shares"].items()}
