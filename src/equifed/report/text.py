"""The sentences of a report: what was measured, never that a model is fair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from equifed.metrics import Interval
from equifed.report.document import Report, Told, describe_own_part, find_note
from equifed.report.methods import (
    TIMES,
    Method,
    Scale,
    capital,
    is_finite,
    join_names,
    plural,
)
from equifed.report.numbers import Difference
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
    "Alone": "the client's result with its own model, trained on its own samples only.",
    "AUROC": "how often a positive sample is ranked before a negative one; 0.5 is guessing.",
    "Calibration error": "mean distance between the probability that the model gives its answer "
    "and how often such answers are right.",
    "Chance floor": "average of the worst-served fifth if all clients were served equally well, "
    "low only because they have few samples; in the tables: by chance alone.",
    "Gini coefficient": "how unequal the clients' values are; 0 is equality.",
    "Interval": "95 of 100 such intervals contain the true value.",
    "Loss": "what training minimises, per sample; lower is better.",
    "Majority class": "accuracy of always answering the client's most frequent class.",
    "MSE": "mean squared error of predicted values, in squared units of the target.",
    "Own part": "parameters that every client keeps for itself, beside the shared ones.",
    "Underserved": "served worse than the other clients by more than chance explains.",
    "Weight": "how much a client's loss counts in a round; equal weights are 1 / clients.",
    "Without own part": "the shared model with the mean of all own parts, as a new client gets it.",
    "Worst-served 20 %": "mean over the fifth of the clients, rounded up, with the worst values.",
}
"""What the words of a report mean."""
ALWAYS = ("Interval", "Loss", "Underserved", "Weight")
"""Words that every page uses."""


# -- the top of a page ----------------------------------------------------------------------------


def write_headline(report: Report) -> dict[str, Any]:
    """Return the first words of the report."""
    warnings = [*_describe_events(report.methods), *describe_warnings(report.methods)]
    if report.scale is None:
        unknown = "No evaluation was recorded, so nothing is known about the clients."
        return {"verdict": "", "sentences": [unknown], "chance": "", "warnings": warnings}
    told, verdict, sentences, who = report.told[report.lead], report.verdict.sentence, [], ""
    if report.several:
        sentences.append(_describe_cost(told, report.methods[report.baseline]))
        who = f"Under {told.method.name}, "
        # After a comma articles begin small, names stay.
        small = verdict.partition(" ")[0] in ("The", "There", "No")
        verdict = verdict and who + (verdict[:1].lower() + verdict[1:] if small else verdict)
    sentences.append(who + _describe_worst(told))
    warnings += report.problems
    chance = _describe_chance(told)
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
        "round": max(len(run.rounds) for m in methods for run in m.runs),
        "seed": max(len(m.runs) for m in methods),
    }
    told = [plural(count, what) for what, count in counts.items()]
    return " · ".join([", ".join(m.name for m in methods), *told, *write_date(methods)])


def write_date(methods: Sequence[Method]) -> list[str]:
    """Say when the last of the runs ended; nothing if that was not recorded."""
    return [f"run on {date} UTC" for date in [find_date(methods)] if date]


def _describe_worst(told: Told) -> str:
    """Say who is served worst, how badly, and how sure that is."""
    i, scale, method, runs = told.worst, told.scale, told.method, len(told.method.runs)
    if i is None:
        return f"No client was evaluated under {method.name}."
    who, value = method.clients[i], float(told.value[i])
    if math.isinf(value):
        return f"{who} is served worst: its {scale.label} is infinite."
    measured = f"{scale.text(value)} {scale.label}{_write_interval(told, i)}"
    measured += f" on {plural(int(told.sizes[i]), 'sample')}"
    seeds = f" in the mean over {plural(runs, 'seed')}" if runs > 1 else ""
    if len(method.clients) == 1:
        return f"{who}, the only client, has {measured}{seeds}."
    if "average_by_client" not in told.estimates:
        return f"{who} is served worst{seeds}: {measured}."
    # The spread of means is narrower than the mean spread, which the table has.
    gap = "" if seeds else f"; best and worst are {scale.gap(told.level('spread'))} apart"
    count = plural(int(np.isfinite(told.value).sum()), "client")
    average = scale.text(told.level("average_by_client"))
    return f"{who} is served worst{seeds}: {measured}. The average over {count} is {average}{gap}."


def _write_interval(told: Told, i: int) -> str:
    lower, upper = told.lower[i], told.upper[i]
    return f" (95 % interval {told.scale.span(lower, upper)})" if math.isfinite(lower) else ""


def _describe_chance(told: Told) -> str:
    """Say how much of the worst client may be chance, and who else may be the worst."""
    worst, clients = told.lowest, told.method.clients
    if worst is None or np.isfinite(told.lower).sum() == 1:
        return ""
    scale, interval = told.scale, worst.interval
    others = [clients[i] for i in worst.candidates if i != worst.observed]
    seed = " of the first seed" if len(told.method.runs) > 1 else ""
    first = (
        f"The lowest measured accuracy{seed}, {scale.text(interval.estimate)}, is low partly by "
        f"chance. The lowest true accuracy is between {scale.number(interval.lower)} and "
        f"{scale.text(interval.upper)} (95 % confidence)"
    )
    if not others:
        return f"{first}, and {clients[worst.observed]} has it."
    count = plural(len(others), "other client")
    return f"{first}. {clients[worst.observed]} or {count} may have it: {join_names(others)}."


def _describe_events(methods: Sequence[Method]) -> list[str]:
    """Name the clients whose answers were refused or kept in bounds, or who stood out."""
    out = []
    for method in methods:
        for kind, what in REFUSALS.items():
            counts = method.count_events(kind)
            bad = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0]
            if bad:
                names = join_names([f"{method.clients[i]} ({counts[i]})" for i in bad])
                out.append(f"{method.name}: {what.format(plural(len(bad), 'client'))}: {names}.")
    return out


def describe_warnings(methods: Sequence[Method]) -> list[str]:
    """Say which methods did not train, as their first run with a warning has it."""
    out = []
    for method in methods:
        told = [_list_warnings(run) for run in method.runs]
        some = [sentences for sentences in told if sentences]
        more = f" ({len(some)} of {len(told)} runs have warnings.)" if len(told) > 1 else ""
        out += [f"{method.name}: {sentence}{more}" for sentence in (some[0] if some else ())]
    return out


def _list_warnings(history: History) -> list[str]:
    """Return the warnings of a run: recorded ones, and those that its numbers call for."""
    recorded = [str(e["reason"]) for e in history.events if e["event"] == "warning"]
    return list(dict.fromkeys([*recorded, *find_warnings(history)]))


# -- differences between methods ------------------------------------------------------------------


def _describe_cost(told: Told, baseline: Method) -> str:
    """Say what the worst client gained, what the average paid and what was sent."""
    scale, n, name = told.scale, len(told.method.clients), told.method.name
    keys = ("worst", "average_by_client")
    found = [told.estimates[key].difference if key in told.estimates else None for key in keys]
    worst, average = found
    if worst is None or average is None:
        return f"{name} and {baseline.name} have no seeds in common to compare."
    who, effect = f"Against {baseline.name}, {name}", describe_effect(worst.interval, scale)
    if n == 1:
        said = [f"{who} {effect.format(f'the {scale.label} of the only client')}."]
    else:
        mean = describe_effect(average.interval, scale).format("the average over clients")
        worse = effect.format(f"the worst client's {scale.label}")
        said = [f"{who} {worse} and {mean}."]
    sent = told.estimates["bytes"].difference
    if sent is not None and sent.before > 0:
        said.append(f"It sent {sent.after / sent.before:.3g} {TIMES} the bytes.")
    on = "" if n == 1 else f"on {plural(n, 'client')} "
    one = "with one seed, which does not show how much it varies between seeds"
    seeds = one if worst.pairs == 1 else f"over {worst.pairs} seeds"
    return " ".join([*said, f"Measured {on}{seeds}{describe_evidence(worst, scale)}."])


def describe_effect(difference: Interval, scale: Scale) -> str:
    """Say what happened to a level of service, with {} in the place of its name."""
    change = difference.estimate
    if change == 0 and not is_finite(difference):
        return "did not change {}"
    verb, shown = ("raised" if change > 0 else "lowered"), scale.gap(abs(change))
    if not is_finite(difference):
        return f"{verb} {{}} by {shown}"
    if difference.lower <= 0 <= difference.upper:
        span = f"{scale.signed(difference.lower)} to {scale.signed(difference.upper)}"
        return f"did not measurably change {{}} ({scale.change(change)}, 95 % interval {span})"
    ends = sorted([abs(difference.lower), abs(difference.upper)])
    return f"{verb} {{}} by {shown} (95 % interval {' to '.join(map(scale.number, ends))})"


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


# -- participants, own parts, sweeps, words -------------------------------------------------------


def describe_participant(told: Told, i: int) -> str:
    """Tell a client how the model serves it, beside the average."""
    scale, value, average = told.scale, float(told.value[i]), told.level("average_by_client")
    if not np.isfinite(value):
        return f"You have no {scale.label}: you have no samples in that split."
    measured = (
        f"The model has a {scale.label} of {scale.text(value)} on your "
        f"{plural(int(told.sizes[i]), 'sample')}{_write_interval(told, i)}."
    )
    if len(told.method.clients) == 1 or math.isnan(average):
        return measured
    side = "better" if (value > average) == scale.higher_is_better else "worse"
    same = scale.text(value) == scale.text(average)
    distance = "equal to" if same else f"{scale.gap(abs(value - average))} {side} than"
    return f"{measured} That is {distance} the average over clients, {scale.text(average)}."


def describe_own(method: Method, scale: Scale) -> list[str]:
    """Say what the clients of a method keep, and what it is worth beside the shared model alone."""
    history = method.history
    known, note = describe_own_part(history), find_note(history)
    if not known and not note:
        return []
    how = note.partition(" by ")[2].rpartition(";")[0]
    out = [f"{capital(known or 'own parts')}{f'; {how}' if how else ''}."]
    shared, whole = history.without_own, history.last(scale.metric, scale.split)
    if shared is None or whole is None or shared.metric != scale.metric:
        return out
    both = np.isfinite(shared.values) & np.isfinite(whole.values)
    if both.any():
        sign, ours, theirs = scale.kind.sign, whole.values[both], shared.values[both]
        worst = [scale.text(float(sign * (sign * v).min())) for v in (ours, theirs)]
        gain = sign * (ours - theirs)
        out.append(
            f"Average {scale.label} with own parts: {scale.text(ours.mean())}, worst client "
            f"{worst[0]}. Without (the shared model with the mean of the own parts, which is what "
            f"a new client gets): {scale.text(theirs.mean())} and {worst[1]}. Of "
            f"{plural(int(both.sum()), 'client')}, {int((gain > 0).sum())} are served better with "
            f"their own part and {int((gain < 0).sum())} worse."
        )
    return out


def describe_frontier(names: Sequence[str], marks: Sequence[bool], seeds: int) -> str:
    """Say which settings of a sweep are not dominated."""
    kept = [name for name, mark in zip(names, marks, strict=True) if mark]
    words = "; ".join(kept[:6]) + ("; …" if len(kept) > 6 else "")
    return (
        f"Of {plural(len(names), 'setting')}, {len(kept)} {'is' if len(kept) == 1 else 'are'} not "
        f"dominated (no other serves both the average and the worst client better): {words}. "
        f"Measured with {plural(seeds, 'seed')}; differences between close points may be chance."
    )


def list_glossary(report: Report) -> list[tuple[str, str]]:
    """Return the words that a page uses, with their meanings."""
    if report.scale is None:
        return []
    used = {column.label for told in report.told for column in told.columns}
    used |= {*ALWAYS, capital(report.scale.kind.label), *(m.label for m in report.measures)}
    used |= {"Chance floor"} if report.scale.kind.is_fraction else set()
    used |= {"Own part" for method in report.methods if find_note(method.history)}
    return [(word, text) for word, text in GLOSSARY.items() if word in used]
