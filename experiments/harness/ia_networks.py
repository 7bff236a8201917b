"""IA's networks: who is served how well by six methods on MNIST and CIFAR-10 with 100 clients.

IA's Section 7 and Appendix J.2 print the division (Dirichlet 0.5 by class), the network, R = 100
rounds, J = 5 local epochs and all learning rates. They do not print the size of a minibatch, which
is chosen here for every method by its average accuracy on validation samples, and leave open what
the update of the SCAFF-PD family is divided by when J counts epochs: all local steps (Algorithm 2
with one gradient a step), or J = 5. Both readings are run; with the second one the step of the
server is larger by the number of minibatches in a pass of the average client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed import History
from equifed.metrics import (
    average_by_client,
    best_fraction,
    gini,
    lorenz_curve,
    mean_interval,
    paired_difference,
    twenty_twenty,
    worst_fraction,
)
from experiments.harness.choice import choose
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Settings, Table
from experiments.harness.measures import (
    answers,
    floor,
    per_client,
    validation_score,
    with_interval,
    with_limits,
)
from experiments.harness.running import Histories, run_variants

Array = NDArray[np.float64]
SOURCE = "IA, Table 1"
OURS = "SCAFF-PD-IA"
MEASURES = ("average", "worst 20 %", "best 20 %", "R_A,B", "Gini")
AVERAGE, WORST, UNFAIRNESS, GINI = 0, 1, 3, 4


def measured(history: History, split: str = "test") -> Array:
    """Return the five columns of IA's Table 1: three of accuracies, two of losses."""
    accuracy, loss = (per_client(history, metric, split) for metric in ("accuracy", "loss"))
    return np.array(
        [
            average_by_client(accuracy),
            worst_fraction(accuracy, 0.2, higher_is_better=True),
            best_fraction(accuracy, 0.2, higher_is_better=True),
            twenty_twenty(loss),
            gini(loss),
        ]
    )


def run(context: Context) -> Outcome:
    """Choose minibatches on validation samples, run all seeds, put Table 1 beside the numbers.

    With ``only``, a list of methods, these alone are run.
    """
    if only := context.settings.get("only"):
        few = {method: context.settings["methods"][method] for method in only}
        context = replace(context, settings={**context.settings, "methods": few})
    settings = context.settings
    variants, choice = choose(context, validation_score, "average validation accuracy")
    found, problems = run_variants(context, variants, settings["seeds"])
    found = {name: runs for name, runs in found.items() if runs}
    tables = {
        "table-1": _table(found, settings, "test"),
        "validation": _table(found, settings, "validation"),
        "choice": choice,
    }
    figures = {
        f"figure-4-lorenz-{i}": _lorenz(found, group, title)
        for i, (title, group) in enumerate(settings["groups"].items(), 1)
        if set(group) & set(found)
    }
    figures["average-accuracy"] = _curves(found)
    return Outcome(checks(found, settings), tables, figures, problems)


def columns(found: Histories, split: str = "test") -> dict[str, Array]:
    """Return the measures of every method, shape (seeds, 5)."""
    return {
        name: np.array([measured(h, split) for h in runs.values()]) for name, runs in found.items()
    }


def _table(found: Histories, settings: Settings, split: str) -> Table:
    """Return Table 1 beside ours, on test samples with the floor that chance gives the worst."""
    rows = []
    titles = [title for one in MEASURES for title in (f"{one}, published", f"{one}, here")]
    words = f"IA's Table 1 on {split} samples: mean over seeds ± 95 %"
    for name, values in columns(found, split).items():
        row: list[Any] = [name, len(values)]
        for published, ours in zip(_published(settings, name), values.T, strict=True):
            row += [published, with_interval(ours, ".3f")]
        if split == "test":
            floors = [floor(*one, 0.2) / 100 for one in answers(found[name]).values()]
            row.append(with_interval(floors, ".3f"))
        rows.append(row)
    if split == "test":
        sizes = [n for runs in found.values() for _, one in answers(runs).values() for n in one]
        titles.append("floor of the worst 20 %")
        words += (f"; floor: if all were served equally ({min(sizes):g} to {max(sizes):g} test "
                  "samples a client)")  # fmt: skip
    return Table(words, ("method", "seeds", *titles), rows)


def _published(settings: Settings, method: str) -> Sequence[float]:
    numbers: Sequence[float] = settings["published"][method.partition(",")[0]]
    return numbers


def _lorenz(found: Histories, group: Sequence[str], title: str) -> str:
    """Draw y - x/2 over x, as the paper's Fig. 4 does, with the mean over seeds."""
    lines = {}
    for name in (one for one in group if one in found):
        curves = [lorenz_curve(per_client(h, "loss", "test")) for h in found[name].values()]
        x = np.linspace(0, 1, 101)
        y = np.array([np.interp(x, a, b) for a, b in curves]) - x / 2
        lines[name.partition(",")[0]] = Line(x, y.mean(0))
    return figure(
        lines, title=f"Lorenz curves, {title}",
        x_label="fraction of clients, smallest losses first", y_label="share of the losses - x/2",
    )  # fmt: skip


def _curves(found: Histories) -> str:
    lines = {}
    for name, runs in found.items():
        series = [history.series("accuracy", "test") for history in runs.values()]
        values = 100 * np.array([np.nanmean(v, axis=1) for _, v in series])
        lines[name.replace(", by epochs", " (J)")] = Line.of_seeds(series[0][0], values)
    return figure(lines, title="Average over clients", x_label="round",
                  y_label="average test accuracy, %")  # fmt: skip


# -- checks -----------------------------------------------------------------------------------


def checks(found: Histories, settings: Settings) -> list[Check]:
    """Compare the order of the six methods, then every number, with the paper's."""
    values, out = columns(found), []
    for title, group in settings["groups"].items():
        here = {name: values[name] for name in group if name in values}
        ours = next((name for name in here if name.partition(",")[0] == OURS), None)
        best = next((n for n in here if n.partition(",")[0] == settings["highest_worst"]), None)
        for name, column, words in (
            (ours, UNFAIRNESS, "the smallest relative unfairness index"),
            (ours, GINI, "the smallest Gini coefficient"),
            (ours, AVERAGE, "the best average accuracy"),
            (best, WORST, "the best worst-20 % accuracy"),
        ):
            if name is not None and len(here) > 1:
                out.append(_first(here, name, column, words, title))
    out += [_number_check(name, values[name], settings) for name in values]
    return out


def _first(here: Mapping[str, Array], name: str, column: int, words: str, title: str) -> Check:
    """Check that a method comes first of the six in a measure, in the mean over seeds."""
    sign = 1.0 if words.startswith("the best") else -1.0
    means = {one: float(v[:, column].mean()) for one, v in here.items()}
    others = [one for one in here if one != name]
    rival = max(others, key=lambda one: sign * means[one])
    shown = ", ".join(f"{one.partition(',')[0]} {value:.3f}" for one, value in means.items())
    return Check(
        f"{name.partition(',')[0]} has {words} of the six",
        f"{SOURCE}; {title}",
        f"{shown}; {_paired(here[name][:, column], here[rival][:, column], rival)}",
        sign * means[name] >= sign * means[rival],
    )


def _paired(ours: Array, theirs: Array, rival: str) -> str:
    if len(ours) != len(theirs):
        return f"not paired with {rival}: runs failed"
    change = paired_difference(ours, theirs)
    shown = with_limits(change, form="+.3f")
    return f"less {rival.partition(',')[0]} within seeds: {shown}"


def outside(values: Array, published: Sequence[float]) -> list[str]:
    r"""Return the measures whose published value one more seed would not have given.

    That is beyond :math:`\bar v \pm t_{s-1}\,\mathrm{sd}\,\sqrt{1 + 1/s}` at 95 %, s the number of
    seeds: the paper's table shows one number a method, so it is compared as a single run.
    """
    out = []
    for name, number, ours in zip(MEASURES, published, values.T, strict=True):
        limits = mean_interval(ours)
        half = (limits.upper - limits.estimate) * math.sqrt(len(ours) + 1)
        if not abs(number - limits.estimate) <= half:
            out.append(name)
    return out


def _number_check(method: str, values: Array, settings: Settings) -> Check:
    published = _published(settings, method)
    pairs = zip(MEASURES, published, values.T, strict=True)
    wrong = outside(values, published)
    return Check(
        f"{method}: " + ", ".join(f"{m} {v}" for m, v in zip(MEASURES, published, strict=True)),
        SOURCE,
        ", ".join(f"{m} {with_interval(ours, '.3f')}" for m, _, ours in pairs),
        not wrong and len(values) > 1,
        _why(wrong, len(values)),
    )


def _why(wrong: Sequence[str], seeds: int) -> str:
    if seeds < 2:
        return "one seed shows no spread"
    return f"outside the spread of seeds: {', '.join(wrong)}" if wrong else ""
