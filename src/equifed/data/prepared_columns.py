"""A column of a table and the features that it becomes: numbers, or categories."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import one_hot, to_numbers
from equifed.data.split import DataError
from equifed.data.targets import DECIMAL_COMMA, explain_comma

Unknown: TypeAlias = Literal["other", "error"]

OTHER = "other"
WHOLE = re.compile(r"([+-]?\d+)\.0+")


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers: gaps are filled, then ``(value - centre) / scale``.

    Parameters
    ----------
    name : str
        Title of the column.
    fill : float, optional
        What stands for a missing value, in the column's own unit; None: a gap is refused.
    centre, scale : float
        In the column's own unit.
    indicator : bool
        Whether a 0/1 column follows that says where values were missing.
    error : float
        How far a median in ``fill`` or ``centre`` may be off, having been counted on a grid; the
        distance of two quartiles in ``scale`` by twice that.
    by_client : tuple of (str, float, float, float)
        Client, and the centre, scale and fill value of its own; empty when all share one.
    """

    name: str
    fill: float | None = None
    centre: float = 0.0
    scale: float = 1.0
    indicator: bool = False
    error: float = 0.0
    by_client: tuple[tuple[str, float, float, float | None], ...] = ()

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        return (self.name, *([f"{self.name} missing"] if self.indicator else []))

    def encode(self, values: Sequence[Any], owners: Sequence[str | None]) -> NDArray[np.float64]:
        """Return the features of cleaned values (None: missing), one row each."""
        numbers = read_numbers(self.name, values, numbered=True)
        gaps = np.isnan(numbers)
        centre: Any = self.centre
        scale: Any = self.scale
        fill: Any = np.nan if self.fill is None else self.fill
        if self.by_client:
            own = {name: numbers for name, *numbers in self.by_client}
            common = [self.centre, self.scale, self.fill]
            rows = [own.get(str(owner), common) for owner in owners]
            centre, scale, fill = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        filled = np.where(gaps, fill, numbers)
        block = [(filled - centre) / scale, *([gaps * 1.0] if self.indicator else [])]
        return np.stack(block, axis=1)


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one 0/1 column each.

    Parameters
    ----------
    name : str
        Title of the column.
    categories : tuple of str
        Those with a column of their own.
    other : bool
        Whether a column ``NAME=other`` stands for rare categories, and those never seen. Without
        one, a category never seen is a row of zeros.
    unknown : {"other", "error"}
        Whether a category never seen is taken so, or refused.
    indicator : bool
        Whether a 0/1 column follows that says where values were missing. Without one, a gap is
        treated as a category never seen.
    """

    name: str
    categories: tuple[str, ...]
    other: bool = False
    unknown: Unknown = "other"
    indicator: bool = False

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        names = [f"{self.name}={c}" for c in (*self.categories, *([OTHER] if self.other else []))]
        return (*names, *([f"{self.name} missing"] if self.indicator else []))

    def encode(self, values: Sequence[Any], owners: Sequence[str | None]) -> NDArray[np.float64]:
        """Return the features of cleaned values (None: missing), one row each."""
        texts = name_categories(values)
        known = set(self.categories)
        gaps = np.array([t is None for t in texts])
        new = np.array([t not in known for t in texts]) & ~(gaps & self.indicator)
        if self.unknown == "error" and new.any():
            row = int(np.flatnonzero(new)[0])
            seen = "nothing" if texts[row] is None else repr(texts[row])
            raise DataError(
                f"Column {self.name!r}: row {row + 1} holds {seen}, which is none of the "
                f"categories {', '.join(self.categories[:12])}; correct it, or fit with "
                "unknown='other'."
            )
        blocks = [one_hot([t if t in known else "" for t in texts], self.categories)]
        blocks[0][new | gaps] = 0.0
        if self.other:
            blocks.append(new[:, None].astype(np.float64))
        if self.indicator:
            blocks.append(gaps[:, None].astype(np.float64))
        return np.hstack(blocks)


def name_category(value: Any) -> str:
    """Return the text that tells a category, the same for a CSV file and a data frame.

    >>> [name_category(v) for v in (1, 1.0, "1.0", "01", True, "TRUE", " x ")]
    ['1', '1', '1', '01', 'True', 'True', 'x']
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    text = str(value).strip()
    whole = WHOLE.fullmatch(text)
    if whole:
        return whole[1]
    return text.capitalize() if text.lower() in ("true", "false") else text


def name_categories(values: Sequence[Any]) -> list[str | None]:
    """Return the text of every category, None where it is missing; each is looked at once."""
    kinds = set(map(type, values)) - {type(None)}
    if len(kinds) > 1:  # 1 and True are one key
        return [None if v is None else name_category(v) for v in values]
    known = {v: name_category(v) for v in set(values) if v is not None}
    return [known.get(v) for v in values]


def name_client(client: str, message: str) -> str:
    """Return a message that says whose rows it is about.

    >>> name_client("north", "Column 'age' holds inf.")
    "Client 'north': column 'age' holds inf."
    """
    return f"Client {client!r}: {message[0].lower()}{message[1:]}" if client else message


def read_numbers(
    name: str, values: Sequence[Any], *, numbered: bool = False
) -> NDArray[np.float64]:
    """Return cleaned values as numbers, NaN where they are missing; or name the one that is none.

    ``numbered`` adds its row to the message, where the caller's rows are the user's.

    >>> read_numbers("age", ["1", None, 2.5])
    array([1. , nan, 2.5])
    """
    numbers = to_numbers([np.nan if v is None else v for v in values])
    if numbers is None:
        row = next(k for k, v in enumerate(values) if v is not None and to_numbers([v]) is None)
        text, place = str(values[row]), f" in row {row + 1}" if numbered else ""
        cure = "correct it, leave it empty if not known, or list the column in categorical."
        raise DataError(
            f"Column {name!r} is not numeric (it has {text!r:.60}{place}); "
            f"{explain_comma(text) if DECIMAL_COMMA.fullmatch(text) else cure}"
        )
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        place = f", the first is row {infinite[0] + 1}" if numbered else ""
        raise DataError(
            f"Column {name!r} holds {numbers[infinite[0]]} in {len(infinite)} row(s){place}; "
            "correct or remove them."
        )
    return numbers
