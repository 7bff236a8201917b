"""Targets: classes or values? Where whole numbers could be either, the user is asked.

Arrays are numbered when all of them are here (:func:`number_targets`); of tables, every client
tells what its column holds (:func:`describe_target`) and the answers are joined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from equifed.data.columns import (
    DECIMAL_COMMA,
    are_whole,
    explain_comma,
    find_gaps,
    name_category,
    read_numbers,
    to_amounts,
    to_numbers,
)
from equifed.data.split import Array, DataError, check_classes, refuse

Task: TypeAlias = Literal["classification", "regression"]
Numbered: TypeAlias = tuple[dict[str, Array], int | None, tuple[str, ...]]

MANY = 20
"""Whole numbers with more different values than this may be values as well as classes."""
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Target:
    """The column to predict: its classes in order, or None for a regression, and its unit."""

    name: str
    classes: tuple[str, ...] | None = None
    unit: str | None = None

    def name_labels(self, values: Sequence[Any]) -> list[str]:
        """Return labels as class names are written: numbers alike, however they were typed.

        >>> Target("y", ("-1", "1")).name_labels(["+1", 1.0, "01", "x"])
        ['1', '1', '1', 'x']
        """
        if not all(NUMBER.fullmatch(name) for name in self.classes or ()):
            return [name_category(v) for v in values]
        numbers = [to_numbers([v]) for v in values]
        return [
            str(int(n[0])) if n is not None and float(n[0]).is_integer() else name_category(v)
            for v, n in zip(values, numbers, strict=True)
        ]

    def encode(self, cells: Sequence[Any]) -> Array:
        """Return labels 0..K - 1 (int64) of cleaned class names, or values (float64)."""
        where = f"Column {self.name!r}"
        refuse(
            find_gaps(cells),
            lambda k: f"{where} lacks a value in row {k + 1}; leave such rows out.",
        )
        if self.classes is None:
            return read_numbers(self.name, cells, numbered=True)
        code = {name: k for k, name in enumerate(self.classes)}
        texts = self.name_labels(cells)
        refuse(
            (k for k, text in enumerate(texts) if text not in code),
            lambda k: (
                f"{where}: row {k + 1} holds {texts[k]!r}, which is none of the classes "
                f"{', '.join(list(code)[:12])}; correct it or leave the row out."
            ),
        )
        return np.array([code[t] for t in texts], dtype=np.int64)


def check_task(task: str | None, classes: Any) -> None:
    """Refuse a task that there is not, and a number of classes for a regression."""
    if task is not None and task not in get_args(Task):
        raise DataError(f"task must be 'classification' or 'regression', got {task!r}.")
    if task == "regression" and classes is not None:
        raise DataError(
            f"task='regression' has no classes, got classes={classes!r}; leave one of them out."
        )
    check_classes(classes)


def ask_task(where: str, distinct: Sequence[Any], more: str = "") -> None:
    """Ask whether whole numbers are classes or values."""
    raise DataError(
        f"{where} holds whole numbers, {len(distinct)} different ones in all, from {distinct[0]} "
        f"to {distinct[-1]}: values or classes? Say task='regression', or task='classification' to "
        f"have them numbered in sorted order{', ' + more if more else ''}."
    )


# -- arrays ---------------------------------------------------------------------------------------


def number_targets(arrays: Mapping[str, Array], classes: int | None, task: str | None) -> Numbered:
    """Return the targets as int64 or float64, the number of classes, and names given to classes.

    ``arrays`` says whose they are, for messages (``"Client 'a': train y"``): numbers, or text as
    objects. With ``classes`` they are labels 0..classes - 1; whole numbers that are not 0..K - 1
    with K up to 20 need a ``task``.
    """
    filled = {where: y for where, y in arrays.items() if len(y)}
    text = {where: y.dtype == object for where, y in filled.items()}
    if any(text.values()):
        if not all(text.values()):
            one, other = (next(w for w, t in text.items() if t is kind) for kind in (True, False))
            raise DataError(f"{one} is text, {other} numbers; give all text or all numbers.")
        return _number_text(arrays, classes, task)
    fractions = any(y.dtype.kind == "f" for y in filled.values())
    if task == "regression" or (task is None and classes is None and fractions):
        return {where: y.astype(np.float64) for where, y in arrays.items()}, None, ()
    labels = {where: _as_labels(y, where) for where, y in arrays.items()}
    distinct = np.unique(np.concatenate(list(labels.values())))
    natural = len(distinct) == distinct[-1] + 1 and distinct[0] == 0  # 0..K - 1, all there
    if classes is not None:
        return labels, classes, ()
    if task is None and (not natural or len(distinct) > MANY):
        odd = distinct[0] if distinct[0] < 0 else distinct[-1]
        where = next(where for where, y in labels.items() if odd in y)
        ask_task(where, distinct.tolist(), "or classes=K if they are labels 0..K - 1")
    if natural:
        return labels, max(len(distinct), 2), ()
    coded = {where: np.searchsorted(distinct, y) for where, y in labels.items()}
    return coded, len(distinct), tuple(str(v) for v in distinct)


def _number_text(arrays: Mapping[str, Array], classes: int | None, task: str | None) -> Numbered:
    for where, y in arrays.items():
        if len(y) and task == "regression":
            raise DataError(f"{where} is text, e.g. {y[0]!r}, so it cannot be regressed on.")
        if len(y) and y.ndim > 1 and y.shape[1:] != (1,):
            raise DataError(f"{where} has shape {y.shape}; give one label per sample.")
    titles = tuple(sorted({v for y in arrays.values() for v in y.ravel().tolist()}))
    if classes is not None and classes != len(titles):
        raise DataError(
            f"{next(iter(arrays))}: there are {len(titles)} different texts "
            f"({', '.join(titles[:5])}) but classes={classes}; give labels 0..{classes - 1}, or "
            "leave classes out."
        )
    code = {title: k for k, title in enumerate(titles)}
    coded = {
        where: np.array([code[v] for v in y.ravel().tolist()], np.int64)
        for where, y in arrays.items()
    }
    return coded, len(titles), titles


def _as_labels(y: Array, where: str) -> Array:
    """Return whole numbers as int64 of shape (m,)."""
    if len(y) and y.ndim > 1 and y.shape[1:] != (1,):
        raise DataError(
            f"{where} has shape {y.shape}; give one label per sample (one-hot rows: "
            ".argmax(1)), or floats for a regression."
        )
    y = y.ravel()
    if y.dtype.kind == "f":
        refuse(
            np.flatnonzero(~(np.isfinite(y) & (y == np.round(y)))),
            lambda k: (
                f"{where}: labels must be whole numbers, got {y[k]} in row {k}; correct "
                "them, or leave classes out for a regression."
            ),
        )
    refuse(
        y[np.abs(y.astype(np.float64)) >= 2**53],
        lambda large: f"{where}: {large} is no label; relabel the classes 0..K - 1.",
    )
    return y.astype(np.int64)


# -- columns --------------------------------------------------------------------------------------


def describe_target(name: str, values: Sequence[Any], task: str | None = None) -> dict[str, Any]:
    """Return what one client tells of its targets: of which kind they are, and which labels.

    Labels are told unless the target is a regression: by ``task``, or because of its fractions.

    >>> describe_target("ill", ["no", "yes", "no"])
    {'numeric': False, 'whole': False, 'labels': ['no', 'yes']}
    """
    where = f"Column {name!r}"
    try:
        values = list({(type(v), v): v for v in values}.values())
    except TypeError:
        raise DataError(f"{where} must hold text or numbers, one in a row.") from None
    numbers = to_numbers(values) if task == "regression" else to_amounts(values)
    if task == "regression" and numbers is None:
        odd = next(v for v in values if to_numbers([v]) is None)
        raise DataError(f"{where} is not numeric (it has {str(odd)!r}): cannot be a regression.")
    whole = numbers is not None and are_whole(numbers)
    if task == "regression" or (numbers is not None and not whole and task is None):
        read_numbers(name, values)  # refuses infinities
        return {"numeric": True, "whole": False, "labels": []}
    if numbers is not None and whole:
        labels = [str(v) for v in sorted({int(v) for v in numbers.tolist()})]
    else:
        if numbers is None and task is None:
            _refuse_numbers_in_text(where, values)
        labels = sorted({name_category(v) for v in values})
    return {"numeric": numbers is not None, "whole": whole, "labels": labels}


def _refuse_numbers_in_text(where: str, values: Sequence[Any]) -> None:
    """Refuse text that may well be numbers, before each of them becomes a class."""
    texts, numeric = [str(v) for v in values], [to_amounts([v]) is not None for v in values]
    refuse(
        (text for text in texts if DECIMAL_COMMA.fullmatch(text)),
        lambda text: f"{where} holds {text!r}: {explain_comma(text)}",
    )
    if any(numeric):
        number, word = texts[numeric.index(True)], texts[numeric.index(False)]
        raise DataError(
            f"{where} holds numbers and text, e.g. {number!r} and {word!r}; correct the odd ones, "
            "or say task='classification' if all of them are classes."
        )


def combine_targets(
    name: str,
    answers: Mapping[str, Mapping[str, Any]],
    task: str | None = None,
    classes: int | None = None,
    unit: str | None = None,
) -> Target:
    """Return the target of all clients, from what :func:`describe_target` gave for each.

    >>> told = {"n": describe_target("y", [-1, 1]), "s": describe_target("y", ["1"])}
    >>> combine_targets("y", told)
    Target(name='y', classes=('-1', '1'), unit=None)
    """
    where = f"Column {name!r}"
    numeric = {client: told["numeric"] for client, told in answers.items()}
    if task is None and len(set(numeric.values())) > 1:
        one, two = (next(c for c, k in numeric.items() if k is kind) for kind in (True, False))
        raise DataError(
            f"{where} holds numbers at client {one!r} and text at client {two!r}; make them alike, "
            "or say task='classification' if all of them are classes."
        )
    whole = all(told["whole"] for told in answers.values())
    if task == "regression" or (task is None and all(numeric.values()) and not whole):
        return Target(name, None, unit)
    if classes is not None and not whole:
        raise DataError(
            f"With classes={classes} the target column must hold labels 0..{classes - 1}, got "
            "text; leave classes out to have the labels numbered."
        )
    labels = {label for told in answers.values() for label in told["labels"]}
    if not whole:
        return Target(name, tuple(sorted(labels)), unit)
    distinct = sorted(map(int, labels))
    gaps = len(distinct) > 2 and distinct[-1] - distinct[0] >= len(distinct)
    if task is None and classes is None and (len(distinct) > MANY or gaps):
        ask_task(where, distinct)
    named = distinct if classes is None else range(classes)
    return Target(name, tuple(map(str, named)), unit)
