"""Events that training makes: who stood out in a round, and warnings at the end of a run.

A report asks for the warnings again, so that older runs are checked as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from equifed.contract import Clients, Info, Losses, Vector
from equifed.contract.algorithm import layers
from equifed.metrics.metric import DIRECTED, METRICS, Metric, find_metric
from equifed.training.final_model import LONG, Kept
from equifed.training.history import History, MetricRecord

ROUNDING = 1e-7  # relative difference of two losses that says nothing: single precision has no more
# A run whose certified gap is this fraction of its objective has nothing left to descend
CERTIFIED = 0.01
MOST_SCALES = 100.0  # largest ratio of two features' standard deviations that is not remarked upon
ROUNDS = 5  # rounds in a row after which somebody leads for long

PRIVACY = "privacy"  # kind of the event at a private run's end; its ``ledgers`` hold what was spent

LEADS = f"has had more than half of the weight for {ROUNDS} rounds: it dominates the weights"

Pair = tuple[Losses, Losses]  # the clients' losses before training and at the end


def find_ledgers(algorithm: Any, state: Any, clients: Clients) -> list[dict[str, Any]]:
    """Return what was spent of privacy, by clients or by a layer of the algorithm; else nothing."""
    for layer in layers(algorithm):
        if hasattr(layer, "account"):
            return list(layer.account(state, clients))
        state = getattr(state, "inner", state)
    return clients.account()


def tell_privacy(ledgers: Sequence[Mapping[str, Any]]) -> str:
    """Say which budget is to be published: the largest of all ledgers.

    >>> tell_privacy([{"epsilon": 3.0, "delta": 1e-5, "unit": "record"}])
    'publish epsilon 3 at delta 1e-05 for every record; equifed privacy RUN lists what was spent'
    """
    worst = max(ledgers, key=lambda told: (told["epsilon"], told["delta"]))
    budget = f"epsilon {worst['epsilon']:g} at delta {worst['delta']:g}"
    whose = f"for every {worst['unit']}"
    return f"publish {budget} {whose}; equifed privacy RUN lists what was spent"


def tell_touches(
    kept: Kept, history: History, r: int, info: Info, tell: Callable[..., None]
) -> Kept:
    """Tell what a guard did or saw, and who of at least three has led for long."""
    for i, kind, reason in info.touches:
        name = history.names[i]
        seen = (event["client"] for event in history.list_events("watch"))
        if kind != "watch" or name not in seen:
            tell(kind, r, reason, client=name)
    sizes = np.abs(info.weights)
    first = int(sizes.argmax())
    if len(sizes) < 3 or not sizes[first] > 0.5 * sizes.sum():
        return replace(kept, leader=-1, leads=0)
    leads = kept.leads + 1 if kept.leader == first else 1
    if leads == ROUNDS:
        tell("watch", r, LEADS, client=history.names[first])
    return replace(kept, leader=first, leads=leads)


def tell_start(given: Any, algorithm: Any, clients: Clients, means: bool) -> list[tuple[str, str]]:
    """Return kind and reason of the events that say what runs: engine, own parts, wrappers.

    ``means`` tells that a mean of the models of sampled rounds may be returned.
    """
    told = [
        ("note", clients.choice), ("note", clients.describe_own()),
        ("warning", clients.warn_of_own()), ("note", describe_wrapper(given, algorithm)),
        ("note", describe_sampling(algorithm, clients, means)),
    ]  # fmt: skip
    return [(kind, reason) for kind, reason in told if reason]


def describe_scale(scale: float) -> str:
    """Say what strengths of the objective are multiples of."""
    return (
        f"Strengths are multiples of {scale:.6g}, the clients' mean loss under a model without "
        "features; scale = 1.0 in the objective makes them numbers in the loss's own unit."
    )


def describe_wrapper(given: Any, ran: Any) -> str | None:
    """Say what a default has put around an algorithm, and why: its docstring's first line."""
    known = {type(part) for part in layers(given)}
    added = [type(part) for part in layers(ran) if type(part) not in known]
    if not added:
        return None
    why = (f"{cls.__name__}: {(cls.__doc__ or '').strip().partition(chr(10))[0]}" for cls in added)
    return f"Added to {type(layers(given)[-1]).__name__} by default: {' '.join(why)}"


def count_asked(algorithm: Any, n: int) -> int:
    """Return how many of n clients a round asks; n where those not asked are remembered."""
    parts = layers(algorithm)
    if any(getattr(part, "remembers", False) for part in parts):
        return n
    drawn = getattr(parts[-1], "clients_per_round", None)
    return min(drawn or n, math.ceil(getattr(parts[-1], "participation", 1.0) * n))


def describe_sampling(algorithm: Any, clients: Clients, means: bool) -> str | None:
    """Say what sampling leaves in the model, and what helps."""
    n, core = len(clients.names), layers(algorithm)[-1]
    asked = count_asked(algorithm, n)
    if asked == n:
        return None
    told = f"Each round asks {asked} of {n} clients, so the model keeps changing with the sample. "
    told += (
        f"After {LONG} rounds a mean of the last models is returned instead of the last one."
        if means
        else "give_out='average' returns a mean of the last models instead of the last one."
    )
    may = clients.can_remember() and not clients.hides_sums
    if not may or not getattr(core, "one_sum", False) or getattr(core, "clients_per_round", None):
        return told
    name = type(core).__name__
    return f"{told} Remembering({name}(...)) avoids this noise at no cost for the clients."


def show_algorithm(algorithm: Any) -> str:
    """Return an algorithm with its settings, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(algorithm))


def describe_directions(asked: Sequence[Metric]) -> list[str]:
    """Say which metrics of one's own were taken for losses because their names do not tell."""
    return [
        f"{metric.name}: its name does not show which direction is better (as _score, _error and "
        "_loss do); it is taken for a loss, lower is better"
        for metric in asked
        if metric.name not in METRICS and not metric.name.endswith(DIRECTED)
    ]


def describe_samples(
    clients: Clients, history: History, asked: Sequence[Metric], x: Vector
) -> None:
    """Add what samples say about the final model, with and without own parts."""
    shown = history.main_metric()
    if shown is None:
        return
    metric, split = shown
    known = {**METRICS, **{metric.name: metric for metric in asked}}
    names = dict.fromkeys(r.metric for r in history.metrics if r.split == split)
    history.details = clients.describe(x, split, [known[name] for name in names if name in known])
    shared = () if history.own is None else clients.evaluate_shared(x, (split,))
    for found in shared:
        if metric in found.metrics:
            told = (history.rounds[-1].round, split, metric, found.metrics[metric], found.sizes)
            history.without_own = MetricRecord(*told)


def find_warnings(
    history: History, scales: Losses | None = None, measure: Callable[[], Pair] | None = None
) -> list[str]:
    """Return what is wrong with a run; ``scales`` are those of its features, where known.

    ``measure`` gives training losses before and after, for a run that recorded nothing like it.
    """
    found = check_descent(history, measure), check_against_start(history), check_scales(scales)
    return [sentence for sentence in found if sentence is not None]


def check_descent(history: History, measure: Callable[[], Pair] | None = None) -> str | None:
    """Tell whether the objective, or else the average training loss, is not below its start."""
    found = _compare_means(history, "loss", "train")
    known = [
        (r.objective, r.clients, r.numbers.get("gap", math.inf))
        for r in history.rounds
        if r.objective is not None
    ]
    if known and math.isfinite(known[-1][0]) and known[-1][2] <= CERTIFIED * abs(known[-1][0]):
        return None  # it is as good as the smallest there is
    if len(known) > 1 and known[0][1] == known[-1][1]:
        found = "the objective", known[0][0], known[-1][0]
    if found is None and measure is not None:
        start, end = measure()
        if _fell(float(start.max()), float(end.max())):
            return None  # lower at the worst client is training, too
        found = "the average train loss", float(start.mean()), float(end.mean())
    if found is None or not math.isfinite(found[1]) or _fell(*found[1:]):
        return None
    what, before, after = found
    cure = "it did not move: use larger step sizes, unless it began at the optimum"
    if not after <= before + ROUNDING * abs(before):
        cure = "use smaller step sizes"
    if history.list_events(PRIVACY):
        cure = "the noise may hide what is learned: more rows, fewer columns or a larger epsilon"
    return f"training did not lower {what}: from {before:.4g} to {after:.4g}; {cure}."


def _fell(before: float, after: float) -> bool:
    return after < before - ROUNDING * abs(before)


def check_against_start(history: History) -> str | None:
    """Tell whether the clients are served worse, on average, than before training."""
    chosen = history.main_metric()
    found = None if chosen is None else _compare_means(history, *chosen)
    if chosen is None or found is None:
        return None
    metric, (what, start, end) = find_metric(chosen[0]), found
    if not _fell(metric.sign * start, metric.sign * end):
        return None
    side = "below" if metric.higher_is_better else "above"
    return (
        f"{what} is {metric.write(end)}, {side} the {metric.write(start)} of the model before "
        "training."
    )


def check_scales(scales: Losses | None) -> str | None:
    """Tell whether the features have scales that no one step size suits."""
    if scales is None or np.isnan(scales).all():
        return None
    low, high = int(np.nanargmin(scales)), int(np.nanargmax(scales))
    ratio = scales[high] / scales[low]
    if not ratio > MOST_SCALES:
        return None
    return (
        f"the scales of the features differ by a factor of {ratio:,.0f}: the standard deviation of "
        f"feature {high} is {scales[high]:.3g}, that of feature {low} {scales[low]:.3g}; "
        "standardise them (equifed.data.standardise)."
    )


def check_finite(parameters: Mapping[str, Vector]) -> str | None:
    """Tell which parameters are infinite or not a number somewhere."""
    bad = [name for name, value in parameters.items() if not bool(value.isfinite().all())]
    if not bad:
        return None
    return f"the model is not finite ({', '.join(bad)}): it diverged; use smaller step sizes."


def _compare_means(history: History, metric: str, split: str) -> tuple[str, float, float] | None:
    """Return a metric's average before and after training, over those measured both times."""
    rounds, values = history.series(metric, split)
    if len(rounds) < 2 or rounds[0] != 0:
        return None
    both = ~np.isnan(values[0]) & ~np.isnan(values[-1])
    if not both.any():
        return None
    start, end = (float(row[both].mean()) for row in (values[0], values[-1]))
    return f"the average {split} {metric}", start, end
