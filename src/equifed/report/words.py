"""The words at the top of a page: what was measured, never that a model is fair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from equifed.report.document import Report
from equifed.report.effects import describe_cost, write_change
from equifed.report.measures import Estimate, choose_format
from equifed.report.methods import ClientRows, Method
from equifed.report.own_parts import read_own
from equifed.report.scales import DASH, Scale, bytes_text, capital, plural
from equifed.training.history import History
from equifed.training.warnings import find_warnings

NAMED = 5
"""At most this many clients are named in a sentence."""


def write_headline(report: Report) -> dict[str, Any]:
    """Return the first words of the report."""
    if report.scale is None:
        return {
            "verdict": "",
            "sentences": ["No evaluation was recorded, so nothing is known about the clients."],
            "chance": "",
            "warnings": [*describe_quarantines(report.methods), *describe_warnings(report.methods)],
        }
    lead, base = report.lead, report.baseline
    method, rows = report.methods[lead], report.rows[lead]
    sentences = []
    if report.several:
        found = report.estimates[lead]
        sentences.append(describe_cost(method, report.methods[base], found, report.scale))
    who = f"Under {method.name}, " if report.several else ""
    sentences.append(who + describe_worst(method, rows, report.scale, report.estimates[lead]))
    told = [*describe_quarantines(report.methods), *describe_warnings(report.methods)]
    verdict = report.verdict.sentence
    return {
        "verdict": f"{who}{lower_first(verdict)}" if who and verdict else verdict,
        "sentences": sentences,
        "chance": describe_chance(method, rows),
        "warnings": [*told, *report.problems],
    }


def lower_first(sentence: str) -> str:
    """Return a sentence as it stands after a comma: its articles begin small, names stay."""
    first = sentence.partition(" ")[0]
    return sentence[:1].lower() + sentence[1:] if first in ("The", "There", "No") else sentence


def find_date(methods: Sequence[Method]) -> str:
    """Return when the last of the runs ended, if that was recorded."""
    times = [str(e["time"]) for m in methods for e in m.events() if e.get("time")]
    return max(times, default="")[:16].replace("T", " ")


def write_subtitle(report: Report) -> str:
    """Say in one line what was run."""
    method = report.methods[0]
    seeds = max(len(m.runs) for m in report.methods)
    rounds = max(len(run.history.rounds) for m in report.methods for run in m.runs)
    names = ", ".join(m.name for m in report.methods)
    counts = [plural(len(method.clients), "client"), plural(rounds, "round"), plural(seeds, "seed")]
    return " · ".join([names, *counts, *write_date(report.methods)])


def write_date(methods: Sequence[Method]) -> list[str]:
    """Say when the last of the runs ended; nothing if that was not recorded."""
    date = find_date(methods)
    return [f"run on {date} UTC"] if date else []


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
    cards = {"worst": "Worst client", "average_by_client": "Average over clients"}
    cards = {"worst": "The client"} if report.single else cards | {"spread": "Best to worst"}
    for key, label in cards.items():
        measure = next(m for m in report.measures if m.key == key)
        estimate = found[key]
        note = _name_worst(method, worst) if key == "worst" else ""
        change = write_change(estimate.difference, base, scale)
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
    alone = len(method.runs) == 1 or len(method.clients) == 1
    return method.clients[worst] if alone else several


def describe_worst(
    method: Method, rows: ClientRows, scale: Scale, found: dict[str, Estimate]
) -> str:
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
    measured = f"{scale.text(value)} {scale.label}{_write_interval(rows, i, scale)} on {samples}"
    if len(method.clients) == 1:
        return f"{method.clients[i]}, the only client, has {measured}{seeds}."
    out = f"{method.clients[i]} is served worst{seeds}: {measured}."
    if "average_by_client" not in found:
        return out
    average = scale.text(found["average_by_client"].interval.estimate)
    out += f" The average over {clients} is {average}"
    if seeds:  # the spread of means is narrower than the mean spread, which the table has
        return out + "."
    return f"{out}; from best to worst it is {scale.gap(found['spread'].interval.estimate)}."


def _write_interval(rows: ClientRows, i: int, scale: Scale) -> str:
    if not math.isfinite(rows.lower[i]):
        return ""
    return f" (95 % interval {scale.span(rows.lower[i], rows.upper[i])})"


def describe_chance(method: Method, rows: ClientRows) -> str:
    """Say how much of the worst client may be chance, and who else may be the worst."""
    worst, n = rows.worst, int((np.isfinite(rows.lower)).sum())
    if worst is None or n == 1:
        return ""
    scale = Scale("accuracy", "")
    others = [i for i in worst.candidates if i != worst.observed]
    ends = scale.number(worst.interval.lower), scale.text(worst.interval.upper)
    seed = " of the first seed" if len(method.runs) > 1 else ""
    first = (
        f"The lowest of {n:,} measured accuracies{seed}, {scale.text(worst.interval.estimate)}, is "
        f"low partly by chance. The lowest true accuracy lies between {ends[0]} and {ends[1]} with "
        "95 % confidence, which allows for that. "
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


def collect_certificate_notes(methods: Sequence[Method]) -> list[str]:
    """Return what is proved of the models that methods gave out (first seed), or why nothing is."""
    said = [(method.name, method.runs[0].history.describe_certificate()) for method in methods]
    return [f"{name}: {note}" for name, note in said if note is not None]


REFUSALS = {
    "quarantine": "answers of {} were refused (rounds in brackets)",
    "guard": "claims or updates of {} were kept in bounds by the guard (rounds in brackets)",
    "watch": "{} stood out beside the others, and nothing was changed (runs in brackets)",
}
"""What events about a client mean, by their kind."""


def describe_quarantines(methods: Sequence[Method]) -> list[str]:
    """Name the clients whose answers were refused or kept in bounds, or who stood out."""
    out = []
    for method in methods:
        found = {what: method.quarantines(kind) for kind, what in REFUSALS.items()}
        found["{} reached the cap of a guard on their weight (runs in brackets)"] = method.capped()
        for what, counts in found.items():
            bad = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0]
            if bad:
                names = ", ".join(f"{method.clients[i]} ({counts[i]})" for i in bad[:NAMED])
                more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
                told = what.format(plural(len(bad), "client"))
                out.append(f"{method.name}: {told}: {names}{more}.")
    return out


def describe_warnings(methods: Sequence[Method]) -> list[str]:
    """Say which methods did not train, as their first run with a warning has it."""
    out = []
    for method in methods:
        told = [list_warnings(run.history) for run in method.runs]
        some = [sentences for sentences in told if sentences]
        if some:
            more = f" ({len(some)} of {len(told)} runs have warnings.)" if len(told) > 1 else ""
            out += [f"{method.name}: {sentence}{more}" for sentence in some[0]]
    return out


def list_warnings(history: History) -> list[str]:
    """Return the warnings of a run: recorded ones, and those that its numbers call for."""
    recorded = [str(e["reason"]) for e in history.events if e["event"] == "warning"]
    return list(dict.fromkeys([*recorded, *find_warnings(history)]))


def describe_participant(report: Report, i: int) -> str:
    """Tell a client how the model serves it, beside the average."""
    assert report.scale is not None
    scale, rows = report.scale, report.rows[report.lead]
    value, found = float(rows.value[i]), report.estimates[report.lead]
    if not np.isfinite(value):
        return f"There is no {scale.label} of yours: you have no samples in that split."
    measured = (
        f"The model has a {scale.label} of {scale.text(value)} on your "
        f"{plural(int(rows.sizes[i]), 'sample')}{_write_interval(rows, i, scale)}."
    )
    if report.single or "average_by_client" not in found:
        return measured
    average = found["average_by_client"].interval.estimate
    better = (value > average) == scale.higher_is_better
    side = "better" if better else "worse"
    same = scale.text(value) == scale.text(average)
    distance = "equal to" if same else f"{scale.gap(abs(value - average))} {side} than"
    return f"{measured} That is {distance} the average over clients, {scale.text(average)}."


def list_participant_cards(report: Report, i: int) -> list[dict[str, str]]:
    """Return the client's own numbers."""
    assert report.scale is not None
    rows, scale = report.rows[report.lead], report.scale
    return [
        make_card(capital(scale.label), scale.text(float(rows.value[i]))),
        *_list_more_cards(report, i),
        make_card("Loss", Scale("loss", "").text(float(rows.loss[i]))),
        *_list_own_cards(report),
        make_card("Your samples", f"{int(rows.sizes[i]):,}"),
        make_card("Your weight", f"{rows.weight[i]:.4f}" if np.isfinite(rows.weight[i]) else DASH),
        make_card("Rounds you took part in", f"{100 * rows.participation[i]:.0f} %"),
        make_card("Rounds your answer was refused", f"{int(rows.quarantines[i])}"),
    ]


def _list_own_cards(report: Report) -> list[dict[str, str]]:
    """Say what part of the model is the client's own."""
    table = read_own(report.methods[report.lead].runs[0].history)
    if table is None:
        return []
    count, named = plural(table.values.shape[1], "number"), ", ".join(table.parameters)
    return [make_card("Your own part of the model", count, named)]


def _list_more_cards(report: Report, i: int) -> list[dict[str, str]]:
    """Return what else is known about the client: its majority class, its model alone, metrics."""
    names = {"majority": "Your most frequent class", "alone": "Your model alone"}
    names |= {"without_own": "Without your own part"}
    return [
        make_card(names.get(column.key, column.label), column.texts[i], column.limits[i])
        for column in report.columns[report.lead]
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
