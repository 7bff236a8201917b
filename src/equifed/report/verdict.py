"""Is there anything to gain, and who would be better off alone? One sentence, and its numbers.

It is wrong about equally served clients at most once in forty times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.metrics import EqualService, chance_floor, compare_to_chance
from equifed.metrics.chance import LEVEL, find_worse_means
from equifed.report.methods import NAMED, Method, Scale, capital, find_note, join_names, plural
from equifed.training.history import History


@dataclass(frozen=True)
class Verdict:
    """What a run says about its clients: in one sentence, and in the numbers behind it."""

    sentence: str
    notes: tuple[str, ...] = ()  # about how clients are served
    equal: bool | None = None  # None: nothing is said
    underserved: tuple[str, ...] = ()
    better_alone: tuple[str, ...] = ()  # whose own models are measured to be better
    all_alone: bool | None = None  # whether clients as a whole are; None: not known
    together: str = ""  # the same in words
    alone: tuple[str, ...] = ()  # notes about own models

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as the report's JSON has it."""
        return {
            "sentence": self.sentence,
            "notes": [*self.notes, *self.alone],
            "equally_served": self.equal,
            "underserved": list(self.underserved),
            "better_alone": list(self.better_alone),
            "all_better_alone": self.all_alone,
        }


def write_verdict(method: Method, scale: Scale | None) -> Verdict:
    """Judge the first run of a method; its seeds share their test samples."""
    if scale is None or len(method.clients) == 1:
        return Verdict("")
    found = _judge_fractions(method, scale) or _judge_losses(method, scale)
    history = method.history
    clause, notes, names = compare_alone(history, scale)
    joined = f"{found.sentence}; {clause}" if clause and found.sentence else ""
    sentence = joined or found.sentence or capital(clause)  # a client's name stays as it is
    told = (*found.notes, *_compare_majority(method, scale))
    said = f"{sentence}." if sentence else ""
    all_alone, together = compare_federation(history, scale)
    notes = (f"{capital(together)}.", *notes) if together else notes
    return Verdict(said, told, found.equal, found.underserved, names, all_alone, together, notes)


def name_clients(names: tuple[str, ...], all_names: tuple[str, ...]) -> str:
    """List a few names, or say how many there are of all."""
    if len(names) > NAMED:
        return f"{len(names)} of {len(all_names)} clients"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


# -- accuracies -----------------------------------------------------------------------------------


def _judge_fractions(method: Method, scale: Scale) -> Verdict | None:
    known = method.count_correct(scale)
    if known is None or len(known[0]) < 2:
        return None
    some, (correct, *_), sizes = known[0], known[1], known[2].astype(np.float64)
    found = compare_to_chance(correct, sizes)
    low = tuple(method.clients[some[i]] for i in found.underserved)
    notes = [_describe_floor(found, len(sizes), scale)]
    if found.equal:
        notes.append(_describe_power(sizes, found.pooled, scale))
    who = name_clients(low, method.clients)
    what = "One shared model" if not find_note(method.history) else "The model, with its own parts,"
    said = _say_who(found, who, len(low), scale, what)
    return Verdict(said, tuple(notes), found.equal, low)


def _say_who(found: EqualService, who: str, count: int, scale: Scale, what: str) -> str:
    if found.pooled == 1:
        return f"There is no spread: every {scale.split} sample is answered correctly"
    if found.equal:
        return (
            f"{what} serves all clients alike: the spread is what chance explains at these "
            f"numbers of {scale.split} samples"
        )
    if found.low_fifth:
        gap = scale.gap(found.floor - found.worst)
        if found.count == 1:
            named = f", {who}," if who else ""
            return f"The worst-served client{named} is {gap} below what chance explains"
        named = f", most clearly {who}" if who else ""
        return f"The worst-served fifth is {gap} below what chance explains{named}"
    if who:
        return f"{who} {'is' if count == 1 else 'are'} served worse than chance explains"
    return (
        "The spread is wider than chance explains, although the worst-served fifth is not below "
        "what it would be by chance"
    )


def _describe_floor(found: EqualService, count: int, scale: Scale) -> str:
    few, have = (f"{found.count} ", "have") if found.count > 1 else ("", "has")
    return (
        f"The worst-served {few}of {count} clients {have} {scale.text(found.worst)}. If every "
        f"client's true accuracy were {scale.text(found.pooled)}, it would still be about "
        f"{scale.text(found.floor)} ({scale.span(*found.usual)} in 95 of 100 cases), because "
        f"{scale.split} samples are few (test of equal service: p {write_p(found.p_value)})."
    )


def _describe_power(sizes: Losses, pooled: float, scale: Scale) -> str:
    """Say how badly a client would have to be served to be noticed."""
    from scipy.special import bdtr

    m, n = int(np.median(sizes)), len(sizes)
    fewest = np.arange(m + 1)
    told = fewest[2 * n * bdtr(fewest, m, pooled) <= LEVEL]
    samples = f"With {plural(m, f'{scale.split} sample')} (the median)"
    if not len(told):
        return f"{samples} no accuracy can be shown to be low; more samples are needed."
    most = scale.text((told[-1] + 1) / m)
    return f"{samples} we can only detect an accuracy below {most}."


def _compare_majority(method: Method, scale: Scale) -> Iterator[str]:
    """Say who is served no better than by always answering its most frequent class."""
    record, details = method.history.last(scale.metric, scale.split), method.details(scale)
    if record is None or details is None or scale.metric != "accuracy":
        return
    shares, names = details.majorities(), np.array(method.clients)
    low = tuple(names[(record.values <= shares) & (shares < 1)])
    if low:
        verb, whose = ("is", "its") if len(low) == 1 else ("are", "their")
        yield (
            f"{name_clients(low, method.clients)} {verb} served no better than by always "
            f"predicting {whose} most frequent class."
        )


# -- losses ---------------------------------------------------------------------------------------


def _judge_losses(method: Method, scale: Scale) -> Verdict:
    record, details = method.history.last(scale.metric, scale.split), method.details(scale)
    nothing = Verdict("", (f"How much of the spread of the {scale.label} is chance is not known.",))
    if record is None or details is None:
        return nothing
    upper = details.limits(scale.metric)[:, 1]
    some = np.flatnonzero(np.isfinite(record.values) & np.isfinite(upper) & (record.sizes > 1))
    if len(some) < 2 or scale.higher_is_better or scale.kind.each is None:
        return nothing
    low = tuple(
        method.clients[some[i]] for i in _find_worse(record.values, upper, record.sizes, some)
    )
    who = name_clients(low, method.clients)
    subject = f"{who} {'has' if len(low) == 1 else 'have'} a {scale.label}" if low else (
        f"No client's {scale.label} is"
    )  # fmt: skip
    note = (
        f"Every client's {scale.label} was compared with the mean of the others (Welch's test of "
        f"logarithms, one-sided, corrected for {plural(len(some), 'client')})."
    )
    sentence = f"{subject} above the others' by more than chance explains"
    return Verdict(sentence, (note,), not low, low)


def _find_worse(values: Losses, upper: Losses, sizes: Any, some: Any) -> tuple[int, ...]:
    """Return positions in ``some``; standard errors are read back from Student's limits."""
    from scipy.special import stdtrit

    errors = (upper - values)[some] / stdtrit(sizes[some] - 1, 0.975)
    return find_worse_means(values[some], errors, sizes[some])


def find_floor(method: Method, scale: Scale) -> float:
    """Return the chance floor of the worst-served fifth of a method's first run; NaN if unknown."""
    known = method.count_correct(scale)
    if known is None or len(known[0]) < 2:
        return math.nan
    _, counts, sizes = known
    return chance_floor(sizes, float(counts[0].sum() / sizes.sum()))


# -- alone ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AloneTable:
    """What clients would have alone, beside the shared model."""

    values: Losses
    gains: Losses  # (N, 3): own model minus shared one and 95 % limits; NaN if unknown
    some: Any  # clients that are compared
    sure: tuple[int, ...]  # better off alone beyond chance, all clients considered (Holm)
    event: Mapping[str, Any]


def tabulate_alone(history: History, scale: Scale) -> AloneTable | None:
    """Return what is known of the clients' own models; None: nothing of this metric."""
    alone, shared = history.alone, history.last(scale.metric, scale.split)
    if alone is None or shared is None:
        return None
    if (alone.metric, alone.split) != (scale.metric, scale.split):
        return None
    events = [e for e in history.events if e["event"] == "alone"]
    event: dict[str, Any] = events[-1] if events else {}
    told, change = event.get("gains", {}), alone.values - shared.values
    compared = np.array([name not in event.get("one_class", ()) for name in history.names])
    some = np.flatnonzero(np.isfinite(change) & compared)
    table = np.stack([change, *np.full((2, len(change)), np.nan), np.ones(len(change))], axis=1)
    for i in some:
        table[i] = told.get(history.names[i], table[i])
    sure = _correct(table[:, 3], some)
    return AloneTable(alone.values, table[:, :3], some, sure, event)


def _correct(chances: Losses, some: Any) -> tuple[int, ...]:
    """Return the clients whose tests hold together at the verdict's level: Holm's steps."""
    out: list[int] = []
    for rank, i in enumerate(sorted(some, key=lambda i: chances[i])):
        if chances[i] * (len(some) - rank) > LEVEL:
            break
        out.append(int(i))
    return tuple(sorted(out))


def compare_federation(history: History, scale: Scale) -> tuple[bool | None, str]:
    """Tell whether clients as a whole are better off alone: Student's test, paired over clients.

    Its standard error is at least that of other samples of the same clients, where that is known:
    a few clients may gain alike by chance.
    """
    from scipy.special import stdtr

    found = tabulate_alone(history, scale)
    if found is None or len(found.some) < 3:
        return None, ""
    gains, n = scale.kind.sign * found.gains[found.some, 0], len(found.some)
    limits = found.gains[found.some, 1:]
    rows = float(np.linalg.norm(limits[:, 1] - limits[:, 0])) / (2 * 1.96 * n)
    error = max(float(gains.std(ddof=1)) / math.sqrt(n), rows if math.isfinite(rows) else 0.0)
    if error == 0:
        return None, ""
    mean = float(gains.mean())
    p = float(2 * stdtr(n - 1, -abs(mean) / error))
    of = f"mean over {plural(len(gains), 'client')}; paired test, p {write_p(p)}"
    much = scale.gap(abs(mean))
    if p > 2 * LEVEL:
        return False, f"clients as a whole are not measurably better off alone or together ({of})"
    side = "alone" if mean > 0 else "together than alone"
    return mean > 0, f"clients as a whole are better off {side}, by {much} ({of})"


def write_p(p: float) -> str:
    """Write the probability of a test."""
    return "below 0.001" if p < 0.001 else f"= {p:.2g}"


def compare_alone(history: History, scale: Scale) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Say who would be better off alone: a clause, the numbers, and the clients."""
    found = tabulate_alone(history, scale)
    if found is None or not len(found.some):
        return "", (), ()
    gains = scale.kind.sign * found.gains[:, 0]
    better = sorted((int(i) for i in found.some if gains[i] > 0), key=lambda i: -gains[i])
    names = tuple(history.names[i] for i in found.sure)
    clause = f"no client would {'clearly ' if better else ''}be better off alone"
    if names:
        sizes = [abs(float(found.gains[i, 0])) for i in found.sure]
        least, most = scale.gap(min(sizes)), scale.gap(max(sizes))
        much = most if least == most else f"{scale.number(min(sizes))} to {most}"
        side = "higher" if scale.higher_is_better else "lower"
        what = "" if scale.kind.is_fraction else f"the {scale.kind.label} {side} "
        clause = f"{name_clients(names, history.names)} would be better off alone, {what}by {much}"
    return clause, tuple(_describe_alone(found, better, history, scale)), names


def _describe_alone(
    found: AloneTable, better: list[int], history: History, scale: Scale
) -> Iterator[str]:
    """Say how many would have more alone, how much more, and who is not compared."""
    one, sure = len(better) == 1, len(found.sure)
    if better:
        told = [f"{history.names[i]} {describe_gain(found, i, scale)}" for i in better]
        own = "has a better {} with a model of its own" if one else (
            "have a better {} with models of their own"
        )  # fmt: skip
        known = np.isfinite(found.gains[better, 1]).any()
        limits = " (95 % intervals, sample by sample)" if known else ""
        yield (
            f"{len(better)} of {plural(len(found.some), 'client')} {own.format(scale.label)}"
            f"{limits}: {join_names(told)}. {sure or 'No'} difference{'s' * (sure > 1)} "
            f"{'are' if sure > 1 else 'is'} significant after correcting for the number of clients."
        )
    apart = tuple(found.event.get("one_class", ()))
    if apart:
        yield (
            f"{name_clients(apart, history.names)} {'has' if len(apart) == 1 else 'have'} training "
            "samples of one class: alone always predicts that class, and is not compared."
        )
    if found.event.get("reason"):
        yield f"Alone: {found.event['reason']}."


def describe_gain(found: AloneTable, i: int, scale: Scale) -> str:
    """Write what a client gains by its own model, with its limits."""
    change, lower, upper = map(float, found.gains[i])
    text = scale.change(change)
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return text
    return f"{text} ({scale.signed(lower)} to {scale.signed(upper)})"
