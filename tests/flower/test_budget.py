"""A site under a privacy budget: what it answers, what that costs, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scripts.trust.questions import (
    Server,
    agree,
    average_gradients,
    guess_blindly,
    measure_gradient,
    measure_row,
    serve,
)
from tests.flower.grid import QUICK, MemoryGrid, convex, memory_grid

from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.budget import Budget
from equifed.flower.handshake import StartError
from equifed.flower.plan import pack_plan, sign_plan
from equifed.flower.rehearsal import make_plan
from equifed.flower.site import Policy, SiteError
from equifed.privacy.ledger import Ledger
from equifed.training.history import History
from equifed.training.signing import public_of

pytestmark = pytest.mark.long

KEY = Ed25519PrivateKey.generate()
LINE = f'operators = ["{public_of(KEY, "anna").line} anna"]\n'
APP: dict[str, Any] = {
    "rounds": 3,
    "data": {"classes": 3},
    "model": {"name": "logistic", "l2": 0.01, "dtype": "float64"},
    "evaluate": {"splits": []},
    "algorithm": {
        "name": "scaff-pd",
        "objective": {"name": "chi-square", "rho": 0.1, "scale": 1.0},
        "local": {"lr": 0.1, "steps": 2},
        "steps": {"name": "constant", "primal": 0.4, "dual": 0.1},
    },
}
FEDAVG = {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}}


def make(root: Path, table: dict[str, Any], budget: str) -> MemoryGrid:
    (root / "policy.toml").write_text(f"{LINE}{budget}")
    task = AppConfig.from_dict(table).build_task()
    return memory_grid(convex(), task, root / "memory", policy=str(root / "policy.toml"))


def run(grid: MemoryGrid, table: dict[str, Any], privacy: Any = "none") -> History:
    config = AppConfig.from_dict(table)
    settings = FederationSettings(4, privacy, deadlines=QUICK)
    told = sign_plan(make_plan(config, settings), KEY)
    return run_federation(grid, config, replace(settings, plan=pack_plan(told)))


def read_ledgers(root: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted((root / "memory" / "ledger").glob("*.json"))]


@pytest.mark.parametrize("algorithm", [APP["algorithm"], FEDAVG], ids=lambda a: a["name"])
@pytest.mark.parametrize("privacy", ["none", "secure"])
def test_a_run_spends_the_budget_of_a_run_and_the_third_is_refused(
    algorithm: dict[str, Any], privacy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {**APP, "algorithm": algorithm}
    grid = make(tmp_path, table, "[budget]\nepsilon = 3.0\nper_run = 2.0\nrows = 3.0\nloss = 2.0\n")
    budget = Budget(3.0, 3.0, 2.0, per_run=2.0)
    history = run(grid, table, privacy)
    assert len(history.rounds) == 3 and not any("gap" in r.numbers for r in history.rounds)
    told = "answers with noise: epsilon 3 at delta 1e-05 for every record, over all runs"
    assert f"WARNING: client-0: {told}" in capsys.readouterr().out
    first = [budget.open_ledger(tmp_path / "memory", f"client-{i}") for i in range(4)]
    assert [ledger.spent for ledger in first] == pytest.approx([2.0] * 4, rel=2e-2)
    run(grid, table, privacy)
    for ledger in first:
        again = budget.open_ledger(tmp_path / "memory", ledger.name)
        assert ledger.spent < again.spent <= 3.0
    with pytest.raises(StartError, match=r"budget of this site is spent: the plan would cost ep"):
        run(grid, table, privacy)


def test_with_a_huge_budget_it_is_the_run_without_noise(tmp_path: Path) -> None:
    found = []
    for name, budget in (("a", "[budget]\nepsilon = 1e12\nrows = 99.0\nloss = 99.0\n"), ("b", "")):
        (tmp_path / name).mkdir()
        found.append(run(make(tmp_path / name, APP, budget), APP).parameters)
    for key, value in found[0].items():  # type: ignore[union-attr]
        np.testing.assert_allclose(value, found[1][key], atol=0.1)  # type: ignore[index]


@contextmanager
def noisy(epsilon: float = 3.0, **changes: Any) -> Iterator[Server]:
    budget = f"[budget]\nepsilon = {epsilon}\nrows = 4.0\nloss = 3.0\n"
    with serve(policy=budget, evaluate={"splits": []}, **changes) as server:
        yield server


def test_the_same_question_has_the_same_answer_and_costs_nothing() -> None:
    with noisy() as server:
        x = agree(server)
        first = server.gradient(x, 1)
        (node, *_) = server.grid.contexts.values()
        root = Path(node.node_config["policy"]).parent
        before = read_ledgers(root)
        again = server.gradient(x, 1)
        assert first.numbers == again.numbers and first.numbers["loss"] >= 0
        assert before == read_ledgers(root)
        assert server.gradient(x, 2).numbers["loss"] != first.numbers["loss"]
        assert before != read_ledgers(root)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("metrics", {"splits": ["test"], "metrics": [], "describe": False}),
        ("statistics", {}),
        ("curvature", {"form": "blocks", "address": ["round", 1], "round": 1}),
        ("prepare", {"asked": {"stage": "sums"}}),
    ],
)
def test_what_has_no_sensitivity_is_refused_by_name(op: str, args: dict[str, Any]) -> None:
    """Also where a plan has it: the plan itself is refused then."""
    with noisy() as server:
        x = agree(server)
        reply = server.ask(op, args, x)
        assert reply.error == "refused" and not reply.arrays
    with serve(policy="[budget]\nepsilon = 3.0\nrows = 4.0\nloss = 3.0\n") as server:
        reply = server.greet(sign_plan(server.plan))
        assert reply.error == "refused"


def test_a_plan_that_measures_is_refused_with_the_cure(tmp_path: Path) -> None:
    table = {**APP, "evaluate": {"splits": ["test"]}}
    grid = make(tmp_path, table, "[budget]\nepsilon = 3.0\nrows = 3.0\nloss = 2.0\n")
    with pytest.raises(StartError, match=r"'metrics' has no declared sensitivity \(\[evaluate\]"):
        run(grid, table)


def test_a_signed_operator_learns_no_gradient_and_no_row() -> None:
    with noisy() as server:
        assert measure_gradient(server, 1.0)[1] > 0.5
    with noisy(privacy="none") as server:
        assert average_gradients(server) > 0.5
    with noisy() as server:
        blind = guess_blindly(server)
        assert measure_row(server, 9.0)[1] > 0.5 * blind > 0.1


def test_a_budget_that_cannot_be_says_why(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    for text, message in (
        ("[budget]\nepsilon = 3.0\nrows = 4.0\nloss = 3.0\n", "needs operators"),
        (f"{LINE}[budget]\nepsilon = 3.0\n", "budget.rows.*is required"),
        (f"{LINE}[budget]\nepsilon = -1.0\nrows = 4.0\nloss = 3.0\n", "epsilon"),
        (f"{LINE}[budget]\nepsilon = 1.0\nrows = 4.0\nloss = 3.0\nper_run = 2.0\n", "per_run"),
    ):
        path.write_text(text)
        with pytest.raises(SiteError, match=message):
            Policy.read(path)
    path.write_text(f"{LINE}[budget]\nepsilon = 3.0\nrows = 4.0\nloss = 3.0\n")
    assert Policy.read(path).budget == Budget(3.0, 4.0, 3.0)


def test_a_damaged_ledger_answers_nothing(tmp_path: Path) -> None:
    grid = make(tmp_path, APP, "[budget]\nepsilon = 3.0\nrows = 3.0\nloss = 2.0\n")
    (tmp_path / "memory" / "ledger").mkdir(parents=True)
    (tmp_path / "memory" / "ledger" / "client-1.json").write_text("{")
    with pytest.raises(StartError, match="client-1: "):
        run(grid, APP)
    assert Ledger(3.0, 1e-5).left > 0
