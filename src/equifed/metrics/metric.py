"""What is measured for every client, and which way is better: decided here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number per client: its direction, and how it is written.

    Parameters
    ----------
    name
        As in evaluations and in ``metrics.csv``.
    higher_is_better
        Whether more is better service.
    is_fraction
        Whether a value is the fraction of samples that were answered correctly. Fractions are
        written in percent, their differences in points, and binomial intervals apply to them.

    >>> METRICS["accuracy"].write(0.7631), METRICS["loss"].write(0.51239)
    ('76.3 %', '0.5124')
    """

    name: str
    higher_is_better: bool
    is_fraction: bool = False

    @property
    def sign(self) -> float:
        """What to multiply values by so that larger is better: 1 or -1."""
        return 1.0 if self.higher_is_better else -1.0

    @property
    def factor(self) -> float:
        """What a value is multiplied by before it is shown."""
        return 100.0 if self.is_fraction else 1.0

    @property
    def unit(self) -> str:
        """Unit after a value."""
        return " %" if self.is_fraction else ""

    @property
    def unit_of_differences(self) -> str:
        """Unit after a difference of two values."""
        return " points" if self.is_fraction else ""

    def write_number(self, value: float) -> str:
        """Write a value without its unit."""
        # Twelve digits first: a number that was summed in another order is written the same.
        shown = float(f"{self.factor * value:.12g}")
        return f"{shown:.1f}" if self.is_fraction else f"{shown:.4g}"

    def write(self, value: float) -> str:
        """Write a value with its unit."""
        return self.write_number(value) + self.unit


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", higher_is_better=True, is_fraction=True),
        Metric("loss", higher_is_better=False),
    )
}
"""The metrics that are known by name; the first one that was evaluated is the one to show."""


def find_metric(name: str) -> Metric:
    """Return the metric of a name; one that is not known is taken for a kind of loss.

    >>> find_metric("accuracy").sign, find_metric("squared error").sign
    (1.0, -1.0)
    """
    return METRICS.get(name) or Metric(name, higher_is_better=False)
