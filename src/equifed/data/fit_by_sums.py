r"""Answers of a fit as vectors that are only added, exactly.

A question of :mod:`equifed.data.fit` says which numbers an answer has, so an answer is
a vector of whole numbers whose sum over the clients is the answer of all of them together:

* a count is its digits to the base :math:`2^{12}`, small enough for hidden sums of 2000 clients;
* a number v is the digits of :math:`2^{1074} v`: every float is a multiple of :math:`2^{-1074}`, so
  that sums have no rounding but the last one, whatever the sizes, and are those of ``math.fsum``;
* the categories of a column are counted in :data:`BUCKETS` buckets by a digest of their text. Those
  of buckets with enough rows are then asked for by name, and the named ones are counted: a text
  that is rare in the whole federation is told only if it shares its bucket with a frequent one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.fit import KINDS, Question, combine
from equifed.data.preparation import OTHER, Preparation
from equifed.data.split import DataError

Vector = NDArray[np.float64]
Add = Callable[[Question], Vector]  # the sum of the vectors of all clients' answers

Collect = Callable[[Question], Sequence[Mapping[str, Sequence[str]]]]
"""Asks every client for names of categories, by column."""

BUCKETS = 4096
BASE = 12  # bits of a digit

COUNT, NUMBER = 4, 175  # digits of a count, and of a float

MOST_NAMES = 5000  # categories of one column that a client names at most

LAYOUT: dict[str, dict[str, int]] = {
    "kinds": dict.fromkeys(KINDS, COUNT),
    "sums": {"count": COUNT, "gaps": COUNT, "sum": NUMBER},
    "squares": {"apart": NUMBER, "squares": NUMBER},
}


def fit_by_sums(asked: Question, add: Add, collect: Collect) -> Preparation:
    """Ask until the preparation is known; nothing is seen but sums, and names of categories."""
    if asked["prepare"]["per_client"]:
        raise DataError(
            "per_client=True reveals the scales of every single client, which are not sums; leave "
            "it out."
        )
    told: Question | Preparation = asked
    while not isinstance(told, Preparation):
        total = from_vector(told, add(told))
        if told["stage"] == "sums" and told["coded"]:
            _count_categories(told, total, add, collect)
        told = combine(told, {"all clients": total})
    return told


def _count_categories(
    asked: Question, total: dict[str, dict[str, Any]], add: Add, collect: Collect
) -> None:
    """Put the counts of frequent categories into the answer; all others together are OTHER."""
    rule, coded = asked["prepare"], asked["coded"]
    least = 1 if rule["unknown"] == "error" else int(rule["min_count"])
    heavy = {c: [b for b, n in enumerate(total[c]["buckets"]) if n >= least] for c in coded}
    asked = {**asked, "columns": coded, "heavy": heavy}
    found = collect({**asked, "stage": "names"})
    names = {c: sorted({text for told in found for text in told[c]}) for c in coded}
    asked |= {"stage": "counts", "names": names}
    counted = from_vector(asked, add(asked))
    for column in coded:
        pairs = zip(names[column], counted[column]["counts"], strict=True)
        counts = {text: n for text, n in pairs if n >= least}
        rest = sum(total[column].pop("buckets")) - sum(counts.values())
        if rest < 0:
            raise DataError(f"Column {column!r}: more rows have categories than there are rows.")
        if rest and OTHER not in counts:
            counts[OTHER] = min(rest, max(least - 1, 1))  # a sign that there are rare ones
        total[column]["counts"] = counts


def measure_vector(asked: Question) -> int:
    """Return the length of an answer's vector."""
    return sum(count * width for c in asked["columns"] for _, width, count in _lay_out(asked, c))


def to_vector(asked: Question, answer: Mapping[str, Mapping[str, Any]]) -> Vector:
    """Return one client's answer as a vector of whole numbers."""
    digits: list[int] = []
    for column in asked["columns"]:
        told = answer[column]
        for key, width, _ in _lay_out(asked, column):
            if key == "buckets":
                filled = Counter[int]()
                for text, count in told["counts"].items():
                    filled[_find_bucket(asked, column, text)] += count
                values = [filled[bucket] for bucket in range(BUCKETS)]
            elif key == "counts":
                values = [told["counts"].get(text, 0) for text in asked["names"][column]]
            else:
                values = [told[key]]
            split = split_count if width == COUNT else split_exactly
            digits += [digit for value in values for digit in split(value)]
    return np.array(digits, dtype=np.float64)


def from_vector(asked: Question, total: Vector) -> dict[str, dict[str, Any]]:
    """Return the answer of all clients together from the sum of their vectors."""
    if total.shape != (measure_vector(asked),) or not (total == np.rint(total)).all():
        raise DataError("The sum of the clients' answers is not made of whole numbers.")
    at, out = 0, dict[str, dict[str, Any]]()
    for column in asked["columns"]:
        out[column] = {}
        for key, width, count in _lay_out(asked, column):
            rows = total[at : at + count * width].reshape(count, width).tolist()
            at += count * width
            values = [(join_count if width == COUNT else join_exactly)(row) for row in rows]
            if width == COUNT and min(values, default=0) < 0:
                raise DataError(f"Column {column!r}: {key} of all clients is {min(values)}.")
            out[column][key] = values if key in ("buckets", "counts") else values[0]
    return out


def find_names(asked: Question, answer: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return one client's categories that are in the asked buckets, by column."""
    out = {}
    for column in asked["columns"]:
        heavy = set(asked["heavy"][column])
        texts = [t for t in answer[column]["counts"] if _find_bucket(asked, column, t) in heavy]
        if len(texts) > MOST_NAMES:
            raise DataError(
                f"Column {column!r} has {len(texts)} different texts, too many for categories; "
                "leave it out of features."
            )
        out[column] = sorted(texts)
    return out


def split_count(whole: int, width: int = COUNT) -> list[int]:
    """Return the digits of a whole number, lowest first, all with its sign."""
    sign, whole = (-1 if whole < 0 else 1), abs(whole)
    return [sign * (whole >> BASE * k & (1 << BASE) - 1) for k in range(width)]


def join_count(digits: Sequence[float]) -> int:
    """Return the whole number that digits, or sums of them, stand for."""
    return sum(int(digit) << BASE * k for k, digit in enumerate(digits))


def split_exactly(value: float) -> list[int]:
    """Return the digits of a finite float, lowest first, all with its sign.

    >>> join_exactly([a + b for a, b in zip(split_exactly(0.1), split_exactly(0.2))])
    0.30000000000000004
    """
    return split_count(int(Fraction(value) * 2**1074), NUMBER)


def join_exactly(digits: Sequence[float]) -> float:
    """Return the float nearest to the number that digits, or sums of them, stand for."""
    whole = join_count(digits)
    try:
        return float(Fraction(whole, 2**1074))
    except OverflowError:
        return math.copysign(math.inf, whole)


def _lay_out(asked: Question, column: str) -> list[tuple[str, int, int]]:
    """Return the entries of an answer about one column: key, digits and how many."""
    stage = asked["stage"]
    if stage == "counts":
        return [("counts", COUNT, len(asked["names"][column]))]
    if stage == "sums" and column in asked["coded"]:
        return [("gaps", COUNT, 1), ("buckets", COUNT, BUCKETS)]
    return [(key, width, 1) for key, width in LAYOUT[stage].items()]


def _find_bucket(asked: Question, column: str, text: str) -> int:
    digest = hashlib.sha256(repr((asked.get("salt", ""), column, text)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS
