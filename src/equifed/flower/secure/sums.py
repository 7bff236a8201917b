"""Weighted sums whose terms the server does not see: the messages around ``masks`` and ``secure``.

Clients multiply by their weight, which is public, before masking.

* :class:`PairSums` (``privacy="sums"``): pairwise masks alone, with the keys of the hello. One
  exchange a sum, nothing to unmask; but the masks of a client that does not answer are not removed,
  so the sum is lost and the round is repeated without it. If the late vector then arrives after
  all, the server could subtract the two sums and see it.
* :class:`SecureSums` (``privacy="secure"``): own masks and secret sharing besides (see ``secure``).
  Two exchanges a sum and two more for every ``slots`` sums; a late vector stays hidden, and a
  client may vanish between its vector and the unmasking.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Weights
from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.flower.mailbox import Answers, Check, positions
from equifed.flower.secure.masks import FRACTION_BITS, Words, from_fixed
from equifed.flower.secure.session import Published, majority, opened_sum
from equifed.flower.wire import Reply, Request, WireError, expect

if TYPE_CHECKING:
    from equifed.flower.server import FlowerClients

Requests = dict[int, Request]
Ask = Callable[[Requests, Check], Answers]


class PrivacyError(RuntimeError):
    """A sum that would show one client's vector."""


class HiddenSums(Protocol):
    """A way to sum what clients keep."""

    def total(
        self, clients: FlowerClients, requests: Requests, weights: Weights, part: str, ask: Ask
    ) -> NDArray[np.float64]:
        """Return sum_i weights_i v_i, where ``requests`` make clients compute or recall v_i."""
        ...


@dataclass
class PairSums:
    """Pairwise masks with the keys of the hello; see the module's text."""

    bits: int = FRACTION_BITS
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    number: int = 0

    def total(
        self, clients: FlowerClients, requests: Requests, weights: Weights, part: str, ask: Ask
    ) -> NDArray[np.float64]:
        """Return the weighted sum; one exchange."""
        table = {
            "scheme": "pairs",
            "name": f"{self.session}/{self.number // 64}",
            "slot": self.number % 64,
            "members": {str(i): clients.roster.keys[i].hex() for i in requests},
            "bits": self.bits,
        }
        self.number += 1
        masked = _masked(clients, requests, weights, part, ask, table)
        return from_fixed(sum_words(masked), self.bits)


@dataclass
class _Prepared:
    """An epoch as the server knows it."""

    name: str
    members: dict[int, Published]
    boxes: dict[int, dict[int, list[bytes]]]
    slot: int = 0


@dataclass
class SecureSums:
    """Double masking with secret sharing; see ``secure`` for the protocol and what it withstands.

    Parameters
    ----------
    bits : int
        Bits after the point.
    slots : int
        Sums that one exchange of keys and one of shares prepare.
    """

    bits: int = FRACTION_BITS
    slots: int = 16
    _epoch: _Prepared | None = None

    def total(
        self, clients: FlowerClients, requests: Requests, weights: Weights, part: str, ask: Ask
    ) -> NDArray[np.float64]:
        """Return the weighted sum; two exchanges, and two more for a new epoch."""
        epoch = self._epoch
        if epoch is None or set(epoch.members) != set(requests) or epoch.slot >= self.slots:
            epoch = self._epoch = self._prepared(clients)
        slot, epoch.slot = epoch.slot, epoch.slot + 1
        table = {**self._table(epoch.name), "slot": slot}
        masked = _masked(clients, requests, weights, part, ask, table)
        shares = self._shares(clients, epoch, table)
        words = opened_sum(masked, shares, epoch.name, slot, epoch.members)
        return from_fixed(words, self.bits)

    def _table(self, name: str) -> dict[str, Any]:
        return {"scheme": "secure", "name": name, "slots": self.slots, "bits": self.bits}

    def _prepared(self, clients: FlowerClients) -> _Prepared:
        """Take steps 1 and 2: keys, then shares."""
        table = self._table(secrets.token_hex(8))

        def check_keys(i: int, reply: Reply) -> None:
            if len(_published(reply.numbers).masking) != self.slots:
                raise WireError("sent another number of keys than asked for")

        answers = self._step(clients, "keys", table, check_keys)
        told = {str(i): r.numbers for i, r in sorted(answers.complete(clients.names).items())}
        members = {int(i): _published(numbers) for i, numbers in told.items()}

        def check_boxes(i: int, reply: Reply) -> None:
            boxes = _boxes(reply.numbers)
            if set(boxes) != set(members) - {i} or any(
                len(b) != self.slots for b in boxes.values()
            ):
                raise WireError("sent shares for others than asked for")

        answers = self._step(clients, "shares", {**table, "members": told}, check_boxes)
        boxes = {i: _boxes(r.numbers) for i, r in answers.complete(clients.names).items()}
        return _Prepared(table["name"], members, boxes)

    def _shares(
        self, clients: FlowerClients, epoch: _Prepared, table: dict[str, Any]
    ) -> dict[int, dict[int, bytes]]:
        """Take step 4; it needs a majority, not everybody.

        Raises
        ------
        MissingClients
            If too few are left to open the sum.
        """
        slot, everybody = table["slot"], sorted(epoch.members)
        requests = clients.requests("unmask", Stream(0, (epoch.name, slot)), {}, {})
        for i, request in requests.items():
            boxes = {str(j): epoch.boxes[j][i][slot].hex() for j in everybody if j != i}
            request.args["mask"] = {**table, "arrived": everybody, "boxes": boxes}

        def check(i: int, reply: Reply) -> None:
            if set(_hex_table(reply.numbers.get("shares"))) != set(everybody):
                raise WireError("sent shares of others than asked for")

        answers = clients.post.ask(requests, check, partial=True)
        if len(answers.replies) < majority(len(everybody)):
            raise MissingClients(
                {i: failure.reason for i, failure in answers.failures.items()}, clients.names
            )
        return {i: _hex_table(reply.numbers["shares"]) for i, reply in answers.replies.items()}

    def _step(
        self, clients: FlowerClients, op: str, table: dict[str, Any], check: Check
    ) -> Answers:
        requests = clients.requests(op, Stream(0, (table["name"], op)), {"mask": table}, {})
        return clients.post.ask(requests, check)


def sum_words(masked: dict[int, Words]) -> Words:
    """Return the sum modulo 2^64; its order does not matter."""
    rows = iter(masked.values())
    total = next(rows).copy()
    for row in rows:
        total += row
    return total


def _masked(
    clients: FlowerClients,
    requests: Requests,
    weights: Weights,
    part: str,
    ask: Ask,
    table: dict[str, Any],
) -> dict[int, Words]:
    """Ask every client for its scaled and masked vector; all of them, or MissingClients."""
    _refuse_revealing(weights)
    for k, i in enumerate(positions(clients.index)):
        requests[i].args["mask"] = {**table, "weight": float(weights[k]), "part": part}

    def check(i: int, reply: Reply) -> None:
        expect(reply.arrays, "masked", clients.model.size, "uint64")

    replies = ask(requests, check).complete(clients.names)
    return {i: replies[i].arrays["masked"] for i in sorted(replies)}


def _refuse_revealing(weights: Weights) -> None:
    if np.count_nonzero(weights) < 2:
        raise PrivacyError(
            "This sum would be one client's vector, because no other client has any weight. Use an "
            "objective with a cap on the weights (CVaR, or a chi-square penalty), let more clients "
            "take part, or give up hidden sums with privacy = 'none'."
        )


def _published(numbers: dict[str, Any]) -> Published:
    try:
        sharing = bytes.fromhex(numbers["sharing"])
        masking = tuple(bytes.fromhex(key) for key in numbers["masking"])
    except (KeyError, ValueError, TypeError):
        raise WireError("sent something else than keys") from None
    if any(len(key) != 32 for key in (sharing, *masking)):
        raise WireError("sent keys of a wrong length")
    return Published(sharing, masking)


def _boxes(numbers: dict[str, Any]) -> dict[int, list[bytes]]:
    try:
        return {
            int(j): [bytes.fromhex(box) for box in boxes] for j, boxes in numbers["boxes"].items()
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        raise WireError("sent something else than shares") from None


def _hex_table(value: Any) -> dict[int, bytes]:
    try:
        return {int(j): bytes.fromhex(share) for j, share in value.items()}
    except (ValueError, TypeError, AttributeError):
        raise WireError("sent something else than shares") from None
