r"""What hidden sums are made of: fixed point, pairwise masks and shared secrets.

A vector becomes whole numbers modulo :math:`2^{64}`: with f bits after the point, v is sent as
:math:`\mathrm{round}(2^f v)`. Sums of such numbers are exact; the only error is the rounding, at
most :math:`2^{-f-1}` for each client. Every pair of clients agrees on a key (X25519, then HKDF) and
expands it (ChaCha20) into a mask of the vector's length; the one of smaller position adds it, the
other subtracts it, so that the masks are gone from the sum of all and from nothing less.

A secret is shared so that any t of n can rebuild it and fewer learn nothing (Shamir 1979): it is
the constant term of a polynomial of degree t - 1 over the integers modulo the prime
:math:`2^{521} - 1`; a share is its value at a client's position plus one.

Nothing here knows of Flower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

FRACTION_BITS = 40
"""Default bits after the point: a step of 9.1e-13 and sums up to 8.3e6 in absolute value."""

PRIME = 2**521 - 1
SHARE_BYTES = 66

Words = NDArray[np.uint64]


class RangeError(ValueError):
    """A value too large for the fixed point; nothing is ever clipped."""


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


def sum_words(vectors: Iterable[Words]) -> Words:
    """Return the sum modulo 2^64; its order does not matter."""
    first, *others = vectors
    total = first.copy()
    for vector in others:
        total += vector
    return total


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
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    return derive_key(shared, purpose)


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
    coefficients = [int.from_bytes(secret, "big")]
    for k in range(1, threshold):  # 576 bits, so that the remainder is as good as uniform
        drawn = int.from_bytes(derive_key(randomness, f"coefficient {k}", 72), "big")
        coefficients.append(drawn % PRIME)
    return {i: _evaluate(coefficients, i + 1).to_bytes(SHARE_BYTES, "big") for i in holders}


def rebuild_secret(shares: Mapping[int, bytes], length: int = 32) -> bytes:
    """Return the secret of ``length`` bytes from shares by holder (Lagrange at zero)."""
    points = {i + 1: int.from_bytes(value, "big") for i, value in shares.items()}
    total = 0
    for x, y in points.items():
        top, bottom = 1, 1
        for other in points:
            if other != x:
                top, bottom = top * other % PRIME, bottom * (other - x) % PRIME
        total = (total + y * top * pow(bottom, -1, PRIME)) % PRIME
    if total >= 1 << (8 * length):
        raise ValueError("These shares do not belong to one secret, or there are too few.")
    return total.to_bytes(length, "big")


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):  # Horner
        total = (total * x + coefficient) % PRIME
    return total
