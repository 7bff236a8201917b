r"""Numbers that add up although each of them is hidden: fixed point and pairwise masks.

A vector becomes whole numbers modulo :math:`2^{64}`: with f bits after the point, v is sent as
:math:`\mathrm{round}(2^f v)`. Sums of such numbers are exact; the only error is the rounding, at
most :math:`2^{-f-1}` for each client. Every pair of clients agrees on a key (X25519, then HKDF) and
expands it (ChaCha20) into a mask of the vector's length; the one of smaller position adds it, the
other subtracts it, so that the masks are gone from the sum of all and from nothing less.

Nothing here knows of Flower.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

FRACTION_BITS = 40
"""Default bits after the point: a step of 9.1e-13 and sums up to 8.3e6 in absolute value."""

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


def worst_error(terms: int, bits: int = FRACTION_BITS) -> float:
    """Return the largest error of a sum of ``terms`` vectors, in every coordinate.

    >>> worst_error(4) == 4 * 2.0**-41
    True
    """
    return float(terms * 2.0 ** -(bits + 1))


def public_key(secret: bytes) -> bytes:
    """Return the X25519 public key of 32 secret bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed(secret: bytes, public: bytes, purpose: str) -> bytes:
    """Return the 32 bytes that the owners of two key pairs share for one purpose.

    >>> a, b = b"a" * 32, b"b" * 32
    >>> agreed(a, public_key(b), "sum 1") == agreed(b, public_key(a), "sum 1")
    True
    """
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    return derived(shared, purpose)


def derived(secret: bytes, purpose: str, length: int = 32) -> bytes:
    """Return bytes for one purpose from a secret (HKDF with SHA-256)."""
    return HKDF(SHA256(), length, None, b"equifed " + purpose.encode()).derive(secret)


def expanded(seed: bytes, size: int) -> Words:
    """Return ``size`` pseudorandom words (ChaCha20) from 32 bytes that serve nothing else."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64, copy=False)


def pair_mask(
    secret: bytes, own: int, publics: Mapping[int, bytes], purpose: str, size: int
) -> Words:
    """Return the sum of the masks that client ``own`` shares with the others in ``publics``.

    The masks of all clients of ``publics`` add up to zero modulo 2^64.
    """
    total = np.zeros(size, dtype=np.uint64)
    for other, public in publics.items():
        if other != own:
            mask = expanded(agreed(secret, public, purpose), size)
            total = total + mask if own < other else total - mask
    return total
