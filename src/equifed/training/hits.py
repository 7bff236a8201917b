"""The file of a run folder that says which samples the final model answers correctly."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.contract.evaluation import Hits
from equifed.training.files import Damaged

HITS = "hits.npz"


def pack_hits(hits: Mapping[str, Hits]) -> bytes:
    """Return the content of the file: eight samples to a byte."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, found in hits.items():
        arrays[f"{split}/correct"] = np.packbits(found.correct)
        arrays[f"{split}/total"] = np.array(len(found.correct))
        arrays[f"{split}/checksums"] = found.checksums
        arrays[f"{split}/predicted"] = found.predicted
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def unpack_hits(content: bytes) -> dict[str, Hits]:
    """Read the content of the file.

    >>> hits = Hits(np.array([True, False, True]), np.array([7, 9]), np.array([2, 1]))
    >>> unpack_hits(pack_hits({"test": hits}))["test"].correct
    array([ True, False,  True])
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        splits = dict.fromkeys(name.partition("/")[0] for name in arrays.files)
        return {
            split: Hits(
                np.unpackbits(arrays[f"{split}/correct"], count=int(arrays[f"{split}/total"])) > 0,
                arrays[f"{split}/checksums"],
                arrays[f"{split}/predicted"],
            )
            for split in splits
        }


def read_hits(path: Path) -> dict[str, Hits]:
    """Read the file; a run of before there was one has none."""
    try:
        return unpack_hits(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Damaged(f"{path} is damaged: it cannot be read ({error}).") from None
