"""How columns are to become features: what a user chooses, before anything is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from equifed.data.preparation import Missing, Scale
from equifed.data.prepared_columns import Unknown
from equifed.data.split import DataError


@dataclass(frozen=True)
class Prepare:
    """How columns become features; ``[data.prepare]`` in a configuration.

    Parameters
    ----------
    scale : {"standard", "robust", None}
        Subtract the mean and divide by the standard deviation of the training values there are; or
        the median, and the distance of the quartiles (where that is 0, the deviation); or neither.
        Constant columns are only shifted.
    missing : {"indicator", "mean", "median", "drop", "error"}
        Gaps take the mean, with a 0/1 column beside every column that has gaps in training rows
        (in a column of categories, a gap is a category); the mean or the median alone; or rows
        with gaps are left out, or refused.
    categorical : "auto" or sequence of str
        Columns that are categories; ``"auto"``: those with text, booleans, or pandas' ``category``.
    unknown : {"other", "error"}
        What to do with categories that no training row has.
    min_count : int
        Categories with fewer training rows in the whole federation go to ``other``; with
        ``unknown="error"`` all are kept.
    per_client : bool
        Scale every client by its own numbers. Differences of level between clients are lost then.
    """

    scale: Literal["standard", "robust"] | None = "standard"
    missing: Missing = "indicator"
    categorical: tuple[str, ...] | Literal["auto"] = "auto"
    unknown: Unknown = "other"
    min_count: int = 5
    per_client: bool = False

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "scale": (*get_args(get_args(Scale)[0]), None),
            "missing": get_args(Missing),
            "unknown": get_args(Unknown),
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                told = ", ".join(map(repr, values))
                raise DataError(f"{key} must be one of {told}, got {getattr(self, key)!r}.")
        coded: Any = self.categorical
        if isinstance(coded, str) and coded != "auto":
            object.__setattr__(self, "categorical", (coded,))
        elif not isinstance(coded, str):
            object.__setattr__(self, "categorical", tuple(str(c) for c in coded))
        count: Any = self.min_count
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise DataError(f"min_count must be a whole number of at least 1, got {count!r}.")
        if self.per_client and self.scale is None:
            raise DataError("per_client=True scales every client by itself; give a scale with it.")
