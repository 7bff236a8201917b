"""RC-FL on three clients with one class of Fashion-MNIST each: who is served how well.

RC-FL's Section 6 prints kappa = 5 local steps, splits of 80, 10 and 10 % of each client's data, and
five trials; step sizes, alpha, q and batch size are not printed. They are chosen by the average
over the worst client and all clients of the accuracy on the validation samples. The paper has 7,000
images of each class; the package's 1,500 are used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from experiments.harness.choice import choose
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Table
from experiments.harness.measures import (
    accuracy_table,
    percentages,
    validation_score,
    with_limits,
)
from experiments.harness.running import Histories, run_variants

from equifed.metrics import paired_difference
from equifed.objectives import (
    HeterogeneousCVaR,
    rc_fl_bound,
    rc_fl_bound_by_client,
    weighted_massart,
)

SOURCE = "RC-FL, Section 6 and Fig. 1 (no numbers in the text)"


def run(context: Context) -> Outcome:
    """Choose every method's settings on validation samples, then compare test accuracies."""
    variants, searched = choose(context, lambda history: validation_score(history, tail=0))
    found, problems = run_variants(context, variants, context.settings["seeds"])
    measures = {
        "average": lambda values: values.mean(1),
        "worst": lambda values: values.min(1),
        "range": lambda values: np.ptp(values, axis=1),
    }
    tables = {
        "accuracy": accuracy_table(found, measures, by_client=True, fraction=1 / 3),
        "generalisation": generalisation(found, variants["RC-FL"]["algorithm"]["tails"]),
        "grid": searched,
    }
    return Outcome(checks(found), tables, {"accuracy": _drawn(found)}, problems)


def generalisation(found: Histories, tails: Sequence[float]) -> Table:
    """Return how large RC-FL's risk of each method can truly be, by RC-FL's Theorems 3 and 4.

    All models of all seeds are a finite class, chosen without the test samples, whose errors are
    the losses. The risk is the heterogeneous CVaR with the tails that RC-FL trained with.
    """
    runs = [history for by_seed in found.values() for history in by_seed.values()]
    record = runs[0].last("accuracy", "test")
    assert record is not None
    sizes, n = record.sizes, len(record.sizes)
    shares = np.full(n, 1 / n)
    half = {"models": len(runs), "bound": 0.5}  # errors lie in [0, 1]
    whole = weighted_massart(shares / np.array(tails), sizes, **half)
    each = [weighted_massart([1.0], [m], **half) for m in sizes]
    rows: list[list[Cell]] = []
    for method, by_seed in found.items():
        risks = [HeterogeneousCVaR(tuple(tails)).value(1 - p / 100) for p in percentages(by_seed)]
        third = [rc_fl_bound(r, whole, shares, tails, sizes) for r in risks]
        fourth = [rc_fl_bound_by_client(r, each, shares, tails, sizes) for r in risks]
        rows.append([method, *(float(np.mean(v)) for v in (risks, third, fourth))])
    columns = ("method", "risk on test samples", "at most (Theorem 3)", "at most (Theorem 4)")
    title = f"Generalisation bound on RC-FL's risk, all {len(runs)} models at once (95 %)"
    return Table(title, columns, rows)


def _drawn(found: Histories) -> str:
    lines = {}
    for method in found:
        lines[method] = Line.of_seeds([0, 1, 2], percentages(found[method]), dots=True)
    return figure(
        lines, title="Test accuracy of the three clients",
        x_label="0 T-shirt, 1 pullover, 2 shirt (band: all seeds)", y_label="test accuracy, %",
    )  # fmt: skip


def checks(found: Histories) -> list[Check]:
    """Compare with what the paper says about its Fig. 1."""
    ours, plain = (percentages(found[name]) for name in ("RC-FL", "FedAvg"))
    ranges = {name: np.ptp(percentages(found[name]), axis=1) for name in found}
    others = [name for name in found if name != "RC-FL"]
    narrow = all(ranges["RC-FL"].mean() <= ranges[name].mean() for name in others)
    spread = ", ".join(f"{name} {value.mean():.1f}" for name, value in ranges.items())
    out = [
        Check(
            "RC-FL achieves fairer, almost identical accuracy across the clients",
            SOURCE,
            f"range over clients, mean over {len(ours)} seeds, in points: {spread}",
            bool(narrow and ranges["RC-FL"].mean() <= 5.0),
        )
    ]
    change = paired_difference(ours.mean(1), plain.mean(1))
    out.append(
        Check(
            "RC-FL maintains roughly the same average accuracy",
            SOURCE,
            f"RC-FL less FedAvg within seeds: {with_limits(change, ' points')}",
            change.estimate > -2.0,
        )
    )
    return out
