"""Whatever is put together: what a run certifies is true, or it certifies nothing.

Algorithms and wrappers are those of the catalogue, drawn with batch sizes, sampling, engines,
precisions, own parts, absent clients and interruptions. The optimum of what the run says it
minimises comes from an interior-point solver.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.optima import interior_point, smooth_optimum
from tests.problems import Problem, convex_problem, drawn_objective
from tests.training.test_witness import Between

from equifed.algorithms import ScaffPDIA
from equifed.algorithms.around import Certified, unwrap
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.views import ClientsView, VectorsView
from equifed.objectives import Average, SaddleObjective
from equifed.objectives.base import FreeSum
from equifed.objectives.capped import with_cap
from equifed.runs.catalogue import ALGORITHMS
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long

ROUNDS = 8
PRIVATE = {"epsilon": 3.0, "rounds": ROUNDS, "clip": 1.0}
LOADED = {name: entry.load() for name, entry in ALGORITHMS.items()}
TAKES = {name: set(inspect.signature(make).parameters) for name, make in LOADED.items()}
WRAPPERS = sorted(name for name, takes in TAKES.items() if "algorithm" in takes)
CORES = sorted(set(LOADED) - set(WRAPPERS))
PROVE = ["scaff-pd", "fair-newton", "scaffold", "afl", "scaff-pd-ia"]
"""Methods that are certified often: half of the draws are among them."""


class ScaledVectors(VectorsView):
    def see_sum(self, weights: np.ndarray, add: Callable[..., Any]) -> torch.Tensor:
        return 0.25 * add(weights)


class ScaledSums(ClientsView):
    """Sums of a quarter."""

    Vectors = ScaledVectors


class SmallerLosses(ClientsView):
    """Losses that look smaller than they are."""

    def see_numbers(self, numbers: np.ndarray, what: str, stream: Any) -> np.ndarray:
        return 0.9 * numbers


class SomeAway(ClientsView):
    """Every third client is away in every other question."""

    def see_numbers(self, numbers: np.ndarray, what: str, stream: Any) -> np.ndarray:
        lost = self.index[self.index % 3 == 1]
        if stream.generator().random() < 0.5 and 0 < len(lost) < len(self.index):
            raise MissingClients(dict.fromkeys(map(int, lost), "away"), self.names)
        return numbers


@dataclass(frozen=True)
class Composition:
    """A problem, what to run on it, and how."""

    problem: Problem
    algorithm: AnyAlgorithm
    engine: str
    dtype: torch.dtype
    own: bool
    broken: bool

    def clients(self) -> Any:
        make = self.problem.clients_with_own if self.own else self.problem.clients
        return make(self.engine, dtype=self.dtype)


def draw_composition(seed: int) -> Composition:
    draw = np.random.default_rng(10**8 + seed)
    problem = convex_problem(int(draw.integers(10**6)))
    _, objective = drawn_objective(int(draw.integers(10**6)), problem.n)
    smooth = max(np.linalg.norm(a, 2) ** 2 * 2 / len(a) for a in problem.inputs) + problem.l2
    batch = [None, None, None, 3]
    local = LocalSGD(lr=0.3 / smooth, steps=int(draw.integers(1, 4)), batch_size=draw.choice(batch))
    given = {
        "objective": objective,
        "local": local,
        "lr": 0.3 / smooth,
        "gradient_batch_size": draw.choice(batch),
        "loss_batch_size": draw.choice(batch),
        "participation": float(draw.choice([1.0, 1.0, 1.0, 0.6])),
        "dual_step": 0.05 / smooth,
        "phi": 0.0,
        "scale": 1.0,  # strengths are in the unit of the loss, in which the optimum is computed
        "variates": str(draw.choice(["fresh", "stored"])),
        "weighting": str(draw.choice(["uniform", "size"])),
    }
    core = draw.choice(PROVE if draw.random() < 0.5 else CORES)
    algorithm = build(core, given)
    for _ in range(int(draw.integers(0, 3))):
        algorithm = wrap(algorithm, str(draw.choice(WRAPPERS)))
    if draw.random() < 0.6:
        algorithm = Certified(algorithm, every=int(draw.integers(1, 3)))
    if draw.random() < 0.3:
        algorithm = Between(algorithm, [ScaledSums, SmallerLosses, ClientsView][draw.integers(3)])
    if draw.random() < 0.2:
        algorithm = Between(algorithm, SomeAway)
    dtype = torch.float32 if draw.random() < 0.25 else torch.float64
    engine = str(draw.choice(["loop", "stacked"]))
    own, broken = bool(draw.random() < 0.15), bool(draw.random() < 0.2)
    return Composition(problem, algorithm, engine, dtype, own, broken)


def build(name: str, given: dict[str, Any]) -> AnyAlgorithm:
    """Make an algorithm of what its signature takes of these settings."""
    settings = {key: value for key, value in given.items() if key in TAKES[name]}
    settings |= PRIVATE if name == "private-fedavg" else {}
    for without in ((), ("objective",), ("gradient_batch_size", "loss_batch_size")):
        try:
            return LOADED[name](**{k: v for k, v in settings.items() if k not in without})
        except (TypeError, ValueError):
            continue
    raise AssertionError(f"{name} cannot be made of {settings}")


def wrap(algorithm: AnyAlgorithm, name: str) -> AnyAlgorithm:
    """Put a wrapper around it, unless the wrapper refuses."""
    try:
        return LOADED[name](algorithm)
    except (TypeError, ValueError):
        return algorithm


class Kill(Callback):
    """Ends the program in a round."""

    def round(self, record: Any, info: object) -> None:
        if record.round == 4:
            raise KeyboardInterrupt


def play(composition: Composition, folder: Path) -> History | str:
    """Train, perhaps with an interruption; or say why the composition is refused."""
    given: dict[str, Any] = {"rounds": ROUNDS}
    if not composition.own:
        given["x"] = composition.problem.start().to(composition.dtype)
    try:
        if not composition.broken:
            return train(composition.algorithm, composition.clients(), **given)
        parts = [RunFolder(folder, composition.clients().names) for _ in range(2)]
        parts[0].create()
        given |= {"folder": parts[0], "callbacks": [Kill()]}
        with pytest.raises(KeyboardInterrupt):
            train(composition.algorithm, composition.clients(), **given)
        given |= {"folder": parts[1], "callbacks": [], "resume": True}
        return train(composition.algorithm, composition.clients(), **given)
    except (ValueError, RuntimeError) as refused:
        return str(refused)


def declared_objective(algorithm: AnyAlgorithm, problem: Problem) -> SaddleObjective | None:
    """Return what an algorithm says that it minimises."""
    core: Any = unwrap(algorithm)
    if isinstance(core, ScaffPDIA):
        return core.upper if core.cap is None else with_cap(core.upper, core.cap)  # phi = 0
    if getattr(core, "averages", False):
        return Average(tuple(problem.sizes) if core.weighting == "size" else None)
    objective = getattr(core, "objective", None)
    return objective if isinstance(objective, SaddleObjective) else None


@dataclass(frozen=True)
class Outcome:
    """What became of a composition: rounds that were certified, and the worst of them."""

    certified: int
    excess: float
    """Largest (true gap - certified gap), relative to the optimum; at most rounding."""
    why: str = ""


def examine(seed: int, folder: Path) -> Outcome:
    """Run a composition and compare what it certifies with the optimum."""
    composition = draw_composition(seed)
    history = play(composition, folder)
    if isinstance(history, str):
        return Outcome(0, -np.inf, history)
    rounds = [r for r in history.rounds if "gap" in r.numbers]
    if not rounds:
        return Outcome(0, -np.inf, "no certificate")
    problem = composition.problem
    objective = declared_objective(composition.algorithm, problem)
    assert objective is not None, "certified, and no objective is declared"
    own_l2 = composition.clients().own.l2 if composition.own else None
    if isinstance(objective, FreeSum):
        best = smooth_optimum(problem, objective)
    else:
        best, _ = interior_point(problem, objective, own_l2)
    told = [(r.objective, r.numbers["gap"]) for r in rounds if r.objective is not None]
    given_out = history.given_out
    if given_out.gap is not None and not composition.own:
        x = torch.cat([v.reshape(-1) for v in history.parameters.values()]).double().numpy()
        told.append((objective.value(problem.losses(x)), given_out.gap))
    sizes = [abs(best), *(abs(value) for value, _ in told)]
    excess = max(((value - best - gap) / max(sizes) for value, gap in told), default=-np.inf)
    return Outcome(len(rounds), excess)


def check(seed: int, folder: Path) -> Outcome:
    found, dtype = examine(seed, folder), draw_composition(seed).dtype
    rounding = 1e-8 if dtype == torch.float64 else 1e-6  # of the solver, and of what is recorded
    assert found.excess <= rounding, f"{draw_composition(seed)}: {found}"
    return found


@pytest.mark.parametrize("block", range(6))
def test_what_is_certified_is_true(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    seeds = range(10 * block, 10 * block + 10)
    found = [check(seed, tmp_path / str(seed)) for seed in seeds]
    assert any(outcome.certified for outcome in found)  # else nothing was tried


@pytest.mark.slow
@pytest.mark.parametrize("block", range(25))
def test_what_is_certified_is_true_of_five_hundred_more(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    for seed in range(100 + 20 * block, 120 + 20 * block):
        check(seed, tmp_path / str(seed))
