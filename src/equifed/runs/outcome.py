"""After the choice: solve it on all rows but test rows, measure, and say what was gained."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Losses
from equifed.contract.evaluation import Details, Hits
from equifed.contract.streams import Stream
from equifed.data.curves import bend, find_lines
from equifed.data.describe import Table
from equifed.data.federation import Federation
from equifed.engines.evaluate import describe_client, gives_probabilities
from equifed.metrics.metric import Metric, find_metric
from equifed.metrics.reducers import worst_fraction
from equifed.models.curvature import find_places
from equifed.models.flat import FlatModel
from equifed.models.predictor import Predictor
from equifed.report.methods import Scale
from equifed.report.verdict import compare_federation
from equifed.runs.alone import Alone, build_linear, measure_models, score_samples, solve_each
from equifed.runs.build import has_rare_class
from equifed.runs.candidates import ALONE, BASE, Choice, Score, model_for, read_score, solve
from equifed.runs.decisions import add_decisions
from equifed.runs.held_out import pool
from equifed.training.history import History

LEVEL = 0.05
"""Gains that chance alone would give more often than this are called chance."""
NO_TEST = "There are no test rows, so what the choice brings is not known."


def finish(
    data: Federation, choice: Choice, thresholds: Losses
) -> tuple[str, list[dict[str, Any]], dict[str, History]]:
    """Return what was gained, a row for every kind of candidate, and the runs of all of them."""
    whole, split = pool(data), "train" if data.test is None else "test"
    wanted = {**choice.best, choice.name: choice.point}
    bent = whole if choice.bent is None else bend(whole, choice.bent)
    given = {name: bent if point.curves else whole for name, point in wanted.items()}
    runs = {name: next(solve(given[name], [p], (split,))) for name, p in wanted.items()}
    alone, pairs = None, []
    if ALONE in choice.scores:
        pairs = solve_alone(whole, choice.alone_l2)
        if choice.point.curves:  # own models are lines: in the chosen one's columns
            pairs, whole = widen_models(pairs, bent), bent
        alone = measure_alone(whole, pairs, choice, split)
        replace_models(runs[choice.name], whole, pairs, choice.keepers, split)
        alone[0].add_to(runs[choice.name])
    own = np.where(np.isin(data.names, choice.keepers), np.nan, thresholds)
    add_decisions(runs[choice.name], given[choice.name], split, own)
    apart = np.isin(data.names, data.find_one_class())  # alone they always answer their class
    rows = list_rows(choice, runs, None if alone is None else alone[1], split, apart)
    if has_rare_class(whole):
        add_auroc(rows, runs, whole, pairs, split)
    if data.test is None:
        return NO_TEST, rows, runs
    mine, base = (
        score_rows(given[k], cast(Predictor, runs[k].predictor()), split)
        for k in (choice.name, BASE)
    )
    scale = Scale(main_metric(runs[BASE]).name, split)
    all_alone, _ = compare_federation(runs[choice.name], scale)  # as the report has it
    return describe_gain(choice, runs, split, tell_apart(mine, base), bool(all_alone)), rows, runs


def solve_alone(data: Federation, l2s: Losses) -> list[tuple[FlatModel, Tensor]]:
    """Return every client's own model with its penalty."""
    linear, strengths = build_linear(data, *model_for(data)), sorted(set(l2s.tolist()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = solve_each(linear, data, strengths)
    return [(linear, found[strengths.index(v), i]) for i, v in enumerate(l2s.tolist())]


def widen_models(
    pairs: Sequence[tuple[FlatModel, Tensor]], bent: Federation
) -> list[tuple[FlatModel, Tensor]]:
    """Return the same models for the columns of a federation with bends, which count nothing."""
    assert bent.preparation is not None
    linear = build_linear(bent, *model_for(bent))
    lines, out = [*find_lines(bent.preparation), -1], []
    for model, x in pairs:
        wide = x.new_zeros(linear.size)
        wide[find_places(linear)[:, lines]] = x[find_places(model)]
        out.append((linear, wide))
    return out


def measure_alone(
    data: Federation, pairs: Sequence[tuple[FlatModel, Tensor]], choice: Choice, split: str
) -> tuple[Alone, Score]:
    """Return own models as a report compares them, and their scores."""
    one_class = tuple(data.find_one_class())
    record, samples = measure_models(data, pairs, one_class, split=split)
    plain, losses = (measure_models(data, pairs, (), m, split)[0].values for m in (None, "loss"))
    how = "own models by Newton's method, l2 chosen on held-out rows"
    if one_class:
        how += f"; one class in training, shown with it and not compared: {', '.join(one_class)}"
    told = Alone(record, losses, choice.alone_l2, one_class, how, samples, data)
    return told, Score(losses, plain)


def replace_models(
    history: History, data: Federation, pairs: Sequence[tuple[FlatModel, Tensor]],
    keepers: Sequence[str], split: str,
) -> None:  # fmt: skip
    """Give some clients their own model in place of the shared one, and measure it."""
    if not keepers:
        return
    predictor, parts = cast(Predictor, history.predictor()), []
    for name, (linear, x) in zip(data.names, pairs, strict=True):
        held = dict(predictor.module_for(name).named_parameters())
        mine = linear.unflatten(x) if name in keepers else {k: held[k] for k in linear.shapes}
        parts.append({k: p.detach().to(torch.float64) for k, p in mine.items()})
    own = {k: torch.stack([part[k] for part in parts]) for k in parts[0]}
    history.own, history.trained = own, replace(predictor, own=own)
    history.provenance["own"] = list(own)
    for name in keepers:
        i = data.names.index(name)
        if data.splits()[split].sizes[i]:
            _measure_again(history, data, *pairs[i], i, split)


def _measure_again(
    history: History, data: Federation, linear: FlatModel, x: Tensor, i: int, split: str
) -> None:
    """Put the numbers of one client's own model into a history."""
    part = data.splits()[split]
    scores = score_samples(data, linear, x, *part.client(i))
    kinds: list[Metric] = []
    for k, record in enumerate(history.metrics):
        if record.split == split:
            kind, values = find_metric(record.metric), record.values.copy()
            values[i] = kind.measure(scores.targets, scores.answer(kind.needs))
            history.metrics[k] = replace(record, values=values)
            kinds.append(kind)
    if split in history.hits:
        correct, mine = history.hits[split].correct.copy(), slice(*part.offsets[i : i + 2])
        correct[mine] = scores.answer("prediction") == scores.targets
        history.hits[split] = Hits(correct, history.hits[split].checksums)
    if history.details is not None and history.details.split == split:
        stream = Stream(0).at("details", data.names[i], split)
        sure = data.classes is not None and gives_probabilities(linear.loss)
        clients = list(history.details.clients)
        clients[i] = describe_client(scores, kinds, part.client_groups(i), stream, sure)
        history.details = Details(split, tuple(clients))


# -- numbers ----------------------------------------------------------------------------------


def list_rows(
    choice: Choice, runs: dict[str, History], alone: Score | None, split: str, apart: Any = False
) -> list[dict[str, Any]]:
    """Return a row for every kind of candidate; clients ``apart`` are not compared with alone."""
    kind = main_metric(runs[BASE])
    last = {k: read_score(run, split) for k, run in runs.items()}
    last |= {} if alone is None else {ALONE: alone}
    rows = []
    for name, score in last.items():
        point = {**choice.best, choice.name: choice.point}.get(name)
        row: dict[str, Any] = {"candidate": name, "chosen": name == choice.name}
        row |= {"settings": "" if point is None else point.settings, "metric": kind.name}
        held = choice.scores[name], choice.scores.get(ALONE)
        for label, mine, own in (("validation", *held), (split, score, alone)):
            row[label] = {"loss": mine.mean, **summarise(mine.metric, kind)}
            if own is not None and name != ALONE:
                row[label]["better_alone"] = int(
                    (~np.asarray(apart) & (own.loss < mine.loss)).sum()
                )
        rows.append(row)
    return rows


def add_auroc(
    rows: list[dict[str, Any]], runs: dict[str, History], data: Federation,
    pairs: Sequence[tuple[FlatModel, Tensor]], split: str,
) -> None:  # fmt: skip
    """Put the mean AUROC beside accuracy, which says little where a class is rare."""
    for row in rows:
        run = runs.get(row["candidate"])
        own = None if run else measure_models(data, pairs, (), "auroc", split)[0]
        record = run.last("auroc", split) if run else own
        known = np.full(1, math.nan) if record is None else record.values
        row[split]["auroc"] = summarise(known, find_metric("auroc"))["average"]


def main_metric(run: History) -> Metric:
    """Return what a run is about."""
    shown = run.main_metric()
    return find_metric("loss" if shown is None else shown[0])


def summarise(values: Losses, kind: Metric) -> dict[str, float]:
    """Return average and worst fifth of the clients that have a value."""
    some = values[np.isfinite(values)]
    if not len(some):
        return {"average": math.nan, "worst_fifth": math.nan}
    fifth = worst_fraction(some, 0.2, higher_is_better=kind.higher_is_better)
    return {"average": float(some.mean()), "worst_fifth": float(fifth)}


def tabulate(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of a fit as a table."""
    kind = find_metric(rows[0]["metric"])
    splits = [k for k, v in rows[0].items() if isinstance(v, dict)]
    header, lines = ["candidate"], []
    for split in splits:
        if "average" not in rows[0][split]:  # under privacy
            header.append(f"{split} loss, noised")
            continue
        header += [f"{split} {kind.label}", "worst fifth", "better alone"]
        header += ["AUROC"] if "auroc" in rows[0][split] else []
    for row in rows:
        cells = [row["candidate"] + (" *" if row["chosen"] else "")]
        for split in splits:
            told = row[split]
            if "average" not in told:
                cells.append(f"{told['loss']:.4g}")
                continue
            cells += [kind.write(told[k]) for k in ("average", "worst_fifth")]
            cells.append(str(told.get("better_alone", "")))
            cells += [find_metric("auroc").write(told["auroc"])] if "auroc" in told else []
        lines.append(tuple(cells))
    return Table("* chosen, on validation rows", tuple(header), lines)


def score_rows(data: Federation, predictor: Predictor, split: str) -> list[Losses]:
    """Return the loss of every row, by client."""
    linear, part, found = build_linear(data, *model_for(data)), data.splits()[split], []
    for i, name in enumerate(data.names):
        x = linear.flatten(predictor.module_for(name))
        found.append(score_samples(data, linear, x, *part.client(i)).losses)
    return found


def tell_apart(ours: Sequence[Losses], theirs: Sequence[Losses]) -> float:
    """Return how likely rows as different as these are if ours are not served better.

    The mean over clients of the mean differences of their rows, held against its standard error:
    it is about these clients, and other rows of theirs.

    >>> rng = np.random.default_rng(0)
    >>> theirs = [rng.random(50) for _ in range(4)]
    >>> tell_apart([row - 0.1 for row in theirs], theirs) < 0.01 < tell_apart(theirs, theirs)
    True
    """
    gains = [b - a for a, b in zip(ours, theirs, strict=True) if len(a)]
    freedom = sum(len(g) - 1 for g in gains)
    mean = float(np.mean([g.mean() for g in gains])) if gains else 0.0
    if mean <= 0 or not freedom:
        return 1.0
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in gains) / freedom
    error = math.sqrt(within * sum(1 / len(g) for g in gains)) / len(gains)
    return NormalDist().cdf(-mean / error) if error > 0 else 0.0


def describe_gain(
    choice: Choice, runs: dict[str, History], split: str, unlike: float, all_alone: bool
) -> str:
    """Say what was gained, for whom, what was given up, and whether own models would do better.

    ``unlike`` is how likely the gain is by chance.
    """
    kind, chance = main_metric(runs[BASE]), choice.name != BASE and unlike >= LEVEL
    mine, base = (read_score(runs[k], split).metric for k in (choice.name, BASE))
    now, then = ({k: kind.write(v) for k, v in summarise(v, kind).items()} for v in (mine, base))
    told, whom = [], "Worst-served " + ("fifth" if len(mine) > 5 else "client")
    if all_alone:
        told.append(
            "You would all be better off alone: on average over the clients own models serve "
            "better, beyond chance."
        )
    elif choice.name == BASE:
        own = any(point.own_l2 is not None for point in choice.best.values())
        told.append(
            "One shared model serves all clients alike here: "
            f"{'own parts and ' if own else ''}fair objectives gained nothing on held-out rows."
        )
    elif chance:
        told.append("One shared model serves all clients as well: the difference is within chance.")
    if choice.name == BASE:
        told.append(
            f"Average {split} {kind.label} {now['average']}, {whom.lower()} {now['worst_fifth']}."
        )
        return " ".join(told)
    with np.errstate(invalid="ignore"):
        change = kind.sign * (mine - base)
    told.append(
        f"{whom} of {len(change):,}: {then['worst_fifth']} to {now['worst_fifth']}, average "
        f"{then['average']} to {now['average']} ({split} {kind.label}, against one model for the "
        f"average, solved alike{', a difference within chance' if chance and all_alone else ''}"
        f"); clients better served: {int((change > 0).sum())}, worse: {int((change < 0).sum())}."
    )
    return " ".join(told)
