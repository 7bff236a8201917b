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

A vector becomes whole numbers modulo :math:`2^{64}`: with f bits after the point, v is sent as
:math:`\mathrm{round}(2^f v)`. Sums of such numbers are exact; the only error is the rounding, at
most :math:`2^{-f-1}` for each client. Every pair of clients agrees on a key (X25519, then HKDF) and
expands it (ChaCha20) into a mask of the vector's length; the one of smaller position adds it, the
other subtracts it, so that the masks are gone from the sum of all and from nothing less.

A secret is shared so that any t of n can rebuild it and fewer learn nothing (Shamir 1979): it is
the constant term of a polynomial of degree t - 1 over the integers modulo the prime
:math:`2^{521} - 1`; a share is its value at a client's position plus one.

Nothing here knows of Flower: bytes and plain values go in and out.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

NONCE = bytes(12)  # every encryption key is used once, so its nonce may be fixed
FRACTION_BITS = 40  # after the point: a step of 9.1e-13 and sums up to 8.3e6 in absolute value
PRIME, SHARE_BYTES = 2**521 - 1, 66

Words = NDArray[np.uint64]
Boxes = dict[int, list[bytes]]  # encrypted shares, by client and slot
Digests = dict[int, list[bytes]]  # of shares, by client and slot


class RangeError(ValueError):
    """A value too large for the fixed point; nothing is ever clipped."""


class SecureError(RuntimeError):
    """A step of the protocol that must not be taken."""


class WrongSecret(SecureError):
    """Shares of a client that do not belong to its keys; ``client`` is its position."""

    def __init__(self, client: int) -> None:
        super().__init__("its shares do not belong to the keys that it published")
        self.client = client


# -- fixed point, masks and shared secrets ---------------------------------------------------------


def to_fixed(values: NDArray[np.float64], terms: int, bits: int = FRACTION_BITS) -> Words:
    r"""Return :math:`\mathrm{round}(2^f v) \bmod 2^{64}` of values whose sum of ``terms`` fits.

    Every value must be below :math:`2^{63-f}/\text{terms}`, so that no sum can wrap around.

    >>> from_fixed(to_fixed(np.array([1.5, -2.25]), terms=2) * np.uint64(2))
    array([ 3. , -4.5])
    """
    scaled = np.rint(np.asarray(values, dtype=np.float64) * 2.0**bits)
    limit = 2.0**63 / terms
    if not (np.abs(scaled) < limit).all():  # also false for NaN
        raise RangeError(
            f"a value to be summed is not below {limit * 2.0**-bits:.3g} in absolute value; use "
            "fewer bits after the point, or smaller weights"
        )
    return scaled.astype(np.int64).view(np.uint64)


def from_fixed(words: Words, bits: int = FRACTION_BITS) -> NDArray[np.float64]:
    """Return the values that sums of fixed-point numbers stand for."""
    return words.view(np.int64).astype(np.float64) * 2.0**-bits


def worst_error(terms: int, bits: int = FRACTION_BITS) -> float:
    """Return the largest error of a sum of ``terms`` vectors, in every coordinate.

    >>> worst_error(4) == 4 * 2.0**-41
    True
    """
    return float(terms * 2.0 ** -(bits + 1))


def make_public_key(secret: bytes) -> bytes:
    """Return the X25519 public key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree_on_key(secret: bytes, public: bytes, purpose: str) -> bytes:
    """Return the 32 bytes that the owners of two key pairs share for one purpose.

    >>> a, b = b"a" * 32, b"b" * 32
    >>> A, B = make_public_key(a), make_public_key(b)
    >>> agree_on_key(a, B, "sum 1") == agree_on_key(b, A, "sum 1")
    True
    """
    other = X25519PublicKey.from_public_bytes(public)
    return derive_key(X25519PrivateKey.from_private_bytes(secret).exchange(other), purpose)


def derive_key(secret: bytes, purpose: str, length: int = 32) -> bytes:
    """Return bytes for one purpose from a secret (HKDF with SHA-256)."""
    return HKDF(SHA256(), length, None, b"equifed " + purpose.encode()).derive(secret)


def expand_mask(seed: bytes, size: int) -> Words:
    """Return ``size`` pseudorandom words (ChaCha20) from 32 bytes that serve nothing else."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64, copy=False)


def make_pair_mask(
    secret: bytes, own: int, publics: Mapping[int, bytes], purpose: str, size: int
) -> Words:
    """Return the sum of the masks that client ``own`` shares with the others in ``publics``.

    The masks of all clients of ``publics`` add up to zero modulo 2^64.
    """
    total = np.zeros(size, dtype=np.uint64)
    for other, public in publics.items():
        if other != own:
            mask = expand_mask(agree_on_key(secret, public, purpose), size)
            total = total + mask if own < other else total - mask
    return total


def share_secret(
    secret: bytes, randomness: bytes, holders: Sequence[int], threshold: int
) -> dict[int, bytes]:
    """Return one share for each holder (a position of at least 0); any ``threshold`` rebuild it.

    The polynomial's coefficients are derived from ``randomness``, 32 secret bytes, so that the same
    shares can be computed again instead of being stored.

    >>> shares = share_secret(b"s" * 32, b"r" * 32, [0, 3, 7], threshold=2)
    >>> rebuild_secret({0: shares[0], 7: shares[7]}) == b"s" * 32
    True
    """
    if not 1 <= threshold <= len(set(holders)):
        raise ValueError(f"A threshold of {threshold} does not suit {len(set(holders))} holders.")
    # 576 bits are drawn of each coefficient, so that the remainder is as good as uniform
    drawn = (derive_key(randomness, f"coefficient {k}", 72) for k in range(1, threshold))
    coefficients = [int.from_bytes(part, "big") % PRIME for part in (secret, *drawn)]

    def evaluate(x: int) -> int:  # Horner
        return functools.reduce(lambda total, c: (total * x + c) % PRIME, coefficients[::-1], 0)

    return {i: evaluate(i + 1).to_bytes(SHARE_BYTES, "big") for i in holders}


def rebuild_secret(shares: Mapping[int, bytes], length: int = 32) -> bytes:
    """Return the secret of ``length`` bytes from shares by holder (Lagrange at zero)."""
    points = {i + 1: int.from_bytes(value, "big") for i, value in shares.items()}
    total = 0
    for x, y in points.items():
        top, bottom = 1, 1
        for other in points.keys() - {x}:
            top, bottom = top * other % PRIME, bottom * (other - x) % PRIME
        total = (total + y * top * pow(bottom, -1, PRIME)) % PRIME
    if total >= 1 << (8 * length):
        raise ValueError("These shares do not belong to one secret, or there are too few.")
    return total.to_bytes(length, "big")


def digest_secret(secret: bytes) -> bytes:
    """Return what may be shown of a secret or share to recognise it later."""
    return hashlib.sha256(b"equifed secret " + secret).digest()


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
    if not isinstance(value, dict):
        return [from_hex(inner, *kinds[1:]) for inner in value]
    if any(key != str(int(key)) for key in value):  # one way to write a position
        raise ValueError("no position")
    return {int(key): from_hex(inner, *kinds[1:]) for key, inner in value.items()}


# -- the protocol ----------------------------------------------------------------------------------


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
        slots = [self._share_own(slot, sorted(parties)) for slot in range(self.slots)]
        boxes: Boxes = {j: [] for j in parties if j != self.own}
        for j, listed in boxes.items():
            for slot, shares in enumerate(slots):
                box = self._cipher(parties[j].sharing, self.own, j, slot)
                listed.append(box.encrypt(NONCE, shares[j], None))
        return boxes, {j: [digest_secret(shares[j]) for shares in slots] for j in sorted(parties)}

    def find_bad_boxes(
        self, parties: Mapping[int, Published], boxes: Boxes, digests: Digests
    ) -> list[int]:
        """Return whose boxes do not open, or hold other shares than their digests say."""

        def fits(j: int) -> bool:
            try:
                opened = [
                    self._open(j, slot, parties, boxes[j][slot]) for slot in range(self.slots)
                ]
            except (SecureError, KeyError, IndexError):
                return False
            return [digest_secret(share) for share in opened] == digests.get(j, [])[: self.slots]

        return [j for j in sorted(set(parties) - {self.own}) if not fits(j)]

    def mask(
        self, vector: Words, slot: int, parties: Mapping[int, Published], members: str = ""
    ) -> Words:
        """Step 3: return the vector under this client's own mask and those of all its pairs.

        ``members`` says who has a weight; the masks are gone only if all were told the same.
        """
        publics = {j: keys.masking[slot] for j, keys in parties.items()}
        purpose = f"{self.name} slot {slot} of {sorted(parties)} sum of {members}"
        secret, size = self._derive(f"mask {slot}"), len(vector)
        pairs = make_pair_mask(secret, self.own, publics, purpose, size)
        return vector + expand_mask(self._derive(f"own {slot}"), size) + pairs

    def unmask(
        self, slot: int, parties: Mapping[int, Published], boxes: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """Step 4: return a share of the own mask of each party with a box."""
        own = self._share_own(slot, sorted(parties))[self.own]
        held = {j: self._open(j, slot, parties, boxes[j]) for j in sorted(parties) if j in boxes}
        return {**held, self.own: own}

    def _open(self, j: int, slot: int, parties: Mapping[int, Published], box: bytes) -> bytes:
        try:
            cipher = self._cipher(parties[j].sharing, j, self.own, slot)
            return cipher.decrypt(NONCE, box, None)
        except InvalidTag:
            raise SecureError("a share was changed on its way") from None

    def _share_own(self, slot: int, holders: Sequence[int]) -> dict[int, bytes]:
        drawn = derive_key(self.secret, f"polynomial own {slot}")
        return share_secret(self._derive(f"own {slot}"), drawn, holders, majority(len(holders)))

    def _cipher(self, public: bytes, sender: int, holder: int, slot: int) -> ChaCha20Poly1305:
        purpose = f"{self.name} share of {sender} for {holder} in {slot}"
        return ChaCha20Poly1305(agree_on_key(self._derive("sharing"), public, purpose))

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
    total: Words = functools.reduce(np.add, masked.values())
    for j in sorted(parties):
        holders = [i for i in sorted(answers) if j in answers[i]][:need]
        if len(holders) < need:
            raise SecureError(f"{len(holders)} clients hold a share of client {j}, not {need}")
        try:
            secret = rebuild_secret({i: answers[i][j] for i in holders})
        except ValueError:
            raise WrongSecret(j) from None
        if digest_secret(secret) != parties[j].own[slot]:
            raise WrongSecret(j)
        total = total - expand_mask(secret, len(total))
    return total
