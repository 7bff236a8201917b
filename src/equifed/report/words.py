"""The sentences of a report: what was measured, never that a model is fair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equifed.metrics import Interval
from equifed.report.clients import ClientRows
from equifed.report.measures import Estimate
from equifed.report.methods import Method
from equifed.report.scales import TIMES, Scale, finite, plural

NAMED = 5
"""At most this many clients are named in a sentence."""


def worst_sentence(method: Method, rows: ClientRows, scale: Scale) -> str:
    """Say who is served worst, how badly, and how sure that is."""
    i = rows.worst_position(scale)
    if i is None:
        return f"No client was evaluated under {method.name}."
    value = float(rows.value[i])
    if math.isinf(value):
        return f"{method.clients[i]} is served worst: its {scale.label} is infinite."
    limits = ""
    if math.isfinite(rows.lower[i]):
        limits = f" (95 % interval {scale.span(rows.lower[i], rows.upper[i])})"
    samples = plural(int(rows.sizes[i]), "sample")
    clients = plural(int(np.isfinite(rows.value).sum()), "client")
    seeds = f" in the mean over {plural(len(method.runs), 'seed')}" if len(method.runs) > 1 else ""
    average = scale.text(float(np.nanmean(rows.value)))
    out = (
        f"{method.clients[i]} is served worst{seeds}: {scale.text(value)} {scale.label}{limits} on "
        f"{samples}. The average over {clients} is {average}"
    )
    if seeds:  # the spread of means is narrower than the mean spread, which the table has
        return out + "."
    spread = scale.gap(float(np.nanmax(rows.value) - np.nanmin(rows.value)))
    return f"{out}; from best to worst it is {spread}."


def chance_note(method: Method, rows: ClientRows) -> str:
    """Say how much of the worst client may be chance, and who else may be the worst."""
    worst = rows.worst
    if worst is None:
        return ""
    scale = Scale("accuracy", "")
    n, others = len(method.clients), [i for i in worst.candidates if i != worst.observed]
    ends = scale.number(worst.interval.lower), scale.text(worst.interval.upper)
    first = (
        f"The lowest of {n:,} measured accuracies is low partly by chance. "
        f"The lowest true accuracy lies between {ends[0]} and {ends[1]} with 95 % confidence, "
        f"which allows for that{' (first seed)' if len(method.runs) > 1 else ''}. "
    )
    if not others:
        return (
            first
            + f"It is {method.clients[worst.observed]}'s: no other client comes into question."
        )
    names = ", ".join(method.clients[i] for i in others[:NAMED])
    more = f" and {len(others) - NAMED:,} more" if len(others) > NAMED else ""
    return first + (
        f"These samples cannot tell whether it is {method.clients[worst.observed]}'s or that of "
        f"{plural(len(others), 'other client')}: {names}{more}."
    )


def cost_sentence(
    method: Method, baseline: Method, found: dict[str, Estimate], scale: Scale
) -> str:
    """Say what the worst client gained, what the average paid and what was sent."""
    worst, average, spread = (found.get(k) for k in ("worst", "average_by_client", "spread"))
    if worst is None or average is None or spread is None or worst.difference is None:
        return f"{method.name} and {baseline.name} have no seeds in common to compare."
    assert average.difference is not None and spread.difference is not None
    of = f"the worst client's {scale.label}"
    worse, mean = effect(worst.difference, scale), effect(average.difference, scale)
    sentences = [
        f"Against {baseline.name}, {method.name} {worse.format(of)} and "
        f"{mean.format('the average over clients')}.",
        _gap_sentence(spread, scale),
        _bytes_sentence(found),
        f"Measured on {plural(len(method.clients), 'client')} {seeds_words(worst.pairs)}.",
    ]
    return " ".join(filter(None, sentences))


def effect(difference: Interval, scale: Scale) -> str:
    """Say what happened to a level of service, with {} in the place of its name.

    >>> effect(Interval(-0.02, -0.03, -0.01), Scale("accuracy", "test"))
    'lowered {} by 2.0 points (95 % interval −3.0 to −1.0)'
    """
    change = difference.estimate
    if change == 0:
        return "did not change {}"
    verb, shown = ("raised" if change > 0 else "lowered"), scale.gap(abs(change))
    if not finite(difference):
        return f"{verb} {{}} by {shown}"
    span = f"95 % interval {scale.signed(difference.lower)} to {scale.signed(difference.upper)}"
    if difference.lower <= 0 <= difference.upper:
        return f"did not measurably change {{}} ({scale.change(change)}, {span})"
    return f"{verb} {{}} by {shown} ({span})"


def _gap_sentence(spread: Estimate, scale: Scale) -> str:
    assert spread.difference is not None
    after, change = spread.interval.estimate, spread.difference.estimate
    word = "shrank" if change < 0 else "grew"
    if change == 0:
        return f"The gap from best to worst client stayed at {scale.gap(after)}."
    span = f"from {scale.number(after - change)} to {scale.gap(after)}"
    return f"The gap from best to worst client {word} {span}."


def _bytes_sentence(found: dict[str, Estimate]) -> str:
    sent = found["bytes"]
    if sent.difference is None:
        return ""
    ours = sent.interval.estimate
    theirs = ours - sent.difference.estimate
    if theirs <= 0:
        return ""
    if ours == theirs:
        return "It sent as many bytes."
    return f"It sent {ours / theirs:.3g} {TIMES} the bytes."


def seeds_words(count: int) -> str:
    """Say how many seeds there were, and what one seed does not tell.

    >>> seeds_words(5)
    'over 5 seeds'
    """
    alone = "with one seed, which does not show how much it varies between seeds"
    return alone if count == 1 else f"over {count} seeds"


def certificate_notes(methods: Sequence[Method]) -> list[str]:
    """Return why methods have no certificate, where their runs say so."""
    found = []
    for method in methods:
        notes = [e.get("reason", "") for e in method.events() if e["event"] == "note"]
        said = [note for note in notes if note.startswith("no certificate")]
        if said:
            found.append(f"{method.name}: {said[0]}")
    return found


def quarantine_sentences(methods: Sequence[Method]) -> list[str]:
    """Name the clients whose answers were refused."""
    out = []
    for method in methods:
        counts = method.quarantines()
        bad = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0]
        if bad:
            names = ", ".join(f"{method.clients[i]} ({counts[i]})" for i in bad[:NAMED])
            more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
            out.append(
                f"{method.name}: answers of {plural(len(bad), 'client')} were refused "
                f"(rounds in brackets): {names}{more}."
            )
    return out
