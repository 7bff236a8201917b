"""What is measured for every client, and which way is better: decided here and nowhere else.

A metric is a function of a client's targets and of what the model answers, computed where the
samples are; :mod:`equifed.metrics.scores` holds the functions. What is known by name is in
``METRICS``; a function of one's own becomes a metric by :func:`as_metric`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from equifed.contract.streams import Stream
from equifed.metrics import scores
from equifed.metrics.checks import Values
from equifed.metrics.sample_limits import Counts, limit_metric

Needs = Literal["prediction", "score", "probability", "loss"]
Task = Literal["any", "classes", "values"]
DIRECTED = ("_score", "_error", "_loss")
"""Endings of names that say which way is better: more, or less of it."""


@dataclass(frozen=True)
class Metric:
    """A number per client: how it is computed, its direction, and how it is written.

    Parameters
    ----------
    name
        As in evaluations and in ``metrics.csv``. The name of a metric of your own says which way is
        better wherever it is read, as in scikit-learn: more is better if it ends in ``_score``.
    higher_is_better
        Whether more is better service.
    is_fraction
        Whether a value is the fraction of samples that were answered correctly. Fractions are
        written in percent, their differences in points, and binomial intervals apply to them.
    compute
        ``f(y, answers)`` of one client; NaN where it is not defined.
    needs
        What ``answers`` are: the ``"prediction"`` (a class, or values), the ``"score"`` (two
        classes: how far the second is ahead, shape (m,); more: one output each; values: the
        prediction), the ``"probability"`` (two classes: of the second; more: of each), or the
        training ``"loss"`` of every sample.
    task
        Whether it is about ``"classes"``, about ``"values"`` to regress on, or any.
    label
        Name on pages; by default the name.
    each
        ``f(y, answers)`` per sample, if the metric is its mean.
    counts
        ``f(y, answers)``: successes and trials, if the metric is their ratio; None where it is not.
    undefined
        When it has no value.

    >>> METRICS["accuracy"].write(0.7631), METRICS["loss"].write(0.51239), METRICS["mse"].label
    ('76.3 %', '0.5124', 'MSE')
    """

    name: str
    higher_is_better: bool
    is_fraction: bool = False
    compute: Callable[[Any, Any], float] | None = None
    needs: Needs = "prediction"
    task: Task = "any"
    label: str = ""
    each: Callable[[Any, Any], Values] | None = None
    counts: Callable[[Any, Any], Counts | None] | None = None
    undefined: str = ""

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or "\n" in self.name:
            raise ValueError(f"A metric needs a name of one line, got {self.name!r}.")
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))

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

    def measure(self, y: Any, answers: Any) -> float:
        """Return the metric of one client's samples; NaN where it is not defined."""
        if self.compute is None:
            raise ValueError(f"The metric {self.name} has no function to compute it.")
        if len(y) == 0:
            return float("nan")
        try:
            value = float(self.compute(y, answers))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The metric {self.name} failed on {len(y)} samples with {self.needs}s of shape "
                f"{np.shape(answers)}: {error}"
            ) from error
        return value

    def limits(self, y: Any, answers: Any, stream: Stream) -> tuple[float, float]:
        """Return 95 % limits for other samples of the same client; NaN where nothing is known."""
        return limit_metric(self, y, answers, stream)


def _of_classes(name: str, higher: bool, needs: Needs = "score", **more: Any) -> Metric:
    return Metric(name, higher, needs=needs, task="classes", **more)


def _of_values(name: str, label: str, compute: Callable[[Any, Any], float], **more: Any) -> Metric:
    higher = more.pop("higher", False)
    return Metric(name, higher, compute=compute, task="values", label=label, **more)


_ONE = "a client whose samples are all of one class has none"

METRICS = {
    metric.name: metric
    for metric in (
        _of_classes("accuracy", True, "prediction", is_fraction=True, compute=scores.accuracy,
                    each=scores.correct, counts=scores.count_correct),
        _of_values("mse", "MSE", scores.mse, each=scores.squared_errors),
        Metric("loss", False, compute=scores.mean_loss, each=scores.take_losses, needs="loss"),
        _of_classes("balanced_accuracy", True, "prediction", compute=scores.balanced_accuracy),
        _of_classes("recall", True, compute=scores.recall, counts=scores.count_recalled,
                    undefined="a client without a sample of the positive class has none"),
        _of_classes("precision", True, compute=scores.precision, counts=scores.count_precise,
                    undefined="a client none of whose samples is predicted positive has none"),
        _of_classes("f1", True, compute=scores.f1, label="F1",
                    undefined="a client without positive samples, true or predicted, has none"),
        _of_classes("auroc", True, compute=scores.auroc, label="AUROC", undefined=_ONE),
        _of_classes("average_precision", True, compute=scores.average_precision, undefined=_ONE),
        _of_classes("brier", False, "probability", compute=scores.brier, label="Brier score",
                    each=scores.squared_distances),
        _of_classes("log_loss", False, "probability", compute=scores.log_loss,
                    each=scores.log_losses),
        _of_values("rmse", "RMSE", scores.rmse),
        _of_values("mae", "MAE", scores.mae, each=scores.absolute_errors),
        _of_values("r2", "R²", scores.r2, higher=True,
                   undefined="a client whose targets are all the same, or one sample, has none"),
    )
}  # fmt: skip
"""The metrics that are known by name; the first one that was evaluated is the one to show."""


def find_metric(name: str) -> Metric:
    """Return the metric of a name; of one that is not known the name says which way is better.

    >>> find_metric("accuracy").sign, find_metric("squared error").sign, find_metric("my_score").sign
    (1.0, -1.0, 1.0)
    """  # noqa: E501
    return METRICS.get(name) or Metric(name, higher_is_better=name.endswith("_score"))


def as_metric(given: Any) -> Metric:
    """Return a name, a :class:`Metric` or a function ``f(y, answers)`` as a metric.

    A function's second argument says what it needs, as in scikit-learn: ``y_score`` the score,
    ``y_prob`` or ``y_proba`` the probability, anything else the prediction.

    >>> def miss_rate(y, predicted):
    ...     return float(np.mean(y != predicted))
    >>> as_metric(miss_rate).needs, as_metric("auroc").label
    ('prediction', 'AUROC')
    """
    if isinstance(given, str):
        if given not in METRICS:
            raise ValueError(f"There is no metric {given!r}; known are {', '.join(METRICS)}.")
        return METRICS[given]
    if isinstance(given, Metric):
        metric = given
    elif callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        if not name.isidentifier():
            raise ValueError(
                f"The metric {given!r} has no name; give Metric('name', higher_is_better=..., "
                "compute=...)."
            )
        metric = Metric(name, name.endswith("_score"), compute=given, needs=_read_needs(given))
    else:
        raise ValueError(
            f"A metric is a name ({', '.join(METRICS)}), a Metric or a function f(y, answers), got "
            f"{given!r}."
        )
    return _check_own(metric)


def as_metrics(given: Iterable[Any]) -> tuple[Metric, ...]:
    """Return metrics that were asked for, each once, in order."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"metrics must be a sequence of names or functions, got {given!r}.")
    found = [as_metric(one) for one in given]
    names = [metric.name for metric in found]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"The metric {twice[0]} is given more than once; give it once.")
    return tuple(found)


def _check_own(metric: Metric) -> Metric:
    """Refuse an own metric that takes a known name, cannot be computed or belies its direction."""
    known = METRICS.get(metric.name)
    if known is metric:
        return metric
    if known is not None:
        raise ValueError(f"{metric.name} is the name of a known metric; call yours another name.")
    if metric.compute is None:
        raise ValueError(f"The metric {metric.name} has no function to compute it: give compute=.")
    if metric.is_fraction:
        raise ValueError(
            f"{metric.name}: only accuracy is a fraction of samples; leave is_fraction out."
        )
    if metric.higher_is_better != metric.name.endswith("_score"):
        cure = f"{metric.name}_score" if metric.higher_is_better else metric.name[:-6] + "_error"
        raise ValueError(
            f"{metric.name}: the name of a metric of your own says which way is better, '_score' "
            f"at its end that more is; call it {cure!r}."
        )
    return metric


def _read_needs(function: Callable[..., Any]) -> Needs:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return "prediction"
    second = names[1] if len(names) > 1 else ""
    return "score" if "score" in second else "probability" if "prob" in second else "prediction"
