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
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from equifed.data.split import FLOATS, TOKENS, Array, DataError, refuse, refuse_any, refuse_twice

EXACT = 2**24  # largest whole number up to which float32 leaves out none
KINDS = {"b": "truth values", "i": "whole numbers", "u": "whole numbers", "f": "real numbers"}
Parts: TypeAlias = Mapping[Any, Any] | tuple[Any, ...]  # the arrays of samples, by name or in order
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

    def find(self, parts: Parts, where: str) -> dict[str, list[Array]]:
        """Return the sequences among the arrays of samples."""
        rows = {
            name: [to_numpy(v, f"{where}[{name!r}], item {k}") for k, v in enumerate(values)]
            for name, values in _by_name(parts).items()
            if self._value(name) is not None and len(values)
        }
        numbered = ((name, k, row) for name in rows for k, row in enumerate(rows[name]))
        refuse(
            (one for one in numbered if one[2].dtype.kind not in "biuf"),
            lambda odd: (
                f"{where}[{odd[0]!r}], item {odd[1]} holds {odd[2].ravel()[:1].tolist()}, which is "
                "not a number; give what a tokenizer makes of it."
            ),
        )
        return {name: values for name, values in rows.items() if all(v.ndim == 1 for v in values)}

    def apply(self, parts: Parts, longest: Mapping[str, int], where: str) -> Parts:
        """Return arrays whose sequences are as long as ``longest`` says, and the mask."""
        out, lengths = _by_name(parts), dict[str, list[int]]()
        for name, rows in self.find(parts, where).items():
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
        if self.mask is not None:
            ends = [(counts, longest[name]) for name, counts in lengths.items()]
            reasons = {
                f"there is one already, {self.mask!r}": self.mask in out,
                "no sequence is there": not ends,
                f"{' and '.join(lengths)} have different lengths": ends != ends[:1] * len(ends),
            }
            refuse(
                (reason for reason, holds in reasons.items() if holds),
                lambda why: (
                    f"{where}: mask={self.mask!r} cannot be made: {why}; give it in the data."
                ),
            )
            counts, length = ends[0]
            out[self.mask] = (np.arange(length) < np.array(counts)[:, None]).astype(np.int64)
        return out if isinstance(parts, Mapping) else tuple(out.values())

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
        refuse(
            (f for f in self.fields if f.kind not in WORDS.values() or min(f.shape, default=1) < 1),
            lambda one: f"{one} is not an array of a sample",
        )

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
        parts = find_fields(given, None, here) or (given,)
        names = {one.name for one in self.fields}
        rule = self.padding
        if rule is not None and (not self.named or names <= {*_by_name(parts), rule.mask}):
            longest = {one.name: one.shape[0] for one in self.fields if len(one.shape) == 1}
            given = rule.apply(parts, longest, here)
        if not isinstance(given, Mapping if self.named else tuple):
            what = f"a {'mapping' if self.named else 'tuple'} of these arrays"
            text = f"{here}: a sample is {self}; give {what}, got {type(given).__name__}."
            raise DataError(text, text)
        rows, layout = pack(given, here, padding=self.padding)
        compare_layouts(self, layout, here, there)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any] | None) -> Self | None:
        """Read what :meth:`to_json` wrote; None where samples are one array."""
        if told is None:
            return None
        try:
            fields = [
                Field(str(f["name"]), tuple(map(int, f["shape"])), f["kind"])
                for f in told["fields"]
            ]
            padding = Padding(**told["padding"]) if told["padding"] else None
            return cls(tuple(fields), bool(told["named"]), padding)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no layout of samples: {error!r}") from error


class Packed(NamedTuple):
    """Rows and what they hold; no layout: one array."""

    rows: Array
    layout: Layout | None


def compare_layouts(first: Layout | None, other: Layout | None, here: str, there: str) -> None:
    """Refuse samples ``here`` of another layout than the first, ``there``; None is one array."""
    if first is None or other is None:
        pairs: list[tuple[Any, Any]] = [(other or "one array", first or "one array")]
    else:
        mine, theirs = ({f.name: f for f in layout.fields} for layout in (first, other))
        pairs = [(theirs.get(n, f"no {n!r}"), mine.get(n, f"no {n!r}")) for n in mine | theirs]
        pairs.append((f"the rule {other.padding}", f"the rule {first.padding}"))
    for seen, wanted in pairs:
        if seen != wanted:
            text = (
                f"{here} has {seen}, {there} has {wanted}; give all samples the same arrays (pad "
                "or cut sequences to one length, convert with astype)."
            )
            raise DataError(text, text)  # names, shapes and kinds, no values: others may be told


def find_fields(value: Any, rows: int | None, where: str) -> Parts | None:
    """Return the arrays of which samples consist; None if there is one alone."""
    if isinstance(value, Mapping) and not is_frame(value):
        return value
    if not isinstance(value, tuple) or rows is None:
        return value if isinstance(value, tuple) else None
    arrays = all(getattr(part, "ndim", 0) for part in value)
    columns = all(hasattr(part, "__len__") and len(part) == rows for part in value)
    if len(value) == rows > 1 and arrays and columns:
        raise DataError(
            f"{where} is a tuple of {rows} arrays of {rows} rows each: give a mapping of names if "
            "a sample consists of several arrays, or join the rows to one array."
        )
    return value if len(value) != rows and (arrays or columns) else None


def _by_name(parts: Parts) -> dict[str, Any]:
    """Return arrays by name, those of a tuple by place."""
    pairs = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    return {str(name): part for name, part in pairs}


def pad_clients(held: Mapping[str, Any], padding: Padding) -> dict[str, Any]:
    """Fill up the sequences of all clients, by split, to the longest; pairs become rows."""
    pairs = {
        (label, client): pair
        for label, part in held.items() if isinstance(part, Mapping)
        for client, pair in part.items()
        if isinstance(pair, Sequence) and len(pair) in (2, 3) and len(pair[1])
    }  # fmt: skip
    where = {key: f"Client {str(key[1])!r}: {key[0]} X" for key in pairs}
    found = {key: find_fields(x, len(y), where[key]) for key, (x, y, *_) in pairs.items()}
    given = {k: (pairs[k][0],) if parts is None else parts for k, parts in found.items()}
    longest: dict[str, int] = {}
    for key, parts in given.items():
        for name, rows in padding.find(parts, where[key]).items():
            longest[name] = max(longest.get(name, 0), *map(len, rows))
    named = padding.fill if isinstance(padding.fill, Mapping) else {}
    refuse(
        (name for name in named if name not in longest),
        lambda name: (
            f"pad names {name!r}, which is not a sequence of the samples; there are "
            f"{', '.join(dict.fromkeys(n for parts in given.values() for n in _by_name(parts)))}."
        ),
    )
    out = {label: dict(part) if isinstance(part, Mapping) else part for label, part in held.items()}
    for key, (_, *targets) in pairs.items():
        parts = padding.apply(given[key], longest, where[key])
        label, client = key
        out[label][client] = (pack(parts, where[key], len(targets[0]), padding), *targets)
    return out


def pack(
    given: Parts, where: str, count: int | None = None, padding: Padding | None = None
) -> Packed:
    """Return the arrays of samples as rows; named ones in the order of their names."""
    parts, named = _by_name(given), isinstance(given, Mapping)
    refuse_any(
        (not parts, f"{where} is a {type(given).__name__} without arrays."),
        (len(parts) < len(given), f"{where} has {len(given)} arrays; give a mapping of texts to "
         "arrays."),
    )  # fmt: skip
    order = sorted(parts) if named else list(parts)
    arrays = {name: as_array(parts[name], f"{where}[{name!r}]") for name in order}
    rows = (f"{where}[{order[0]!r}]", len(arrays[order[0]])) if count is None else ("y", count)
    reals = [a.dtype for a in arrays.values() if a.dtype.kind == "f"]
    for name, array in arrays.items():
        _check_part(array, f"{where}[{name!r}]", *rows, beside=bool(reals))
    kind = TOKENS if not reals else FLOATS[any(dtype.itemsize > 4 for dtype in reals)]
    flat = [a.reshape(len(a), prod(a.shape[1:])).astype(kind) for a in arrays.values()]
    fields = [Field(n, a.shape[1:], KINDS[a.dtype.kind]) for n, a in arrays.items()]
    return Packed(np.concatenate(flat, axis=1), Layout(tuple(fields), named, padding))


def _check_part(array: Array, where: str, other: str, rows: int, *, beside: bool) -> None:
    """Refuse what a row cannot hold, or no model can use."""
    refuse_any(
        (array.dtype == object, f"{where} is text; give numbers: what a tokenizer makes of it."),
        (len(array) and 0 in array.shape, f"{where} has the shape {array.shape}: nothing in it."),
        (len(array) != rows, f"{where} has {len(array)} rows, {other} has {rows}; give every array "
         "one row per sample."),
    )  # fmt: skip
    real, most = array.dtype.kind == "f", EXACT if beside else 2**63 - 1
    wrong = ~np.isfinite(array) if real else (array < 0) | (array > most)
    bad = np.unique(np.nonzero(wrong)[0])
    if len(bad):
        cure = "remove or impute these rows" if real else (
            "whole numbers are tokens, places and masks of at least 0, and beside real ones may "
            f"reach {EXACT} (2^24), up to where float32 has all of them: renumber them, or give "
            "amounts as floats"
        )  # fmt: skip
        raise DataError(
            f"{where} holds {array[wrong][0]} in row {bad[0]} ({len(bad)} row(s) affected); {cure}."
        )


# -- one array ------------------------------------------------------------------------------------


def to_numpy(value: Any, where: str) -> Array:
    """Return a value as an array; text, and numbers beside it, as objects that stay as they are."""
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.kind in "USTO" and not isinstance(value, np.ndarray):
            array = np.asarray(value, dtype=object)  # 1 and "1" in one list
        return array
    except Exception as error:  # whatever a foreign __array__ raises
        raise DataError(
            f"{where} is not an array ({type(value).__name__}; {str(error)[:120]}); convert it, "
            "rows of unequal length must be padded or cut to one length."
        ) from None


def as_array(value: Any, where: str) -> Array:
    """Return what a user calls an array as numbers (b, i, u, f), or text as an array of objects."""
    refuse_mask(value, where)
    if is_frame(value):
        return _join_columns(value, where)
    if hasattr(value, "toarray"):
        raise DataError(f"{where} is sparse ({type(value).__name__}); give {where[-1]}.toarray().")
    first: Any = value[0] if isinstance(value, list | tuple) and value else None
    if hasattr(first, "detach") or getattr(first, "ndim", False):  # one by one: to name the odd one
        parts = [to_numpy(v, f"{where}, item {k}") for k, v in enumerate(value)]
        refuse(
            (k for k, part in enumerate(parts) if part.shape != parts[0].shape),
            lambda k: (
                f"{where}: item {k} has the shape {parts[k].shape}, earlier ones {parts[0].shape}; "
                "pad (pad=0 fills up sequences), cut or resize all items to one shape."
            ),
        )
        value = value if parts[0].dtype.kind in "USTO" else np.array(parts)
    array = to_numpy(value, where)
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
