"""Numbers of runs: of each client, over rounds, over seeds, and how they are written.

Rows beside the published ones have own parts or models trained alone. A method with an own part is
called as the one without, and ``", own bias"``. Where every client has one class, an own bias and
an own model are trivial (always that class): no such rows there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from equifed import History
from equifed.contract import Index
from equifed.metrics import (
    Interval,
    chance_floor,
    mean_interval,
    variance_beyond_chance,
    worst_fraction,
)
from equifed.runs import merge_tables
from experiments.harness.experiment import Cell, Check, Context, Settings, Table
from experiments.harness.running import Histories, run_variants

Array = NDArray[np.float64]
Measure = Callable[[Array], Array]
"""Maps accuracies (seeds, clients) to one number for each seed."""


# -- one run --------------------------------------------------------------------------------------


def per_client(history: History, metric: str, split: str) -> Array:
    """Return the newest values of the clients that have samples in the split."""
    record = history.last(metric, split)
    assert record is not None
    known: Array = record.values[~np.isnan(record.values)]
    return known


def validation_score(history: History, tail: float | None = None) -> float:
    """Return the average accuracy on validation samples, or its mean with that of the worst.

    Parameters
    ----------
    history : History
        A run that was evaluated on validation samples.
    tail : float, optional
        The fraction of clients that count as the worst; 0 is the worst client alone. Where clients
        have few validation samples the accuracy of a single one is nearly a coin.
    """
    values = per_client(history, "accuracy", "validation")
    if tail is None:
        return float(values.mean())
    worst = worst_fraction(values, tail, higher_is_better=True) if tail else values.min()
    return float(worst + values.mean()) / 2


def series(history: History, what: str) -> tuple[Index, Array]:
    """Return the evaluated rounds, and worst, average or deviation of the test accuracies in %."""
    rounds, values = history.series("accuracy", "test")
    reduced = {"worst": values.min(1), "average": values.mean(1), "deviation": values.std(1)}
    return rounds, 100 * reduced[what]


def last_round(history: History) -> int:
    """Return the last evaluated round."""
    return int(history.series("accuracy", "test")[0][-1])


def rounds_to(history: History, target: float) -> float:
    """Return the first evaluated round at which every client has the accuracy, or infinity."""
    rounds, values = history.series("accuracy", "test")
    reached = np.flatnonzero(values.min(1) >= target)
    return float(rounds[reached[0]]) if len(reached) else float("inf")


# -- runs with several seeds ----------------------------------------------------------------------


def percentages(runs: Mapping[int, History], split: str = "test") -> Array:
    """Return the accuracies at the end in %, shape (seeds, clients)."""
    records = [history.last("accuracy", split) for history in runs.values()]
    return 100 * np.array([record.values for record in records if record is not None])


def with_interval(
    values: Sequence[float] | Array | Interval, form: str = ".1f", half_form: str = ""
) -> str:
    """Return the mean over seeds and half the width of its 95 % interval, if that is known.

    >>> with_interval([1.0, 2.0, 3.0]), with_interval([2.0])
    ('2.0 ± 2.5', '2.0')
    """
    limits = values if isinstance(values, Interval) else mean_interval(values)
    half = (limits.upper - limits.lower) / 2
    shown = f" ± {half:{half_form or form}}" if np.isfinite(half) else ""
    return f"{limits.estimate:{form}}{shown}"


def with_limits(difference: Interval, unit: str = "", form: str = "+.1f") -> str:
    """Return a difference within seeds and its 95 % limits, if they are known.

    >>> with_limits(Interval(1.0, -0.5, 2.5), " points")
    '+1.0 points (-0.5 to +2.5)'
    """
    shown = f"{difference.estimate:{form}}{unit}"
    if not np.isfinite(difference.upper):
        return shown
    return f"{shown} ({difference.lower:{form}} to {difference.upper:{form}})"


def for_new_samples(told: Interval, splits: int, ratio: float) -> Interval:
    """Return an interval over random splits, widened because splits share samples.

    The variance of the mean is (1/J + test/train) times that of one of J splits, in place of 1/J
    (Nadeau and Bengio 2003); ``ratio`` is test/train.

    >>> for_new_samples(Interval(1.0, 0.0, 2.0), splits=4, ratio=0.75)
    Interval(estimate=1.0, lower=-1.0, upper=3.0)
    """
    wider = float(np.sqrt(1 + splits * ratio))
    low, high = (told.estimate + wider * (end - told.estimate) for end in (told.lower, told.upper))
    return Interval(told.estimate, low, high)


# -- chance ---------------------------------------------------------------------------------------


def floor(values: Array, sizes: Array, fraction: float) -> float:
    """Return the accuracy in % that the worst fraction would have if all were served equally.

    >>> round(floor(np.array([0.9, 0.7]), np.array([50, 50]), 0.5), 1)
    76.8
    """
    pooled = float(values @ sizes / sizes.sum())
    return 100 * chance_floor(sizes, min(max(pooled, 0.0), 1.0), fraction)


def beyond_chance(values: Array, sizes: Array) -> float:
    """Return the standard deviation of the true accuracies in points; 0 if chance explains all.

    >>> beyond_chance(np.array([0.5, 0.52]), np.array([50, 50]))
    0.0
    """
    variance = variance_beyond_chance(np.round(values * sizes), sizes)
    return float("nan") if np.isnan(variance) else 100 * float(np.sqrt(max(0.0, variance)))


Answers = dict[int, tuple[Array, Array]]
"""By seed: test accuracies, and numbers of test samples, of the clients that have any."""


def answers(runs: Mapping[int, History], alone: bool = False) -> Answers:
    """Return how well the clients were served at the end, by the run or by models of their own."""
    out = {}
    for seed, history in runs.items():
        record = history.alone if alone else history.last("accuracy", "test")
        if record is not None and record.split == "test" and record.metric == "accuracy":
            known = record.sizes > 0
            sizes = np.asarray(record.sizes[known], dtype=np.float64)
            out[seed] = (record.values[known], sizes)
    return out


def clients_table(found: Mapping[str, Mapping[str, Mapping[int, History]]]) -> Table:
    """Return the test accuracy of every client, of every method and seed, by setting."""
    rows: list[list[Cell]] = []
    for title, runs in found.items():
        for method, by_seed in runs.items():
            for seed, (values, sizes) in answers(by_seed).items():
                rows += [
                    [title, method, seed, k, int(size), round(float(value), 5)]
                    for k, (value, size) in enumerate(zip(values, sizes, strict=True))
                ]
    columns = ("setting", "method", "seed", "client", "test samples", "accuracy")
    return Table("Test accuracy of every client", columns, rows)


def accuracy_table(
    found: Histories,
    measures: Mapping[str, Measure],
    by_client: bool = False,
    *,
    fraction: float | None = None,
    alone: Answers | None = None,
) -> Table:
    """Return measures of the test accuracies of every method, with intervals over seeds.

    Parameters
    ----------
    found : dict
        Runs by method and seed.
    measures : mapping
        Measures by their title.
    by_client : bool
        Whether every client has a column.
    fraction : float, optional
        Whose floor is shown: what the worst fraction would have if all were served equally well.
        None shows none, and no spread beyond chance.
    alone : mapping, optional
        What clients would have with own models, for a row of it.
    """
    first = next(h for runs in found.values() for h in runs.values())
    told = {method: answers(runs) for method, runs in found.items()}
    if alone:
        told["alone"] = alone
    rows: list[list[Cell]] = []
    for method, each in told.items():
        values = 100 * np.array([one for one, _ in each.values()])
        per_seed = [*(values.T if by_client else ()), *(f(values) for f in measures.values())]
        if fraction is not None:
            per_seed.append(np.array([floor(*one, fraction) for one in each.values()]))
            per_seed.append(np.array([beyond_chance(*one) for one in each.values()]))
        rows.append([method, len(values), *map(with_interval, per_seed)])
    columns = ["method", "seeds", *(first.names if by_client else ()), *measures]
    title = "Test accuracy in %, mean over seeds ± 95 %"
    if fraction is not None:
        columns += ["floor", "spread beyond chance"]
        sizes = np.concatenate([one for _, one in next(iter(told.values())).values()])
        worst = "client" if count_of(fraction, first) == 1 else f"{100 * fraction:g} %"
        title += (f"; floor: the worst {worst} if all were served equally ({sizes.min():g} to "
                  f"{sizes.max():g} test samples a client)")  # fmt: skip
    return Table(title, columns, rows)


def count_of(fraction: float, history: History) -> int:
    """Return how many clients a fraction is, rounded up."""
    return int(np.ceil(fraction * len(history.names) - 1e-9))


# -- rows beside the published ones ----------------------------------------------------------------

OWN, ALONE = ", own bias", "alone"
BASE, OURS = "FedAvg", "SCAFF-PD"


def is_published(method: str) -> bool:
    """Tell whether a method is as its paper has it, without an own part."""
    return method != ALONE and not method.endswith(OWN)


def fit_alone(context: Context, like: Settings) -> tuple[Answers, list[str]]:
    """Return what every client would have with a model of its own, seed by seed, and what failed.

    Logistic regression is solved exactly, with the strength of the penalty chosen by each client on
    its validation samples; other models take the local steps of the variant on each client alone.
    """
    variant = merge_tables(like, {"with_alone": True})
    found, failed = run_variants(context, {ALONE: variant}, context.settings["seeds"])
    return answers(found[ALONE], alone=True), failed


def own_checks(found: Histories, alone: Answers, fraction: float, base: str = BASE) -> list[Check]:
    """Tell the own part from the fair objective: each with and without the other.

    ``fraction`` says who the worst are; ``base`` is what FedAvg without an own part is called.
    """
    told = {method: answers(runs) for method, runs in found.items()}
    told[ALONE] = alone
    pairs = [(OURS + OWN, BASE + OWN), (OURS, base), (BASE + OWN, base), (OURS + OWN, OURS),
             (BASE + OWN, ALONE), (OURS + OWN, ALONE)]  # fmt: skip
    known = [(a, b) for a, b in pairs if told.get(a) and told.get(b)]
    return [_compare(a, b, told[a], told[b], fraction) for a, b in known]


def _compare(method: str, rival: str, ours: Answers, theirs: Answers, fraction: float) -> Check:
    both = [seed for seed in ours if seed in theirs]
    worst, average = (
        mean_interval([100 * (take(ours[s][0]) - take(theirs[s][0])) for s in both])
        for take in (lambda v: float(worst_fraction(v, fraction, higher_is_better=True)), np.mean)
    )
    few = len(ours[both[0]][0]) * fraction <= 1
    words = "client" if few else f"{100 * fraction:g} %"
    sure = not worst.lower <= 0 <= worst.upper
    return Check(
        f"{method} serves the worst {words} at least as well as {rival}",
        "our aim",
        f"within {len(both)} seeds: worst {words} {with_limits(worst, ' points')}, average "
        f"{with_limits(average, ' points')}",
        worst.estimate >= 0,
        "" if sure else "the seeds do not tell the two apart",
    )
