"""What :func:`equifed.fit` tries: linear models along paths of strengths, on rows held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from equifed.algorithms.fair_newton import FairNewton
from equifed.contract import Losses, Stream
from equifed.data import DataError, Federation, Preparation, Split
from equifed.data.curves import bend
from equifed.data.split import refuse_any
from equifed.engines.simulate import simulate
from equifed.objectives import Average, ChiSquare
from equifed.runs.alone import build_linear, is_solvable, measure_models, solve_each
from equifed.runs.build import has_rare_class
from equifed.runs.linear_paths import LinearPaths, measure
from equifed.training import History, RunFolderError, StopWhen, files, train

L2 = (1e-4, 1e-3, 1e-2, 1e-1)  # penalties that every candidate is tried with
RHOS = (3.0, 1.0, 0.3, 0.1, 0.03)
OWN_L2 = (1.0, 1e-1, 1e-2, 1e-3)
OWN_RHOS = (1.0, 0.3, 0.1)
GAP, ROUNDS = 1e-6, 60
# Folds; share of the rows that is held out; with fewer of them at the median client, folds
FOLDS, SHARE, ENOUGH = 5, 0.2, 10
# A client may keep its own model where that has at most this share of the chosen one's loss
HALF = 0.5
ALONE, TRIED = "each client alone", "tried"
# Of l2, rho, own_l2, and rho beside an own part
Strengths: TypeAlias = tuple[tuple[float, ...], ...]


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

    def objective(self, scale: float | None = None) -> Average | ChiSquare:
        """Return what it minimises."""
        return Average() if self.rho is None else ChiSquare(self.rho, scale=scale)


BASE = Point(0.0).family


class Score(NamedTuple):
    """Loss and main metric of every client; NaN for one without such rows."""

    loss: Losses
    metric: Losses

    @property
    def mean(self) -> float:
        """Mean loss over clients."""
        return float(np.nanmean(self.loss))


# Measures candidates along one path, which has a name, on held-out rows
Scorer: TypeAlias = Callable[[str, Sequence[Point]], dict[Point, Score]]
Pair: TypeAlias = tuple[Losses, Losses]
# Returns loss and main metric of several candidates on the held-out rows of a fold
Compute: TypeAlias = Callable[[Federation], Sequence[Pair]]


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

    @classmethod
    def take(
        cls, scores: Mapping[Point, Score], rows: str, model: tuple[str, str],
        notes: Sequence[str] = (), **more: Any,
    ) -> Choice:  # fmt: skip
        """Choose the smallest mean loss."""
        best, point = find_best(scores), min(scores, key=lambda p: scores[p].mean)
        told = {family: scores[p] for family, p in best.items()}
        none = np.empty(0)
        return cls(point, best, told, (), none, rows, len(scores), tuple(notes), model, **more)

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
            "choice": str(self), "candidate": self.name, "settings": self.point.settings,
            "own_models": list(self.keepers), "rows": self.rows, "tried": self.tried,
            "notes": list(self.notes), "validation": {k: s.mean for k, s in self.scores.items()},
        }  # fmt: skip


def choose(
    data: Federation, seed: int, folder: Path | None, tell: Callable[[str], None],
    may_fold: bool = True, keep_own: bool = False, curves: bool = False,
) -> Choice:  # fmt: skip
    """Try the candidates on held-out rows, and take one; ``curves``: with bent columns, too."""
    check_clients(data)
    folds, rows = hold_out(data, seed, may_fold)
    made = {"data": data.checksum(), "seed": seed, "tried": [L2, RHOS, OWN_L2, OWN_RHOS]}
    trials = Trials(folds, made, None if folder is None else folder / TRIED, tell)
    scores, bent = try_linear(trials.score), None
    if curves:
        curved = bend(data)
        bent, curved_folds = curved.preparation, hold_out(curved, seed, may_fold)[0]
        scores |= try_linear(replace(trials, folds=curved_folds).score, curves=True)
    choice = Choice.take(scores, rows, model_for(data), bent=bent)
    held, notes, mine = trials.sizes.sum(axis=0), list[str](), scores[choice.point]
    if is_solvable(build_linear(data, *choice.model)):
        alone, l2s = _choose_alone(trials.over_folds("alone", _measure_alone))
        choice.scores[ALONE] = alone
        better = find_keepers(data, held, alone, mine)
        choice = replace(choice, alone_l2=l2s, keepers=better if keep_own else ())
        kept = np.isin(data.names, choice.keepers)
        mine = Score(*(np.where(kept, *pair) for pair in zip(alone, mine, strict=True)))
        if better and not keep_own:
            notes.append(
                f"Own models of {join_names(better)} have at most half the loss on held-out rows. "
                "To let such clients keep theirs, fit with keep_own=True (--keep-own)."
            )
    else:
        notes.append("The model is too large for each client's own one to be solved beside it.")
    if one_class := data.find_one_class():
        notes.append(
            f"{join_names(one_class)}: training rows of one class only; a model of their own would "
            "always answer it, so they keep none."
        )
    if few := int((held < ENOUGH).sum()):
        notes.append(
            f"{few:,} of {len(data):,} clients have fewer than {ENOUGH} held-out rows: too few to "
            "keep a model of their own."
        )
    choice.scores[choice.name] = mine
    return replace(choice, notes=tuple(notes))


def check_clients(data: Federation) -> None:
    """Refuse data in which there is nothing to choose or to learn."""
    targets, only = data.train.targets, "fit chooses what serves several clients; there is only one"
    one = f"{data.in_units(targets[0])}: there is nothing to learn; check the target column"
    refuse_any(
        (len(data) == 1, f"{only}, {data.names[0]!r}; check the client column."),
        ((targets == targets[:1]).all(), f"Every training row has the target {one}."),
    )


def find_best(scores: Mapping[Point, Score]) -> dict[str, Point]:
    """Return the best of every family, the plain average first; of equals the one tried first."""
    best: dict[str, Point] = {}
    for p in sorted(scores, key=lambda p: scores[p].mean):
        best.setdefault(p.family, p)
    return dict(sorted(best.items(), key=lambda pair: (pair[0] != BASE, pair[0])))


def try_linear(
    score: Scorer, strengths: Strengths | None = None, curves: bool = False
) -> dict[Point, Score]:
    """Return the scores of linear candidates: for each penalty three paths."""
    scores, what = dict[Point, Score](), "curves, " if curves else ""
    l2s, rhos, own_l2s, own_rhos = strengths or (L2, RHOS, OWN_L2, OWN_RHOS)
    for l2 in l2s:
        flat = Point(l2, curves=curves)
        shared = [flat, *(replace(flat, rho=rho) for rho in rhos)]
        scores |= score(f"{what}one shared model, l2 {l2:g}", shared)
        own = score(f"{what}own bias, l2 {l2:g}", [replace(flat, own_l2=v) for v in own_l2s])
        near = min(own, key=lambda p: own[p].mean)
        fair = [near, *(replace(near, rho=rho) for rho in own_rhos)]
        scores |= score(f"{what}own bias, fair, l2 {l2:g}", fair) | own
    return scores


def find_keepers(data: Federation, held: Losses, alone: Score, chosen: Score) -> tuple[str, ...]:
    """Return the clients whose own model has at most half the loss on enough held-out rows."""
    with np.errstate(invalid="ignore"):
        better = (alone.loss <= HALF * chosen.loss) & (held >= ENOUGH)
    one_class, pairs = data.find_one_class(), zip(data.names, better, strict=True)
    return tuple(name for name, keep in pairs if keep and name not in one_class)


def join_names(names: Sequence[str]) -> str:
    """List a few names, and count the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def model_for(data: Federation) -> tuple[str, str]:
    """Return the linear model for these data, and its loss."""
    if data.classes is None:
        return "linear", "squared"
    return "logistic", "logistic" if data.classes == 2 else "cross_entropy"


# -- the rows that are held out: validation rows, or folds of training rows --------------------


def with_validation(data: Federation, seed: int, error: type[ValueError] = DataError) -> Federation:
    """Return data with validation rows; refuse those that were prepared without."""
    fitted = data.preparation is not None and data.preparation.is_fitted
    if data.validation is None and not fitted:
        data = data.split(validation=SHARE, seed=seed)
    if data.validation is None or not len(data.validation):
        raise error("There are no validation rows to choose on; give validation=0.15.")
    return data


def describe_held(data: Federation) -> str:
    """Say how many validation rows there are, and of whom."""
    assert data.validation is not None
    who = int((data.validation.sizes > 0).sum())
    return f"{len(data.validation):,} validation rows of {who} clients"


def hold_out(data: Federation, seed: int, may_fold: bool = True) -> tuple[list[Federation], str]:
    """Return pairs of training and validation rows, and which rows those are.

    ``may_fold``: the validation rows, if there are any, are random ones of each client.
    """
    held, fitted = data.validation, data.preparation is not None and data.preparation.is_fitted
    sizes = np.round(SHARE * data.train.sizes) if held is None else held.sizes
    few = np.median(sizes) < ENOUGH
    if not (held is None and fitted) and not (few and (held is None or may_fold)):
        data = with_validation(data, seed)
        return [data], describe_held(data)
    data = pool(data)
    most = min(FOLDS, int(data.train.sizes.max()))  # no fold is empty
    if most == 1:
        raise DataError(
            "Every client has a single row to train on, so none can be held out to choose on; "
            "leave such clients out, or join them."
        )
    folds = []
    for k in range(most):  # every fifth row of a client; a single row stays
        train, out = [], []
        for name, rows in zip(data.names, data.train.rows(), strict=True):
            order = Stream(seed).at("folds", name).generator().permutation(len(rows))
            mine = (np.arange(len(rows)) % FOLDS == k) & (len(rows) > 1)
            train.append(rows[np.sort(order[~mine])])
            out.append(rows[np.sort(order[mine])])
        folds.append(replace(data, train=data.train.take(train), validation=data.train.take(out)))
    return folds, f"{len(data.train):,} training rows in {most} folds"


def pool(data: Federation) -> Federation:
    """Return the federation with validation rows among the training rows."""
    train, held = data.train, data.validation
    if held is None:
        return data
    pairs = [zip(train.client(i), held.client(i), strict=True) for i in range(len(data))]
    clients: list[Any] = [tuple(map(np.concatenate, pair)) for pair in pairs]
    groups = None
    if train.groups is not None and held.groups is not None:
        told = [part.client_groups(i) for i in range(len(data)) for part in (train, held)]
        groups = np.concatenate(cast(Any, told))
    return replace(data, train=Split.from_clients(clients, groups), validation=None)


# -- what is solved ---------------------------------------------------------------------------


def solve(data: Federation, points: Sequence[Point], evaluate: Sequence[str]) -> Iterator[History]:
    """Solve one point after the other, each from the model of the one before it."""
    metrics, x = ["auroc"] if has_rare_class(data) and evaluate else [], cast(Any, None)
    for (l2, own_l2), alike in groupby(points, key=lambda point: (point.l2, point.own_l2)):
        own: Any = {} if own_l2 is None else {"own": "bias", "own_l2": own_l2}
        clients = simulate(data, *model_for(data), l2=l2, dtype=torch.float64, **own)
        for point in alike:
            history = train(
                FairNewton(point.objective()), clients, rounds=ROUNDS, every=ROUNDS, x=x,
                stop=StopWhen(at_relative_gap=GAP), evaluate=evaluate, metrics=metrics,
                progress=False,
            )  # fmt: skip
            x = history.parameters
            yield history


def read_score(history: History, split: str) -> Score:
    """Return what a run says about a split."""
    shown, nothing = history.main_metric() or ("loss", split), np.full(len(history.names), np.nan)
    found = (history.last(metric, split) for metric in ("loss", shown[0]))
    return Score(*(nothing if record is None else record.values for record in found))


@dataclass(frozen=True, eq=False)
class Trials:
    """Candidates on held-out rows; what was tried is kept in a folder, to resume."""

    folds: Sequence[Federation]
    made: dict[str, Any]  # what the scores depend on
    folder: Path | None = None
    tell: Callable[[str], None] = lambda _: None

    @property
    def sizes(self) -> Losses:
        """Held-out rows of every client, fold by fold."""
        held = [fold.validation for fold in self.folds]
        return np.array([part.sizes for part in held if part is not None], dtype=np.float64)

    def score(self, name: str, points: Sequence[Point]) -> dict[Point, Score]:
        """Return the scores of points along one path."""
        found = self.over_folds(name, partial(_measure_path, points=points))
        return dict(zip(points, found, strict=True))

    def over_folds(self, name: str, compute: Compute) -> list[Score]:
        """Return means over all held-out rows of every client."""
        found, folds = [], len(self.folds)
        for k, fold in enumerate(self.folds):
            self.tell(f"{name}, fold {k + 1} of {folds}" if folds > 1 else name)
            found.append(self._remember(f"{name}-{k}", partial(compute, fold)))
        values, sizes = np.array(found), self.sizes[:, None, None]  # folds first, clients last
        added, total = np.where(sizes > 0, values * sizes, 0.0).sum(axis=0), sizes.sum(axis=0)
        means = np.where(total > 0, added / np.maximum(total, 1), np.nan)
        return [Score(*mean) for mean in means]

    def _remember(self, name: str, compute: Callable[[], Sequence[Pair]]) -> Sequence[Pair]:
        """Return scores as a file has them, or else compute and write them."""
        if self.folder is None:
            return compute()
        path = self.folder / (name.replace(" ", "-").replace(",", "") + ".json")
        if path.exists():
            held = files.read_sealed(path)
            refuse_other(held, self.made, self.folder)
            return [Score(**{k: np.array(v, dtype=np.float64) for k, v in one.items()})
                    for one in held["scores"]]  # fmt: skip
        scores = compute()
        told = [{"loss": loss.tolist(), "metric": metric.tolist()} for loss, metric in scores]
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_file(path, files.seal({"made": self.made, "scores": files.as_plain(told)}))
        return scores


def _measure_path(fold: Federation, points: Sequence[Point]) -> Sequence[Pair]:
    if LinearPaths.serves(fold):
        return [measure(fold, at, "validation") for at in LinearPaths(fold).walk(points)]
    return [read_score(history, "validation") for history in solve(fold, points, ("validation",))]


def _measure_alone(fold: Federation) -> Sequence[Pair]:
    """Return what clients have with models of their own, for each penalty."""
    linear, found = build_linear(fold, *model_for(fold)), []
    for rows in solve_each(linear, fold, L2)[0]:
        told = (measure_models(fold, linear, rows, m, "validation")[0] for m in ("loss", None))
        found.append(Score(*(record.values for record in told)))
    return found


def _choose_alone(scores: Sequence[Score]) -> tuple[Score, Losses]:
    """Return what each client alone has with the penalty that suits its held-out rows, and that."""
    losses, metrics = map(np.array, zip(*scores, strict=True))
    usual, unknown = int(np.argmin([s.mean for s in scores])), np.isnan(losses).any(axis=0)
    best = np.where(unknown, usual, np.argmin(np.where(unknown, 0.0, losses), axis=0))
    at = best, np.arange(losses.shape[1])
    return Score(losses[at], metrics[at]), np.array(L2)[best]


def refuse_other(held: Mapping[str, Any], made: Mapping[str, Any], folder: Path) -> None:
    """Refuse what was tried on other data or with other settings."""
    if held["made"] != json.loads(json.dumps(made)):
        raise RunFolderError(
            f"{folder} holds results of other data or settings; choose another folder, or pass "
            "--overwrite (in Python overwrite=True) to replace it."
        )
