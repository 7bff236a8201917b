"""Settings: numbers in an interval, or one of a few words."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def check_settings(given: object, cure: str = "", **allowed: str | tuple[str, ...]) -> None:
    """Refuse an attribute outside of its interval, or not among its words; None is no value.

    >>> check_settings(slice(0, 2), "1 is all of it", start="[0, 1)", stop="(0, 1]")
    Traceback (most recent call last):
    ...
    ValueError: slice stop must lie in (0, 1], got 2; 1 is all of it.
    """
    for name, those in allowed.items():
        value = getattr(given, name)
        wanted = None if value is None else _find_fault(value, those)
        if wanted is not None:
            seen = value if isinstance(value, Real) else repr(value)
            told = f"{type(given).__name__} {name} must {wanted}, got {seen}"
            raise ValueError(f"{told}; {cure}." if cure else f"{told}.")


def _find_fault(value: Any, those: str | tuple[str, ...]) -> str | None:
    """Return what a value must do and does not."""
    if isinstance(those, tuple):
        words = f"be {', '.join(map(repr, those[:-1]))} or {those[-1]!r}"
        return None if value in those else words
    if not issubclass(type(value), Real):
        return "be a number"
    low, high = map(float, those[1:-1].split(","))
    above = value >= low if those[0] == "[" else value > low
    below = value <= high if those[-1] == "]" else value < high
    if above and below:
        return None
    if high < math.inf:
        return f"lie in {those}"
    least = f"at least {low:g}" if those[0] == "[" else f"above {low:g}" if low else "positive"
    return f"be {least}" if math.isfinite(value) else f"be {least} and finite"
