"""The experiments: their yardstick is exact, their tiny forms run, their results are traceable."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.harness.choice import alternatives, combinations, variant_of
from experiments.harness.exact import Quadratics, projection_slope, solve, solve_in_box
from experiments.harness.experiment import EXPERIMENTS, ROOT, definition
from experiments.harness.page import (
    PAPERS,
    judge,
    list_figures,
    page,
    read_cells,
    read_record,
    summarise,
)
from experiments.harness.running import configured, reproduce
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed import DRFA
from equifed.datasets.small import synthetic_regression
from equifed.objectives import CVaR, RelativeFairness
from equifed.runs import build_run, merge_tables

POINTS, PENGUINS, SYNTHETIC = (
    EXPERIMENTS[name].module for name in ("ia-points", "ia-penguins", "scaff-pd-synthetic")
)
pytestmark = pytest.mark.long


# -- the exact solver -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # theirs, at its tolerance
@pytest.mark.parametrize("rho", [0.0, 0.01, 0.1])
def test_the_exact_solver_agrees_with_an_interior_point_solver(rho: float) -> None:
    cp = pytest.importorskip("cvxpy")
    data = synthetic_regression(seed=3)
    n, x, nu = 5, cp.Variable(10), cp.Variable()
    losses = [
        cp.sum_squares(a @ x - y) / len(y) + 0.05 * cp.sum_squares(x)
        for a, y in (data.train.client(i) for i in range(n))
    ]
    bounds = []
    if rho:  # by the multiplier nu of sum w = 1: nu + |(l - nu + rho)_+|^2 / (2 rho n) - rho / 2
        above = cp.Variable(n, nonneg=True)
        bounds = [one - nu + rho <= above[i] for i, one in enumerate(losses)]
        value = nu + cp.sum_squares(above) / (2 * rho * n) - rho / 2
    else:
        value = cp.max(cp.hstack(losses))
    problem = cp.Problem(cp.Minimize(value), bounds)
    problem.solve(solver=cp.CLARABEL)
    ours = solve(Quadratics.of_regression(data, 0.1), RelativeFairness(0.0, rho=rho))
    assert ours.value == pytest.approx(problem.value, abs=1e-6)
    assert ours.value <= problem.value + 1e-9
    np.testing.assert_allclose(ours.x, x.value, atol=1e-3)
    assert ours.gradient < 1e-9
    assert abs(ours.slack) < 1e-12


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    phi=st.sampled_from([0.0, 0.1, 0.3]),
    rho=st.sampled_from([0.0, 0.05]),
    tail=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_no_model_is_better_than_the_exact_one(
    seed: int, phi: float, rho: float, tail: float
) -> None:
    draw = np.random.default_rng(seed)
    roots = draw.standard_normal((5, 6, 3))
    hessians = np.einsum("ika,ikb->iab", roots, roots) + np.eye(3)
    problem = Quadratics(hessians, 2 * draw.standard_normal((5, 3)), 5 + draw.random(5))
    objective = RelativeFairness(phi, CVaR(tail), CVaR(tail), rho=rho)
    found = solve(problem, objective)
    assert found.gradient < 1e-6
    assert abs(found.slack) < 1e-9
    for scale in (1e-3, 1e-1, 1.0):
        others = found.x + scale * draw.standard_normal((20, 3))
        values = [objective.value(problem.losses(x)) for x in others]
        assert min(values) >= found.value - 1e-9


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), phi=st.sampled_from([0.0, 0.2]))
def test_the_slope_of_the_projection_is_its_derivative(seed: int, phi: float) -> None:
    draw = np.random.default_rng(seed)
    objective = RelativeFairness(phi)
    point, along = draw.standard_normal(6), draw.standard_normal(6)
    slope = projection_slope(objective, point, objective.prox(point, 1.0))
    h = 1e-7
    ahead, behind = (objective.prox(point + s * h * along, 1.0) for s in (1, -1))
    np.testing.assert_allclose(slope @ along, (ahead - behind) / (2 * h), atol=1e-6)


def test_no_point_of_the_papers_grid_is_better_than_the_solution_in_the_box() -> None:
    problem = Quadratics.of_regression(PENGUINS.federation("measured"), intercept=True)
    axes = [np.linspace(a, b, 41) for a, b in zip(PENGUINS.LOW, PENGUINS.HIGH, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    losses = (
        0.5 * np.einsum("ka,iab,kb->ki", points, problem.hessians, points)
        - points @ problem.linear.T
        + problem.constants
    )
    for phi in (0.0, 0.05):
        found = solve_in_box(problem, RelativeFairness(phi), PENGUINS.LOW, PENGUINS.HIGH)
        values = (losses.max(1) - phi * losses.min(1)) / (1 - phi)
        assert values.min() >= found.value - 1e-9
        assert (found.x >= PENGUINS.LOW - 1e-9).all() and (found.x <= PENGUINS.HIGH + 1e-9).all()


# -- single parts ---------------------------------------------------------------------------------


def test_the_smallest_circle_is_the_unit_circle() -> None:
    centre, radius, bound = POINTS.minimum(POINTS.largest, 1.0, 1e-6)
    assert radius == pytest.approx(1.0, abs=1e-6)
    assert bound <= 1.0 <= radius + 1e-12
    np.testing.assert_allclose(centre, 0, atol=1e-5)


def test_the_thinnest_ring_is_thinner_than_any_other() -> None:
    _, width, bound = POINTS.minimum(POINTS.difference, 2.0, 1e-4)
    others = POINTS.difference(np.random.default_rng(0).uniform(-2, 2, (20000, 2)))
    assert bound <= width <= others.min()
    assert POINTS.distances(POINTS.POINTS)[0].min() == 0  # every point is one of the eight


@given(factor=st.floats(0.05, 0.95), first=st.floats(1e-3, 1e3))
def test_the_rate_of_a_geometric_sequence_is_its_factor(factor: float, first: float) -> None:
    assert SYNTHETIC.rate(first * factor ** np.arange(12.0)) == pytest.approx(factor, rel=1e-6)


def test_a_grid_has_every_combination_once() -> None:
    axes = {"a.b": [1, 2], "a.c": [[0.5, 1.0], [1.0, 1.0]], "d, e.f": [["x", 3]]}
    found = [variant_of(one) for one in combinations(axes)]
    assert len(found) == 4
    assert {"a": {"b": 2, "c": [0.5, 1.0]}, "d": "x", "e": {"f": 3}} in found


def test_a_gamma_that_does_not_decay_is_drfa(tmp_path: Path) -> None:
    table, variant = _drfa_fashion("DRFA, gamma decaying")
    inner = {"algorithm": {"name": "drfa", **variant["algorithm"]["drfa"]}}
    slower = [merge_tables(variant, {"algorithm": {"factor": f}}) for f in (1.0, 0.5)]
    built = build_run(configured(table, inner, 0))
    plain = built.train()
    same, less = (build_run(configured(table, one, 0)).train() for one in slower)
    assert plain.parameters is not None and same.parameters is not None
    for name, value in plain.parameters.items():
        np.testing.assert_array_equal(value.numpy(), same.parameters[name].numpy())
    assert not np.array_equal(plain.weights[4], less.weights[4])
    assert isinstance(built.algorithm, DRFA)


def _drfa_fashion(variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    table = definition("drfa-fashion", quick=True)
    table["run"] |= {"rounds": 4, "data": {"name": "fashion-three", "train": 60, "test": 30}}
    return table, table["variants"][variant]


# -- definitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_definition_is_a_valid_configuration(name: str, quick: bool) -> None:
    table = definition(name, quick)
    if "run" not in table or name == "one-recipe":  # what it tries depends on the data set
        return
    variants = dict(table.get("variants", {}))
    for method in table.get("methods", {}):
        for title, (_, tried) in alternatives(table, method).items():
            if name == "scaff-pd-synthetic":
                tried["algorithm"]["objective"]["rho"] = table["rho"][0]
            variants[title] = tried
    for variant in variants.values():
        configured(table, variant, 1)


def test_tuning_never_sees_the_seeds_that_are_reported() -> None:
    for name in EXPERIMENTS:
        for quick in (False, True):
            table = definition(name, quick)
            assert not set(table.get("tuning_seeds", [])) & set(table.get("seeds", []))


def test_an_unknown_experiment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'ia-points'"):
        definition("ia-point")


# -- tiny forms -----------------------------------------------------------------------------------


def test_points_agree_with_the_printed_sums(tmp_path: Path) -> None:
    outcome = reproduce("ia-points", tmp_path, quick=True)
    assert all(one.agrees for one in outcome.checks)
    changed = {"published": {"absolute": 7.09}}
    outcome = reproduce("ia-points", tmp_path, quick=True, changes=changed)
    assert [one.agrees for one in outcome.checks] == [False, True, True]


def test_penguins_unfairness_falls_and_the_federated_method_is_exact(tmp_path: Path) -> None:
    outcome = reproduce("ia-penguins", tmp_path, changes={"phi": [0.0, 0.05], "rounds": 150})
    by_claim = {one.measured.partition(":")[0]: one for one in outcome.checks}
    assert by_claim[f"{PENGUINS.READINGS['measured']}, in the paper's box"].agrees
    assert by_claim[f"{PENGUINS.READINGS['measured']}, without bounds"].agrees
    # With the other ten penguins the worst-case solution has equal losses: nothing is left to fall.
    flat = by_claim[f"{PENGUINS.READINGS['complete']}, without bounds"]
    assert not flat.agrees and "equal losses" in flat.why
    assert outcome.checks[-1].agrees


TINY = {
    "rho": [0.1],
    "shift": [0.05],
    "local_steps": [10, 20],
    "seeds": [0],
    "tuning_rounds": 3,
    "run": {"rounds": 6},
    "methods": {"SCAFF-PD": {"algorithm": {"local": {"steps": 20}}}},
    "grid": {
        "SCAFF-PD": {"algorithm.steps.dual": [1.0], "algorithm.local.lr": [0.01]},
        "DRFA": {"algorithm.local.lr": [0.003]},
    },
}


def test_synthetic_measures_distances_and_runs_only_what_is_missing(tmp_path: Path) -> None:
    outcome = reproduce("scaff-pd-synthetic", tmp_path, quick=True, changes=TINY)
    assert not outcome.problems
    table = outcome.tables["distances"]
    by_name = {row[0]: row for row in table.rows}
    place = list(table.columns).index("distance at the end (geometric mean)")
    assert by_name["SCAFF-PD, rho 0.1"][place] < 0.1 * by_name["SCAFF-PD, J 10"][place]
    record = json.loads((tmp_path / "results" / "results.json").read_text(encoding="utf-8"))
    assert record["command"].startswith("python -m experiments run scaff-pd-synthetic --quick")
    assert record["settings"]["rho"] == [0.1]
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "runs").rglob("summary.json")}
    again = reproduce("scaff-pd-synthetic", tmp_path, quick=True, changes=TINY)
    assert again == outcome
    assert written == {f: f.stat().st_mtime_ns for f in (tmp_path / "runs").rglob("summary.json")}


def test_drfa_fashion_counts_rounds_to_the_target(tmp_path: Path) -> None:
    small = {"name": "fashion-three", "train": 60, "test": 30}
    changes = {"run": {"rounds": 4, "data": small}, "target": 0.0}
    outcome = reproduce("drfa-fashion", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    table = outcome.tables["methods"]
    assert [row[3] for row in table.rows] == [0.0] * 11  # accuracy 0 is there before round 1
    assert set(outcome.figures) >= {"figure-1-worst-accuracy", "figure-2-worst-accuracy"}
    fedavg = next(one for one in outcome.checks if one.claim.startswith("FedAvg cannot"))
    assert not fedavg.agrees


@pytest.mark.parametrize("rounds", [(300, 200, 150), (300, 200, 220), (np.inf, 200, 100)])
def test_time_of_a_gap_is_judged_for_every_price_of_a_message(rounds: tuple[float, ...]) -> None:
    settings = definition("drfa-fashion")
    gaps, steps = settings["figure_1"], np.array([5, 10, 15])
    told = EXPERIMENTS["drfa-fashion"].module.judge_time(
        dict(zip(gaps, rounds, strict=True)), settings
    )
    prices = np.arange(10_000)[:, None]
    with np.errstate(invalid="ignore"):
        seconds = np.array(rounds) * (prices + steps)
    falls = (np.diff(seconds) < 0) & np.isfinite(seconds[:, :-1])
    assert told.agrees == bool(falls.all(1).any())
    for k, how in enumerate(told.measured.split("; ")):
        first = int(falls[:, k].argmax())
        assert (f"longer than {max(0, first - 1)} local steps" in how) == bool(falls[:, k].any())


def test_rc_fashion_chooses_on_validation_samples_only(tmp_path: Path) -> None:
    changes = {"run": {"rounds": 4, "data": {"train": 80, "test": 40}}, "seeds": [0]}
    outcome = reproduce("rc-fashion", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    rows, found = outcome.tables["grid"].rows, ("FedAvg", "AFL", "q-FFL", "RC-FL", "SCAFF-PD")
    assert [row[0] for row in rows if row[3] == "chosen"] == [*found]
    best = max(float(str(row[2])) for row in rows if row[0] == "RC-FL")
    assert [row[2] for row in rows if row[0] == "RC-FL" and row[3]] == [best]
    assert len(outcome.tables["accuracy"].rows) == 5


# -- what the project has stored ------------------------------------------------------------------


def test_the_page_is_made_from_the_stored_results() -> None:
    written = (ROOT.parent / "docs" / "reproductions.md").read_text(encoding="utf-8")
    assert written == page()
    for name in EXPERIMENTS:
        path = ROOT / name / "results" / "results.json"
        assert f"## {name}\n" in written
        for row in definition(name).get("not_run_yet", []):
            assert f"**Not run yet**: {row}" in written
        if path.exists():  # else the page says that there is nothing stored yet
            assert f"`{json.loads(path.read_text(encoding='utf-8'))['command']}`" in written


def test_the_summary_is_short_and_counts_every_check() -> None:
    rows = summarise().rows
    assert len(rows) <= 20
    counted = sum(int(str(cell)) for row in rows for cell in row[2:5])
    assert counted == sum(
        len((read_record(name) or {"checks": []})["checks"]) for name in EXPERIMENTS
    )


def test_every_table_and_figure_has_a_row_that_its_checks_judge() -> None:
    figures = tomllib.loads(PAPERS.read_text(encoding="utf-8"))["row"]
    rows = list_figures(figures).rows
    assert len({(row[0], row[1]) for row in rows}) == len(rows) == len(figures)
    for said, row in zip(figures, rows, strict=True):
        if "source" not in said:
            continue
        checks = (read_record(said["experiment"]) or {"checks": []})["checks"]
        mine = [c for c in checks if any(words in c["source"] for words in said["source"])
                and said.get("claim", "") in c["claim"]]  # fmt: skip
        assert ("**no**" in str(row[5])) == (not all(c["agrees"] for c in mine)), row[:2]
        assert row[3] in [c["measured"] for c in mine if c["agrees"] == ("**no**" not in row[5])]
    with pytest.raises(ValueError, match="no stored check of ia-points"):
        list_figures([{"paper": "", "where": "Fig. 99", "published": "", "data": "",
                       "experiment": "ia-points", "source": ["Fig. 99"]}])  # fmt: skip


def test_printed_cells_stand_beside_ours() -> None:
    table = read_cells("scaff-pd-cifar10", "table-3")
    assert list(table.columns) == ["method", "average", "worst-20 %", "published average",
                                   "published worst-20 %"]  # fmt: skip
    printed = definition("scaff-pd-cifar10")["scenario"]["Table 3"]["published"]
    rows = {row[0]: row for row in table.rows}
    for method, (average, worst) in printed.items():
        assert [float(str(cell)) for cell in rows[method][3:]] == [average, worst]
    assert rows["Delta-FL"][3:] == ["-", "-"]


def test_a_claim_that_holds_on_other_data_is_no_plain_yes() -> None:
    tweets = {"agrees": True, "source": "RC-FL, Table 1, Sent140 (tweets there, roles here)"}
    assert judge("rc-shakespeare", tweets) == "order only, other data"
    assert judge("rc-shakespeare", {**tweets, "agrees": False}) == "**no**"
    assert judge("ia-points", tweets) == "yes"
    for name in EXPERIMENTS:  # every rule is about a check that is stored
        record = read_record(name)
        sources = [one["source"] for one in (record or {"checks": []})["checks"]]
        for words in definition(name).get("other", {}) if record else ():
            assert any(words in source for source in sources), (name, words)


def test_every_experiment_has_a_readme_and_its_figures_are_svg() -> None:
    for name in EXPERIMENTS:
        text = (ROOT / name / "README.md").read_text(encoding="utf-8")
        assert f"python -m experiments run {name}" in text and "equifed reproduce" not in text
        for figure in (ROOT / name / "figures").glob("*.svg"):
            assert re.match(r'<svg xmlns="http://www.w3.org/2000/svg"', figure.read_text("utf-8"))
