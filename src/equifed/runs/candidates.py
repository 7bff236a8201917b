"""What :func:`equifed.fit` tries: linear models along paths of strengths, on rows held out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.arrays import Losses
from equifed.data.curves import bend
from equifed.data.federation import Federation
from equifed.data.preparation import Preparation
from equifed.data.split import DataError
from equifed.engines.simulate import simulate
from equifed.objectives import Average, ChiSquare
from equifed.runs.alone import build_linear, is_solvable, measure_models, solve_each
from equifed.runs.build import has_rare_class
from equifed.runs.held_out import ENOUGH, hold_out
from equifed.runs.linear_paths import LinearPaths, measure
from equifed.training.files import RunFolderError, read_sealed, seal, write_file
from equifed.training.final_model import StopWhen
from equifed.training.history import History
from equifed.training.loop import train

L2 = (1e-4, 1e-3, 1e-2, 1e-1)
"""Penalties that every candidate is tried with."""
RHOS = (3.0, 1.0, 0.3, 0.1, 0.03)
OWN_L2 = (1.0, 1e-1, 1e-2, 1e-3)
OWN_RHOS = (1.0, 0.3, 0.1)
GAP, ROUNDS = 1e-6, 60
HALF = 0.5
"""A client may keep its own model where that has at most this share of the chosen one's loss."""
ALONE, TRIED = "each client alone", "tried"
Strengths: TypeAlias = tuple[tuple[float, ...], ...]
"""Of l2, rho, own_l2, and rho beside an own part."""


@dataclass(frozen=True)
class Point:
    """One model that is tried."""

    l2: float
    own_l2: float | None = None  # None: no own part
    rho: float | None = None  # of chi-square; None: the average
    curves: bool = False  # columns of numbers with bends

    @property
    def family(self) -> str:
        """What kind of candidate it is."""
        own = "one shared model" if self.own_l2 is None else "own bias"
        curves = " with curves" if self.curves else ""
        return f"{own}{curves}, {'average' if self.rho is None else 'fair'}"

    @property
    def settings(self) -> str:
        """Its strengths in words."""
        told = {"l2": self.l2, "own_l2": self.own_l2, "rho": self.rho}
        return ", ".join(f"{k} = {v:g}" for k, v in told.items() if v is not None)


BASE = Point(0.0).family


@dataclass(frozen=True, eq=False)
class Score:
    """Loss and main metric of every client; NaN for one without such rows."""

    loss: Losses
    metric: Losses

    @property
    def mean(self) -> float:
        """Mean loss over clients."""
        return float(np.nanmean(self.loss))


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen on held-out rows; nothing here depends on a test row."""

    point: Point
    best: dict[str, Point]  # of every family
    scores: dict[str, Score]  # of the best, and of own models, on held-out rows
    keepers: tuple[str, ...]  # clients that keep models of their own
    alone_l2: Losses  # penalty of each client's own model
    rows: str
    tried: int
    notes: tuple[str, ...]
    model: tuple[str, str]  # its name, and that of its loss
    noised: bool = False  # losses may even be negative: no shares of them are told
    bent: Preparation | None = None  # where the curves that were tried bend

    @property
    def name(self) -> str:
        """What is chosen, in a few words."""
        count = len(self.keepers)
        own = f", {count} own model{'s' * (count > 1)}" if count else ""
        return self.point.family + own

    def __str__(self) -> str:
        mine, average = self.scores[self.point.family].mean, self.scores[BASE].mean
        against = f"{100 * (mine / average - 1):+.1f} % against {BASE} ({average:.4g})"
        if self.noised:
            against = f"{BASE} has {average:.4g}"
        if self.point.family == BASE:
            others = (s.mean for k, s in self.scores.items() if k not in (self.name, BASE, ALONE))
            against = f"the next best kind has {min(others):.4g}"
        keep = f"; {join_names(self.keepers)} keep models of their own" if self.keepers else ""
        return (
            f"{self.point.family} ({self.point.settings}): mean loss of the clients {mine:.4g}, "
            f"{against}, the smallest of {self.tried} candidates on {self.rows}{keep}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return {
            "choice": str(self),
            "candidate": self.name,
            "settings": self.point.settings,
            "own_models": list(self.keepers),
            "rows": self.rows,
            "tried": self.tried,
            "notes": list(self.notes),
            "validation": {k: s.mean for k, s in self.scores.items()},
        }


def choose(
    data: Federation, seed: int, folder: Path | None, tell: Callable[[str], None],
    may_fold: bool = True, keep_own: bool = False, curves: bool = False,
) -> Choice:  # fmt: skip
    """Try the candidates on held-out rows, and take one; ``curves``: with bent columns, too."""
    check_clients(data)
    folds, rows = hold_out(data, seed, may_fold)
    made = {"data": data.checksum(), "seed": seed, "tried": [L2, RHOS, OWN_L2, OWN_RHOS]}
    trials = Trials(folds, made, None if folder is None else folder / TRIED, tell)
    scores, bent = try_linear(trials), None
    if curves:
        curved = bend(data)
        bent = curved.preparation
        scores |= try_linear(
            replace(trials, folds=hold_out(curved, seed, may_fold)[0]), curves=True
        )
    point = min(scores, key=lambda p: scores[p].mean)
    best = find_best(scores)
    told = {family: scores[p] for family, p in best.items()}
    held = np.sum([_sizes(fold) for fold in folds], axis=0)
    notes, l2s, keepers = [], np.full(len(data), L2[-1]), tuple[str, ...]()
    if is_solvable(build_linear(data, *model_for(data))):
        told[ALONE], l2s = choose_alone(trials.score_alone())
        better = find_keepers(data, held, told[ALONE], scores[point])
        keepers = better if keep_own else ()
        if better and not keep_own:
            notes.append(
                f"Own models of {join_names(better)} have at most half the loss on held-out rows. "
                "To let such clients keep theirs, fit with keep_own=True (--keep-own)."
            )
    else:
        notes.append("The model is too large for each client's own one to be solved beside it.")
    notes += describe_clients(data, held)
    choice = Choice(
        point, best, told, keepers, l2s, rows, len(scores), tuple(notes), model_for(data),
        bent=bent,
    )  # fmt: skip
    mine = told[point.family]
    if keepers:
        kept = np.isin(data.names, keepers)
        pairs = zip(vars(told[ALONE]).values(), vars(mine).values(), strict=True)
        mine = Score(*(np.where(kept, own, shared) for own, shared in pairs))
    told[choice.name] = mine
    return choice


def check_clients(data: Federation) -> None:
    """Refuse data in which there is nothing to choose or to learn."""
    if len(data) == 1:
        raise DataError(
            f"fit chooses what serves several clients; there is only one, {data.names[0]!r}. Check "
            "the client column, or train one model for it with equifed.train."
        )
    targets = data.train.targets
    if (targets == targets[:1]).all():
        raise DataError(
            f"Every training row has the target {data.in_units(targets[0])}: there is nothing to "
            "learn; check the target column."
        )


def find_best(scores: Mapping[Point, Score]) -> dict[str, Point]:
    """Return the best of every family, the plain average first; of equals the one tried first."""
    best: dict[str, Point] = {}
    for p in sorted(scores, key=lambda p: scores[p].mean):
        best.setdefault(p.family, p)
    return dict(sorted(best.items(), key=lambda pair: (pair[0] != BASE, pair[0])))


def try_linear(
    trials: Scorer, strengths: Strengths | None = None, curves: bool = False
) -> dict[Point, Score]:
    """Return the scores of linear candidates: for each penalty three paths."""
    scores, what = dict[Point, Score](), "curves, " if curves else ""
    l2s, rhos, own_l2s, own_rhos = strengths or (L2, RHOS, OWN_L2, OWN_RHOS)
    for l2 in l2s:
        flat = Point(l2, curves=curves)
        shared = [flat, *(replace(flat, rho=rho) for rho in rhos)]
        scores |= trials.score(f"{what}one shared model, l2 {l2:g}", shared)
        points = [replace(flat, own_l2=v) for v in own_l2s]
        own = trials.score(f"{what}own bias, l2 {l2:g}", points)
        near = min(own, key=lambda p: own[p].mean)
        fair = [near, *(replace(near, rho=rho) for rho in own_rhos)]
        scores |= trials.score(f"{what}own bias, fair, l2 {l2:g}", fair) | own
    return scores


def choose_alone(scores: Sequence[Score]) -> tuple[Score, Losses]:
    """Return what each client alone has with the penalty that suits its held-out rows, and that."""
    losses = np.array([s.loss for s in scores])
    usual = int(np.argmin([s.mean for s in scores]))
    unknown = np.isnan(losses).any(axis=0)
    best = np.where(unknown, usual, np.argmin(np.where(unknown, 0.0, losses), axis=0))
    at = best, np.arange(losses.shape[1])
    return Score(losses[at], np.array([s.metric for s in scores])[at]), np.array(L2)[best]


def find_keepers(data: Federation, held: Losses, alone: Score, chosen: Score) -> tuple[str, ...]:
    """Return the clients whose own model has at most half the loss on enough held-out rows."""
    with np.errstate(invalid="ignore"):
        better = (alone.loss <= HALF * chosen.loss) & (held >= ENOUGH)
    one_class = tuple(data.find_one_class())
    pairs = zip(data.names, better, strict=True)
    return tuple(name for name, keep in pairs if keep and name not in one_class)


def describe_clients(data: Federation, held: Losses) -> list[str]:
    """Say which clients cannot have a model of their own, and why."""
    told, one_class = [], tuple(data.find_one_class())
    if one_class:
        told.append(
            f"{join_names(one_class)}: training rows of one class only; a model of their own would "
            "always answer it, so they keep none."
        )
    few = int((held < ENOUGH).sum())
    if few:
        told.append(
            f"{few:,} of {len(data):,} clients have fewer than {ENOUGH} held-out rows: too few to "
            "keep a model of their own."
        )
    return told


def join_names(names: Sequence[str]) -> str:
    """List a few names, and count the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def model_for(data: Federation) -> tuple[str, str]:
    """Return the linear model for these data, and its loss."""
    if data.classes is None:
        return "linear", "squared"
    return "logistic", "logistic" if data.classes == 2 else "cross_entropy"


# -- what is solved ---------------------------------------------------------------------------


def solve(data: Federation, points: Sequence[Point], evaluate: Sequence[str]) -> Iterator[History]:
    """Solve one point after the other, each from the model of the one before it."""
    options: Any = {"evaluate": evaluate, "every": ROUNDS, "stop": StopWhen(at_relative_gap=GAP)}
    x: Any = None
    for k, point in enumerate(points):
        if k == 0 or (point.l2, point.own_l2) != (points[k - 1].l2, points[k - 1].own_l2):
            own: Any = {} if point.own_l2 is None else {"own": "bias", "own_l2": point.own_l2}
            clients = simulate(data, *model_for(data), l2=point.l2, dtype=torch.float64, **own)
        objective = Average() if point.rho is None else ChiSquare(point.rho)
        run, more = FairNewton(objective), ["auroc"] if has_rare_class(data) and evaluate else []
        history = train(run, clients, rounds=ROUNDS, x=x, metrics=more, progress=False, **options)
        x = history.parameters
        yield history


def read_score(history: History, split: str) -> Score:
    """Return what a run says about a split."""
    shown, kept = history.main_metric(), []
    for metric in ("loss", "loss" if shown is None else shown[0]):
        record = history.last(metric, split)
        kept.append(np.full(len(history.names), np.nan) if record is None else record.values)
    return Score(*kept)


# -- what is remembered -----------------------------------------------------------------------


class Scorer(Protocol):
    """Measures candidates on held-out rows."""

    def score(self, name: str, points: Sequence[Point]) -> dict[Point, Score]:
        """Return the scores of points along one path."""


@dataclass(frozen=True, eq=False)
class Trials:
    """Candidates on held-out rows; what was tried is kept in a folder, to resume."""

    folds: Sequence[Federation]
    made: dict[str, Any]  # what the scores depend on
    folder: Path | None = None
    tell: Callable[[str], None] = lambda _: None

    def score(self, name: str, points: Sequence[Point]) -> dict[Point, Score]:
        """Return the scores of points along one path."""

        def compute(fold: Federation) -> list[Score]:
            if LinearPaths.serves(fold):
                walk = LinearPaths(fold).walk(points)
                return [Score(*measure(fold, at, "validation")) for at in walk]
            solved = solve(fold, points, ("validation",))
            return [read_score(history, "validation") for history in solved]

        return dict(zip(points, self._score(name, compute), strict=True))

    def score_alone(self) -> list[Score]:
        """Return the scores of own models, for each penalty."""

        def compute(fold: Federation) -> list[Score]:
            linear = build_linear(fold, *model_for(fold))
            with warnings.catch_warnings():  # a client's own model may be far from converged
                warnings.simplefilter("ignore", UserWarning)
                solved = solve_each(linear, fold, L2)
            scores = []
            for models in solved:
                pairs = [(linear, x) for x in models]
                told = (measure_models(fold, pairs, (), m, "validation") for m in ("loss", None))
                scores.append(Score(*(record.values for record, _ in told)))
            return scores

        return self._score("alone", compute)

    def _score(self, name: str, compute: Callable[[Federation], list[Score]]) -> list[Score]:
        found = []
        for k, fold in enumerate(self.folds):
            self.tell(f"{name}, fold {k + 1} of {len(self.folds)}" if len(self.folds) > 1 else name)
            found.append(self._remember(f"{name}-{k}", partial(compute, fold)))
        sizes = np.array([_sizes(fold) for fold in self.folds])
        return [_combine(parts, sizes) for parts in zip(*found, strict=True)]

    def _remember(self, name: str, compute: Callable[[], list[Score]]) -> list[Score]:
        """Return scores as a file has them, or else compute and write them."""
        if self.folder is None:
            return compute()
        path = self.folder / (name.replace(" ", "-").replace(",", "") + ".json")
        if path.exists():
            held = read_sealed(path)
            refuse_other(held, self.made, self.folder)
            return [Score(*(np.array(v, dtype=np.float64) for v in s.values()))
                    for s in held["scores"]]  # fmt: skip
        scores = compute()
        told = [{k: [None if x != x else x for x in v.tolist()] for k, v in asdict(s).items()}
                for s in scores]  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(path, seal({"made": self.made, "scores": told}))
        return scores


def refuse_other(held: Mapping[str, Any], made: Mapping[str, Any], folder: Path) -> None:
    """Refuse what was tried on other data or with other settings."""
    if held["made"] != json.loads(json.dumps(made)):
        raise RunFolderError(
            f"{folder} holds results of other data or settings; choose another folder, or pass "
            "--overwrite (in Python overwrite=True) to replace it."
        )


def _sizes(fold: Federation) -> Losses:
    assert fold.validation is not None
    return fold.validation.sizes.astype(np.float64)


def _combine(parts: Sequence[Score], sizes: Losses) -> Score:
    """Return the means over all held-out rows of every client."""
    total = sizes.sum(axis=0)

    def mean(values: Sequence[Losses]) -> Losses:
        added = np.where(sizes > 0, np.array(values) * sizes, 0.0).sum(axis=0)
        return np.where(total > 0, added / np.maximum(total, 1), np.nan)

    return Score(mean([p.loss for p in parts]), mean([p.metric for p in parts]))
