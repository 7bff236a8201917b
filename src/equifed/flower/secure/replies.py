"""What clients answer in the steps of a secure sum, as the server reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from equifed.flower.secure.session import Published
from equifed.flower.wire import Reply, WireError

T = TypeVar("T")


def read(reader: Callable[[Reply], T], reply: Reply) -> T:
    """Return what a reader makes of a reply, or raise :class:`WireError`."""
    try:
        return reader(reply)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise WireError("sent something else than keys or shares") from None


def read_keys(reply: Reply) -> Published:
    """Return the public keys."""
    return Published.from_dict(reply.numbers)


def read_boxes(reply: Reply) -> dict[int, list[bytes]]:
    """Return encrypted shares by holder."""
    boxes = reply.numbers["boxes"].items()
    return {int(j): [bytes.fromhex(box) for box in listed] for j, listed in boxes}


def read_digests(reply: Reply) -> dict[int, list[tuple[bytes, bytes]]]:
    """Return digests of shares by holder."""
    listed = reply.numbers["digests"].items()
    return {int(j): [(bytes.fromhex(a), bytes.fromhex(b)) for a, b in pairs] for j, pairs in listed}


def read_bad(reply: Reply) -> set[int]:
    """Return whose boxes did not open."""
    return {int(j) for j in reply.numbers["bad"]}


def read_shares(reply: Reply) -> dict[int, bytes]:
    """Return shares by party."""
    return {int(j): bytes.fromhex(share) for j, share in reply.numbers["shares"].items()}
