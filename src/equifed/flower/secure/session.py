r"""Secure sums: double masking with recovery by secret sharing (Bonawitz et al. 2017, Figure 4).

Client i adds to its vector a mask of its own, :math:`\mathrm{PRG}(b_i)`, and one for each pair. An
*epoch* prepares many sums at once; a *slot* of it has its own keys and serves exactly one sum.

1. keys: every client publishes, for every slot, a public key for masks, and one key for shares.
2. shares: every client shares, for every slot, its :math:`b_i` and its secret mask key among all,
   each share encrypted for its holder; the server relays what it cannot read.
3. masked: every client sends its scaled, masked vector.
4. unmask: those still there send shares of :math:`b_j` for every j whose masked vector arrived, and
   of the mask key for every j whose vector did not; never both for the same client and slot. With t
   of n answers the server removes what masks are left and holds the sum, and nothing else.

A client that is gone after step 3 is still in the sum. Steps 1 and 2 are repeated every
``slots`` sums only.

**What it withstands**: a server that follows the protocol and looks at everything it receives,
together with up to t - 1 of the clients, t being more than half. **What it does not**: a server
that lies (it relays the keys, unauthenticated, and could put itself between clients), clients that
send wrong vectors, and whatever the sum itself tells; a sum in which one client alone has weight is
that client's vector, and is refused. The server still sees every client's losses, squared norms
where an algorithm asks for them, metrics, sizes, weights and presence.

Nothing here knows of Flower: what goes in and out is bytes and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from equifed.flower.secure import shamir
from equifed.flower.secure.masks import Words, agreed, derived, expanded, pair_mask, public_key

NONCE = bytes(12)
"""Every encryption key is used once, so its nonce may be fixed."""


class SecureError(RuntimeError):
    """A step of the protocol that must not be taken."""


def majority(n: int) -> int:
    """Return the least number of clients that must stay: more than half.

    >>> majority(4), majority(5)
    (3, 3)
    """
    return n // 2 + 1


@dataclass(frozen=True)
class Published:
    """A client's public keys for one epoch: one for shares, and one for masks in every slot."""

    sharing: bytes
    masking: tuple[bytes, ...]


@dataclass(frozen=True)
class Epoch:
    """A client's secrets for one epoch, all derived from 32 random bytes.

    Parameters
    ----------
    name : str
        Identity of the epoch, the same for all clients, never used twice.
    own : int
        The client's position.
    secret : bytes
        32 random bytes that never leave the client.
    slots : int
        Number of sums.
    """

    name: str
    own: int
    secret: bytes
    slots: int

    def published(self) -> Published:
        """Step 1: return the public keys."""
        masking = tuple(public_key(self._mask_key(slot)) for slot in range(self.slots))
        return Published(public_key(self._sharing_key()), masking)

    def shares(self, members: Mapping[int, Published]) -> dict[int, list[bytes]]:
        """Step 2: return, for every other member, one encrypted pair of shares for each slot."""
        if self.own not in members or members[self.own] != self.published():
            raise SecureError("the list of members does not hold this client's own keys")
        if len(members) < 2:
            raise SecureError("a sum over one client hides nothing")
        out: dict[int, list[bytes]] = {j: [] for j in members if j != self.own}
        for slot in range(self.slots):
            own, mask = self._both_shares(slot, sorted(members))
            for j, boxes in out.items():
                box = ChaCha20Poly1305(self._box_key(members[j].sharing, self.own, j, slot))
                boxes.append(box.encrypt(NONCE, own[j] + mask[j], None))
        return out

    def masked(self, vector: Words, slot: int, members: Mapping[int, Published]) -> Words:
        """Step 3: return the vector under this client's own mask and those of all its pairs."""
        publics = {j: keys.masking[slot] for j, keys in members.items()}
        purpose = f"{self.name} slot {slot} of {sorted(members)}"
        pairs = pair_mask(self._mask_key(slot), self.own, publics, purpose, len(vector))
        return vector + expanded(self._own_mask(slot), len(vector)) + pairs

    def unmask(
        self,
        slot: int,
        members: Mapping[int, Published],
        arrived: Sequence[int],
        boxes: Mapping[int, bytes],
    ) -> dict[int, bytes]:
        """Step 4: return one share for each member: of its own mask if its vector arrived, else of
        its mask key.
        """  # noqa: D205 - one sentence
        if not set(arrived) <= set(members) or len(set(arrived)) < majority(len(members)):
            raise SecureError("too few vectors arrived to open the sum")
        if self.own not in arrived:
            raise SecureError("this client's own vector is said not to have arrived")
        out = {}
        for j in sorted(members):
            pair = self._opened(j, slot, members, boxes)
            half = pair[: shamir.SHARE_BYTES] if j in arrived else pair[shamir.SHARE_BYTES :]
            out[j] = half
        return out

    def _opened(
        self, j: int, slot: int, members: Mapping[int, Published], boxes: Mapping[int, bytes]
    ) -> bytes:
        if j == self.own:
            own, mask = self._both_shares(slot, sorted(members))
            return own[j] + mask[j]
        key = self._box_key(members[j].sharing, j, self.own, slot)
        try:
            return ChaCha20Poly1305(key).decrypt(NONCE, boxes[j], None)
        except (InvalidTag, KeyError):
            raise SecureError("a share is missing or was changed on its way") from None

    def _both_shares(
        self, slot: int, holders: Sequence[int]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        t = majority(len(holders))
        random = [derived(self.secret, f"polynomial {kind} {slot}") for kind in ("own", "mask")]
        return (
            shamir.share(self._own_mask(slot), random[0], holders, t),
            shamir.share(self._mask_key(slot), random[1], holders, t),
        )

    def _box_key(self, public: bytes, sender: int, holder: int, slot: int) -> bytes:
        purpose = f"{self.name} share of {sender} for {holder} in {slot}"
        return agreed(self._sharing_key(), public, purpose)

    def _sharing_key(self) -> bytes:
        return derived(self.secret, f"{self.name} sharing")

    def _mask_key(self, slot: int) -> bytes:
        return derived(self.secret, f"{self.name} mask {slot}")

    def _own_mask(self, slot: int) -> bytes:
        return derived(self.secret, f"{self.name} own {slot}")


def opened_sum(
    masked: Mapping[int, Words],
    answers: Mapping[int, Mapping[int, bytes]],
    name: str,
    slot: int,
    members: Mapping[int, Published],
) -> Words:
    """Return the sum of the vectors that arrived, on the server's side of step 4.

    Parameters
    ----------
    masked : dict of arrays
        The masked vectors that arrived, by client.
    answers : dict of dict
        By client that answered step 4, its share for every member.
    name, slot, members
        As in :class:`Epoch`; ``members`` are those that were asked for their vectors.
    """
    need = majority(len(members))
    if len(answers) < need:
        raise SecureError(f"{len(answers)} clients answered the last step, {need} are needed")
    helpers = sorted(answers)[:need]
    size = len(next(iter(masked.values())))
    total = np.zeros(size, dtype=np.uint64)
    for vector in masked.values():
        total = total + vector
    purpose = f"{name} slot {slot} of {sorted(members)}"
    for j in sorted(members):
        secret = shamir.rebuild({i: answers[i][j] for i in helpers})
        if j in masked:
            total = total - expanded(secret, size)
            continue
        # What j would have added to cancel the masks of those who arrived.
        if public_key(secret) != members[j].masking[slot]:
            raise SecureError("the rebuilt key does not belong to the client that is gone")
        others = {i: members[i].masking[slot] for i in masked}
        total = total + pair_mask(secret, j, others, purpose, size)
    return total
