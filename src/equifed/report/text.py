"""The sentences of a report: what was measured, never that a model is fair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from equifed.metrics import Interval
from equifed.report.document import Report, find_note, read_own
from equifed.report.methods import (
    DASH,
    TIMES,
    Method,
    Scale,
    bytes_text,
    capital,
    is_finite,
    join_names,
    plural,
)
from equifed.report.numbers import ClientRows, Difference, Measured
from equifed.training.events import find_warnings
from equifed.training.history import History

REFUSALS = {
    "quarantine": "answers of {} were refused (rounds in brackets)",
    "guard": "claims or updates of {} were kept in bounds by the guard (rounds in brackets)",
    "watch": "{} stood out beside the others, and nothing was changed (runs in brackets)",
}
"""What events about a client mean, by their kind."""
GLOSSARY = {
    "Accuracy": "fraction of a client's samples that are answered correctly.",
    "Alone": "what the client would have with a model of its own, trained on its samples only.",
    "AUROC": "how often a positive sample is ranked before a negative one; 0.5 is guessing.",
    "Average over clients": "every client counts once, however many samples it has.",
    "Calibration error": "mean distance between the probability that the model gives its answer "
    "and how often such answers are right.",
    "Chance floor": "what the worst-served fifth of equally served clients would have on average, "
    "only because their samples are few; in the tables, by chance alone.",
    "Interval": "95 of 100 such intervals contain the true value, the others miss it.",
    "Loss": "what training minimises, per sample; lower is better.",
    "Majority class": "accuracy of always answering the client's most frequent class. A model that "
    "is below it serves the client worse than no model.",
    "MSE": "mean squared error of predicted values, in squared units of the target.",
    "Own part": "numbers of the model that every client keeps for itself, beside the shared ones.",
    "Underserved": "served worse than the other clients by more than chance explains.",
    "Weight": "how much a client's loss counts in a round; equal weights are 1 over the number of "
    "clients.",
    "Without own part": "with the shared model and the mean of all own parts, which is what a new "
    "client gets.",
    "Worst-served 20 %": "mean over the fifth of the clients, rounded up, with the worst values.",
}
"""What the words of a report mean."""


# -- the top of a page ----------------------------------------------------------------------------


def write_headline(report: Report) -> dict[str, Any]:
    """Return the first words of the report."""
    told = [*_describe_events(report.methods), *describe_warnings(report.methods)]
    if report.scale is None:
        unknown = "No evaluation was recorded, so nothing is known about the clients."
        return {"verdict": "", "sentences": [unknown], "chance": "", "warnings": told}
    lead = report.lead
    method, rows, found = report.methods[lead], report.rows[lead], report.estimates[lead]
    sentences, who, verdict = [], "", report.verdict.sentence
    if report.several:
        base = report.methods[report.baseline]
        sentences.append(_describe_cost(method, base, found, report.scale))
        who = f"Under {method.name}, "
        # After a comma articles begin small, names stay.
        small = verdict.partition(" ")[0] in ("The", "There", "No")
        verdict = verdict and who + (verdict[:1].lower() + verdict[1:] if small else verdict)
    sentences.append(who + _describe_worst(method, rows, report.scale, found))
    chance, warnings = _describe_chance(method, rows), [*told, *report.problems]
    return {"verdict": verdict, "sentences": sentences, "chance": chance, "warnings": warnings}


def find_date(methods: Sequence[Method]) -> str:
    """Return when the last of the runs ended, if that was recorded."""
    times = [str(e["time"]) for m in methods for e in m.events() if e.get("time")]
    return max(times, default="")[:16].replace("T", " ")


def write_subtitle(report: Report) -> str:
    """Say in one line what was run."""
    methods = report.methods
    counts = {
        "client": len(methods[0].clients),
        "round": max(len(run.history.rounds) for m in methods for run in m.runs),
        "seed": max(len(m.runs) for m in methods),
    }
    told = [plural(count, what) for what, count in counts.items()]
    return " · ".join([", ".join(m.name for m in methods), *told, *write_date(methods)])


def write_date(methods: Sequence[Method]) -> list[str]:
    """Say when the last of the runs ended; nothing if that was not recorded."""
    return [f"run on {date} UTC" for date in [find_date(methods)] if date]


def list_cards(report: Report) -> list[dict[str, str]]:
    """Return the few numbers at the top, of the headline's method."""
    if report.scale is None:
        return []
    scale, found, rows = report.scale, report.estimates[report.lead], report.rows[report.lead]
    method, worst = report.methods[report.lead], rows.worst_position(report.scale)
    if worst is None or "worst" not in found:
        return []
    base, seeds = report.methods[report.baseline].name, len(method.runs)
    alone = seeds == 1 or len(method.clients) == 1  # else not always the same client is worst
    note = method.clients[worst] if alone else f"worst in each seed, mean of {seeds}"
    labels = {"worst": "Worst client", "average_by_client": "Average over clients"}
    labels = {"worst": "The client"} if report.single else labels | {"spread": "Best to worst"}
    shown = [
        _make_card(
            label,
            report.write(key),
            note if key == "worst" else "",
            _write_change(found[key].difference, base, scale),
        )
        for key, label in labels.items()
    ]
    sent, rounds = (found[key].interval.estimate for key in ("bytes", "rounds"))
    return [*shown, _make_card("Sent and received", bytes_text(sent), plural(int(rounds), "round"))]


def _make_card(label: str, value: str, note: str = "", change: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note, "change": change}


def _describe_worst(
    method: Method, rows: ClientRows, scale: Scale, found: dict[str, Measured]
) -> str:
    """Say who is served worst, how badly, and how sure that is."""
    i = rows.worst_position(scale)
    if i is None:
        return f"No client was evaluated under {method.name}."
    who, value, runs = method.clients[i], float(rows.value[i]), len(method.runs)
    if math.isinf(value):
        return f"{who} is served worst: its {scale.label} is infinite."
    samples, interval = plural(int(rows.sizes[i]), "sample"), _write_interval(rows, i, scale)
    measured = f"{scale.text(value)} {scale.label}{interval} on {samples}"
    seeds = f" in the mean over {plural(runs, 'seed')}" if runs > 1 else ""
    if len(method.clients) == 1:
        return f"{who}, the only client, has {measured}{seeds}."
    if "average_by_client" not in found:
        return f"{who} is served worst{seeds}: {measured}."
    average, spread = (found[k].interval.estimate for k in ("average_by_client", "spread"))
    # The spread of means is narrower than the mean spread, which the table has.
    gap = "" if seeds else f"; from best to worst it is {scale.gap(spread)}"
    return (
        f"{who} is served worst{seeds}: {measured}. The average over "
        f"{plural(int(np.isfinite(rows.value).sum()), 'client')} is {scale.text(average)}{gap}."
    )


def _write_interval(rows: ClientRows, i: int, scale: Scale) -> str:
    lower, upper = rows.lower[i], rows.upper[i]
    return f" (95 % interval {scale.span(lower, upper)})" if math.isfinite(lower) else ""


def _describe_chance(method: Method, rows: ClientRows) -> str:
    """Say how much of the worst client may be chance, and who else may be the worst."""
    worst, n = rows.worst, int((np.isfinite(rows.lower)).sum())
    if worst is None or n == 1:
        return ""
    scale, interval = Scale("accuracy", ""), worst.interval
    others = [method.clients[i] for i in worst.candidates if i != worst.observed]
    seed = " of the first seed" if len(method.runs) > 1 else ""
    first = (
        f"The lowest of {n:,} measured accuracies{seed}, {scale.text(interval.estimate)}, is low "
        f"partly by chance. The lowest true accuracy lies between {scale.number(interval.lower)} "
        f"and {scale.text(interval.upper)} with 95 % confidence, which allows for that. "
    )
    who = f"{method.clients[worst.observed]}'s"
    if not others:
        return f"{first}It is {who}: no other client comes into question."
    return (
        f"{first}These samples cannot tell whether it is {who} or that of "
        f"{plural(len(others), 'other client')}: {join_names(others)}."
    )


def collect_certificate_notes(methods: Sequence[Method]) -> list[str]:
    """Return what is proved of the models that methods gave out (first seed), or why nothing is."""
    said = [(method.name, method.history.describe_certificate()) for method in methods]
    return [f"{name}: {note}" for name, note in said if note is not None]


def _describe_events(methods: Sequence[Method]) -> list[str]:
    """Name the clients whose answers were refused or kept in bounds, or who stood out."""
    out = []
    for method in methods:
        found = {what: method.quarantines(kind) for kind, what in REFUSALS.items()}
        found["{} reached the cap of a guard on their weight (runs in brackets)"] = method.capped()
        for what, counts in found.items():
            bad = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0]
            if bad:
                names = join_names([f"{method.clients[i]} ({counts[i]})" for i in bad])
                out.append(f"{method.name}: {what.format(plural(len(bad), 'client'))}: {names}.")
    return out


def describe_warnings(methods: Sequence[Method]) -> list[str]:
    """Say which methods did not train, as their first run with a warning has it."""
    out = []
    for method in methods:
        told = [_list_warnings(run.history) for run in method.runs]
        some = [sentences for sentences in told if sentences]
        more = f" ({len(some)} of {len(told)} runs have warnings.)" if len(told) > 1 else ""
        out += [f"{method.name}: {sentence}{more}" for sentence in (some[0] if some else ())]
    return out


def _list_warnings(history: History) -> list[str]:
    """Return the warnings of a run: recorded ones, and those that its numbers call for."""
    recorded = [str(e["reason"]) for e in history.events if e["event"] == "warning"]
    return list(dict.fromkeys([*recorded, *find_warnings(history)]))


# -- differences between methods ------------------------------------------------------------------


def _describe_cost(
    method: Method, baseline: Method, found: dict[str, Measured], scale: Scale
) -> str:
    """Say what the worst client gained, what the average paid and what was sent."""
    worst, average, spread = (
        found[key].difference if key in found else None
        for key in ("worst", "average_by_client", "spread")
    )
    if worst is None or average is None or spread is None:
        return f"{method.name} and {baseline.name} have no seeds in common to compare."
    n, effect = len(method.clients), describe_effect(worst.interval, scale)
    who = f"Against {baseline.name}, {method.name}"
    if n == 1:
        told = [f"{who} {effect.format(f'the {scale.label} of the only client')}."]
    else:
        mean = describe_effect(average.interval, scale).format("the average over clients")
        worse = effect.format(f"the worst client's {scale.label}")
        told = [f"{who} {worse} and {mean}.", _describe_gap(spread, scale)]
    on = "" if n == 1 else f"on {plural(n, 'client')} "
    one = "with one seed, which does not show how much it varies between seeds"
    seeds = one if worst.pairs == 1 else f"over {worst.pairs} seeds"
    measured = f"Measured {on}{seeds}{describe_evidence(worst, scale)}."
    return " ".join(filter(None, [*told, _describe_bytes(found["bytes"].difference), measured]))


def describe_effect(difference: Interval, scale: Scale) -> str:
    """Say what happened to a level of service, with {} in the place of its name.

    >>> describe_effect(Interval(-0.02, -0.03, -0.01), Scale("accuracy", "test"))
    'lowered {} by 2.0 points (95 % interval 1.0 to 3.0)'
    """
    change = difference.estimate
    if change == 0 and not is_finite(difference):
        return "did not change {}"
    verb, shown = ("raised" if change > 0 else "lowered"), scale.gap(abs(change))
    if not is_finite(difference):
        return f"{verb} {{}} by {shown}"
    span = write_span(difference, scale)
    if difference.lower <= 0 <= difference.upper:
        return f"did not measurably change {{}} ({scale.change(change)}, {span})"
    ends = sorted([abs(difference.lower), abs(difference.upper)])
    return f"{verb} {{}} by {shown} (95 % interval {' to '.join(map(scale.number, ends))})"


def write_span(difference: Interval, scale: Scale) -> str:
    """Write the limits of a difference.

    >>> write_span(Interval(0.0, -0.01, 0.02), Scale("accuracy", "test"))
    '95 % interval −1.0 to +2.0'
    """
    return f"95 % interval {scale.signed(difference.lower)} to {scale.signed(difference.upper)}"


def _write_change(difference: Difference | None, baseline: str, scale: Scale) -> str:
    """Write a difference to the baseline with its interval."""
    if difference is None:
        return ""
    found = difference.interval
    span = f" ({write_span(found, scale)})" if is_finite(found) else ""
    return f"{scale.change(found.estimate)} against {baseline}{span}"


def _describe_gap(spread: Difference, scale: Scale) -> str:
    before, after = scale.gap(spread.before), scale.gap(spread.after)
    word = "shrank" if spread.after < spread.before else "grew"
    moved = "stayed at" if before == after else f"{word} from {scale.number(spread.before)} to"
    return f"The measured gap from best to worst client {moved} {after}."


def _describe_bytes(sent: Difference | None) -> str:
    if sent is None or sent.before <= 0:
        return ""
    if sent.after == sent.before:
        return "It sent as many bytes."
    return f"It sent {sent.after / sent.before:.3g} {TIMES} the bytes."


def describe_evidence(difference: Difference, scale: Scale) -> str:
    """Say what the intervals of a comparison allow for."""
    agreed = " that agree" if difference.pairs > 1 and "seeds" not in difference.about else ""
    if difference.about == "seeds":
        return ""
    if difference.about == "none":
        why = "" if scale.kind.is_fraction else f": single {scale.metric} values are not recorded"
        return f"{agreed}; nothing is known about other samples{why}"
    what = "seeds and test samples" if "seeds" in difference.about else "test samples"
    if difference.paired:
        return f"{agreed}; intervals are for other {what}, paired sample by sample"
    return (
        f"{agreed}; intervals are for other {what}, and too wide rather than too narrow: the runs "
        "did not record which samples they had in common and answered correctly"
    )


def describe_participant(report: Report, i: int) -> str:
    """Tell a client how the model serves it, beside the average."""
    scale, rows = report.shown, report.rows[report.lead]
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
    side = "better" if (value > average) == scale.higher_is_better else "worse"
    same = scale.text(value) == scale.text(average)
    distance = "equal to" if same else f"{scale.gap(abs(value - average))} {side} than"
    return f"{measured} That is {distance} the average over clients, {scale.text(average)}."


def list_participant_cards(report: Report, i: int) -> list[dict[str, str]]:
    """Return the client's own numbers."""
    rows, scale, own = report.rows[report.lead], report.shown, []
    names = {
        "majority": "Your most frequent class", "alone": "Your model alone",
        "without_own": "Without your own part",
    }  # fmt: skip
    more = [
        _make_card(names.get(column.key, column.label), column.texts[i], column.limits[i])
        for column in report.columns[report.lead]
    ]
    table = read_own(report.methods[report.lead].history)
    if table is not None:
        count, named = plural(table.values.shape[1], "number"), ", ".join(table.parameters)
        own = [_make_card("Your own part of the model", count, named)]
    return [
        _make_card(capital(scale.label), scale.text(float(rows.value[i]))),
        *more,
        _make_card("Loss", Scale("loss", "").text(float(rows.loss[i]))),
        *own,
        _make_card("Your samples", f"{int(rows.sizes[i]):,}"),
        _make_card("Your weight", f"{rows.weight[i]:.4f}" if np.isfinite(rows.weight[i]) else DASH),
        _make_card("Rounds you took part in", f"{100 * rows.participation[i]:.0f} %"),
        _make_card("Rounds your answer was refused", f"{int(rows.quarantines[i])}"),
    ]


# -- participants, own parts, sweeps, words --------------------------------------------------------


def describe_own(method: Method, scale: Scale) -> list[str]:
    """Say what the clients of a method keep, and what it is worth beside the shared model alone."""
    history = method.history
    table, note = read_own(history), find_note(history)
    if table is None and not note:
        return []
    known = "own parts" if table is None else table.describe
    how = note.partition(" by ")[2].rpartition(";")[0]
    out = [f"{capital(known)}{f'; {how}' if how else ''}."]
    shared, whole = history.without_own, history.last(scale.metric, scale.split)
    if shared is None or whole is None or shared.metric != scale.metric:
        return out
    both = np.isfinite(shared.values) & np.isfinite(whole.values)
    if both.any():
        pick = np.min if scale.higher_is_better else np.max
        ours, theirs = whole.values[both], shared.values[both]
        gain = scale.kind.sign * (ours - theirs)
        out.append(
            f"With its own part, a client has a {scale.label} of {scale.text(ours.mean())} on "
            f"average, the worst {scale.text(pick(ours))}; with the shared model and the mean "
            f"of the own parts, which is what a new client gets, {scale.text(theirs.mean())} "
            f"and {scale.text(pick(theirs))}. {int((gain > 0).sum())} of "
            f"{plural(int(both.sum()), 'client')} are served better with their own part, "
            f"{int((gain < 0).sum())} worse."
        )
    return out


def describe_undefined(method: Method, scale: Scale) -> list[str]:
    """Say for whom a metric is not defined, and that they are left out of its summaries."""
    out = []
    for kind, record in method.further(scale):
        lost = np.flatnonzero(np.isnan(record.values) & (record.sizes > 0))
        names = [method.clients[i] for i in lost]
        if names:
            why = f" ({kind.undefined})" if kind.undefined else ""
            left = "it is" if len(names) == 1 else "they are"
            out.append(
                f"{capital(kind.label)} is not defined for {join_names(names)}{why}; "
                f"{left} left out of its average and of its worst-served 20 %."
            )
    return out


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


def list_glossary(methods: Sequence[Method], scale: Scale | None) -> list[tuple[str, str]]:
    """Return the words that a page uses, with their meanings."""
    if scale is None:
        return []
    histories = [method.history for method in methods]
    details = [method.details(scale) for method in methods]
    classes = scale.metric == "accuracy"
    used = {
        "Accuracy": classes,
        "Chance floor": classes,
        "Majority class": classes and any(found is not None for found in details),
        "MSE": scale.metric == "mse",
        "Alone": any(history.alone is not None for history in histories),
        "Own part": any(find_note(history) for history in histories),
        "Without own part": any(history.without_own is not None for history in histories),
        "AUROC": any(kind.name == "auroc" for m in methods for kind, _ in m.further(scale)),
        "Calibration error": any(f is not None and f.pool_calibration() for f in details),
    }
    return [(word, text) for word, text in GLOSSARY.items() if used.get(word, True)]
