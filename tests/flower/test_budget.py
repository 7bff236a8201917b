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
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file
from scripts.trust.questions import (
    Server,
    agree,
    average_gradients,
    guess_blindly,
    measure_gradient,
    measure_row,
    serve,
)
from tests.cli.test_cli import equifed
from tests.flower.grid import QUICK, MemoryGrid, convex, memory_grid
from tests.problems import regression

from equifed.contract.streams import Stream
from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.handshake import StartError
from equifed.flower.plan import pack_plan, sign_plan
from equifed.flower.rehearsal import make_plan
from equifed.flower.site import Budget, Policy, SiteError
from equifed.models.flat import FlatModel
from equifed.models.losses import binary_logistic
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import Bounds, Entry, Ledger, Planned, compose
from equifed.privacy.noise import SecretNoise, StreamNoise
from equifed.privacy.site import PrivateSite
from equifed.training.history import History
from equifed.training.keys import public_of
from equifed.training.loop import train

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
FAIR = APP["algorithm"]["objective"]
NEWTON = {**APP, "algorithm": {"name": "fair-newton", "objective": FAIR}, "guard": {"mode": "off"}}
FEDAVG = {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}}


def make(root: Path, table: dict[str, Any], budget: str) -> MemoryGrid:
    (root / "policy.toml").write_text(f"{LINE}{budget}")
    task = AppConfig.from_dict(table).build_task()
    return memory_grid(convex(), task, root / "memory", policy=str(root / "policy.toml"))


def run(
    grid: MemoryGrid, table: dict[str, Any], privacy: Any = "none", deliver: bool = False
) -> History:
    config = AppConfig.from_dict(table)
    settings = FederationSettings(4, privacy, deadlines=QUICK, deliver=deliver)
    told = sign_plan(make_plan(config, settings), KEY)
    return run_federation(grid, config, replace(settings, plan=pack_plan(told)))


def read_ledgers(root: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted((root / "memory" / "ledger").glob("*.json"))]


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sites draw the noise of a simulation with seed 0."""
    plain = PrivateClients.make_site

    def make(clients: PrivateClients, i: int, ledger: Ledger, noise: Any, planned: Any) -> Any:
        if isinstance(noise, SecretNoise):
            who = clients.names[i].removeprefix("client-")
            noise = StreamNoise(Stream(0).at("privacy", int(who) if who.isdigit() else who))
        return plain(clients, i, ledger, noise, planned)

    monkeypatch.setattr(PrivateClients, "make_site", make)


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
    with pytest.raises(StartError, match=r"privacy budget does not suffice: the plan costs ep"):
        run(grid, table, privacy)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("metric", ["full", "projected", "low-rank", "own bias"])
def test_curvature_is_that_of_the_simulator_and_moments_are_paid_once(
    metric: str, tmp_path: Path
) -> None:
    """With the simulator's noise: the same model and entries; later runs pay for no moments."""
    table = {**NEWTON, "algorithm": {**NEWTON["algorithm"], "metric": metric}}
    if metric == "own bias":
        table = {**NEWTON, "model": {**NEWTON["model"], "own": "bias"}}
    text = "[budget]\nepsilon = 3.0\nper_run = 2.0\nrows = 3.0\nloss = 2.0\n"
    grid = make(tmp_path, table, text)
    history = run(grid, table, deliver=metric == "own bias")
    config, bounds = AppConfig.from_dict(table), Budget(3.0, 3.0, 2.0, per_run=2.0).bound(3)
    clients = config.build_task().build_private(convex(), bounds)
    wanted = train(config.build_algorithm([1] * 4), clients, rounds=3, seed=0, progress=False)
    for key, value in (history.parameters or {}).items():  # own ones are at the sites
        np.testing.assert_allclose(value, wanted.parameters[key], atol=1e-9)  # type: ignore[index]
    for i, wanted_own in enumerate((wanted.own or {}).get("1.bias", ())):  # delivered with its own
        (path,) = (tmp_path / "memory" / "results" / f"client-{i}").glob("*/model.safetensors")
        np.testing.assert_allclose(load_file(path)["1.bias"], wanted_own, atol=1e-9)
    entries = [[Entry(**e) for e in told["entries"]] for told in read_ledgers(tmp_path)]
    for ledger, own in zip(clients.ledgers, entries, strict=True):
        assert {e.kind: e.steps for e in own} == {"moments": 1, "losses": 3, "gradients": 3}
        assert {e.kind: e for e in own} == {e.kind: e for e in ledger.entries}
        assert compose(own, 1e-5) == pytest.approx(2.0)
    kept = sorted((tmp_path / "memory" / "ledger").glob("*.moments"))
    told = [path.read_bytes() for path in kept]
    run(grid, table)
    assert told == [path.read_bytes() for path in kept] and len(told) == 4
    for before, ledger in zip(entries, read_ledgers(tmp_path), strict=True):
        new = [Entry(**e) for e in ledger["entries"]][len(before) :]
        assert [(e.kind, e.steps) for e in new] == [("losses", 3), ("gradients", 3)]
        assert compose(new, 1e-5) == pytest.approx(2.0)  # what moments cost buys less noise
    with pytest.raises(StartError, match=r"privacy budget does not suffice: the plan costs"):
        for _ in range(9):
            run(grid, table)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("own", [None, "bias"])
def test_sums_of_noised_answers_may_be_hidden_and_cost_the_same(
    own: str | None, tmp_path: Path
) -> None:
    """One round is that in clear; of more sums of the same moments some would show one site."""
    algorithm = {"name": "fair-newton", "objective": {**FAIR, "rho": 10.0}}
    model = NEWTON["model"] if own is None else {**NEWTON["model"], "own": own}
    table = {**NEWTON, "algorithm": algorithm, "model": model}
    table["guard"] = {"mode": "off", "rounding": 0.0}
    for rounds in (1, 3):
        table["rounds"], histories, ledgers = rounds, list[History](), []
        for privacy in ("none", "secure"):
            root = tmp_path / f"{privacy}-{rounds}"
            root.mkdir()
            grid = make(root, table, "[budget]\nepsilon = 2.0\nrows = 3.0\nloss = 2.0\n")
            histories.append(run(grid, table, privacy))
            ledgers.append(read_ledgers(root))
        assert ledgers[0] == ledgers[1]
        (clear, hidden), said = histories, "the curvature is that of the sum opened before"
        stale = [e["reason"] for e in hidden.events if e["event"] == "stale"]
        assert all(said in reason for reason in stale) and bool(stale) == (rounds > 1)
        for key, value in (hidden.parameters or {}).items():
            wanted = clear.parameters[key]  # type: ignore[index]
            np.testing.assert_allclose(value, wanted, atol=1e-7 if rounds == 1 else 0.1)


def test_the_ledger_of_a_node_is_shown(tmp_path: Path) -> None:
    run(make(tmp_path, NEWTON, "[budget]\nepsilon = 3.0\nrows = 3.0\nloss = 2.0\n"), NEWTON)
    folder = tmp_path / "memory" / "ledger"
    (told,) = json.loads(equifed("privacy", folder / "client-2.json", "--json").stdout)["ledgers"]
    assert (told["name"], told["epsilon"]) == ("client-2", 3.0)
    assert told["spent"] == pytest.approx(3.0)
    assert {one["kind"] for one in told["entries"]} == {"losses", "gradients", "moments"}
    assert "moments" in equifed("privacy", folder / "client-2.json").stdout
    result = equifed("privacy", folder / "client-2.moments")
    assert result.exit_code == 2 and "is not a privacy ledger" in result.stderr


def test_squared_losses_follow_from_moments_and_a_second_run_is_free(tmp_path: Path) -> None:
    budget = "[budget]\nepsilon = 2e6\nper_run = 1e6\nrows = 4.0\nloss = 20.0\n"
    (tmp_path / "policy.toml").write_text(f"{LINE}{budget}")
    for algorithm in (NEWTON["algorithm"], FEDAVG, APP["algorithm"]):
        table = {**NEWTON, "algorithm": algorithm, "data": {}, "model": {"name": "linear"}}
        policy, one = str(tmp_path / "policy.toml"), AppConfig.from_dict(table).build_task()
        run(memory_grid(regression((9, 8, 7, 9)), one, tmp_path / "memory", policy=policy), table)
        for told in read_ledgers(tmp_path):
            assert [(e["kind"], e["steps"]) for e in told["entries"]] == [("moments", 1)]
            assert compose([Entry(**told["entries"][0])], 1e-5) == pytest.approx(1e6)


def draw_site(ledger: Ledger, shift: float = 0.0) -> PrivateSite:
    rows, labels = torch.eye(3) + shift, torch.tensor([0, 1, 1])
    model = FlatModel(torch.nn.Linear(3, 1), binary_logistic, rows)
    bounds = Bounds(epsilon=2.0, rows=1.0, loss=2.0, rounds=5)
    return PrivateSite(bounds, ledger, model, rows, labels, SecretNoise(), Planned(1, 5, 5))


@pytest.mark.parametrize(("case", "paid"), [("same", 1), ("other rows", 2), ("no entry", 1)])
def test_moments_are_told_again_if_they_are_of_these_rows_and_paid(
    case: str, paid: int, tmp_path: Path
) -> None:
    kept, path = tmp_path / "north.moments", tmp_path / "north.json"
    first = draw_site(Ledger(9.0, 1e-5, path=path))
    first.keep_moments(kept, "one")
    moments = first.moments()
    ledger = Ledger(9.0, 1e-5, path=None if case == "no entry" else path)
    second = draw_site(ledger, 1.0 if case == "other rows" else 0.0)
    second.keep_moments(kept, "two")
    assert torch.equal(second.moments(), moments) == (case == "same")
    assert sum(entry.steps for entry in ledger.entries) == paid
    assert second.hessian_noise() == pytest.approx(first.hessian_noise())


def test_damaged_moments_answer_nothing(tmp_path: Path) -> None:
    site = draw_site(Ledger(9.0, 1e-5))
    site.keep_moments(tmp_path / "north.moments", "one")
    site.moments()
    (tmp_path / "north.moments").write_text("{}")
    with pytest.raises(RuntimeError, match="damaged"):
        site.keep_moments(tmp_path / "north.moments", "two")


def test_a_site_without_a_budget_beside_others_stops_curvature(tmp_path: Path) -> None:
    table = NEWTON
    grid = make(tmp_path, table, "[budget]\nepsilon = 3.0\nrows = 3.0\nloss = 2.0\n")
    (tmp_path / "open.toml").write_text(LINE)
    last = next(c for c in grid.contexts.values() if c.node_config["partition-id"] == 3)
    last.node_config["policy"] = str(tmp_path / "open.toml")
    with pytest.raises(ValueError, match="with noise, but 'client-3' has none"):
        run(grid, table)


@pytest.mark.usefixtures("seeded")
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


@pytest.mark.usefixtures("seeded")
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


@pytest.mark.usefixtures("seeded")
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
