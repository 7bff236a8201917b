r"""Sharing a secret so that any t of n can rebuild it and fewer learn nothing (Shamir 1979).

The secret is the constant term of a polynomial of degree t - 1 over the integers modulo the prime
:math:`2^{521} - 1`; a share is its value at a client's position plus one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equifed.flower.secure.masks import derived

PRIME = 2**521 - 1
SHARE_BYTES = 66


def share(
    secret: bytes, randomness: bytes, holders: Sequence[int], threshold: int
) -> dict[int, bytes]:
    """Return one share for each holder (a position of at least 0); any ``threshold`` rebuild it.

    The polynomial's coefficients are derived from ``randomness``, 32 secret bytes, so that the same
    shares can be computed again instead of being stored.

    >>> shares = share(b"s" * 32, b"r" * 32, [0, 3, 7], threshold=2)
    >>> rebuild({0: shares[0], 7: shares[7]}) == b"s" * 32
    True
    """
    if not 1 <= threshold <= len(set(holders)):
        raise ValueError(f"A threshold of {threshold} does not suit {len(set(holders))} holders.")
    coefficients = [int.from_bytes(secret, "big")]
    for k in range(1, threshold):  # 576 bits, so that the remainder is as good as uniform
        drawn = int.from_bytes(derived(randomness, f"coefficient {k}", 72), "big")
        coefficients.append(drawn % PRIME)
    return {i: _value(coefficients, i + 1).to_bytes(SHARE_BYTES, "big") for i in holders}


def rebuild(shares: Mapping[int, bytes], length: int = 32) -> bytes:
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


def _value(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total
