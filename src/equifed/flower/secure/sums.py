"""Weighted sums whose terms the server does not see (``privacy="secure"``): its side of them.

Clients multiply by their weight, which is public, before masking; ``session`` has the protocol. A
sum takes two exchanges, and three more for every ``slots`` sums.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Weights
from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.flower.mailbox import Check
from equifed.flower.messenger import Ask, Messenger, Requests
from equifed.flower.secure.ledger import Ledger
from equifed.flower.secure.masking import to_keys
from equifed.flower.secure.masks import FRACTION_BITS, Words, from_fixed
from equifed.flower.secure.session import (
    Boxes,
    Digests,
    Published,
    WrongSecret,
    digest_secret,
    from_hex,
    majority,
    open_sum,
)
from equifed.flower.wire import Reply, WireError, expect_vector


def _read_total(words: Words, bits: int, ledger: Ledger) -> NDArray[np.float64]:
    """Return what a sum stands for, with a note where it is noise: one masked vector was wrong."""
    total, largest = from_fixed(words, bits), 2.0 ** (63 - bits)
    if float(np.abs(total).max(initial=0.0)) > largest / 8:
        ledger.notes.append(
            f"a sum that was opened has numbers near {largest:.2g}, the largest there are: "
            "somebody's masked vector was wrong or damaged, and nobody can see whose. Do not trust "
            "the model from here on; start again from the one of a round before"
        )
    return total


@dataclass
class _Prepared:
    """An epoch as the server knows it."""

    name: str
    parties: dict[int, Published]
    digests: dict[int, Digests]
    accused: dict[int, set[int]]
    slot: int = 0


@dataclass
class SecureSums:
    """Double masking with secret sharing; see ``session`` for the protocol, what it withstands."""

    bits: int = FRACTION_BITS  # after the point
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
        table = {**self._table(epoch.name), "slot": slot}
        masked = _collect(messenger, requests, weights, part, ask, table, size)
        shares = self._unmask(messenger, epoch, table)
        try:
            words = open_sum(masked, shares, epoch.name, slot, epoch.parties)
        except WrongSecret as wrong:
            self._epoch = None
            raise MissingClients({wrong.client: str(wrong)}, messenger.members.names) from wrong
        return _read_total(words, self.bits, self.ledger)

    def _table(self, name: str) -> dict[str, Any]:
        return {"name": name, "slots": self.slots, "bits": self.bits}

    def _prepare(self, messenger: Messenger) -> _Prepared:
        """Take steps 1 and 2: keys, then shares."""
        table = self._table(secrets.token_hex(8))

        def check_keys(i: int, reply: Reply) -> None:
            if len(_read_keys(reply).masking) != self.slots:
                raise WireError("sent another number of keys than asked for")

        replies = _take_step(messenger, "keys", table, check_keys)
        told = {str(i): reply.numbers for i, reply in sorted(replies.items())}
        parties = {i: _read_keys(reply) for i, reply in sorted(replies.items())}

        def check_boxes(i: int, reply: Reply) -> None:
            boxes, digests = _read_boxes(reply)
            counts = {*map(len, boxes.values()), *map(len, digests.values())}
            others = set(parties) - {i}
            if (set(boxes), set(digests), counts) != (others, set(parties), {self.slots}):
                raise WireError("sent shares for others than asked for")
            if any(len(pair) != 2 for pairs in digests.values() for pair in pairs):
                raise WireError(NOT_KEYS)

        replies = _take_step(messenger, "shares", {**table, "parties": told}, check_boxes)
        digests = {i: _read_boxes(reply)[1] for i, reply in replies.items()}
        accused = self._relay(messenger, table, replies)
        return _Prepared(table["name"], parties, digests, accused)

    def _relay(
        self, messenger: Messenger, table: dict[str, Any], shares: dict[int, Reply]
    ) -> dict[int, set[int]]:
        """Give every holder its boxes; return whose did not open, by holder."""
        requests = messenger.write_requests("boxes", Stream(0, (table["name"], "boxes")), {}, {})
        for i, request in requests.items():
            told = {j: reply.numbers for j, reply in shares.items() if j != i}
            request.args["mask"] = {
                **table,
                "boxes": {str(j): n["boxes"][str(i)] for j, n in told.items()},
                "digests": {str(j): n["digests"][str(i)] for j, n in told.items()},
            }

        def check(i: int, reply: Reply) -> None:
            if not _read_bad(reply) <= set(shares) - {i}:
                raise WireError("complains about others than asked for")

        replies = messenger.ask(requests, check)
        accused = {i: _read_bad(reply) for i, reply in replies.items()}
        self._blame(messenger, accused)
        return accused

    def _blame(self, messenger: Messenger, accused: dict[int, set[int]]) -> None:
        """Name those whose boxes most holders cannot open, else those who cannot open most."""
        names, half = messenger.members.names, (len(accused) - 1) / 2
        by = {j: [i for i, bad in accused.items() if j in bad] for j in accused}
        wrong = {
            j: f"sent shares of its keys that {len(holders)} of {len(accused) - 1} cannot open"
            for j, holders in by.items()
            if len(holders) > half
        }
        wrong = wrong or {
            i: f"says that the shares of {len(bad)} of {len(accused) - 1} others do not open"
            for i, bad in accused.items()
            if len(bad) > half
        }
        if wrong:
            raise MissingClients(wrong, names)
        for j, holders in by.items():
            for i in holders:
                self.ledger.notes.append(
                    f"{names[j]} sent {names[i]} a share that does not open, or {names[i]} says so"
                )

    def _unmask(
        self, messenger: Messenger, epoch: _Prepared, table: dict[str, Any]
    ) -> dict[int, dict[int, bytes]]:
        """Take step 4; it needs a majority, not everybody."""
        slot, everybody = table["slot"], sorted(epoch.parties)
        requests = messenger.write_requests("unmask", Stream(0, (epoch.name, slot)), {}, {})
        for request in requests.values():
            request.args["mask"] = {**table, "arrived": everybody}

        def check(i: int, reply: Reply) -> None:
            shares = _read_shares(reply)
            if set(shares) != set(everybody) - epoch.accused[i]:
                raise WireError("sent shares of others than asked for")
            for j, share in shares.items():
                if digest_secret(share) != epoch.digests[j][i][slot][0]:
                    raise WireError(f"sent a wrong share of {messenger.members.names[j]}")

        answers = messenger.mailbox.ask(requests, check, partial=True)
        shares = {i: _read_shares(reply) for i, reply in answers.replies.items()}
        held = min(sum(j in own for own in shares.values()) for j in everybody)
        if held < majority(len(everybody)):
            reasons = {i: failure.reason for i, failure in answers.failures.items()}
            raise MissingClients(reasons, messenger.members.names)
        return shares


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
    size: int | None,
) -> dict[int, Words]:
    """Ask every client for its scaled and masked vector; all of them, or MissingClients."""
    row = to_keys(dict(zip(requests, weights, strict=True)))
    for request in requests.values():
        request.args["mask"] = {**table, "weights": row, "part": part}

    def check(i: int, reply: Reply) -> None:
        expect_vector(reply.arrays, "masked", size or messenger.model.size, "uint64")

    replies = ask(requests, check).complete(messenger.members.names)
    return {i: replies[i].arrays["masked"] for i in sorted(replies)}


# -- what clients answer ---------------------------------------------------------------------------

NOT_KEYS = "sent something else than keys or shares"


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError):
        raise WireError(NOT_KEYS) from None


def _read_keys(reply: Reply) -> Published:
    with _reading():
        return Published.from_dict(reply.numbers)


def _read_boxes(reply: Reply) -> tuple[Boxes, Digests]:
    with _reading():
        boxes = from_hex(reply.numbers["boxes"], dict, list)
        return boxes, from_hex(reply.numbers["digests"], dict, list, list)


def _read_bad(reply: Reply) -> set[int]:
    with _reading():
        return {int(j) for j in reply.numbers["bad"]}


def _read_shares(reply: Reply) -> dict[int, bytes]:
    with _reading():
        return dict(from_hex(reply.numbers["shares"], dict))
