"""What is measured for every client, and which way is better: decided here and nowhere else.

Scores and probabilities of two classes are one number per sample, that of class 1, the positive
one; of more classes one per class, and recall, precision, F1 and AUROC are means over the classes
that the client has. Where scikit-learn warns that a metric is not defined, it is NaN.

Limits for other samples of the same client: Wilson's for ratios of counts, Student's for means over
samples, a bootstrap for all others; none (NaN) where the samples cannot tell.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from equifed.contract.streams import Stream
from equifed.metrics.intervals import student_half, wilson_interval
from equifed.metrics.reducers import Values

Needs = Literal["prediction", "score", "probability", "loss"]
Task = Literal["any", "classes", "values"]
DIRECTED = ("_score", "_error", "_loss")
"""Endings of names that say which way is better: more, or less of it."""
DASH = "–"
RESAMPLES = 200
FEWEST = 5
"""A bootstrap of fewer samples knows too few of the values that others could have."""
NOTHING = (float("nan"), float("nan"))


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
        ``f(y, answers)`` of one client; NaN where it is not defined. By default the mean of
        ``each``.
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
    counts: Callable[[Any, Any], tuple[int, int] | None] | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or "\n" in self.name:
            raise ValueError(f"A metric needs a name of one line, got {self.name!r}.")
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))
        if self.compute is None and self.each is not None:
            object.__setattr__(self, "compute", partial(_average, self.each))

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
        """Write a value without its unit; a dash if it is not finite."""
        if not math.isfinite(value):
            return DASH
        # Twelve digits first: a number that was summed in another order is written the same.
        shown = float(f"{self.factor * value:.12g}")
        return f"{shown:.1f}" if self.is_fraction else f"{shown:.4g}"

    def write(self, value: float) -> str:
        """Write a value with its unit; a dash if it is not finite."""
        return self.write_number(value) + (self.unit if math.isfinite(value) else "")

    def measure(self, y: Any, answers: Any) -> float:
        """Return the metric of one client's samples; NaN where it is not defined."""
        if self.compute is None:
            raise ValueError(f"The metric {self.name} has no function to compute it.")
        if len(y) == 0:
            return float("nan")
        try:
            return float(self.compute(y, answers))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The metric {self.name} failed on {len(y)} samples with {self.needs}s of shape "
                f"{np.shape(answers)}: {error}"
            ) from error

    def limits(self, y: Any, answers: Any, stream: Stream) -> tuple[float, float]:
        """Return 95 % limits for other samples of the same client; NaN where nothing is known."""
        counts = None if self.counts is None or len(y) == 0 else self.counts(y, answers)
        if counts is not None:
            (lower,), (upper,) = wilson_interval(counts[:1], counts[1:])
            return (float(lower), float(upper)) if counts[1] else NOTHING
        if self.each is not None:
            return limit_mean(self.each(y, answers))
        if len(y) < FEWEST or np.isnan(self.try_measure(y, answers)):
            return NOTHING
        draw = stream.at("bootstrap", self.name).generator()
        rows = draw.integers(len(y), size=(RESAMPLES, len(y)))
        values = np.array([self.try_measure(y[row], answers[row]) for row in rows])
        known = values[np.isfinite(values)]  # a resample may lack a class
        if len(known) < RESAMPLES / 2 or np.ptp(known) == 0:
            return NOTHING
        lower, upper = np.quantile(known, [(1 - 0.95) / 2, (1 + 0.95) / 2])
        return float(lower), float(upper)

    def try_measure(self, y: Any, answers: Any) -> float:
        """Return the metric; NaN where a function does not take these samples, as of one class."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.measure(y, answers)
            except ValueError:
                return float("nan")


def limit_mean(values: Values) -> tuple[float, float]:
    """Return Student's limits of a mean; those of numbers that are never negative stay above 0."""
    if len(values) < 2 or not np.isfinite(values).all() or np.ptp(values) == 0:
        return NOTHING
    mean, half = float(values.mean()), student_half(values)
    return max(mean - half, 0.0) if values.min() >= 0 else mean - half, mean + half


# -- the functions ---------------------------------------------------------------------------------


def _average(each: Callable[[Any, Any], Values], y: Any, answers: Any) -> float:
    return float(each(y, answers).mean())


def _take_losses(y: Any, losses: Any) -> Values:
    return np.asarray(losses, dtype=np.float64)


def _correct(y: Any, predicted: Any) -> Values:
    return np.asarray(y == predicted, dtype=np.float64)


def _count_correct(y: Any, predicted: Any) -> tuple[int, int]:
    return int(np.count_nonzero(y == predicted)), len(y)


def _balanced_accuracy(y: Any, predicted: Any) -> float:
    """Return the mean over the client's classes of the fraction answered correctly."""
    hits = _correct(y, predicted)
    return float(np.mean([hits[y == k].mean() for k in np.unique(y)]))


Rate = Literal["recall", "precision", "f1"]


def _list_rates(y: Any, score: Any, rate: Rate) -> list[tuple[int, int]]:
    """Return the ratio of counts of the positive class, or of every class that y has."""
    binary, out = score.ndim == 1, []
    predicted = (score > 0).astype(np.int64) if binary else score.argmax(axis=1)
    for k in [1] if binary else np.unique(y):
        hits, said, true = (
            int(x.sum()) for x in ((y == k) & (predicted == k), predicted == k, y == k)
        )
        out.append(
            {"recall": (hits, true), "precision": (hits, said), "f1": (2 * hits, said + true)}[rate]
        )
    return out


def _average_rate(y: Any, score: Any, rate: Rate) -> float:
    """Return the mean over classes; 0/0 is not defined for one class, and 0 among several."""
    parts = _list_rates(y, score, rate)
    if score.ndim == 1 and parts[0][1] == 0:
        return float("nan")
    return float(np.mean([k / m if m else 0.0 for k, m in parts]))


def _count_rate(y: Any, score: Any, rate: Rate) -> tuple[int, int] | None:
    return _list_rates(y, score, rate)[0] if score.ndim == 1 else None


def _auroc(y: Any, score: Any) -> float:
    """Return how often a positive sample is ranked before a negative one, ties counting half."""
    if score.ndim == 2:  # the mean over the client's classes, each against the rest
        chances = np.exp(score - score.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        return float(np.mean([_auroc(y == k, chances[:, k]) for k in np.unique(y)]))
    positive = y == 1
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return float("nan")
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # equal scores share their mean rank
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * n))


def _squared_distances(y: Any, probability: Any) -> Values:
    """Return the squared distance of every answer from the truth; of two classes, of the second."""
    if probability.ndim == 1:
        return np.asarray((probability - y) ** 2, dtype=np.float64)
    truth = np.eye(probability.shape[1])[y]
    return np.asarray(((probability - truth) ** 2).sum(axis=1))


def _errors(y: Any, predicted: Any) -> Values:
    """Return the errors of every sample, one column per target."""
    return np.asarray(np.asarray(y, np.float64) - predicted).reshape(len(y), -1)


def _squared_errors(y: Any, predicted: Any) -> Values:
    return np.asarray((_errors(y, predicted) ** 2).mean(axis=1))


def _absolute_errors(y: Any, predicted: Any) -> Values:
    return np.asarray(np.abs(_errors(y, predicted)).mean(axis=1))


def _rmse(y: Any, predicted: Any) -> float:
    """Return the root of the mean squared error; of several targets the mean of their roots."""
    return float(np.sqrt((_errors(y, predicted) ** 2).mean(axis=0)).mean())


def _r2(y: Any, predicted: Any) -> float:
    """Return which fraction of the variance of the client's targets is explained."""
    truth = np.asarray(y, np.float64).reshape(len(y), -1)
    spread = ((truth - truth.mean(axis=0)) ** 2).sum(axis=0)
    if len(y) < 2 or not (np.ptp(truth, axis=0) > 0).all():
        return float("nan")
    rest = ((truth - np.asarray(predicted, np.float64).reshape(truth.shape)) ** 2).sum(axis=0)
    return float((1 - rest / spread).mean())


# -- by name ---------------------------------------------------------------------------------------


def _of_classes(name: str, higher: bool, needs: Needs = "score", **more: Any) -> Metric:
    return Metric(name, higher, needs=needs, task="classes", **more)


def _of_values(name: str, label: str, higher: bool = False, **more: Any) -> Metric:
    return Metric(name, higher, task="values", label=label, **more)


def _of_rate(name: Rate, **more: Any) -> Metric:
    return _of_classes(name, True, compute=partial(_average_rate, rate=name), **more)


METRICS = {
    metric.name: metric
    for metric in (
        _of_classes("accuracy", True, "prediction", is_fraction=True, each=_correct,
                    counts=_count_correct),
        _of_values("mse", "MSE", each=_squared_errors),
        Metric("loss", False, each=_take_losses, needs="loss"),
        _of_classes("balanced_accuracy", True, "prediction", compute=_balanced_accuracy),
        _of_rate("recall", counts=partial(_count_rate, rate="recall")),
        _of_rate("precision", counts=partial(_count_rate, rate="precision")),
        _of_rate("f1", label="F1"),
        _of_classes("auroc", True, compute=_auroc, label="AUROC"),
        _of_classes("brier", False, "probability", label="Brier score", each=_squared_distances),
        _of_values("rmse", "RMSE", compute=_rmse),
        _of_values("mae", "MAE", each=_absolute_errors),
        _of_values("r2", "R²", True, compute=_r2),
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
