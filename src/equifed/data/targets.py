"""Targets: classes or values? Where whole numbers could be either, the user is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from equifed.data.split import Array, DataError

Task: TypeAlias = Literal["classification", "regression"]

MANY = 20
"""Whole numbers with more different values than this may be values as well as classes."""

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


def check_task(task: str | None, classes: Any) -> None:
    """Refuse a task that there is not, and a number of classes for a regression."""
    if task is not None and task not in get_args(Task):
        raise DataError(f"task must be 'classification' or 'regression', got {task!r}.")
    if task == "regression" and classes is not None:
        raise DataError(
            f"task='regression' has no classes, got classes={classes!r}; leave one of them out."
        )
    if classes is not None and (
        isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1
    ):
        raise DataError(f"classes must be a whole number of at least 1 or None, got {classes!r}.")


def number_targets(
    arrays: Mapping[str, Array], classes: int | None, task: str | None
) -> tuple[dict[str, Array], int | None, tuple[str, ...]]:
    """Return the targets as int64 or float64, the number of classes, and names given to classes.

    Parameters
    ----------
    arrays : mapping of str to array
        Whose targets, for messages (``"Client 'a': train y"``), and the targets: numbers, or text
        as objects.
    classes : int, optional
        Number of classes, when labels are 0..classes - 1.
    task : {"classification", "regression"}, optional
        Whole numbers that are not 0..K - 1 with K up to 20 need it.
    """
    filled = {where: y for where, y in arrays.items() if len(y)}
    text = {where: y.dtype == object for where, y in filled.items()}
    if any(text.values()):
        if not all(text.values()):
            one, other = (next(w for w, t in text.items() if t is kind) for kind in (True, False))
            raise DataError(f"{one} is text, {other} numbers; give all text or all numbers.")
        return _number_text(arrays, classes, task)
    if task == "regression" or (
        task is None and classes is None and any(y.dtype.kind == "f" for y in filled.values())
    ):
        return {where: y.astype(np.float64) for where, y in arrays.items()}, None, ()
    labels = {where: _as_labels(y, where) for where, y in arrays.items()}
    distinct = np.unique(np.concatenate(list(labels.values())))
    natural = len(distinct) == distinct[-1] + 1 and distinct[0] == 0  # 0..K - 1, all there
    if classes is not None or (natural and task == "classification"):
        return labels, classes if classes is not None else max(len(distinct), 2), ()
    if task == "classification":
        coded = {where: np.searchsorted(distinct, y) for where, y in labels.items()}
        return coded, len(distinct), tuple(str(v) for v in distinct)
    if not natural or len(distinct) > MANY:
        odd = distinct[0] if distinct[0] < 0 else distinct[-1]
        where = next(where for where, y in labels.items() if odd in y)
        ask_task(where, distinct.tolist(), "or classes=K if they are labels 0..K - 1")
    return labels, max(len(distinct), 2), ()


def ask_task(where: str, distinct: Sequence[Any], more: str = "") -> None:
    """Ask whether whole numbers are classes or values."""
    raise DataError(
        f"{where} holds whole numbers, {len(distinct)} different ones in all, from {distinct[0]} "
        f"to {distinct[-1]}: values or classes? Say task='regression', or task='classification' to "
        f"have them numbered in sorted order{', ' + more if more else ''}."
    )


def refuse_numbers_in_text(where: str, texts: Sequence[str], numeric: Sequence[bool]) -> None:
    """Refuse text that may well be numbers, before each of them becomes a class."""
    comma = next((t for t in texts if DECIMAL_COMMA.fullmatch(t)), None)
    if comma is not None:
        raise DataError(f"{where} holds {comma!r}: {explain_comma(comma)}")
    if any(numeric):
        number, word = texts[numeric.index(True)], texts[numeric.index(False)]
        raise DataError(
            f"{where} holds numbers and text, e.g. {number!r} and {word!r}; correct the odd ones, "
            "or say task='classification' if all of them are classes."
        )


def explain_comma(text: str) -> str:
    """Return what to do about a number with a decimal comma."""
    return (
        "numbers need a decimal point; replace the comma, or hand over "
        f"pandas.read_csv(path, sep=';', decimal=',') if {text} is {text.replace(',', '.')}."
    )


def _number_text(
    arrays: Mapping[str, Array], classes: int | None, task: str | None
) -> tuple[dict[str, Array], int | None, tuple[str, ...]]:
    for where, y in arrays.items():
        if len(y) and task == "regression":
            raise DataError(f"{where} is text, e.g. {y[0]!r}, so it cannot be regressed on.")
        if len(y) and y.ndim > 1 and y.shape[1:] != (1,):
            raise DataError(f"{where} has shape {y.shape}; give one label per sample.")
    titles = tuple(sorted({v for y in arrays.values() for v in y.ravel().tolist()}))
    if classes is not None and classes != len(titles):
        first = next(iter(arrays))
        raise DataError(
            f"{first}: there are {len(titles)} different texts ({', '.join(titles[:5])}) but "
            f"classes={classes}; give labels 0..{classes - 1}, or leave classes out."
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
        strange = ~(np.isfinite(y) & (y == np.round(y)))
        if strange.any():
            raise DataError(
                f"{where}: labels must be whole numbers, got {y[strange][0]} in row "
                f"{int(np.flatnonzero(strange)[0])}; correct them, or leave classes out for a "
                "regression."
            )
    large = np.flatnonzero(np.abs(y.astype(np.float64)) >= 2**53)
    if len(large):
        raise DataError(f"{where}: {y[large[0]]} is no label; relabel the classes 0..K - 1.")
    return y.astype(np.int64)
