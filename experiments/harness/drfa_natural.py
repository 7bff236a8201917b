"""DRFA on clients that nobody had to make: Adult (doctorate or not) and roles of Shakespeare.

DRFA's Section 6 names both data sets and leaves the results to an appendix that is not in the text
we have. What it claims in general is compared: the worst accuracy of the baselines in fewer rounds,
and the average accuracy of FedAvg kept. Models, step sizes and sizes are ours and are said in
``experiments/NAME/README.md``; every method's settings are chosen on validation samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from equifed.engines.in_process import InProcessClients
from equifed.metrics import Interval, mean_interval, paired_difference
from equifed.report.page import slug
from equifed.runs.config import RunConfig
from equifed.runs.run import build
from equifed.training.history import History
from experiments.harness.choice import accuracy_table, choose, validation_score
from experiments.harness.curves import drawn, rounds_to, series
from experiments.harness.experiment import Cell, Check, Context, Outcome, Table
from experiments.harness.running import Histories, run_variants

Array = NDArray[np.float64]
SOURCE = "DRFA, Section 6 and Fig. 2 (on Fashion-MNIST; no result on this data set in the text)"
SAME_LEVEL = 1.0
"""Points of accuracy by which DRFA may be behind and still be said to keep a level."""


def run(context: Context) -> Outcome:
    """Choose settings on validation samples, then compare rounds and accuracies on test samples."""
    variants, searched = choose(context, validation_score)
    found, problems = run_variants(context, variants, context.settings["seeds"])
    found = {name: runs for name, runs in found.items() if runs}
    measures = {
        "worst": lambda values: values.min(1),
        "average": lambda values: values.mean(1),
        "standard deviation": lambda values: values.std(1),
    }
    few = len(next(h.names for runs in found.values() for h in runs.values())) <= 5
    tables = {"accuracy": accuracy_table(found, measures, by_client=few)}
    out = checks(found)
    if context.settings.get("training"):
        losses = {m: final_losses(context, m, sorted(runs)) for m, runs in found.items()}
        tables["losses"] = losses_table(losses)
        note = "compare the worst client's losses on training and on test samples"
        out = [one if one.agrees else replace(one, why=note) for one in out] + [_trained(losses)]
    tables |= {"rounds": rounds_table(found), "grid": searched}
    figures = {
        "worst-accuracy": drawn(found, list(found), "worst", "Worst client"),
        "average-accuracy": drawn(found, list(found), "average", "Average over clients"),
        "standard-deviation": drawn(found, list(found), "deviation", "Spread over clients"),
    }
    return Outcome(out, tables, figures, problems)


def final_losses(context: Context, method: str, seeds: Sequence[int]) -> dict[str, Array]:
    """Return the clients' losses under the final models, shape (seeds, clients), by split."""
    out: dict[str, list[Array]] = {"train": [], "test": []}
    for seed in seeds:
        folder = context.out / "runs" / slug(method) / f"seed-{seed}"
        clients = build(RunConfig.read(folder / "config.toml")).clients
        parameters = History.load(folder).parameters
        assert isinstance(clients, InProcessClients) and parameters is not None
        x = torch.cat([parameters[name].reshape(-1) for name in clients.model.shapes])
        for found in clients.evaluate(x, tuple(out)):
            out[found.split].append(found.metrics["loss"])
    return {split: np.array(values) for split, values in out.items()}


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
    limits = f" ({change.lower:+.3f} to {change.upper:+.3f})" if len(ours) > 1 else ""
    return Check(
        "DRFA lowers the worst client's loss on the training samples below FedAvg's",
        "DRFA, problem (2), of which it is the solver",
        f"DRFA less FedAvg within {len(ours)} seeds: {change.estimate:+.3f}{limits}",
        change.estimate < 0,
    )


def rounds_to_level(ours: History, theirs: History) -> tuple[float, float]:
    """Return when both first have the worst test accuracy that ``theirs`` has at its end."""
    level = series(theirs, "worst")[1][-1] / 100
    return rounds_to(ours, level), rounds_to(theirs, level)


def _rounds(found: Histories, other: str) -> dict[int, tuple[float, float]]:
    """Return, for each seed, the rounds of DRFA and of the other method to the other's level."""
    both = sorted(set(found["DRFA"]) & set(found[other]))
    return {seed: rounds_to_level(found["DRFA"][seed], found[other][seed]) for seed in both}


def rounds_table(found: Histories) -> Table:
    """Return how soon DRFA has the worst accuracy that each other method has at its end."""
    rows: list[list[Cell]] = []
    for other in found:
        if other != "DRFA":
            for seed, (ours, theirs) in _rounds(found, other).items():
                level = float(series(found[other][seed], "worst")[1][-1])
                reached = None if np.isinf(ours) else ours
                rows.append([other, seed, level, reached, theirs])
    columns = ("method", "seed", "its worst accuracy at the end, %", "DRFA has it in round",
               "the method first had it in round")  # fmt: skip
    return Table("Rounds to the worst accuracy of the other methods", columns, rows)


def checks(found: Histories) -> list[Check]:
    """Compare with what the paper says of DRFA in general."""
    out = [_sooner(found, other) for other in ("AFL", "q-FedAvg") if other in found]
    for other in [name for name in ("AFL", "q-FedAvg", "FedAvg") if name in found]:
        change = _end(found, other, "worst")
        more = other == "FedAvg"
        out.append(
            Check(
                f"DRFA ends {'above' if more else 'at the level of'} the worst accuracy of {other}",
                SOURCE,
                _points(change, other, len(found[other])),
                change.estimate > (0 if more else -SAME_LEVEL),
            )
        )
    change = _end(found, "FedAvg", "average")
    out.append(
        Check(
            "DRFA keeps the level of FedAvg's average accuracy",
            "DRFA, Fig. 3 (training accuracy on Fashion-MNIST there, test accuracy here)",
            _points(change, "FedAvg", len(found["FedAvg"])),
            change.estimate > -SAME_LEVEL,
        )
    )
    return out


def _sooner(found: Histories, other: str) -> Check:
    pairs = np.array(list(_rounds(found, other).values()))
    ours, theirs = np.median(pairs, axis=0)
    last = max(h.rounds[-1].round for h in found["DRFA"].values())
    said = f"round {ours:g}" if np.isfinite(ours) else f"not in {last} rounds"
    return Check(
        f"DRFA needs fewer rounds than {other} for the same worst accuracy",
        SOURCE,
        f"the worst accuracy that {other} has at its end: DRFA {said}, {other} round {theirs:g} "
        f"(medians of {len(pairs)} seeds)",
        bool(ours < theirs),
    )


def _end(found: Mapping[str, Mapping[int, History]], other: str, what: str) -> Interval:
    """Return DRFA's accuracy at the end less the other method's, within seeds."""
    both = sorted(set(found["DRFA"]) & set(found[other]))
    ours, theirs = (
        [float(series(found[name][seed], what)[1][-1]) for seed in both] for name in ("DRFA", other)
    )
    return paired_difference(ours, theirs)


def _points(change: Interval, other: str, seeds: int) -> str:
    limits = f" ({change.lower:+.1f} to {change.upper:+.1f})" if seeds > 1 else ""
    return f"DRFA less {other} within {seeds} seeds: {change.estimate:+.1f} points{limits}"
