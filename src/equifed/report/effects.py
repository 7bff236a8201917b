"""Words about a difference between two methods: what changed, and what is known about that."""

from __future__ import annotations

from equifed.metrics import Interval
from equifed.report.differences import Difference
from equifed.report.measures import Estimate
from equifed.report.methods import Method
from equifed.report.scales import TIMES, Scale, is_finite, plural


def describe_cost(
    method: Method, baseline: Method, found: dict[str, Estimate], scale: Scale
) -> str:
    """Say what the worst client gained, what the average paid and what was sent."""
    worst, average, spread = (found.get(k) for k in ("worst", "average_by_client", "spread"))
    if worst is None or average is None or spread is None or worst.difference is None:
        return f"{method.name} and {baseline.name} have no seeds in common to compare."
    assert average.difference is not None and spread.difference is not None
    differences = (worst.difference.interval, average.difference.interval)
    worse, mean = (describe_effect(difference, scale) for difference in differences)
    who = f"Against {baseline.name}, {method.name}"
    single = len(method.clients) == 1
    if single:
        sentences = [f"{who} {worse.format(f'the {scale.label} of the only client')}."]
    else:
        of = f"the worst client's {scale.label}"
        told = f"{worse.format(of)} and {mean.format('the average over clients')}"
        sentences = [f"{who} {told}.", _describe_gap(spread.difference, scale)]
    clients = "" if single else f"on {plural(len(method.clients), 'client')} "
    sentences += [
        _describe_bytes(found),
        f"Measured {clients}{describe_seeds(worst.difference.pairs)}"
        f"{describe_evidence(worst.difference, scale)}.",
    ]
    return " ".join(filter(None, sentences))


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


def write_change(difference: Difference | None, baseline: str, scale: Scale) -> str:
    """Write a difference to the baseline with its interval."""
    if difference is None:
        return ""
    found = difference.interval
    span = f" ({write_span(found, scale)})" if is_finite(found) else ""
    return f"{scale.change(found.estimate)} against {baseline}{span}"


def _describe_gap(spread: Difference, scale: Scale) -> str:
    before, after = scale.number(spread.before), scale.gap(spread.after)
    word = "shrank" if spread.after < spread.before else "grew"
    if scale.gap(spread.before) == after:
        return f"The measured gap from best to worst client stayed at {after}."
    return f"The measured gap from best to worst client {word} from {before} to {after}."


def _describe_bytes(found: dict[str, Estimate]) -> str:
    sent = found["bytes"]
    if sent.difference is None:
        return ""
    ours, theirs = sent.difference.after, sent.difference.before
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
