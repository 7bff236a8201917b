"""What a check does when it fails: it says which one, and why."""

from __future__ import annotations

from collections.abc import Callable


def run_check(value: object, name: str, check: Callable[[], None]) -> None:
    """Run a check; whatever goes wrong becomes an AssertionError that names it."""
    try:
        check()
    except Exception as error:
        reason = str(error).strip()
        if not isinstance(error, AssertionError):
            reason = f"{type(error).__name__}: {reason}"
        raise AssertionError(f"{value!r} fails the check {name!r}: {reason}") from error


def ensure(holds: object, message: str) -> None:
    """Raise AssertionError with a message unless something holds."""
    if not holds:
        raise AssertionError(message)
