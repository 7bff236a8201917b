"""After the choice: solve it on all rows but test rows, measure, and say what was gained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from equifed.contract import Losses
from equifed.contract.evaluation import Details
from equifed.data.curves import bend, find_lines
from equifed.data.describe import Table
from equifed.data.federation import Federation
from equifed.metrics import Metric, find_metric, worst_fraction
from equifed.models.curvature import find_places
from equifed.models.flat import FlatModel
from equifed.models.losses import DERIVATIVES
from equifed.models.predictor import Predictor, class_scores
from equifed.report.methods import Scale
from equifed.report.verdict import compare_federation
from equifed.runs import candidates
from equifed.runs.alone import Alone, build_linear, solve_each
from equifed.runs.candidates import ALONE, BASE, Choice, Point
from equifed.runs.linear_paths import LinearPaths, predict_split
from equifed.runs.load import measure_again
from equifed.training.history import History

LEVEL = 0.05  # gains that chance alone would give more often than this are called chance
Array: TypeAlias = NDArray[Any]
# What was gained, a row for every kind of candidate, and the runs of all of them
Found: TypeAlias = tuple[str, list[dict[str, Any]], dict[str, History]]


def finish(data: Federation, choice: Choice, thresholds: Losses) -> Found:
    """Solve the best of every kind again, and the clients' own models, and read test rows."""
    whole, split = candidates.pool(data), "train" if data.test is None else "test"
    wanted = {**choice.best, choice.name: choice.point}
    bent = whole if choice.bent is None else bend(whole, choice.bent)
    given = {name: bent if point.curves else whole for name, point in wanted.items()}
    runs = {k: next(candidates.solve(given[k], [p], (split,))) for k, p in wanted.items()}
    mine, alone = runs[choice.name], None
    if ALONE in choice.scores:
        linear, strengths = build_linear(whole, *choice.model), np.unique(choice.alone_l2)
        solved, _ = solve_each(linear, whole, strengths.tolist())
        rows = solved[np.searchsorted(strengths, choice.alone_l2), np.arange(len(data))]
        if choice.point.curves:  # own models are lines: bends of the chosen one's columns are 0
            assert bent.preparation is not None
            wide, lines = build_linear(bent, *choice.model), find_lines(bent.preparation)
            widened = rows.new_zeros(len(rows), wide.size)
            widened[:, find_places(wide)[:, [*lines, -1]]] = rows[:, find_places(linear)]
            whole, linear, rows = bent, wide, widened
        alone = give_own(mine, whole, linear, rows, data.names, split)
        how = "own models by Newton's method, l2 chosen on held-out rows"
        given_l2 = candidates.read_score(alone, split).loss, choice.alone_l2
        told = Alone.measure(whole, linear, rows, *given_l2, how, split=split)
        if choice.keepers:
            mine = runs[choice.name] = give_own(mine, whole, linear, rows, choice.keepers, split)
        told.add_to(mine)
    own = np.where(np.isin(data.names, choice.keepers), math.nan, thresholds)
    add_decisions(mine, given[choice.name], split, own)
    return conclude(choice, runs, given, alone)


def finish_trained(
    data: Federation, choice: Choice, runs: Mapping[Point, History], metrics: Sequence[str] = ()
) -> Found:
    """Read test rows with the best of every kind as they were trained: none is solved again."""
    best = {family: runs[point] for family, point in choice.best.items()}
    for run in best.values():
        measure_again(run, data, "train" if data.test is None else "test", metrics)
    return conclude(choice, best, dict.fromkeys(best, data))


def give_own(
    history: History, data: Federation, linear: FlatModel, rows: Tensor, names: Sequence[str],
    split: str,
) -> History:  # fmt: skip
    """Return a run in which some clients have their own model in the place of the shared one."""
    predictor = history.predictor()

    def find(name: str, x: Tensor) -> dict[str, Tensor]:
        if name in names:
            return linear.unflatten(x)
        return dict(predictor.module_for(name).named_parameters())

    models = [*map(find, data.names, rows)]
    own = {k: torch.stack([m[k].detach().double() for m in models]) for k in linear.shapes}
    made: Any = {"metrics": [*history.metrics], "events": [*history.events]}
    made["provenance"] = {**history.provenance, "own": [*own]}
    found = replace(history, own=own, trained=replace(predictor, own=own), **made)
    measure_again(found, data, split, ["auroc"] if history.last("auroc", split) else [])
    return found


# -- what predictions are worth at every client, and what thresholds of their own would change -----


def choose_thresholds(folds: Sequence[Federation], point: Point) -> Losses:
    """Return the threshold of probability that is right most often on each client's held-out rows.

    The model is solved without these rows. NaN where there are fewer than ten, and where there are
    not two classes.
    """
    found = np.full(len(folds[0]), math.nan)
    if folds[0].classes != 2 or not LinearPaths.serves(folds[0]):
        return found
    told = []
    for fold in folds:
        at, held = LinearPaths(fold).solve(point.l2, point.own_l2, point.rho), fold.splits()
        part = held["validation"]
        told.append((predict_split(fold, at, "validation"), part.targets, part.owners()))
    scores, targets, owner = map(np.concatenate, zip(*told, strict=True))
    for i in range(len(found)):
        mine = owner == i
        if mine.sum() >= candidates.ENOUGH:
            found[i] = find_threshold(scores[mine], targets[mine])
    return found


def find_threshold(scores: Array, targets: Array) -> float:
    """Return the best threshold of probability; of equally good ones the nearest to 0.5.

    >>> bool(find_threshold(np.arange(4.0), np.array([0, 0, 1, 1])) == expit(1.5))
    True
    """
    order = np.argsort(scores)
    ranked, second = scores[order], targets[order]
    levels = np.unique(ranked)
    middle = (levels[1:] + levels[:-1]) / 2
    cuts = np.concatenate([[0.0, ranked[0] - 1, ranked[-1] + 1], middle])
    below = np.searchsorted(ranked, cuts, "right")
    firsts = np.concatenate([[0], np.cumsum(1 - second)])
    right = firsts[below] + second.sum() - (below - firsts[below])
    best = cuts[right == right.max()]
    return float(expit(best[np.abs(best).argmin()]))


def add_decisions(history: History, data: Federation, split: str, thresholds: Losses) -> None:
    """Put into the details of a run what its predictions are worth at every client."""
    predictor, part = history.predictor(), data.splits()[split]
    if history.details is None or history.details.split != split or part.targets.ndim > 1:
        return
    if data.classes not in (None, 2):
        return
    outputs, clients = _answer(predictor, data, split), list(history.details.clients)
    for i, (detail, rows) in enumerate(zip(history.details.clients, part.rows(), strict=True)):
        if detail is not None:
            told = _describe(predictor, outputs[rows], part.targets[rows], float(thresholds[i]))
            clients[i] = replace(detail, decision={k: v for k, v in told.items() if v == v})
    history.details = Details(split, tuple(clients))


def _describe(predictor: Predictor, outputs: Array, targets: Array, cut: float) -> dict[str, float]:
    """Return mean prediction and mean target, their standard error, and accuracies."""
    if predictor.classes is None:
        made, there = predictor.in_units(outputs[:, 0]), predictor.in_units(targets)
        spread = float(np.std(made - there, ddof=1)) if len(there) > 1 else math.nan
        error = spread / math.sqrt(len(there))
        return {"predicted": float(made.mean()), "observed": float(there.mean()), "error": error}
    chance = predictor.to_chances(class_scores(outputs))[:, 1]
    told = {"predicted": float(chance.mean()), "observed": float(targets.mean())}
    told["error"] = math.sqrt(float((chance * (1 - chance)).sum())) / len(chance)
    told |= {"threshold": cut, "accuracy": float(((chance > 0.5) == targets).mean())}
    moved = math.nan if math.isnan(cut) else float(((chance > cut) == targets).mean())
    return {**told, "accuracy_at_threshold": moved}


def _answer(predictor: Predictor, data: Federation, split: str) -> Array:
    """Return the outputs for all rows of a split."""
    part = data.splits()[split]
    owners = np.repeat(np.asarray(data.names, dtype=object), part.sizes)
    return predictor.answer_owners(part.inputs, owners.tolist())


# -- numbers ----------------------------------------------------------------------------------


def conclude(
    choice: Choice, runs: dict[str, History], given: dict[str, Federation],
    alone: History | None = None,
) -> Found:  # fmt: skip
    """Say what was gained; ``given`` has the data of every run, ``alone`` has own models."""
    data, mine = given[choice.name], runs[choice.name]
    split = "train" if data.test is None else "test"
    apart = np.isin(data.names, data.find_one_class())  # alone they always answer their class
    shown = runs if alone is None else {**runs, ALONE: alone}
    rows = list_rows(choice, shown, split, apart)
    if data.test is None:
        return "There are no test rows, so what the choice brings is not known.", rows, runs
    scored = (score_rows(given[k], runs[k].predictor(), split) for k in (choice.name, BASE))
    # as the report has it
    all_alone, _ = compare_federation(mine, Scale(main_metric(runs[BASE]).name, split))
    gain = describe_gain(choice, runs, split, tell_apart(*scored), bool(all_alone))
    return gain, rows, runs


def list_rows(
    choice: Choice, runs: Mapping[str, History], split: str, apart: Any = False
) -> list[dict[str, Any]]:
    """Return a row for every kind of candidate; clients ``apart`` are not compared with alone."""
    kind, rows = main_metric(runs[BASE]), []
    last = {k: candidates.read_score(run, split) for k, run in runs.items()}
    for name, score in last.items():
        point = {**choice.best, choice.name: choice.point}.get(name)
        row: dict[str, Any] = {"candidate": name, "chosen": name == choice.name}
        row |= {"settings": "" if point is None else point.settings, "metric": kind.name}
        held = choice.scores[name], choice.scores.get(ALONE)
        for label, mine, own in (("validation", *held), (split, score, last.get(ALONE))):
            row[label] = {"loss": mine.mean}
            if label == split or not choice.noised:  # else nothing else was asked
                row[label] |= summarise(mine.metric, kind)
            if own is not None and name != ALONE:
                better = ~np.asarray(apart) & (own.loss < mine.loss)
                row[label]["better_alone"] = int(better.sum())
        if area := runs[name].last("auroc", split):  # accuracy says little of a rare class
            row[split]["auroc"] = summarise(area.values, find_metric("auroc"))["average"]
        rows.append(row)
    return rows


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
    kind, area = find_metric(rows[0]["metric"]), find_metric("auroc")
    columns = [("candidate", [row["candidate"] + " *" * row["chosen"] for row in rows])]
    for split in (key for key, told in rows[0].items() if isinstance(told, dict)):
        told = [row[split] for row in rows]
        if "average" not in told[0]:  # under privacy
            columns.append((f"{split} loss, noised", [f"{t['loss']:.4g}" for t in told]))
            continue
        columns.append((f"{split} {kind.label}", [kind.write(t["average"]) for t in told]))
        columns.append(("worst fifth", [kind.write(t["worst_fifth"]) for t in told]))
        columns.append(("better alone", [str(t.get("better_alone", "")) for t in told]))
        if "auroc" in told[0]:
            columns.append(("AUROC", [area.write(t["auroc"]) for t in told]))
    header, cells = zip(*columns, strict=True)
    return Table("* chosen, on validation rows", header, [*zip(*cells, strict=True)])


def score_rows(data: Federation, predictor: Any, split: str) -> list[Losses]:
    """Return the loss of every row, by client."""
    part, loss = data.splits()[split], predictor.loss
    assert loss is not None
    outputs = torch.as_tensor(_answer(predictor, data, split))
    losses = DERIVATIVES[loss].loss(outputs, torch.as_tensor(part.targets)).numpy()
    return [losses[rows] for rows in part.rows()]


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
    mine, base = (candidates.read_score(runs[k], split).metric for k in (choice.name, BASE))
    now, then = ({k: kind.write(v) for k, v in summarise(v, kind).items()} for v in (mine, base))
    whom, label = f"Worst-served {'fifth' if len(mine) > 5 else 'client'}", f"{split} {kind.label}"
    told = []
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
        told.append(f"Average {label} {now['average']}, {whom.lower()} {now['worst_fifth']}.")
        return " ".join(told)
    with np.errstate(invalid="ignore"):
        change = kind.sign * (mine - base)
    told.append(
        f"{whom} of {len(change):,}: {then['worst_fifth']} to {now['worst_fifth']}, average "
        f"{then['average']} to {now['average']} ({label}, against one model for the "
        f"average, solved alike{', a difference within chance' if chance and all_alone else ''}"
        f"); clients better served: {int((change > 0).sum())}, worse: {int((change < 0).sum())}."
    )
    return " ".join(told)
