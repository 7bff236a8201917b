"""Is there anything to gain? One sentence about a method, and the numbers behind it.

The sentence says that some clients are served worse than others only where few test samples do not
explain it: :func:`equifed.metrics.compare_to_chance` for accuracies, Welch's test of every client
against the others for losses. It is wrong about equally served clients at most once in forty times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.metrics import (
    EqualService,
    accuracy_intervals,
    chance_floor,
    compare_to_chance,
    find_metric,
    find_worse_means,
    variance_beyond_chance,
)
from equifed.metrics.chance import LEVEL
from equifed.report.alone import compare_alone, name_clients
from equifed.report.methods import Method, count_correct
from equifed.report.scales import Scale, capital, plural
from equifed.training.history import History

SPENT = 1e-3
"""Below this, a training loss leaves the weights of clients nothing to weigh."""
MANY = 20
"""From so many clients on, they are drawn anew to see how sure their spread is."""
CHANCE = "The spread is what chance explains at these numbers of test samples"


@dataclass(frozen=True)
class Verdict:
    """What a run says about its clients.

    Parameters
    ----------
    sentence : str
        In one sentence.
    notes : tuple of str
        The numbers behind it.
    equal : bool, optional
        Whether chance explains the spread; None: nothing is said.
    underserved : tuple of str
        Clients that are served worse than chance explains.
    better_alone : tuple of str
        Clients whose own models are measured to be better.
    """

    sentence: str
    notes: tuple[str, ...] = ()
    equal: bool | None = None
    underserved: tuple[str, ...] = ()
    better_alone: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as the report's JSON has it."""
        return {
            "sentence": self.sentence,
            "notes": list(self.notes),
            "equally_served": self.equal,
            "underserved": list(self.underserved),
            "better_alone": list(self.better_alone),
        }


def write_verdict(method: Method, scale: Scale | None) -> Verdict:
    """Judge the first run of a method; its seeds share their test samples."""
    if scale is None or len(method.clients) == 1:
        return Verdict("")
    found = _judge_fractions(method, scale) or _judge_losses(method, scale)
    history = method.runs[0].history
    clause, notes, names = compare_alone(history, scale)
    joined = f"{found.sentence}; {clause}" if clause and found.sentence else ""
    sentence = joined or found.sentence or capital(clause)  # a client's name stays as it is
    sentence = f"{sentence}." if sentence else ""
    told = (*found.notes, *_compare_majority(history, scale), *notes, *find_spent_losses(history))
    return Verdict(sentence, told, found.equal, found.underserved, names)


# -- accuracies -----------------------------------------------------------------------------------


def _judge_fractions(method: Method, scale: Scale) -> Verdict | None:
    known = count_correct(method, scale)
    if known is None or len(known[0]) < 2:
        return None
    some, counts, sizes = known[0], known[1], known[2].astype(np.float64)
    found = compare_to_chance(counts[0], sizes)
    low = tuple(method.clients[some[i]] for i in found.underserved)
    notes = (_describe_floor(found, sizes, scale), _describe_spread(found, counts[0], sizes, scale))
    more = () if not found.equal else (_describe_power(sizes, found.pooled, scale),)
    sentence = _say_equal(found, scale) if found.equal else _say_unequal(found, low, method, scale)
    return Verdict(sentence, (*notes, *more), found.equal, low)


def _say_equal(found: EqualService, scale: Scale) -> str:
    if found.pooled == 1:
        return f"There is no spread: every {scale.split} sample is answered correctly"
    return CHANCE.replace("test samples", f"{scale.split} samples")


def _say_unequal(
    found: EqualService, low: tuple[str, ...], method: Method, scale: Scale
) -> str:  # fmt: skip
    who = name_clients(low, method.clients)
    gap = scale.gap(found.floor - found.worst)
    if found.low_fifth:
        if found.count == 1:
            named = f", {who}," if who else ""
            return f"The worst-served client{named} is {gap} below what chance explains"
        named = f", most clearly {who}" if who else ""
        return f"The worst-served fifth is {gap} below what chance explains{named}"
    if who:
        return f"{who} {'is' if len(low) == 1 else 'are'} served worse than chance explains"
    return (
        "The spread is wider than chance explains, although the worst-served fifth is not below "
        "what it would be by chance"
    )


def _describe_floor(found: EqualService, sizes: Losses, scale: Scale) -> str:
    m = (
        f"{int(sizes.min()):,}"
        if np.ptp(sizes) == 0
        else f"{sizes.min():,.0f} to {sizes.max():,.0f}"
    )
    who = f"worst-served {found.count} of {len(sizes)} clients" if found.count > 1 else (
        f"worst-served of {len(sizes)} clients"
    )  # fmt: skip
    return (
        f"The {who} {'have' if found.count > 1 else 'has'} {scale.text(found.worst)}. Clients that "
        f"all have {scale.text(found.pooled)}, with these {m} {scale.split} samples each, would "
        f"come to {scale.text(found.floor)} there on average, and to {scale.span(*found.usual)} in "
        f"95 of 100 cases (test of equal service: p {_write_p(found.p_value)})."
    )


def _write_p(value: float) -> str:
    return "below 0.001" if value < 0.001 else f"= {value:.2g}"


def _describe_spread(found: EqualService, correct: Losses, sizes: Losses, scale: Scale) -> str:
    beyond = math.sqrt(max(found.variance, 0.0)) if math.isfinite(found.variance) else math.nan
    lower, upper = _limit_spread(correct, sizes, beyond)
    estimate = "" if math.isnan(beyond) else f" is estimated at {scale.gap(beyond)} and"
    return (
        f"The standard deviation of the clients' true accuracies{estimate} lies between "
        f"{scale.number(lower)} and {scale.gap(upper)} with 95 % confidence; that of "
        f"the measured ones is {scale.gap(float((correct / sizes).std()))}."
    )


def _limit_spread(correct: Losses, sizes: Losses, estimate: float) -> tuple[float, float]:
    """Return limits of the standard deviation of true accuracies: clients drawn anew if many."""
    n = len(sizes)
    if n < MANY:
        found = accuracy_intervals(correct, sizes, resamples=400)["standard_deviation"]
        ends = np.array([found.lower, found.upper, estimate])
        return float(np.nanmin(ends)), float(np.nanmax(ends))
    picks = np.random.default_rng(0).integers(n, size=(400, n))
    drawn = [variance_beyond_chance(correct[pick], sizes[pick]) for pick in picks]
    lower, upper = np.sqrt(np.maximum(np.quantile(drawn, [0.025, 0.975]), 0.0))
    return float(lower), float(upper)


def _describe_power(sizes: Losses, pooled: float, scale: Scale) -> str:
    """Say how badly a client would have to be served to be noticed."""
    from scipy.special import bdtr

    m, n = int(np.median(sizes)), len(sizes)
    fewest = np.arange(m + 1)
    told = fewest[2 * n * bdtr(fewest, m, pooled) <= LEVEL]
    if not len(told):
        return (
            f"No client with {plural(m, 'sample')}, the median, could be told to be underserved: "
            f"more {scale.split} samples are needed to know."
        )
    return (
        f"A client with {plural(m, 'sample')}, the median, is told to be underserved from "
        f"{scale.text(told[-1] / m)} downwards; smaller differences would not be noticed."
    )


def _compare_majority(history: History, scale: Scale) -> tuple[str, ...]:
    """Say who is served no better than by always answering its most frequent class."""
    record, details = history.last(scale.metric, scale.split), history.details
    fits = details is not None and details.split == scale.split
    if record is None or details is None or not fits or scale.metric != "accuracy":
        return ()
    shares = details.majorities()
    low = np.flatnonzero(record.values <= shares)  # those with one class have nothing above it
    names = tuple(history.names[i] for i in low if shares[i] < 1)
    one = tuple(history.names[i] for i in np.flatnonzero(shares == 1))
    out = []
    if names:
        no_better = "is served no better" if len(names) == 1 else "are served no better"
        out.append(
            f"{name_clients(names, history.names)} {no_better} than by always answering "
            f"{'its' if len(names) == 1 else 'their'} most frequent class."
        )
    if one:
        have = "has" if len(one) == 1 else "have"
        out.append(
            f"{name_clients(one, history.names)} {have} {scale.split} samples of one class only: "
            "an accuracy says little about such a client."
        )
    return tuple(out)


# -- losses ---------------------------------------------------------------------------------------


def _judge_losses(method: Method, scale: Scale) -> Verdict:
    history = method.runs[0].history
    record = history.last(scale.metric, scale.split)
    nothing = Verdict("", (f"How much of the spread of the {scale.label} is chance is not known.",))
    if record is None or history.details is None or history.details.split != scale.split:
        return nothing
    upper = history.details.limits(scale.metric)[:, 1]
    some = np.flatnonzero(np.isfinite(record.values) & np.isfinite(upper) & (record.sizes > 1))
    if len(some) < 2 or scale.higher_is_better or find_metric(scale.metric).each is None:
        return nothing
    low = tuple(
        method.clients[some[i]] for i in _find_worse(record.values, upper, record.sizes, some)
    )
    sentence = (
        f"{name_clients(low, method.clients)} {'has' if len(low) == 1 else 'have'} a "
        f"{scale.label} above the others' by more than chance explains"
        if low
        else f"No client's {scale.label} is above the others' by more than chance explains"
    )
    note = (
        f"Every client's {scale.label} was held against the mean of the others (Welch's test "
        f"of logarithms, one-sided, corrected for {plural(len(some), 'client')}). A floor by "
        "chance is known for accuracies only: losses also differ because some tasks are noisier."
    )
    return Verdict(sentence, (note,), not low, low)


def _find_worse(values: Losses, upper: Losses, sizes: Any, some: Any) -> tuple[int, ...]:
    """Return positions in ``some``; standard errors are read back from Student's limits."""
    from scipy.special import stdtrit

    errors = (upper - values)[some] / stdtrit(sizes[some] - 1, 0.975)
    return find_worse_means(values[some], errors, sizes[some])


def find_spent_losses(history: History) -> tuple[str, ...]:
    """Say whether training losses have reached zero, where weights of clients have no grip."""
    record = history.last("loss", "train")
    known = np.empty(0) if record is None else record.values[np.isfinite(record.values)]
    if not known.size or known.max() >= SPENT:
        return ()
    return (
        f"Every client's training loss has come down to at most {known.max():.2g}: there is "
        "nothing left to trade off, so weights of clients have no grip on this model.",
    )


def floor_of(method: Method, scale: Scale) -> float:
    """Return the chance floor of the worst-served fifth of a method's first run; NaN if unknown."""
    known = count_correct(method, scale)
    if known is None or len(known[0]) < 2:
        return math.nan
    _, counts, sizes = known
    return chance_floor(sizes, float(counts[0].sum() / sizes.sum()))
