"""What a site keeps of a run that ended: the model as files, its card, and the site's own page."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.flower.memory import write_private
from equifed.flower.wire import WireError
from equifed.models.export import export
from equifed.models.predictor import Predictor

CARD, PAGE, SUMS = "card.md", "participant.html", "SHA256SUMS"
LARGEST_TEXT = 1 << 25
"""Characters of a text that a site takes."""


def keep_delivery(folder: Path, run: str, predictor: Predictor, args: Mapping[str, Any]) -> str:
    """Write what was delivered into a folder of the run, and return the checksum of all of it.

    The folder is what ``equifed predict`` reads. ``sha256sum -c SHA256SUMS`` checks it.
    """
    out = folder / slug(run)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = args.get("files")
    if not isinstance(files, dict) or not set(files) <= {CARD, PAGE}:
        raise WireError("other files are delivered than a card and a page")
    for name, text in files.items():
        if not isinstance(text, str) or len(text) > LARGEST_TEXT:
            raise WireError(f"{name} is no text, or too long")
        write_private(out / name, text.encode())
    written = export(predictor, out, program=True)
    names = sorted([path.name for path in written] + list(files))
    lines = [f"{hashlib.sha256((out / n).read_bytes()).hexdigest()}  {n}" for n in names]
    content = "\n".join(lines).encode() + b"\n"
    write_private(out / SUMS, content)
    return hashlib.sha256(content).hexdigest()


def slug(text: str) -> str:
    """Return a name for a folder: no path, no surprises; people can still read it.

    >>> slug("../site 1")
    '___site_1-bba1dace'
    >>> slug("north")
    'north'
    """
    plain = re.sub(r"[^A-Za-z0-9-]", "_", text)[:40]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def digest(vector: NDArray[Any]) -> str:
    """Return the checksum of a model vector."""
    kind = np.ascontiguousarray(vector)
    head = json.dumps([kind.dtype.name, list(kind.shape)]).encode()
    return hashlib.sha256(head + kind.tobytes()).hexdigest()
