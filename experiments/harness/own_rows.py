"""Rows beside the published ones: own parts and own models, and which of the two helps.

A method with an own part is called as the one without, and ``", own bias"``. Where every client has
one class, an own bias and an own model are trivial (always that class): no such rows there.
"""

from __future__ import annotations

import numpy as np

from equifed.metrics import mean_interval, worst_fraction
from equifed.runs import merge_tables
from experiments.harness.experiment import Check, Context, Settings
from experiments.harness.measures import Answers, answers, with_limits
from experiments.harness.running import Histories, run_variants

OWN, ALONE = ", own bias", "alone"
BASE, OURS = "FedAvg", "SCAFF-PD"


def is_published(method: str) -> bool:
    """Tell whether a method is as its paper has it, without an own part."""
    return method != ALONE and not method.endswith(OWN)


def fit_alone(context: Context, like: Settings) -> tuple[Answers, list[str]]:
    """Return what every client would have with a model of its own, seed by seed, and what failed.

    Logistic regression is solved exactly, with the strength of the penalty chosen by each client on
    its validation samples; other models take the local steps of the variant on each client alone.
    """
    variant = merge_tables(like, {"with_alone": True})
    found, failed = run_variants(context, {ALONE: variant}, context.settings["seeds"])
    return answers(found[ALONE], alone=True), failed


def own_checks(found: Histories, alone: Answers, fraction: float, base: str = BASE) -> list[Check]:
    """Tell the own part from the fair objective: each with and without the other.

    ``fraction`` says who the worst are; ``base`` is what FedAvg without an own part is called.
    """
    told = {method: answers(runs) for method, runs in found.items()}
    told[ALONE] = alone
    pairs = [(OURS + OWN, BASE + OWN), (OURS, base), (BASE + OWN, base), (OURS + OWN, OURS),
             (BASE + OWN, ALONE), (OURS + OWN, ALONE)]  # fmt: skip
    known = [(a, b) for a, b in pairs if told.get(a) and told.get(b)]
    return [_compare(a, b, told[a], told[b], fraction) for a, b in known]


def _compare(method: str, rival: str, ours: Answers, theirs: Answers, fraction: float) -> Check:
    both = [seed for seed in ours if seed in theirs]
    worst, average = (
        mean_interval([100 * (take(ours[s][0]) - take(theirs[s][0])) for s in both])
        for take in (lambda v: float(worst_fraction(v, fraction, higher_is_better=True)), np.mean)
    )
    few = len(ours[both[0]][0]) * fraction <= 1
    words = "client" if few else f"{100 * fraction:g} %"
    sure = not worst.lower <= 0 <= worst.upper
    return Check(
        f"{method} serves the worst {words} at least as well as {rival}",
        "our aim",
        f"within {len(both)} seeds: worst {words} {with_limits(worst, ' points')}, average "
        f"{with_limits(average, ' points')}",
        worst.estimate >= 0,
        "" if sure else "the seeds do not tell the two apart",
    )
