"""RC-FL on three clients with one class of Fashion-MNIST each: who is served how well.

RC-FL's Section 6 prints kappa = 5 local steps, splits of 80, 10 and 10 % of each client's data, and
five trials; step sizes, alpha, q and batch size are not printed. They are chosen by the average
over the worst client and all clients of the accuracy on the validation samples. The paper has 7,000
images of each class; the package's 1,500 are used here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equifed.history import History
from equifed.metrics import mean_interval, paired_difference
from equifed.reproduce.drawing import Line, figure
from equifed.reproduce.experiment import Check, Context, Outcome, Table
from equifed.reproduce.running import Histories, chosen, run_variants

SOURCE = "RC-FL, Section 6 and Fig. 1 (no numbers in the text)"


def validation_score(history: History) -> float:
    """Return minus the mean of worst and average accuracy on the validation samples."""
    record = history.last("accuracy", "validation")
    assert record is not None
    return -float(record.values.min() + record.values.mean()) / 2


def run(context: Context) -> Outcome:
    """Choose every method's settings on validation samples, then compare test accuracies."""
    settings, variants, searched = context.settings, {}, []
    for method, variant in settings["methods"].items():
        axes = settings["grid"][method]
        variants[method], rows = chosen(
            context, method, variant, axes, validation_score, settings["tuning_seeds"]
        )
        for row in rows:
            shown = ", ".join(f"{k.rpartition('.')[2]} = {v}" for k, v in
                              zip(axes, row[1:-2], strict=True))  # fmt: skip
            searched.append([method, shown, -row[-2], row[-1]])
    found, problems = run_variants(context, variants, settings["seeds"])
    tables = {
        "accuracy": _table(found),
        "grid": Table("Choice on validation samples",
                      ("method", "settings", "worst and average, mean", ""), searched),
    }  # fmt: skip
    return Outcome(checks(found), tables, {"accuracy": _drawn(found)}, problems)


def _accuracies(found: Histories, method: str) -> Any:
    records = [history.last("accuracy", "test") for history in found[method].values()]
    return 100 * np.array([record.values for record in records if record is not None])


def _table(found: Histories) -> Table:
    names = next(h.names for runs in found.values() for h in runs.values())
    rows = []
    for method in found:
        values = _accuracies(found, method)
        row: list[Any] = [method, len(values)]
        per_seed = [*values.T, values.mean(1), values.min(1), values.max(1) - values.min(1)]
        for one in per_seed:
            limits = mean_interval(one)
            half = (limits.upper - limits.lower) / 2
            row.append(f"{limits.estimate:.1f}" + (f" ± {half:.1f}" if len(one) > 1 else ""))
        rows.append(row)
    columns = ("method", "seeds", *names, "average", "worst", "range")
    return Table("Test accuracy in %, mean over seeds ± 95 %", columns, rows)


def _drawn(found: Histories) -> str:
    lines = {}
    for method in found:
        values = _accuracies(found, method)
        lines[method] = Line([0, 1, 2], values.mean(0), values.min(0), values.max(0), dots=True)
    return figure(
        lines, title="Test accuracy of the three clients",
        x_label="0 T-shirt, 1 pullover, 2 shirt (band: all seeds)", y_label="test accuracy, %",
    )  # fmt: skip


def checks(found: Histories) -> list[Check]:
    """Compare with what the paper says about its Fig. 1."""
    ours, plain = (_accuracies(found, name) for name in ("RC-FL", "FedAvg"))
    ranges = {name: np.ptp(_accuracies(found, name), axis=1) for name in found}
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
    limits = f" ({change.lower:+.1f} to {change.upper:+.1f})" if len(ours) > 1 else ""
    out.append(
        Check(
            "RC-FL maintains roughly the same average accuracy",
            SOURCE,
            f"RC-FL less FedAvg within seeds: {change.estimate:+.1f} points{limits}",
            change.estimate > -2.0,
        )
    )
    return out
