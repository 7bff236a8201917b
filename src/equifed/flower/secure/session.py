r"""Secure sums: double masking with recovery by secret sharing (Bonawitz et al. 2017, Figure 4).

Client i adds to its vector a mask of its own, :math:`\mathrm{PRG}(b_i)`, and one for each pair. An
*epoch* prepares many sums at once; a *slot* of it has its own keys and serves exactly one sum.

1. keys: every client publishes, for every slot, a public key for masks and a digest of its own
   mask, and one key for shares; signed, where it has the key that its node is registered with.
2. shares: every client shares, for every slot, its :math:`b_i` among all, each share encrypted for
   its holder (a box) and with a digest; the server relays what it cannot read. Holders open their
   boxes at once and say whose do not hold what the digest says.
3. masked: every client sends its scaled, masked vector. All must arrive: the masks of pairs are
   gone from the sum of all alone. Unlike in the paper nobody shares the key of these masks, so the
   vectors of a sum that lost a member are never opened; the round begins anew without it.
4. unmask: those still there send their shares of every :math:`b_j`. With t of n answers the server
   removes these masks and holds the sum, and nothing else. A share that is not the one of the
   digest is the fault of who sent it; a secret that is not the published one, though all shares
   are, that of the client whose it is.

A client that is gone after step 3 is still in the sum. Steps 1 and 2 are repeated every
``slots`` sums only.

**What it withstands**: a server that follows the protocol and looks at everything it receives,
together with up to t - 1 of the clients, t being more than half. Where sites know each other's
keys (``identity``), the server cannot put itself between them. **What it does not**: a server that
sends slightly different models, wrong vectors, and whatever the sum itself tells (see ``ledger``).

Nothing here knows of Flower: bytes and plain values go in and out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from equifed.flower.secure.masks import (
    Words,
    agree_on_key,
    derive_key,
    expand_mask,
    make_pair_mask,
    make_public_key,
    rebuild_secret,
    share_secret,
    sum_words,
)

NONCE = bytes(12)
"""Every encryption key is used once, so its nonce may be fixed."""


Boxes = dict[int, list[bytes]]
"""Encrypted shares, by client and slot."""

Digests = dict[int, list[bytes]]
"""Digests of shares, by client and slot."""


class SecureError(RuntimeError):
    """A step of the protocol that must not be taken."""


class WrongSecret(SecureError):
    """Shares of a client that do not belong to its keys; ``client`` is its position."""

    def __init__(self, client: int) -> None:
        super().__init__("its shares do not belong to the keys that it published")
        self.client = client


def to_hex(value: Any) -> Any:
    """Return bytes in mappings and lists as JSON has them."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): to_hex(inner) for key, inner in value.items()}
    return [to_hex(inner) for inner in value]


def from_hex(value: Any, *kinds: type[Any]) -> Any:
    """Read what :func:`to_hex` wrote of dicts by position and lists; raise if it is anything else.

    >>> from_hex({"2": ["6869"]}, dict, list)
    {2: [b'hi']}
    """
    if not kinds:
        return bytes.fromhex(value)
    if not isinstance(value, kinds[0]):
        raise TypeError(f"no {kinds[0].__name__}")
    if isinstance(value, dict):
        if any(key != str(int(key)) for key in value):  # one way to write a position
            raise ValueError("no position")
        return {int(key): from_hex(inner, *kinds[1:]) for key, inner in value.items()}
    return [from_hex(inner, *kinds[1:]) for inner in value]


def majority(n: int) -> int:
    """Return the least number of clients that must stay: more than half.

    >>> majority(4), majority(5)
    (3, 3)
    """
    return n // 2 + 1


@dataclass(frozen=True)
class Published:
    """A client's public keys for one epoch: one for shares, and one for masks in every slot.

    ``own`` are digests of the masks of its own.
    """

    sharing: bytes
    masking: tuple[bytes, ...]
    own: tuple[bytes, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(to_hex(vars(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Published:
        """Read what :meth:`to_dict` wrote; raise if it is anything else."""
        masking, own = (tuple(from_hex(values[name], list)) for name in ("masking", "own"))
        published = cls(from_hex(values["sharing"]), masking, own)
        keys = (published.sharing, *masking, *own)
        if len(masking) != len(own) or any(len(key) != 32 for key in keys):
            raise ValueError("a key of a wrong length")
        return published


@dataclass(frozen=True)
class Epoch:
    """A client's secrets for one epoch of ``slots`` sums, all from 32 bytes that never leave it.

    ``name`` is the same for all clients and never used twice, ``own`` the client's position.
    """

    name: str
    own: int
    secret: bytes
    slots: int

    def publish(self) -> Published:
        """Step 1: return the public keys."""
        masking = tuple(make_public_key(self._derive(f"mask {slot}")) for slot in range(self.slots))
        own = tuple(digest_secret(self._derive(f"own {slot}")) for slot in range(self.slots))
        return Published(make_public_key(self._derive("sharing")), masking, own)

    def share(self, parties: Mapping[int, Published]) -> tuple[Boxes, Digests]:
        """Step 2: return one encrypted share per slot for every other, and digests of all."""
        if parties.get(self.own) != self.publish():
            raise SecureError("the list of parties does not hold this client's own keys")
        if len(parties) < 2:
            raise SecureError("a sum over one client hides nothing")
        boxes: Boxes = {j: [] for j in parties if j != self.own}
        digests: Digests = {j: [] for j in sorted(parties)}
        for slot in range(self.slots):
            shares = self._share_own(slot, sorted(parties))
            for j, listed in boxes.items():
                box = ChaCha20Poly1305(self._box_key(parties[j].sharing, self.own, j, slot))
                listed.append(box.encrypt(NONCE, shares[j], None))
            for j, told in digests.items():
                told.append(digest_secret(shares[j]))
        return boxes, digests

    def find_bad_boxes(
        self, parties: Mapping[int, Published], boxes: Boxes, digests: Digests
    ) -> list[int]:
        """Return whose boxes do not open, or hold other shares than their digests say."""

        def fits(j: int, slot: int) -> bool:
            try:
                share = self._open(j, slot, parties, {j: boxes[j][slot]})
                return digest_secret(share) == digests[j][slot]
            except (SecureError, KeyError, IndexError):
                return False

        others = sorted(set(parties) - {self.own})
        return [j for j in others if not all(fits(j, slot) for slot in range(self.slots))]

    def mask(
        self, vector: Words, slot: int, parties: Mapping[int, Published], members: str = ""
    ) -> Words:
        """Step 3: return the vector under this client's own mask and those of all its pairs.

        ``members`` says who has a weight; the masks are gone only if all were told the same.
        """
        publics = {j: keys.masking[slot] for j, keys in parties.items()}
        purpose = f"{self.name} slot {slot} of {sorted(parties)} sum of {members}"
        pairs = make_pair_mask(
            self._derive(f"mask {slot}"), self.own, publics, purpose, len(vector)
        )
        return vector + expand_mask(self._derive(f"own {slot}"), len(vector)) + pairs

    def unmask(
        self, slot: int, parties: Mapping[int, Published], boxes: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """Step 4: return a share of the own mask of each party with a box."""
        held = [j for j in sorted(parties) if j == self.own or j in boxes]
        return {j: self._open(j, slot, parties, boxes) for j in held}

    def _open(
        self, j: int, slot: int, parties: Mapping[int, Published], boxes: Mapping[int, bytes]
    ) -> bytes:
        if j == self.own:
            return self._share_own(slot, sorted(parties))[j]
        key = self._box_key(parties[j].sharing, j, self.own, slot)
        try:
            return ChaCha20Poly1305(key).decrypt(NONCE, boxes[j], None)
        except (InvalidTag, KeyError):
            raise SecureError("a share is missing or was changed on its way") from None

    def _share_own(self, slot: int, holders: Sequence[int]) -> dict[int, bytes]:
        drawn = derive_key(self.secret, f"polynomial own {slot}")
        return share_secret(self._derive(f"own {slot}"), drawn, holders, majority(len(holders)))

    def _box_key(self, public: bytes, sender: int, holder: int, slot: int) -> bytes:
        purpose = f"{self.name} share of {sender} for {holder} in {slot}"
        return agree_on_key(self._derive("sharing"), public, purpose)

    def _derive(self, purpose: str) -> bytes:
        return derive_key(self.secret, f"{self.name} {purpose}")


def open_sum(
    masked: Mapping[int, Words],
    answers: Mapping[int, Mapping[int, bytes]],
    slot: int,
    parties: Mapping[int, Published],
) -> Words:
    """Return the sum of the ``masked`` vectors: the server's side of step 4.

    ``answers`` are, by client that answered, its share for every party. Raises
    :class:`WrongSecret` if shares do not belong to what was published.
    """
    need = majority(len(parties))
    if set(masked) != set(parties):
        raise SecureError("a vector is missing, so the sum is under the masks of pairs")
    if len(answers) < need:
        raise SecureError(f"{len(answers)} clients answered the last step, {need} are needed")
    total = sum_words(masked.values())
    for j in sorted(parties):
        secret = _rebuild(j, {i: shares[j] for i, shares in answers.items() if j in shares}, need)
        if digest_secret(secret) != parties[j].own[slot]:
            raise WrongSecret(j)
        total = total - expand_mask(secret, len(total))
    return total


def digest_secret(secret: bytes) -> bytes:
    """Return what may be shown of a secret or share to recognise it later."""
    return hashlib.sha256(b"equifed secret " + secret).digest()


def _rebuild(client: int, shares: Mapping[int, bytes], need: int) -> bytes:
    """Return a client's secret from the first shares of it."""
    if len(shares) < need:
        raise SecureError(f"{len(shares)} clients hold a share of client {client}, not {need}")
    try:
        return rebuild_secret({i: shares[i] for i in sorted(shares)[:need]})
    except ValueError:
        raise WrongSecret(client) from None
