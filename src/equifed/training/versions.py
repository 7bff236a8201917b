"""Which software a number was computed with."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("equifed", "torch", "numpy", "scipy")
"""What numbers depend on."""


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of packages, and Python's; "not installed" for one that is missing.

    >>> package_versions(["numpy", "no-such-package"])["no-such-package"]
    'not installed'
    """
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "python": platform.python_version()}
