"""The sentences of a report: what was measured, never that a model is fair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from equifed.report.decisions import describe_decisions
from equifed.report.document import Report, Told, describe_own_part
from equifed.report.methods import Method, Scale, capital, find_note, is_finite, join_names, plural
from equifed.report.numbers import Difference
from equifed.report.verdict import name_clients
from equifed.training.events import PRIVACY, find_warnings
from equifed.training.history import History

REFUSALS = {
    "quarantine": "answers of {} were refused (rounds in brackets)",
    "guard": "claims or updates of {} were kept in bounds by the guard (rounds in brackets)",
    "watch": "{} stood out beside the others, and nothing was changed (runs in brackets)",
}
"""What events about a client mean, by their kind."""
HEADLINE = ("worst_20_percent", "average_by_client")
"""Measures of the first sentence."""
ALIKE = 0.01
"""Losses this near to that of equal probabilities belong to a model that has learned nothing."""
GLOSSARY = {
    "Alone": "with a model of the client's own, trained on its own samples.",
    "AUROC": "how often a positive sample is ranked before a negative one; 0.5 is guessing.",
    "Calibration error": "mean distance of stated probabilities from how often they are right.",
    "Majority class": "accuracy of always answering the client's most frequent class.",
    "Own part": "parameters that every client keeps for itself.",
    "Solved for the average": "the same model and penalty, with equal weights on all clients.",
    "Weight": "how much a client's loss counted in the last round.",
    "Without own part": "the shared model with the mean of all own parts, as a new client gets it.",
}
"""What the words of a report mean."""


# -- the top of a page -----------------------------------------------------------------------------


def write_headline(report: Report) -> dict[str, Any]:
    """Return the first words of the report: one sentence of result, one of advice, warnings."""
    warnings = [*_describe_events(report.methods), *describe_warnings(report.methods)]
    if report.scale is None:
        unknown = "No evaluation was recorded, so nothing is known about the clients."
        said = {"result": unknown, "advice": "", "verdict": "", "evidence": "", "chance": ""}
        return {**said, "warnings": warnings}
    told = report.told[report.lead]
    remarks = [remark for one in report.told for remark in _list_remarks(one)]
    return {
        "result": _describe_gain(report) if report.several else _describe_worst(told),
        "advice": _advise(report),
        "verdict": report.verdict.sentence,
        "evidence": _describe_evidence(report),
        "chance": _describe_chance(told),
        "warnings": [*warnings, *remarks, *report.problems],
    }


def _describe_gain(report: Report) -> str:
    """Say what the headline's method is worth against the baseline, to whom."""
    told, scale, base = report.told[report.lead], report.shown, report.methods[report.baseline].name
    n = int(np.isfinite(told.value).sum())
    whom = "the only client" if n == 1 else f"the worst-served {name_fifth(n)}of {n:,} clients"
    level, average = (scale.text(told.level(k)) for k in ("worst_20_percent", "average_by_client"))
    mean = "" if n == 1 else f"; the average is {average}"
    if len(report.tied) > 1 and (report.lead == report.baseline or base in report.tied):
        names = join_names(report.tied)
        return f"{names} serve {whom} equally well: {level} {scale.label}{mean}."
    if report.lead == report.baseline:
        if report.chosen is not None:
            return f"{capital(base)} was chosen: {whom} has {level} {scale.label}{mean}."
        return f"{base}, the baseline, serves best: {whom} has {level} {scale.label}{mean}."
    found = [told.estimates[k].difference if k in told.estimates else None for k in HEADLINE]
    low, mid = found
    if low is None or mid is None:
        return f"{told.method.name} and {base} have no seeds in common to compare."
    sure = is_finite(low.interval) and not low.interval.lower <= 0 <= low.interval.upper
    better = (low.interval.estimate > 0) == scale.higher_is_better
    verdict = ("helps" if better else "serves worse") if sure else "makes no measurable difference"
    mean = f"; the average from {scale.text(mid.before)} to {scale.text(mid.after)}"
    name = told.method.name if report.chosen is None else capital(told.method.name)
    return (
        f"{name} {verdict} against {base}: {scale.label} of {whom} goes from "
        f"{scale.text(low.before)} to {scale.text(low.after)}, {_write_change(low, scale)}"
        f"{'' if n == 1 else mean}."
    )


def name_fifth(count: int) -> str:
    """Return "fifth " where a fifth of the clients is more than one."""
    return "fifth " if count > 5 else ""


def _write_change(found: Difference, scale: Scale) -> str:
    change, interval = scale.change(found.interval.estimate), found.interval
    if not is_finite(interval):
        return f"{change} (with no interval: see below)"
    return (
        f"{change} (95 % interval {scale.signed(interval.lower)} to {scale.signed(interval.upper)})"
    )


def _advise(report: Report) -> str:
    """Return what to do, in one sentence."""
    name, base = (report.methods[m].name for m in (report.lead, report.baseline))
    verdict, scale = report.verdict, report.shown
    if verdict.all_alone:
        return f"Train a model per client: {verdict.together}."
    keep = ""
    if verdict.better_alone:
        who = name_clients(verdict.better_alone, report.methods[0].clients)
        whose = "its" if len(verdict.better_alone) == 1 else "their"
        keep = f"; {who} would do better with a model of {whose} own"
    if not report.several:
        return _advise_alone(report, keep)
    found = report.told[report.lead].estimates["worst_20_percent"].difference
    if report.chosen is not None:
        apart = found is None or not found.interval.lower <= 0 <= found.interval.upper
        either = "" if apart or name == base else f' ("{base}" serves as well, within chance)'
        return f'Use the model "{name}", which was chosen on validation samples{either}{keep}.'
    if name == base or (len(report.tied) > 1 and base in report.tied):
        return f"Use {base}: no other method serves the worst-served better{keep}."
    if found is None or not is_finite(found.interval):
        return f"Use {name} if more seeds or test samples confirm it{keep}."
    if found.interval.lower <= 0 <= found.interval.upper:
        return f"Use {base} or {name}: the difference may be chance{keep}."
    mean = report.told[report.lead].estimates["average_by_client"].difference
    if mean is not None and is_finite(mean.interval):
        worse = mean.interval.upper < 0 if scale.higher_is_better else mean.interval.lower > 0
        if worse:
            price = scale.gap(abs(mean.interval.estimate))
            return f"Use {name} if the worst-served are worth {price} of the average{keep}."
    return f"Use {name}{keep}."


def _advise_alone(report: Report, keep: str) -> str:
    """Return what to do after a run that is compared with nothing."""
    if report.verdict.equal:
        return f"Keep this model: no client is measurably served worse than the others{keep}."
    if report.verdict.equal is None:
        return capital(keep[2:]) + "." if keep else ""
    return f"Try a fair objective or an own part: the clients are not served alike{keep}."


def _list_remarks(told: Told) -> Iterator[str]:
    """Yield what a reader should know about the worst client and about the model as a whole."""
    name, i, n = told.method.name, told.worst, len(told.value)
    if i is not None and n > 1 and told.weight[i] <= 1e-6 / n:
        yield (
            f"{name}: {told.method.clients[i]} is served worst on {told.scale.split} samples and "
            "has weight 0: the objective does not see it, because its training loss is low."
        )
    details = told.method.details(told.scale)
    known = () if details is None else details.clients
    classes = max((c.classes or 0 for c in known if c is not None), default=0)
    losses = told.loss[np.isfinite(told.loss)]
    if classes > 1 and losses.size and np.abs(losses / math.log(classes) - 1).max() < ALIKE:
        yield (
            f"{name}: the model gives all {classes} classes nearly the same probability for every "
            "client, as one that has learned nothing does; weigh the worst-off less (a larger rho)."
        )


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
    names = ", ".join(m.name for m in methods)
    if report.chosen is not None:
        names = plural(len(methods), "candidate")
    return " · ".join([names, *told, *write_date(methods)])


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
    count = plural(int(np.isfinite(told.value).sum()), "client")
    average = scale.text(told.level("average_by_client"))
    said = f"{who} is served worst{seeds}: {measured}; the average over {count} is {average}"
    base = next((c.values for c in told.columns if c.key == "average"), np.full(1, math.nan))
    known = base[np.isfinite(base)]
    if not known.size:
        return f"{said}."
    low, mean = scale.text(float(scale.kind.sign * (scale.kind.sign * known).min())), known.mean()
    return f"{said} (solved for the average: worst {low}, average {scale.text(float(mean))})."


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
        f"chance: the lowest true one is between {scale.number(interval.lower)} and "
        f"{scale.text(interval.upper)} (95 % confidence)"
    )
    if not others:
        return f"{first}, and {clients[worst.observed]} has it."
    count = plural(len(others), "other client")
    return f"{first}, of {clients[worst.observed]} or {count} ({join_names(others)})."


def list_evidence(report: Report, headline: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return what is known of how sure a report is, each under the question that it answers."""
    found, lead = report.verdict, report.methods[report.lead]
    told = {
        "Are clients served alike?": [headline["verdict"], headline["chance"], *found.notes],
        "Would clients be better off alone?": found.alone,
        "Are predictions right on average?": describe_decisions(lead, report.scale),
        "Do the methods differ?": [headline["evidence"]],
    }
    some = {question: [line for line in lines if line] for question, lines in told.items()}
    return [(question, lines) for question, lines in some.items() if lines]


def _describe_events(methods: Sequence[Method]) -> list[str]:
    """Name the clients whose answers were refused or kept in bounds, or who stood out."""
    told: dict[str, list[str]] = {}  # sentence to the methods of which it is true
    for method in methods:
        for kind, what in REFUSALS.items():
            counts = method.count_events(kind)
            bad = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i] > 0]
            if bad:
                names = join_names([f"{method.clients[i]} ({counts[i]})" for i in bad])
                sentence = f"{what.format(plural(len(bad), 'client'))}: {names}."
                told.setdefault(sentence, []).append(method.name)
    return [f"{join_names(names)}: {sentence}" for sentence, names in told.items()]


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


# -- differences between methods -------------------------------------------------------------------


def _describe_evidence(report: Report) -> str:
    """Say what the intervals of the differences to the baseline allow for."""
    measured = [told.estimates.get("worst_20_percent") for told in report.told]
    known = [m.difference for m in measured if m is not None and m.difference is not None]
    if not known:
        return ""
    found, scale = known[0], report.shown
    seeds = "with one seed" if found.pairs == 1 else f"over {found.pairs} seeds"
    if found.pairs > 1 and "seeds" not in found.about:
        seeds += " that agree"
    if found.about == "seeds":
        return f"Differences were measured {seeds}."
    if found.about == "none":
        why = "" if scale.kind.is_fraction else f": single {scale.metric} values are not recorded"
        return f"Differences were measured {seeds}; nothing is known about other samples{why}."
    what = "seeds and test samples" if "seeds" in found.about else "test samples"
    how = "paired sample by sample" if found.paired else (
        "wide because the runs did not record which samples they share"
    )  # fmt: skip
    return f"Differences were measured {seeds}; intervals are for other {what}, {how}."


# -- participants, own parts, words ----------------------------------------------------------------


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
            f"{plural(int(both.sum()), 'client')}, {int((gain > 0).sum())} better and "
            f"{int((gain < 0).sum())} worse with their own part."
        )
    return out


def list_glossary(report: Report) -> list[tuple[str, str]]:
    """Return the words that a page uses, with their meanings."""
    used = set(report.heads.values())
    used |= {"Own part" for method in report.methods if find_note(method.history)}
    return [(word, text) for word, text in GLOSSARY.items() if word in used]


# -- differential privacy: the budget, what it protects, and what not ------------------------------


AT_CLIENT = "noise is added at the client, so no server is trusted"
PROTECTED = {
    "record": f"one row of a client by another; {AT_CLIENT}",
    "person": f"all rows of one person by others; {AT_CLIENT}",
    "client": "all rows of a client by others; noise is added at the server, which is trusted with "
    "the clients' updates",
}
"""What may be replaced, and where noise is added, by unit."""

LEFT = (
    "What is true of many rows, wherever they are: that is what a model learns.",
    "The numbers that this page and the run folder have of every client, test rows included, and "
    "who took part. Publish the model alone.",
    "Other runs on the same rows, those of tuning too: their budgets add up.",
    "Preparation that reads the rows: scales, categories and fillings that were not declared.",
    "A simulation: its noise follows from the seed, which the run folder names.",
)
"""What no budget of a run covers."""


def read_budget(history: History) -> Mapping[str, Any] | None:
    """Return the ledger of a run with the largest budget; None: it had no privacy."""
    found = [told for e in history.events if e["event"] == PRIVACY for told in e["ledgers"]]
    return max(found, key=lambda told: (told["epsilon"], told["delta"]), default=None)


def describe_budget(told: Mapping[str, Any]) -> str:
    """Say what a budget is, and whose rows it protects.

    >>> describe_budget({"epsilon": 3.0, "delta": 1e-5, "unit": "record"})[:45]
    'Epsilon 3 at delta 1e-05 for every record: re'
    """
    return (
        f"Epsilon {told['epsilon']:g} at delta {told['delta']:g} for every {told['unit']}: "
        f"replacing {PROTECTED[told['unit']]}. Any event that depends on the model changes its "
        f"probability by at most a factor of e^{told['epsilon']:g}, and by {told['delta']:g} more."
    )


def describe_privacy(methods: Sequence[Method]) -> dict[str, list[str]] | None:
    """Return what is protected and what not; None: no run had privacy."""
    budgets = {method.name: read_budget(method.history) for method in methods}
    if not any(budgets.values()):
        return None
    lines = [
        (f"{name}: " if len(budgets) > 1 else "") + describe_budget(told)
        for name, told in budgets.items()
        if told is not None
    ]
    without = [name for name, told in budgets.items() if told is None]
    if without:
        lines.append(f"Without privacy: {join_names(without)}.")
    return {"budget": lines, "left": list(LEFT)}
