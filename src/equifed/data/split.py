"""Samples of all clients, what they must look like, and which of them are held out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream

T = TypeVar("T")
Array = NDArray[Any]
Rows = NDArray[np.int64]
Labels = NDArray[np.str_]  # the split of every row: train, validation or test

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
TOKENS = np.dtype(np.int64)

Task: TypeAlias = Literal["classification", "regression"]
MANY = 20  # whole numbers with more different values than this may be values as well as classes
RENAMED = {"group": "keep_together", "groups": "report_by"}  # settings of a table, by former name
MOST_CLASSES = 1_000_000  # a label beyond this is a mistake: every class is a model output


class DataError(ValueError):
    """Data that cannot be trained on: says which client, what is wrong and what to change.

    ``told`` says it again for people who may not see the data: names of columns, no values.

    >>> import equifed as ef
    >>> ef.Federation.from_clients({"north": ([[1.0], [2.0]], [0])})
    Traceback (most recent call last):
    equifed.data.split.DataError: Client 'north': train has X of shape (2, 1) and y ...
    """

    def __init__(self, text: str, told: str = "") -> None:
        super().__init__(text)
        self.told = told


def refuse(wrong: Iterable[T], explain: Callable[[T], str]) -> None:
    """Raise a :class:`DataError` about the first wrong thing, if there is one."""
    for first in wrong:
        raise DataError(explain(first))


def refuse_any(*checks: tuple[Any, str]) -> None:
    """Raise a :class:`DataError` with the message of the first check that found something wrong."""
    refuse((message for wrong, message in checks if wrong), str)


def refuse_twice(names: Sequence[Hashable], message: str) -> None:
    """Refuse names of which one occurs twice; ``{!r}`` in the message is that one."""
    if len(set(names)) < len(names):
        refuse((n for k, n in enumerate(names) if n in names[:k]), message.format)


class DataWarning(UserWarning):
    """Data that can be trained on, but not quite as given: says what was left out or is odd.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", DataWarning)  # remarks about your data stop the program
    ...     warnings.warn("Column 'age' is constant.", DataWarning)
    Traceback (most recent call last):
    equifed.data.split.DataWarning: Column 'age' is constant.
    """


@dataclass(frozen=True, eq=False)
class Split:
    """Samples of all clients, flat and ragged: client i has rows ``offsets[i]:offsets[i + 1]``.

    Parameters
    ----------
    inputs : array, shape (total, ...)
        float32 or float64 features, or int64 tokens.
    targets : array, shape (total,) or (total, k)
        int64 classes, or float32 or float64 values for regression.
    offsets : array of int64, shape (n + 1,)
        Where each client's rows begin; the last entry is the total.
    groups : array of text, shape (total,), optional
        The group inside its client that each sample belongs to (a sex, an age band); metrics are
        then told by group as well.

    Examples
    --------
    >>> split = Split.from_clients([(np.ones((2, 3)), np.array([0, 1])), (np.zeros((1, 3)), [1])])
    >>> split.sizes
    array([2, 1])
    >>> split.client(1)[1]
    array([1])
    """

    inputs: Array
    targets: Array
    offsets: Rows
    groups: Array | None = None

    def __post_init__(self) -> None:
        _check_layout(self.inputs, self.targets, self.offsets)
        if self.groups is not None:
            object.__setattr__(self, "groups", name_groups(self.groups, len(self.inputs)))

    @classmethod
    def from_clients(cls, clients: Sequence[tuple[Any, Any]], groups: Array | None = None) -> Self:
        """Join one ``(inputs, targets)`` pair per client, all of the same shape and dtype."""
        inputs, targets = ([np.asarray(part[k]) for part in clients] for k in (0, 1))
        return cls(_join(inputs), np.concatenate(targets), _offsets(inputs), groups)

    @property
    def sizes(self) -> Rows:
        """Number of samples of each client, shape (n,)."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.inputs)

    def client(self, i: int) -> tuple[Array, Array]:
        """Return the inputs and targets of client ``i``, as views."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.inputs[rows], self.targets[rows]

    def client_groups(self, i: int) -> Array | None:
        """Return the groups of the samples of client ``i``; None: there are no groups."""
        return None if self.groups is None else self.groups[self.offsets[i] : self.offsets[i + 1]]

    def rows(self) -> list[Rows]:
        """Return the rows of each client."""
        return np.split(np.arange(len(self)), self.offsets[1:-1])

    def owners(self) -> Rows:
        """Return the client of every row, shape (total,)."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def take(self, rows: Sequence[Rows]) -> Split:
        """Return a split in which client i holds the rows ``rows[i]`` of this one."""
        index = np.concatenate(rows).astype(np.int64) if rows else np.empty(0, dtype=np.int64)
        groups = None if self.groups is None else self.groups[index]
        return Split(self.inputs[index], self.targets[index], _offsets(rows), groups)

    def class_counts(self, classes: int) -> Rows:
        """Return how many samples of each class every client has, shape (n, classes)."""
        n = len(self.offsets) - 1
        cells = self.owners() * classes + self.targets
        return np.bincount(cells, minlength=n * classes).reshape(n, classes)

    def check(self, label: str, names: Sequence[str], classes: int | None) -> None:
        """Refuse a wrong number of clients, an empty one, NaN, infinities and illegal targets."""
        empty, labels = np.flatnonzero(self.sizes == 0), self.targets.dtype == TOKENS
        refuse_any(
            (len(self.sizes) != len(names), f"The {label} split has {len(self.sizes)} clients, but "
             f"there are {len(names)} client names; give one name per client."),
            (classes is None and labels, f"The {label} targets are integers but classes is None; "
             "give classes=K for classification, or convert the targets to float for regression."),
            (classes is not None and not labels, f"The {label} targets must be int64 labels, got "
             f"{self.targets.dtype}; convert them, or give classes=None for regression."),
        )  # fmt: skip
        if label == "train" and len(empty):
            raise DataError(
                f"Client {names[empty[0]]!r} has no training samples{_others(len(empty) - 1)}; "
                "remove it or give it samples."
            )
        whole = self.inputs.dtype == TOKENS
        self._check_values(f"{label} {'tokens' if whole else 'features'}", self.inputs, None, names)
        self._check_values(
            f"{label} {'labels' if labels else 'targets'}", self.targets, classes, names
        )

    def check_like(self, label: str, train: Split) -> None:
        """Refuse a held-out split whose shape or dtype is not that of the training split."""
        for what in ("inputs", "targets"):
            here, there = getattr(self, what), getattr(train, what)
            if here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
                raise DataError(
                    f"The {label} {what} are {here.dtype} of shape {here.shape[1:]} per sample, "
                    f"those of training {there.dtype} of shape {there.shape[1:]}; make them alike."
                )

    def _check_values(self, what: str, array: Array, end: int | None, names: Sequence[str]) -> None:
        """Refuse NaN and infinities, whole numbers below 0, and labels from ``end`` on."""
        real = array.dtype in FLOATS
        with np.errstate(all="ignore"):
            if real and np.isfinite(array.sum(dtype=np.float64)):
                return  # a finite sum has finite terms; the costly search runs only when it is not
        wrong = ~np.isfinite(array) if real else (array < 0) | (array >= (end or np.inf))
        bad = np.unique(np.nonzero(wrong)[0])
        if not len(bad):
            return  # the sum overflowed, the terms are finite
        owners = self.owners()[bad]
        mine, others = bad[owners == owners[0]], _others(len(np.unique(owners)) - 1)
        if not real:
            legal = "be at least 0" if end is None else f"lie in 0..{end - 1}"
            raise DataError(
                f"Client {names[owners[0]]!r}: {what} must {legal}, got {array[wrong][0]} "
                f"({len(mine)} row(s)){others}; correct them, or classes."
            )
        theirs = array[mine].reshape(len(mine), -1)
        column = int((~np.isfinite(theirs)).any(0).argmax())
        kind = "NaN" if np.isnan(theirs[:, column]).any() else "infinity"
        place = np.unravel_index(column, array.shape[1:] or (1,))
        raise DataError(
            f"Client {names[owners[0]]!r}: {what} contain {kind} in column "
            f"{', '.join(map(str, place))} ({len(mine)} row(s) affected){others}; remove or impute "
            "these rows."
        )


def name_groups(groups: Any, rows: int) -> Array:
    """Return groups as texts, one per sample, or say what is wrong with them."""
    given = list(groups) if np.ndim(groups) == 1 else []
    if len(given) != rows:
        raise DataError(f"groups must be one text or number for each of {rows} samples.")
    refuse(
        (k for k, g in enumerate(given) if g is None or g != g or str(g).strip() == ""),
        lambda k: f"Sample {k} has no group: {given[k]!r}; call it 'unknown'.",
    )
    whole = [int(g) if isinstance(g, float | np.floating) and g.is_integer() else g for g in given]
    return np.array([str(g).strip() for g in whole], dtype=np.str_)


def check_names(names: Any, classes: int | None, class_names: tuple[str, ...]) -> None:
    """Refuse client names that are not different texts, and class names that are not one each."""
    if not (isinstance(names, tuple) and names and all(isinstance(n, str) and n for n in names)):
        raise DataError(f"Client names must be a non-empty tuple of texts, got {names!r:.200}.")
    refuse_twice(names, "Client names must differ, got {!r} more than once.")
    look = [unicodedata.normalize("NFC", name) for name in names]
    refuse_twice(look, "Two clients are called {!r}, with its accents written in two ways; write "
                 "them alike if they are one client, or rename one of them.")  # fmt: skip
    check_task(None, classes)
    refuse_any(
        ((classes or 0) > MOST_CLASSES, f"There would be {classes} classes, and a model output for "
         f"each; at most {MOST_CLASSES} are possible: relabel them 0..K - 1."),
        (class_names and len(class_names) != (classes or 0), f"There are {classes} classes but "
         f"{len(class_names)} class names."),
    )  # fmt: skip


def check_task(task: str | None, classes: Any) -> None:
    """Refuse a task that there is not, and a number of classes that is none."""
    whole = isinstance(classes, int | np.integer) and not isinstance(classes, bool)
    refuse_any(
        (task is not None and task not in get_args(Task), "task must be 'classification' or "
         f"'regression', got {task!r}."),
        (task == "regression" and classes is not None, "task='regression' has no classes, got "
         f"classes={classes!r}; leave one of them out."),
        (classes is not None and (not whole or classes < 1), "classes must be a whole number of at "
         f"least 1 or None, got {classes!r}."),
    )  # fmt: skip


def ask_task(where: str, distinct: Sequence[Any], more: str = "") -> None:
    """Ask whether whole numbers are classes or values."""
    raise DataError(
        f"{where} holds whole numbers, {len(distinct)} different ones in all, from {distinct[0]} "
        f"to {distinct[-1]}: values or classes? Set task='regression', or task='classification' to "
        f"have them numbered in sorted order{more}."
    )


# -- what is held out -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Holdout:
    """Fractions of every client's training samples to set aside.

    Parameters
    ----------
    validation, test : float
        Fraction of every client's samples.
    seed : int
        Seed of the draw.

    Examples
    --------
    >>> Holdout(validation=0.2, test=0.2).counts(rows=10)  # validation, test
    (2, 2)
    """

    validation: float = 0.0
    test: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise DataError(
                "The fractions validation and test must lie in [0, 1) and sum to less than 1, to "
                f"leave something to train on; got {self.validation} and {self.test}."
            )

    @property
    def wanted(self) -> bool:
        """Whether anything is held out."""
        return self.validation > 0 or self.test > 0

    def counts(self, rows: int) -> tuple[int, int]:
        """Return how many of a client's rows are for validation and test; one stays in training."""
        test = min(round(self.test * rows), rows - 1)
        return min(round(self.validation * rows), rows - 1 - test), test


def list_owners(owners: Mapping[str, Rows]) -> Array:
    """Return the client of every row."""
    client = np.empty(sum(map(len, owners.values())), dtype=object)
    for name, rows in owners.items():
        client[rows] = name
    return client


def divide_at_random(owners: Mapping[str, Rows], holdout: Holdout) -> Labels:
    """Return the split of every row, drawn client by client."""
    part = np.full(sum(map(len, owners.values())), "train", dtype="U10")
    for name, rows in owners.items():
        # by the client's name: the same rows whatever other clients there are
        order = Stream(holdout.seed).at("split", name).generator().permutation(rows)
        validation, test = holdout.counts(len(rows))
        part[order[:test]], part[order[test : test + validation]] = "test", "validation"
    return part


def divide_groups(
    owners: Mapping[str, Rows], groups: Mapping[str, Rows], holdout: Holdout
) -> Labels:
    """Return the split of every row, all rows of one group (a patient, say) in the same one."""
    # A group at several clients is in one split at all of them; the others are taken in random
    # order while that brings a client nearer to its fractions.
    client = list_owners(owners)
    part = np.full(len(client), "train", dtype="U10")
    several = {g: rows.tolist() for g, rows in groups.items() if len(set(client[rows])) > 1}
    shared = _place_groups("", several, {}, holdout)
    where = {int(r): group for group, rows in groups.items() for r in rows}
    for name, rows in owners.items():
        mine: dict[str, list[int]] = {}
        for row in rows.tolist():
            mine.setdefault(where[row], []).append(row)
        for group, label in _place_groups(name, mine, shared, holdout).items():
            part[mine[group]] = label
    return part


def _place_groups(
    name: str, mine: Mapping[str, list[int]], shared: Mapping[str, str], holdout: Holdout
) -> dict[str, str]:
    """Return the split of each group of one client."""
    places = {group: shared[group] for group in mine if group in shared}
    free = [group for group in mine if group not in shared]
    total = sum(map(len, mine.values()))
    wanted = {"test": holdout.test * total, "validation": holdout.validation * total}
    have = {k: sum(len(mine[g]) for g, put in places.items() if put == k) for k in wanted}
    order = Stream(holdout.seed).at("split groups", name).generator().permutation(len(free))
    for number, group in enumerate(free[k] for k in order):
        size = len(mine[group])
        last = number == len(free) - 1 and "train" not in places.values()  # one must stay
        near = [k for k in wanted if abs(have[k] + size - wanted[k]) < abs(have[k] - wanted[k])]
        places[group] = near[0] if near and not last else "train"
        if places[group] in have:
            have[places[group]] += size
    return places


def divide_by_time(
    owners: Mapping[str, Rows], moments: NDArray[np.float64], holdout: Holdout
) -> Labels:
    """Return the split of every row: a client's last rows are for test, those before validation."""
    part = np.full(len(moments), "train", dtype="U10")
    for rows in owners.values():
        order = rows[np.argsort(moments[rows], kind="stable")]
        cuts = np.flatnonzero(np.diff(moments[order]) > 0) + 1  # first row of each later moment
        validation, test = holdout.counts(len(order))
        end = wanted = len(order)
        for label, count in (("test", test), ("validation", validation)):
            wanted -= count
            if count and len(cuts):
                start = int(cuts[np.abs(cuts - wanted).argmin()])
                part[order[start:end]] = label
                end, cuts = start, cuts[cuts < start]
    return part


# -- small parts ----------------------------------------------------------------------------------


def _check_layout(inputs: Any, targets: Any, offsets: Any) -> None:
    """Check shapes and dtypes of a split, without looking at values."""
    given = {"inputs": inputs, "targets": targets, "offsets": offsets}
    refuse(
        (what for what, array in given.items() if not isinstance(array, np.ndarray)),
        lambda k: f"Split {k} must be a NumPy array, got {type(given[k]).__name__}.",
    )
    kinds = {"inputs": (*FLOATS, TOKENS), "targets": (*FLOATS, TOKENS), "offsets": (TOKENS,)}
    refuse(
        (k for k, array in given.items() if array.ndim == 0 or array.dtype not in kinds[k]),
        lambda k: (
            f"Split {k} must be an array of {', '.join(map(str, kinds[k]))} with one row per "
            f"sample, got {given[k].dtype} of shape {given[k].shape}; convert with astype."
        ),
    )
    rising = len(offsets) > 1 and not (np.diff(offsets) < 0).any() and offsets[0] == 0
    refuse_any(
        (len(inputs) != len(targets), f"Split has {len(inputs)} rows of inputs but {len(targets)} "
         "targets."),
        (targets.ndim > 2 or (targets.dtype == TOKENS and targets.ndim != 1), "Split targets must "
         "have shape (samples,), or (samples, k) for regression, "
         f"got {targets.dtype} of shape {targets.shape}."),
        (offsets.ndim != 1 or not rising or offsets[-1] != len(inputs), "Split offsets must rise "
         f"from 0 to the {len(inputs)} rows, one more than clients, got {offsets!r:.60}."),
    )  # fmt: skip


def _join(parts: Sequence[Array]) -> Array:
    """Join arrays of clients; those that follow each other in one file stay there."""
    parts = [part for part in parts if len(part)] or parts[:1]
    file = _find_file(parts[0])
    ends = [part.ctypes.data + part.nbytes for part in parts]
    follows = all(part.ctypes.data == end for part, end in zip(parts[1:], ends, strict=False))
    if file is None or not follows or any(_find_file(part) is not file for part in parts):
        return np.concatenate(parts)
    start = (parts[0].ctypes.data - file.ctypes.data) // max(file[:1].nbytes, 1)
    return file[start : start + sum(map(len, parts))]


def _find_file(array: Array) -> Array | None:
    """Return the mapped file, whole, that an array is a view of; None if it is of none."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if isinstance(array, np.memmap) else None


def _offsets(parts: Sequence[Array]) -> Rows:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def _others(count: int) -> str:
    return f" (and {count} other client(s) likewise)" if count else ""
