"""Arrays that others made: lists, tensors, data frames and masked arrays as plain NumPy arrays.

What cannot be taken over without changing it is refused: a mask that would be lost, numbers that
would become text, a gap that would become a class called "None".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from equifed.data.split import Array, DataError


def as_array(value: Any, where: str) -> Array:
    """Return what a user calls an array as numbers (b, i, u, f), or text as an array of objects.

    Parameters
    ----------
    value : array-like
        A list, an array, a tensor, a series or a data frame.
    where : str
        Whose it is, for messages: ``"Client 'a': train X"``.

    Examples
    --------
    >>> as_array([True, False], "y"), as_array(["no", "yes"], "y")
    (array([ True, False]), array(['no', 'yes'], dtype=object))
    """
    _refuse_mask(value, where)
    if is_frame(value):
        return _join_columns(value, where)
    if hasattr(value, "toarray"):
        raise DataError(f"{where} is sparse ({type(value).__name__}); give {where[-1]}.toarray().")
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.kind in "USO" and not isinstance(value, np.ndarray):
            array = np.asarray(value, dtype=object)  # 1 and "1" in one list stay what they are
    except Exception as error:  # whatever a foreign __array__ raises
        raise DataError(
            f"{where} is no array ({type(value).__name__}; {str(error)[:120]}); rows of unequal "
            "length must be padded or cut to one length."
        ) from None
    if array.ndim == 0:
        raise DataError(
            f"{where} is a single {type(value).__name__}; give an array with one row per sample."
        )
    if array.dtype.kind in "ST":
        array = np.array([_decode(v) for v in array.ravel().tolist()], object).reshape(array.shape)
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "O":
        return _unpack(array, where)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{where} has the dtype {array.dtype}, e.g. {array.ravel()[:1]}; numbers are needed: "
            "convert it, dates to days since a first one for instance."
        )
    return array


def is_frame(value: Any) -> bool:
    """Tell whether a value has named columns of a type each, as pandas' and polars' frames do."""
    return hasattr(value, "columns") and hasattr(value, "dtypes")


def name_values(values: Iterable[Hashable], what: str) -> dict[Hashable, str]:
    """Return a name for each distinct value, in order of first appearance.

    Different values have different names: 1 and "1", which print alike, are called ``1`` and
    ``'1'``. Equal numbers are one value, as in a dictionary; True and 1 are not.

    >>> name_values([1, "1", 2.0, 1], "client")
    {(False, 1): '1', (False, '1'): "'1'", (False, 2.0): '2.0'}
    """
    names: dict[Hashable, str] = {}
    taken: set[str] = set()
    for value in values:
        try:
            key = name_key(value)
            known = key in names
        except TypeError:
            raise DataError(
                f"{what} must be text or numbers, got a {type(value).__name__} ({value!r:.60})."
            ) from None
        if not known:
            candidates = (str(value), repr(value), f"{value!r} ({type(value).__name__})")
            free = [name for name in candidates if name not in taken]
            if not free:
                raise DataError(f"{what}: {value!r:.60} prints like another value; rename it.")
            names[key] = free[0]
            taken.add(free[0])
    return names


def name_key(value: Hashable) -> Hashable:
    """Return what tells a value from others; raise TypeError where nothing does."""
    hash(value)
    return isinstance(value, bool | np.bool_), value


def _refuse_mask(value: Any, where: str) -> None:
    """Refuse hidden entries: as a plain array they would count with whatever lies below."""
    rows = value if isinstance(value, list | tuple) else [value]
    for k, row in enumerate(rows):
        if isinstance(row, np.ma.MaskedArray) and np.ma.getmaskarray(row).any():
            place = [int(i) for i in np.argwhere(np.ma.getmaskarray(row))[0]]
            place = place if row is value else [k, *place]
            raise DataError(
                f"{where} has masked values, the first at {place}; fill them (.filled(value)) or "
                "leave these rows out."
            )


def _join_columns(frame: Any, where: str) -> Array:
    """Return a data frame as one array, or say which column has no numbers."""
    columns = list(frame.columns)
    twice = [c for k, c in enumerate(columns) if c in columns[:k]]
    if twice:
        raise DataError(f"{where} has the column {twice[0]!r} twice; rename or drop one of them.")
    if not columns:
        return np.empty((len(frame), 0))
    parts = []
    for column in columns:
        if str(getattr(frame[column], "dtype", "")) == "category" and len(columns) > 1:
            raise DataError(
                f"{where}: column {column!r} is of type category; turn it into 0/1 columns "
                "(pandas.get_dummies), or use Federation.from_table(..., categorical=[...])."
            )
        part = as_array(frame[column], f"{where}, column {column!r}")
        if part.dtype == object and len(columns) > 1:
            raise DataError(
                f"{where}: column {column!r} holds text (e.g. {part[0]!r}); turn it into 0/1 "
                "columns, or use Federation.from_table(..., categorical=[...])."
            )
        parts.append(part)
    return np.column_stack(parts)


def _unpack(array: Array, where: str) -> Array:
    """Return an array of Python objects as numbers or as text, or name the one that is neither."""
    values: Sequence[Any] = array.ravel().tolist()
    odd = next((k for k, v in enumerate(values) if not isinstance(v, str | Real | np.bool_)), None)
    if odd is None and (all(isinstance(v, str) for v in values) and values):
        return array
    if odd is None:
        odd = next((k for k, v in enumerate(values) if isinstance(v, str) or v != v), None)
    if odd is not None:
        place = [int(i) for i in np.unravel_index(odd, array.shape)]
        value = values[odd]
        raise DataError(
            f"{where} holds {value!r:.60} ({type(value).__name__}) at {place}, among others; give "
            "all numbers or all text, without gaps."
        )
    whole = all(isinstance(v, Integral | np.bool_) for v in values)
    try:
        return np.array(values, np.int64 if whole else np.float64).reshape(array.shape)
    except OverflowError:
        large = max(values, key=abs)
        raise DataError(f"{where} holds {large!r:.60}, too large a number; rescale it.") from None


def _decode(value: bytes | str) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
