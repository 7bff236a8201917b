"""Where files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where fetched data and measured choices are kept: ``EQUIFED_CACHE``, or a default."""
    given = os.environ.get("EQUIFED_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "equifed"
