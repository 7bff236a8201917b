"""Samples of several arrays (tokens and their mask): one after the other in one row of numbers.

Everything between the data and a module's ``forward`` then sees one array per split. A row is
int64 where all arrays are whole numbers or truth values; beside real numbers these are floats, so
they may reach 2^24 only, up to where float32 has every whole number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np

from equifed.data.split import FLOATS, TOKENS, Array, DataError, refuse, refuse_any, refuse_twice

EXACT = 2**24
"""Largest whole number up to which float32 leaves out none."""
KINDS = {"b": "truth values", "i": "whole numbers", "u": "whole numbers", "f": "real numbers"}
WORDS = {"bool": KINDS["b"], "int": KINDS["i"], "float": KINDS["f"]}


@dataclass(frozen=True)
class Field:
    """One array of a sample."""

    name: str
    shape: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        return f"{self.name} ({' x '.join(map(str, self.shape)) or 'one'}, {self.kind})"


@dataclass(frozen=True)
class Padding:
    """How sequences are filled up at their end, to the longest one of all clients.

    ``fill`` is by name, or for all but ``attention_mask``, which is filled with 0. ``mask`` names
    an array to add: 1 for what was given and 0 for what was filled in.
    """

    fill: float | Mapping[str, float]
    mask: str | None = None

    def find(self, columns: Mapping[str, Any], where: str) -> dict[str, list[Array]]:
        """Return the sequences among columns of values."""
        rows: dict[str, list[Array]] = {}
        for name, values in columns.items():
            if self._value(name) is not None and len(values):
                place = f"{where}[{name!r}], item "
                rows[name] = [_read_one(v, f"{place}{k}") for k, v in enumerate(values)]
        return {name: values for name, values in rows.items() if all(v.ndim == 1 for v in values)}

    def apply(
        self, columns: Mapping[str, Any], longest: Mapping[str, int], where: str
    ) -> dict[str, Any]:
        """Return columns whose sequences are as long as ``longest`` says, and the mask."""
        out, lengths = {**columns}, dict[str, list[int]]()
        for name, rows in self.find(columns, where).items():
            lengths[name], length = list(map(len, rows)), longest.get(name, 0)
            if long := [k for k, row in enumerate(rows) if len(row) > length]:
                most = f"the model's samples have at most {length}; cut it"
                raise DataError(
                    f"{where}[{name!r}], item {long[0]} has {len(rows[long[0]])} values, {most}.",
                    f"{where}[{name!r}] has sequences that are longer: {most}.",
                )
            kind = np.result_type(*[row.dtype for row in rows if len(row)] or [TOKENS])
            out[name] = np.full((len(rows), length), self._value(name), kind)
            for place, row in zip(out[name], rows, strict=True):
                place[: len(row)] = row
        return out if self.mask is None else self._add_mask(out, lengths, longest, where)

    def _add_mask(
        self, columns: dict[str, Any], lengths: Mapping[str, list[int]],
        longest: Mapping[str, int], where: str,
    ) -> dict[str, Any]:  # fmt: skip
        names, title = list(lengths), self.mask or ""
        ends = {n: (lengths[n], longest[n]) for n in names}
        odd = [n for n in names if ends[n] != ends[names[0]]]
        if not names or odd or title in columns:
            why = f"there is one already, {title!r}" if title in columns else "no sequence is there"
            if odd:
                why = f"{names[0]} and {odd[0]} have different lengths"
            raise DataError(f"{where}: mask={title!r} cannot be made: {why}; give it in the data.")
        rows = np.array(lengths[names[0]])[:, None]
        held = (np.arange(longest[names[0]]) < rows).astype(np.int64)
        return {**columns, (str(len(columns)) if "0" in columns else title): held}

    def _value(self, name: str) -> float | None:
        if isinstance(self.fill, Mapping):
            return self.fill.get(name)
        return 0 if name == "attention_mask" else self.fill


@dataclass(frozen=True)
class Layout:
    """The arrays of one sample in the order in which a row holds them; by name unless a tuple.

    >>> X = {"ids": [[5, 6], [7, 0]], "mask": [[True, True], [True, False]]}
    >>> rows, layout = pack(X, "X")
    >>> rows.tolist(), str(layout)
    ([[5, 6, 1, 1], [7, 0, 1, 0]], 'ids (2, whole numbers), mask (2, truth values)')
    """

    fields: tuple[Field, ...]
    named: bool = True
    padding: Padding | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        refuse_twice([one.name for one in self.fields], "two arrays are called {!r}")
        odd = [
            f for f in self.fields if f.kind not in WORDS.values() or min(f.shape, default=1) < 1
        ]
        refuse(odd, lambda one: f"{one} is not an array of a sample")

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields))

    @property
    def whole(self) -> bool:
        """Whether there are no real numbers."""
        return all(one.kind != KINDS["f"] for one in self.fields)

    @property
    def width(self) -> int:
        """Numbers per row."""
        return sum(prod(one.shape) for one in self.fields)

    def spans(self) -> Iterator[tuple[Field, slice]]:
        """Yield every array and where it lies in a row."""
        start = 0
        for one in self.fields:
            yield one, slice(start, start := start + prod(one.shape))

    def unpack(self, rows: Any) -> dict[str, Any]:
        """Return the arrays that rows hold, a tensor, by name."""
        out = {}
        for one, span in self.spans():
            part = rows[:, span].reshape(len(rows), *one.shape)
            whole = part if one.kind == KINDS["f"] else part.long()
            out[one.name] = whole.bool() if one.kind == KINDS["b"] else whole
        return out

    def pack(self, given: Any, here: str = "X", there: str = "the model's samples") -> Array:
        """Return samples of this layout as rows, or say in what they are unlike it."""
        names = {one.name for one in self.fields}
        added = None if self.padding is None else self.padding.mask
        complete = isinstance(given, Mapping) and names <= {*map(str, given), added}
        if self.padding is not None and (complete or not self.named):
            columns, named = name_columns(given)
            longest = {one.name: one.shape[0] for one in self.fields if len(one.shape) == 1}
            columns = self.padding.apply(columns, longest, here)
            given = columns if named else tuple(columns.values())
        if not isinstance(given, Mapping if self.named else tuple):
            what = f"a {'mapping' if self.named else 'tuple'} of these arrays"
            raise _unlike(f"{here}: a sample is {self}; give {what}, got {type(given).__name__}.")
        rows, layout = pack(given, here)
        if layout is not None:
            self.compare(layout, here, there)
        return rows

    def compare(self, other: Layout, here: str, there: str) -> None:
        """Refuse samples ``here`` that are not of the layout that those ``there`` have."""
        mine, theirs = ({f.name: f for f in layout.fields} for layout in (self, other))
        both = (mine, theirs, "lacks", "has"), (theirs, mine, "has", "lacks")
        for held, others, is_so, there_is in both:
            if odd := ", ".join(repr(name) for name in held if name not in others):
                told = f"which {there} {there_is}; it has {', '.join(others)}"
                raise _unlike(f"{here} {is_so} {odd}, {told}. Give all samples the same arrays.")
        for name in mine:
            if mine[name] != theirs[name]:
                raise _unlike(
                    f"{here} has {theirs[name]} per sample, {there} {mine[name]}; make them alike "
                    "(pad or cut sequences to one length, convert with astype)."
                )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any] | None) -> Self | None:
        """Read what :meth:`to_json` wrote; None where samples are one array."""
        if told is None:
            return None
        try:
            held = [
                (str(f["name"]), tuple(map(int, f["shape"])), f["kind"]) for f in told["fields"]
            ]
            padding = Padding(**told["padding"]) if told["padding"] else None
            return cls(tuple(Field(*one) for one in held), bool(told["named"]), padding)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no layout of samples: {error!r}") from error


class Packed(NamedTuple):
    """Rows and what they hold; no layout: one array."""

    rows: Array
    layout: Layout | None


def name_columns(given: Any, rows: int | None = None) -> tuple[dict[str, Any], bool]:
    """Return columns of values by name, and whether the names were given."""
    if isinstance(given, Mapping) and not is_frame(given):
        return {str(name): given[name] for name in given}, True
    several = isinstance(given, tuple) and len(given) != rows
    if several and (rows is None or all(len(part) == rows for part in given)):
        return {str(k): part for k, part in enumerate(given)}, False
    return {"0": given}, False


def pad_clients(held: Mapping[str, Any], padding: Padding) -> dict[str, Any]:
    """Fill up the sequences of all clients, by split, to the longest; pairs become rows."""
    pairs = {
        (label, client): pair
        for label, part in held.items() if isinstance(part, Mapping)
        for client, pair in part.items()
        if isinstance(pair, Sequence) and len(pair) in (2, 3) and len(pair[1])
    }  # fmt: skip
    where = {key: f"Client {str(key[1])!r}: {key[0]} X" for key in pairs}
    columns = {key: name_columns(pair[0], len(pair[1])) for key, pair in pairs.items()}
    longest: dict[str, int] = {}
    for key, (given, _) in columns.items():
        for name, rows in padding.find(given, where[key]).items():
            longest[name] = max(longest.get(name, 0), *map(len, rows))
    named = padding.fill if isinstance(padding.fill, Mapping) else {}
    refuse(
        (name for name in named if name not in longest),
        lambda name: (
            f"pad names {name!r}, which is not a sequence of the samples; there are "
            f"{', '.join(dict.fromkeys(n for c, _ in columns.values() for n in c))}."
        ),
    )
    out = {label: dict(part) if isinstance(part, Mapping) else part for label, part in held.items()}
    for key, (given, by_name) in columns.items():
        filled = padding.apply(given, longest, where[key])
        parts = filled if by_name else tuple(filled.values())
        label, client = key
        packed = pack(parts, where[key], len(pairs[key][1]))
        out[label][client] = (packed, *pairs[key][1:])
    return out


def compare_layouts(first: Layout | None, other: Layout | None, here: str, there: str) -> None:
    """Refuse samples ``here`` of another layout than the first, ``there``; None is one array."""
    if first is None or other is None:
        if first is not other:
            seen, wanted = other or "one array", first or "one array"
            raise _unlike(f"{here} is {seen}, {there} is {wanted}; give all clients the same.")
        return
    first.compare(other, here, there)
    if first.padding != other.padding:
        rules = f"{other.padding}, {there} by {first.padding}"
        raise _unlike(f"{here} is filled up by {rules}; use one rule.")


def _unlike(text: str) -> DataError:
    """Return an error about names, shapes and kinds, no values: others may be told."""
    return DataError(text, text)


def find_fields(value: Any, rows: int, where: str) -> Mapping[str, Any] | Sequence[Any] | None:
    """Return the arrays of which samples consist; None if there is one alone."""
    if isinstance(value, Mapping) and not is_frame(value):
        return value
    if not isinstance(value, tuple) or not all(getattr(part, "ndim", 0) for part in value):
        return None
    if len(value) == rows and all(len(part) == rows for part in value) and rows > 1:
        raise DataError(
            f"{where} is a tuple of {rows} arrays of {rows} rows each: give a mapping of names if "
            "a sample consists of several arrays, or join the rows to one array."
        )
    return None if len(value) == rows else value


def pack(given: Mapping[Any, Any] | Sequence[Any], where: str, count: int | None = None) -> Packed:
    """Return the arrays of samples as rows; named ones in the order of their names."""
    named = isinstance(given, Mapping)
    parts = {str(k): given[k] for k in given} if named else {str(k): v for k, v in enumerate(given)}
    order = sorted(parts) if named else list(parts)
    refuse_any(
        (not parts, f"{where} is a {type(given).__name__} without arrays."),
        (len(parts) < len(given), f"{where} has {len(given)} arrays; give a mapping of texts to "
         "arrays."),
    )  # fmt: skip
    arrays = {name: _read(parts[name], f"{where}[{name!r}]") for name in order}
    first = order[0]
    rows = len(arrays[first]) if count is None else count
    refuse(
        (name for name in order if len(arrays[name]) != rows),
        lambda name: (
            f"{where}[{name!r}] has {len(arrays[name])} rows, "
            f"{f'{where}[{first!r}]' if count is None else 'y'} has {rows}; give every array one "
            "row per sample."
        ),
    )
    fields = [Field(n, a.shape[1:], KINDS[a.dtype.kind]) for n, a in arrays.items()]
    layout = Layout(tuple(fields), named)
    reals = [a.dtype for a in arrays.values() if a.dtype.kind == "f"]
    kind = TOKENS if not reals else FLOATS[any(dtype.itemsize > 4 for dtype in reals)]
    for name, array in arrays.items():
        _check_values(array, f"{where}[{name!r}]", beside=bool(reals))
    flat = [a.reshape(len(a), prod(a.shape[1:])).astype(kind) for a in arrays.values()]
    return Packed(np.concatenate(flat, axis=1), layout)


def _read_one(value: Any, where: str) -> Array:
    """Return one value of an item as an array of numbers."""
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where} is not an array ({str(error)[:120]}); give a list of numbers."
        ) from None
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{where} holds {array.ravel()[:1].tolist()}, which is not a number; give what a "
            "tokenizer makes of it."
        )
    return array


def _read(value: Any, where: str) -> Array:
    """Return one array, of numbers."""
    array = as_array(value, where)
    refuse_any(
        (array.dtype == object, f"{where} is text; give numbers: what a tokenizer makes of it."),
        (len(array) and 0 in array.shape, f"{where} has the shape {array.shape}: nothing in it."),
    )
    return array


def _check_values(array: Array, where: str, beside: bool) -> None:
    """Refuse numbers that a row cannot hold, or that no model can use."""
    if array.dtype.kind == "f":
        bad = np.unique(np.nonzero(~np.isfinite(array))[0])
        refuse(
            bad[:1],
            lambda row: (
                f"{where} holds {'NaN' if np.isnan(array[row]).any() else 'infinity'} in row {row} "
                f"({len(bad)} row(s) affected); remove or impute these rows."
            ),
        )
    elif array.size:
        low, high, most = int(array.min()), int(array.max()), EXACT if beside else 2**63 - 1
        refuse_any(
            (low < 0, f"{where} holds {low}; whole numbers are tokens, places and masks of at "
             "least 0: give it as floats if it is an amount."),
            (high > most, f"{where} holds {high}; whole numbers beside real ones may reach "
             f"{most} (2^24), up to where float32 has all of them: renumber them."
             if beside else f"{where} holds {high}, too large a number; renumber them."),
        )  # fmt: skip


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
            f"{where} is not an array ({type(value).__name__}; {str(error)[:120]}); convert it, "
            "rows of unequal length must be padded or cut to one length."
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
