"""How numbers are written: metrics on a split, signs, bytes, counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equifed.metrics import Interval, Metric, find_metric

MINUS, DASH, TIMES = "−", "–", "×"


@dataclass(frozen=True)
class Scale:
    """A metric on a split, and how to write its values.

    >>> accuracy = Scale("accuracy", "test")
    >>> accuracy.text(0.7631), accuracy.change(-0.0214), Scale("loss", "test").text(0.51239)
    ('76.3 %', '−2.1 points', '0.5124')
    """

    metric: str
    split: str

    @property
    def kind(self) -> Metric:
        """What is known about the metric."""
        return find_metric(self.metric)

    @property
    def higher_is_better(self) -> bool:
        """Whether more is better service."""
        return self.kind.higher_is_better

    @property
    def factor(self) -> float:
        """What a value is multiplied by before it is shown."""
        return self.kind.factor

    @property
    def label(self) -> str:
        """Name with the split.

        >>> Scale("accuracy", "test").label
        'test accuracy'
        """
        return f"{self.split} {self.kind.label}"

    @property
    def axis(self) -> str:
        """Name with the split and the unit.

        >>> Scale("accuracy", "test").axis, Scale("loss", "train").axis
        ('test accuracy, %', 'train loss')
        """
        return self.label + ("," + self.kind.unit if self.kind.unit else "")

    def number(self, value: float) -> str:
        """Write a value without its unit."""
        return self.kind.write_number(value) if math.isfinite(value) else DASH

    def text(self, value: float) -> str:
        """Write a value with its unit."""
        return self.kind.write(value) if math.isfinite(value) else DASH

    def span(self, lower: float, upper: float) -> str:
        """Write an interval.

        >>> Scale("accuracy", "test").span(0.5, 0.613)
        '50.0 to 61.3 %'
        """
        return f"{self.number(lower)} to {self.number(upper)}{self.kind.unit}"

    def signed(self, value: float) -> str:
        """Write a difference without its unit."""
        return add_sign(value, self.number(abs(value)))

    def change(self, value: float) -> str:
        """Write a difference with its unit."""
        return self.signed(value) + (self.kind.unit_of_differences if math.isfinite(value) else "")

    def gap(self, value: float) -> str:
        """Write a distance between two values.

        >>> Scale("accuracy", "test").gap(0.125)
        '12.5 points'
        """
        return self.number(value) + (self.kind.unit_of_differences if math.isfinite(value) else "")


def capital(text: str) -> str:
    """Write the first letter large, and leave the others: names of metrics have theirs.

    >>> capital("test MSE")
    'Test MSE'
    """
    return text[:1].upper() + text[1:]


def add_sign(value: float, magnitude: str) -> str:
    """Put a sign before a magnitude; ± where all of its digits are zero.

    >>> add_sign(-0.2, "0.2"), add_sign(-0.01, "0.0")
    ('−0.2', '±0.0')
    """
    if not math.isfinite(value):
        return DASH
    if not any(digit in magnitude for digit in "123456789"):
        return "±" + magnitude
    return (MINUS if value < 0 else "+") + magnitude


def bytes_text(count: float) -> str:
    """Write a number of bytes.

    >>> bytes_text(1_234_567), bytes_text(12), bytes_text(-2e9)
    ('1.23 MB', '12 B', '−2 GB')
    """
    if not math.isfinite(count):
        return DASH
    size, sign = abs(count), MINUS if count < 0 else ""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{sign}{size / scale:.3g} {unit}"
    return f"{sign}{size:.0f} B"


def plural(count: int, word: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "seed"), plural(1200, "client")
    ('1 seed', '1,200 clients')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def is_finite(interval: Interval) -> bool:
    """Return whether an interval says anything."""
    return math.isfinite(interval.lower) and math.isfinite(interval.upper)
