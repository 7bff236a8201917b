"""What a user's ``load_data`` may return, as a federation of one client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from equifed.data import DataError, Federation

SPLITS = ("train", "validation", "test")


def as_federation(value: Any, name: str, classes: int | None = None) -> Federation:
    """Return the data of one client as a federation of one.

    Parameters
    ----------
    value : Federation, (X, y), mapping or dataset
        A federation with one client is taken as it is (its name too); a mapping has ``(X, y)`` or
        a dataset under "train" and, where there are any, "validation" and "test"; a dataset has
        ``len()`` and gives ``(features, target)`` for a position.
    name : str
        The client's name.
    classes : int, optional
        Number of classes of the whole federation.

    Examples
    --------
    >>> as_federation((np.ones((3, 2)), np.array([0, 1, 0])), "north", classes=4).classes
    4
    """
    if isinstance(value, Federation):
        if len(value) != 1:
            raise DataError(
                f"load_data must return the data of one client, got a federation of {len(value)}; "
                "choose one with federation.subset([i])."
            )
        return value
    parts = value if isinstance(value, Mapping) else {"train": value}
    strangers = set(parts) - set(SPLITS)
    if "train" not in parts or strangers:
        raise DataError(
            f"load_data must return (X, y) or a mapping with 'train' and possibly 'validation' and "
            f"'test', got the keys {sorted(map(str, parts))}."
        )
    pairs = {label: {name: as_arrays(part)} for label, part in parts.items()}
    return Federation.from_clients(
        pairs["train"],
        validation=pairs.get("validation"),
        test=pairs.get("test"),
        classes=classes,
    )


def as_arrays(part: Any) -> tuple[Any, Any]:
    """Return ``(X, y)`` of a pair, or of a dataset object by reading all of it."""
    if isinstance(part, tuple | list) and len(part) == 2:
        return part[0], part[1]
    if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        raise DataError(
            f"load_data must return (X, y) or a dataset with len() and positions, got a "
            f"{type(part).__name__}."
        )
    samples = [part[k] for k in range(len(part))]
    return (
        np.stack([np.asarray(x) for x, _ in samples]),
        np.stack([np.asarray(y) for _, y in samples]),
    )
