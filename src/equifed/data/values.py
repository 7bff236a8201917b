"""What users call an array: numbers, text, or one clear error."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np

from equifed.data.split import Array, DataError, refuse, refuse_twice


def as_array(value: Any, where: str) -> Array:
    """Return what a user calls an array as numbers (b, i, u, f), or text as an array of objects."""
    refuse_mask(value, where)
    if is_frame(value):
        return _join_columns(value, where)
    if hasattr(value, "toarray"):
        raise DataError(f"{where} is sparse ({type(value).__name__}); give {where[-1]}.toarray().")
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.kind in "USTO" and not isinstance(value, np.ndarray):
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
    if array.dtype.kind in "USTO":
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


def refuse_mask(value: Any, where: str) -> None:
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
    refuse_twice(columns, f"{where} has the column {{!r}} twice; rename or drop one of them.")
    if not columns:
        return np.empty((len(frame), 0))
    parts = {c: as_array(frame[c], f"{where}, column {c!r}") for c in columns}
    several = len(columns) > 1
    coded = [c for c in columns if str(getattr(frame[c], "dtype", "")) == "category"]
    odd = {c: f"holds text (e.g. {x[:1].tolist()})" for c, x in parts.items() if x.dtype == object}
    refuse(
        ((odd | dict.fromkeys(coded, "is of type category")).items() if several else ()),
        lambda one: (
            f"{where}: column {one[0]!r} {one[1]}; turn it into 0/1 columns (pandas.get_dummies), "
            "or use Federation.from_table(..., categorical=[...])."
        ),
    )
    return np.column_stack(list(parts.values()))


def _unpack(array: Array, where: str) -> Array:
    """Return Python objects as numbers or as text, or name the one that is neither."""
    values: list[Any] = [
        v.decode("utf-8", "backslashreplace") if isinstance(v, bytes) else v
        for v in array.ravel().tolist()
    ]
    if values and all(isinstance(v, str) for v in values):
        return np.array(values, object).reshape(array.shape)
    odd = [k for k, v in enumerate(values) if not isinstance(v, Real | np.bool_) or v != v]
    strange = [k for k in odd if not isinstance(values[k], str | Real)] or odd
    if strange:
        place = [int(i) for i in np.unravel_index(strange[0], array.shape)]
        value = values[strange[0]]
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
