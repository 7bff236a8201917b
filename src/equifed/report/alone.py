"""Who would be better off alone: own models beside the shared one, on the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.metrics import assume_independent, correct_counts, newcombe_interval
from equifed.metrics.chance import LEVEL
from equifed.report.scales import Scale, plural
from equifed.training.history import History

NAMED = 5
"""At most this many clients are named in a sentence."""


def name_clients(names: tuple[str, ...], all_names: tuple[str, ...]) -> str:
    """List a few names, and count the others.

    >>> name_clients(("a", "b"), ("a", "b", "c"))
    'a and b'
    """
    if len(names) > NAMED:
        return f"{len(names)} of {len(all_names)} clients"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


@dataclass(frozen=True, eq=False)
class AloneTable:
    """What clients would have alone, beside the shared model: ``some`` are those compared.

    ``gains`` has, for every client, own model minus shared one and 95 % limits; NaN if unknown.
    ``sure`` are clients that are better off alone beyond chance, all clients considered (Holm).
    """

    values: Losses
    gains: Losses
    some: Any
    sure: tuple[int, ...]
    paired: bool
    event: Mapping[str, Any]


def tabulate_alone(history: History, scale: Scale) -> AloneTable | None:
    """Return what is known of the clients' own models; None: nothing of this metric."""
    alone, shared = history.alone, history.last(scale.metric, scale.split)
    if alone is None or shared is None:
        return None
    if (alone.metric, alone.split) != (scale.metric, scale.split):
        return None
    told_of = (e for e in reversed(history.events) if e["event"] == "alone")
    event: dict[str, Any] = next(told_of, {})
    change = alone.values - shared.values
    compared = np.array([name not in event.get("one_class", ()) for name in history.names])
    some = np.flatnonzero(np.isfinite(change) & compared)
    gains = np.stack([change, *np.full((2, len(change)), np.nan)], axis=1)
    told = event.get("gains", {})
    chances = np.ones(len(change))
    for i in some:
        if history.names[i] in told:
            *gains[i], chances[i] = told[history.names[i]]
    paired = bool(told)
    if not paired and scale.kind.is_fraction:
        gains[some], chances[some] = _assume_pairs(alone.values, shared, some, gains[some])
    return AloneTable(alone.values, gains, some, _correct(chances, some), paired, event)


def _assume_pairs(alone: Losses, shared: Any, some: Any, gains: Losses) -> tuple[Losses, Losses]:
    """Compare accuracies whose single answers are not known, as if they were independent."""
    from scipy.special import ndtr

    try:
        own, common = (correct_counts(v[some], shared.sizes[some]) for v in (alone, shared.values))
    except ValueError:  # accuracies that are no counts
        return gains, np.ones(len(some))
    if not len(some):
        return gains, np.ones(0)
    joint = assume_independent(own, common, shared.sizes[some])
    found = np.stack(newcombe_interval(joint), axis=1)
    below = np.maximum(found[:, 0] - found[:, 1], 1e-12)  # 1.96 standard errors
    return found, np.where(found[:, 0] > 0, ndtr(-1.96 * found[:, 0] / below), 1.0)


def _correct(chances: Losses, some: Any) -> tuple[int, ...]:
    """Return the clients whose tests hold together at the verdict's level: Holm's steps."""
    out: list[int] = []
    for rank, i in enumerate(sorted(some, key=lambda i: chances[i])):
        if chances[i] * (len(some) - rank) > LEVEL:
            break
        out.append(int(i))
    return tuple(sorted(out))


def compare_alone(history: History, scale: Scale) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Say who would be better off alone: a clause, the numbers, and the clients."""
    found = tabulate_alone(history, scale)
    if found is None or not len(found.some):
        return "", (), ()
    sign, n = scale.kind.sign, len(found.some)
    better = sorted((i for i in found.some if sign * found.gains[i, 0] > 0),
                    key=lambda i: -sign * found.gains[i, 0])  # fmt: skip
    names = tuple(history.names[i] for i in found.sure)
    if names:
        sizes = [abs(float(found.gains[i, 0])) for i in found.sure]
        ends = scale.gap(min(sizes)), scale.gap(max(sizes))
        much = ends[0] if ends[0] == ends[1] else f"{scale.number(min(sizes))} to {ends[1]}"
        who = name_clients(names, history.names)
        by = f"by {much}" if scale.kind.is_fraction else (
            f"the {scale.kind.label} {'higher' if scale.higher_is_better else 'lower'} by {much}"
        )  # fmt: skip
        clause = f"{who} would be better off alone, {by}"
    elif better:
        clause = "no client would clearly be better off alone"
    else:
        clause = "no client would be better off alone"
    return clause, tuple(_describe_alone(found, better, history, scale, n)), names


def _describe_alone(
    found: AloneTable, better: list[Any], history: History, scale: Scale, n: int
) -> Iterator[str]:
    """Say how many would have more alone, how much more, and who is not compared."""
    if better:
        told = [f"{history.names[i]} {describe_gain(found, int(i), scale)}" for i in better]
        more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
        few = f"{len(better)} of {plural(n, 'client')}"
        have = "has" if len(better) == 1 else "have"
        own = "a model of its own" if len(better) == 1 else "models of their own"
        limits = "" if not np.isfinite(found.gains[better, 1]).any() else (
            " (95 % intervals, "
            + ("sample by sample" if found.paired else "as if their samples were others") + ")"
        )  # fmt: skip
        yield (
            f"{few} {have} a better {scale.label} with {own}{limits}: "
            f"{', '.join(told[:NAMED])}{more}. Beyond chance, all clients considered, this is so "
            f"for {len(found.sure) or 'none'}{' of them' * bool(found.sure)}."
        )
    apart = tuple(found.event.get("one_class", ()))
    if apart:
        have = "has" if len(apart) == 1 else "have"
        yield (
            f"{name_clients(apart, history.names)} {have} training samples of one class: alone "
            "is shown with that class, and not compared."
        )
    if found.event.get("reason"):
        yield f"Alone: {found.event['reason']}."


def describe_gain(found: AloneTable, i: int, scale: Scale) -> str:
    """Write what a client gains by its own model, with its limits.

    >>> values = np.array([[0.03, -0.01, 0.07]])
    >>> table = AloneTable(values[:, 0], values, np.array([0]), (), True, {})
    >>> describe_gain(table, 0, Scale("accuracy", "test"))
    '+3.0 points (−1.0 to +7.0)'
    """
    change, lower, upper = map(float, found.gains[i])
    text = scale.change(change)
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return text
    return f"{text} ({scale.signed(lower)} to {scale.signed(upper)})"
