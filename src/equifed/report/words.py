"""The words at the top of a page: what was measured, never that a model is fair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from equifed.metrics import Interval
from equifed.report.document import Report
from equifed.report.measures import Estimate, choose_format
from equifed.report.methods import ClientRows, Method
from equifed.report.scales import DASH, TIMES, Scale, bytes_text, is_finite, plural

NAMED = 5
"""At most this many clients are named in a sentence."""


def write_headline(report: Report) -> dict[str, Any]:
    """Return the first words of the report."""
    if report.scale is None:
        return {
            "sentences": ["No evaluation was recorded, so nothing is known about the clients."],
            "chance": "",
            "warnings": describe_quarantines(report.methods),
        }
    lead, base = report.lead, report.baseline
    method, rows = report.methods[lead], report.rows[lead]
    sentences = []
    if report.several:
        found = report.estimates[lead]
        sentences.append(describe_cost(method, report.methods[base], found, report.scale))
    who = f"Under {method.name}, " if report.several else ""
    sentences.append(who + describe_worst(method, rows, report.scale))
    return {
        "sentences": sentences,
        "chance": describe_chance(method, rows),
        "warnings": [*describe_quarantines(report.methods), *report.problems],
    }


def write_subtitle(report: Report) -> str:
    """Say in one line what was run."""
    method = report.methods[0]
    seeds = max(len(m.runs) for m in report.methods)
    rounds = max(len(run.history.rounds) for m in report.methods for run in m.runs)
    names = ", ".join(m.name for m in report.methods)
    counts = [plural(len(method.clients), "client"), plural(rounds, "round"), plural(seeds, "seed")]
    return " · ".join([names, *counts])


def list_cards(report: Report) -> list[dict[str, str]]:
    """Return the few numbers at the top, of the headline's method."""
    if report.scale is None:
        return []
    scale, found, rows = report.scale, report.estimates[report.lead], report.rows[report.lead]
    method, worst = report.methods[report.lead], rows.worst_position(report.scale)
    if worst is None or "worst" not in found:
        return []
    base = report.methods[report.baseline].name
    shown = []
    for key, label in (("worst", "Worst client"), ("average_by_client", "Average over clients"),
                       ("spread", "Best to worst")):  # fmt: skip
        measure = next(m for m in report.measures if m.key == key)
        estimate = found[key]
        note = _name_worst(method, worst) if key == "worst" else ""
        difference = estimate.difference
        change = "" if difference is None else f"{scale.change(difference.estimate)} against {base}"
        value = choose_format(measure, scale)(estimate.interval.estimate)
        shown.append(make_card(label, value, note, change))
    sent = found["bytes"].interval.estimate
    rounds = plural(int(found["rounds"].interval.estimate), "round")
    return [*shown, make_card("Sent and received", bytes_text(sent), rounds)]


def make_card(label: str, value: str, note: str = "", change: str = "") -> dict[str, str]:
    """Return a number with its name."""
    return {"label": label, "value": value, "note": note, "change": change}


def _name_worst(method: Method, worst: int) -> str:
    """Say whose the worst value is: with several seeds not always the same client's."""
    several = f"worst in each seed, mean of {len(method.runs)}"
    return method.clients[worst] if len(method.runs) == 1 else several


def describe_worst(method: Method, rows: ClientRows, scale: Scale) -> str:
    """Say who is served worst, how badly, and how sure that is."""
    i = rows.worst_position(scale)
    if i is None:
        return f"No client was evaluated under {method.name}."
    value = float(rows.value[i])
    if math.isinf(value):
        return f"{method.clients[i]} is served worst: its {scale.label} is infinite."
    samples = plural(int(rows.sizes[i]), "sample")
    clients = plural(int(np.isfinite(rows.value).sum()), "client")
    seeds = f" in the mean over {plural(len(method.runs), 'seed')}" if len(method.runs) > 1 else ""
    average = scale.text(float(np.nanmean(rows.value)))
    out = (
        f"{method.clients[i]} is served worst{seeds}: {scale.text(value)} {scale.label}"
        f"{_write_interval(rows, i, scale)} on {samples}. The average over {clients} is {average}"
    )
    if seeds:  # the spread of means is narrower than the mean spread, which the table has
        return out + "."
    spread = scale.gap(float(np.nanmax(rows.value) - np.nanmin(rows.value)))
    return f"{out}; from best to worst it is {spread}."


def _write_interval(rows: ClientRows, i: int, scale: Scale) -> str:
    if not math.isfinite(rows.lower[i]):
        return ""
    return f" (95 % interval {scale.span(rows.lower[i], rows.upper[i])})"


def describe_chance(method: Method, rows: ClientRows) -> str:
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


def describe_cost(
    method: Method, baseline: Method, found: dict[str, Estimate], scale: Scale
) -> str:
    """Say what the worst client gained, what the average paid and what was sent."""
    worst, average, spread = (found.get(k) for k in ("worst", "average_by_client", "spread"))
    if worst is None or average is None or spread is None or worst.difference is None:
        return f"{method.name} and {baseline.name} have no seeds in common to compare."
    assert average.difference is not None and spread.difference is not None
    of = f"the worst client's {scale.label}"
    worse, mean = (describe_effect(d, scale) for d in (worst.difference, average.difference))
    sentences = [
        f"Against {baseline.name}, {method.name} {worse.format(of)} and "
        f"{mean.format('the average over clients')}.",
        _describe_gap(spread, scale),
        _describe_bytes(found),
        f"Measured on {plural(len(method.clients), 'client')} {describe_seeds(worst.pairs)}.",
    ]
    return " ".join(filter(None, sentences))


def describe_effect(difference: Interval, scale: Scale) -> str:
    """Say what happened to a level of service, with {} in the place of its name.

    >>> describe_effect(Interval(-0.02, -0.03, -0.01), Scale("accuracy", "test"))
    'lowered {} by 2.0 points (95 % interval −3.0 to −1.0)'
    """
    change = difference.estimate
    if change == 0:
        return "did not change {}"
    verb, shown = ("raised" if change > 0 else "lowered"), scale.gap(abs(change))
    if not is_finite(difference):
        return f"{verb} {{}} by {shown}"
    span = f"95 % interval {scale.signed(difference.lower)} to {scale.signed(difference.upper)}"
    if difference.lower <= 0 <= difference.upper:
        return f"did not measurably change {{}} ({scale.change(change)}, {span})"
    return f"{verb} {{}} by {shown} ({span})"


def _describe_gap(spread: Estimate, scale: Scale) -> str:
    assert spread.difference is not None
    after, change = spread.interval.estimate, spread.difference.estimate
    word = "shrank" if change < 0 else "grew"
    if change == 0:
        return f"The gap from best to worst client stayed at {scale.gap(after)}."
    span = f"from {scale.number(after - change)} to {scale.gap(after)}"
    return f"The gap from best to worst client {word} {span}."


def _describe_bytes(found: dict[str, Estimate]) -> str:
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


def describe_seeds(count: int) -> str:
    """Say how many seeds there were, and what one seed does not tell.

    >>> describe_seeds(5)
    'over 5 seeds'
    """
    alone = "with one seed, which does not show how much it varies between seeds"
    return alone if count == 1 else f"over {count} seeds"


def collect_certificate_notes(methods: Sequence[Method]) -> list[str]:
    """Return what is proved of the models that methods gave out (first seed), or why nothing is."""
    said = [(method.name, method.runs[0].history.describe_certificate()) for method in methods]
    return [f"{name}: {note}" for name, note in said if note is not None]


def describe_quarantines(methods: Sequence[Method]) -> list[str]:
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


def describe_participant(report: Report, i: int) -> str:
    """Tell a client how the model serves it, beside the average."""
    assert report.scale is not None
    scale, rows = report.scale, report.rows[report.lead]
    value, average = float(rows.value[i]), float(np.nanmean(rows.value))
    if not np.isfinite(value):
        return f"There is no {scale.label} of yours: you have no samples in that split."
    better = (value > average) == scale.higher_is_better
    side = "better" if better else "worse"
    distance = f"{scale.gap(abs(value - average))} {side} than" if value != average else "equal to"
    return (
        f"The model has a {scale.label} of {scale.text(value)} on your "
        f"{plural(int(rows.sizes[i]), 'sample')}{_write_interval(rows, i, scale)}. "
        f"That is {distance} the average over clients, {scale.text(average)}."
    )


def list_participant_cards(report: Report, i: int) -> list[dict[str, str]]:
    """Return the client's own numbers."""
    assert report.scale is not None
    rows, scale = report.rows[report.lead], report.scale
    return [
        make_card(scale.label.capitalize(), scale.text(float(rows.value[i]))),
        make_card("Loss", Scale("loss", "").text(float(rows.loss[i]))),
        make_card("Your samples", f"{int(rows.sizes[i]):,}"),
        make_card("Your weight", f"{rows.weight[i]:.4f}" if np.isfinite(rows.weight[i]) else DASH),
        make_card("Rounds you took part in", f"{100 * rows.participation[i]:.0f} %"),
        make_card("Rounds your answer was refused", f"{int(rows.quarantines[i])}"),
    ]


def describe_frontier(names: Sequence[str], marks: Sequence[bool], seeds: int) -> str:
    """Say which settings of a sweep are not dominated."""
    kept = [name for name, mark in zip(names, marks, strict=True) if mark]
    words = "; ".join(kept[:6]) + ("; …" if len(kept) > 6 else "")
    return (
        f"Of {plural(len(names), 'setting')}, {len(kept)} {'is' if len(kept) == 1 else 'are'} not "
        f"dominated, which means that no other serves both the average and the worst client "
        f"better: {words}. Measured with {plural(seeds, 'seed')}; settings whose points lie within "
        f"chance of each other are not told apart."
    )
