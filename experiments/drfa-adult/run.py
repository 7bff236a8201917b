"""DRFA on Adult with two clients, doctorate or not, and the losses that it trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from experiments.harness.experiment import Cell, Check, Context, Outcome, Table
from experiments.harness.measures import is_published, per_client, with_limits
from experiments.harness.natural import compare
from numpy.typing import NDArray

from equifed import History
from equifed.metrics import mean_interval, paired_difference

Array = NDArray[np.float64]


def run(context: Context) -> Outcome:
    """Compare the methods, and the losses of the final models on training and test samples."""
    outcome, found = compare(context)
    losses = {
        m: {split: final_losses(runs, split) for split in ("train", "test")}
        for m, runs in found.items()
        if is_published(m)
    }
    note = "compare the worst client's losses on training and on test samples"
    checks = [one if one.agrees else replace(one, why=note) for one in outcome.checks]
    tables = {**outcome.tables, "losses": losses_table(losses)}
    return replace(outcome, checks=[*checks, _trained(losses)], tables=tables)


def final_losses(runs: Mapping[int, History], split: str) -> Array:
    """Return the clients' losses under the final models, shape (seeds, clients)."""
    return np.array([per_client(runs[seed], "loss", split) for seed in sorted(runs)])


def losses_table(losses: Mapping[str, Mapping[str, Array]]) -> Table:
    """Return the worst loss on training samples, which DRFA minimises, and on test samples."""
    rows: list[list[Cell]] = []
    for method, by_split in losses.items():
        row: list[Cell] = [method]
        for values in by_split.values():
            limits = mean_interval(values.max(1))
            half = (limits.upper - limits.lower) / 2 if len(values) > 1 else None
            row += [limits.estimate, half]
        rows.append(row)
    columns = ("method", "training samples", "± 95 %", "test samples", "± 95 %")
    return Table("Loss of the worst client at the end", columns, rows)


def _trained(losses: Mapping[str, Mapping[str, Array]]) -> Check:
    ours, theirs = (losses[name]["train"].max(1) for name in ("DRFA", "FedAvg"))
    change = paired_difference(ours, theirs)
    shown = with_limits(change, form="+.3f")
    return Check(
        "DRFA lowers the worst client's loss on the training samples below FedAvg's",
        "DRFA, problem (2), of which it is the solver",
        f"DRFA less FedAvg within {len(ours)} seeds: {shown}",
        change.estimate < 0,
    )
