"""``fit`` on a federation: the simulation's choice and numbers, and what sites refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message
from tests.flower.grid import QUICK, MemoryGrid, memory_grid

import equifed as ef
from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.flower import fit, rehearsal
from equifed.flower.app import join, run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.fit import SiteTrials, present
from equifed.flower.handshake import StartError
from equifed.flower.plan import Plan, pack_plan, read_plan, sign_plan
from equifed.flower.rehearsal import make_plan
from equifed.flower.secure.ledger import PrivacyError
from equifed.flower.task import Candidate
from equifed.flower.wire import Reply, Request
from equifed.runs import candidates
from equifed.runs.fit import CHOICE
from equifed.runs.linear_paths import LinearPaths
from equifed.runs.load import load_predictor
from equifed.training.keys import public_of
from equifed.training.play_round import TrainingError

pytestmark = pytest.mark.long

KEY = Ed25519PrivateKey.generate()
FEW: Any = ((1e-2, 1e-1), (0.3,), (1e-1, 1e-2), (0.3,))
HIDDEN: Any = ((1e-3,), (1.0,), (1e-1,), ())


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in zip(("L2", "RHOS", "OWN_L2", "OWN_RHOS"), FEW, strict=True):
        monkeypatch.setattr(candidates, name, values)
    monkeypatch.setattr(fit, "STRENGTHS", {"none": FEW, "secure": HIDDEN})
    monkeypatch.setattr(rehearsal, "STRENGTHS", fit.STRENGTHS)
    rehearsal._rehearse_once.cache_clear()


def draw(classes: int | None = 2, clients: int = 4, shift: float = 1.5) -> Federation:
    rng, parts = np.random.default_rng(5), [dict[str, Any](), {}, {}]
    slopes = rng.normal(size=(3, classes or 1))
    for i in range(clients):
        offset = shift * rng.normal(size=classes or 1)
        for part, rows in zip(parts, (40 + 5 * i, 20, 15), strict=True):
            x = rng.normal(size=(rows, 3))
            scores = x @ slopes + offset + rng.gumbel(size=(rows, classes or 1))
            part[f"client-{i}"] = (x, scores.argmax(1) if classes else scores[:, 0])
    given: dict[str, Any] = {"classes": classes} if classes else {}
    return Federation.from_clients(parts[0], validation=parts[1], test=parts[2], **given)


def configure(classes: int | None = 2, **changes: Any) -> AppConfig:
    table = {
        "rounds": 3,
        "data": {"classes": classes} if classes else {},
        "model": {"name": "logistic" if classes else "linear"},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}},
        "guard": "off",
    }
    return AppConfig.from_dict({**table, **changes})


def settle(out: Path | str = "", clients: int = 4, **given: Any) -> FederationSettings:
    return FederationSettings(clients, deadlines=QUICK, do="fit", out=str(out), **given)


def make_grid(
    data: Federation, config: AppConfig, root: Path, policy: str | None = ""
) -> MemoryGrid:
    """Return sites that answer one operator, or anybody (``None``)."""
    root.mkdir(exist_ok=True)
    listed = f'operators = ["{public_of(KEY, "anna").line} anna"]\n{policy}'
    (root / "policy.toml").write_text("" if policy is None else listed)
    return memory_grid(data, config.build_task(), root / "memory", policy=str(root / "policy.toml"))


def sign(config: AppConfig, settings: FederationSettings) -> FederationSettings:
    return replace(settings, plan=pack_plan(sign_plan(make_plan(config, settings), KEY)))


def served_by(out: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((out / CHOICE).read_text())
    return told


@pytest.mark.parametrize("classes", [2, 3, None])
def test_the_choice_and_its_numbers_are_those_of_the_simulation(
    classes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the solver that both have; the simulation's faster one agrees with that elsewhere."""
    monkeypatch.setattr(LinearPaths, "serves", classmethod(lambda *_: False))
    monkeypatch.setattr(candidates, "is_solvable", lambda _: False)
    data, config = draw(classes), configure(classes)
    seen: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def try_linear(*given: Any) -> Any:
            seen[name] = tried(*given)
            return seen[name]

        return try_linear

    tried = candidates.try_linear
    monkeypatch.setattr(candidates, "try_linear", watch("simulated"))
    monkeypatch.setattr(fit, "try_linear", watch("sites"))
    expected = ef.fit(data)
    grid = make_grid(data, config, tmp_path / "sites")
    out = tmp_path / "run"
    history = run_federation(grid, config, sign(config, settle(out)))
    assert list(seen["sites"]) == list(seen["simulated"]) and len(seen["sites"]) == 10
    for point, score in seen["simulated"].items():
        np.testing.assert_allclose(seen["sites"][point].loss, score.loss, rtol=1e-7)
        np.testing.assert_allclose(seen["sites"][point].metric, score.metric, rtol=1e-7)
    told = served_by(out)
    assert told["choice"] == expected.choice and told["gain"].startswith(expected.gain[:40])
    for mine, theirs in zip(told["candidates"], expected.rows, strict=True):
        for split in ("validation", "test"):
            assert mine[split] == pytest.approx(theirs[split], rel=1e-7)
    assert "proved to be within" in told["certificate"]
    shared = expected.history.parameters
    assert history.parameters is not None and shared is not None
    for name, value in history.parameters.items():
        torch.testing.assert_close(value, shared[name], rtol=0, atol=1e-7)


def test_the_faster_paths_of_the_simulation_choose_the_same(tmp_path: Path) -> None:
    data, config = draw(), configure()
    expected = ef.fit(data)
    run_federation(make_grid(data, config, tmp_path / "s"), config, sign(config, settle(tmp_path)))
    told = served_by(tmp_path)
    assert told["choice"] == expected.choice
    validation = {k: s.mean for k, s in expected.chosen.scores.items() if k in told["validation"]}
    assert told["validation"] == pytest.approx(validation, rel=1e-5)


def test_hidden_sums_choose_by_the_same_losses_and_show_no_vector(tmp_path: Path) -> None:
    """The averages are the simulation's with that penalty; a fair objective has a cap there."""
    data, config = draw(clients=5), configure()
    grid = make_grid(data, config, tmp_path / "s", 'privacy = "secure"\n')
    settings = sign(config, settle(tmp_path, 5, privacy="secure"))
    run_federation(grid, config, settings)
    told = served_by(tmp_path)
    (l2,), rhos, own_l2s, _ = HIDDEN
    trials = candidates.Trials([replace(data, test=None)], {})
    points = [candidates.Point(l2), *(candidates.Point(l2, own) for own in own_l2s)]
    exact = {p: trials.score("", [p])[p].mean for p in points}
    families = told["validation"]
    assert families[candidates.BASE] == pytest.approx(exact[points[0]], rel=2e-3)
    best = min(exact[p] for p in points[1:])
    assert families["own bias, average"] == pytest.approx(best, rel=2e-3)
    assert told["candidate"] == min(families, key=lambda k: families[k])
    assert told["tried"] == 1 + len(rhos) + len(own_l2s)
    for message in grid.received:
        arrays = Reply.from_records(message.content).arrays
        assert {array.dtype.name for array in arrays.values()} <= {"uint64"}


def test_three_sites_have_hidden_sums_to_the_end(tmp_path: Path) -> None:
    clients, data, config = 3, draw(2, 3), configure()
    grid = make_grid(data, config, tmp_path / "s", 'privacy = "secure"\n')
    run_federation(grid, config, sign(config, settle(tmp_path, clients, privacy="secure")))
    assert sum(row["chosen"] for row in served_by(tmp_path)["candidates"]) == 1


# -- test rows -------------------------------------------------------------------------------------


def listen(grid: MemoryGrid, hear: Any) -> None:
    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        hear(Request.from_records(request.content), Reply.from_records(reply.content))
        return [reply]

    grid.tamper = tamper


def test_no_test_row_is_read_before_the_choice_is_stored(tmp_path: Path) -> None:
    data, config, stored = draw(), configure(), list[bool]()
    grid = make_grid(data, config, tmp_path / "s")

    def hear(request: Request, reply: Reply) -> None:
        if "test" in request.args.get("splits", []):
            stored.append((tmp_path / CHOICE).exists())
        if request.args.get("candidate", {}).get("whole"):
            assert (tmp_path / CHOICE).exists()

    listen(grid, hear)
    run_federation(grid, config, sign(config, settle(tmp_path)))
    assert stored and all(stored)


def test_other_test_rows_change_nothing_of_the_choice(tmp_path: Path) -> None:
    config, chosen = configure(), []
    for turn, data in enumerate((draw(), draw())):
        test = data.test
        assert test is not None
        if turn:
            test = replace(test, targets=1 - test.targets)
        place = tmp_path / str(turn)
        grid = make_grid(replace(data, test=test), config, tmp_path / f"s{turn}")
        run_federation(grid, config, sign(config, settle(place)))
        chosen.append(served_by(place))
    assert chosen[0]["choice"] == chosen[1]["choice"] and chosen[0]["gain"] != chosen[1]["gain"]


HARMLESS, WHOLE = Candidate(1e-2, None), Candidate(1e-2, None, True)


def measure(sites: Any, split: str) -> None:
    sites.evaluate(sites.initial(Stream(0).at("initial")), [split])


def play(sites: Any, round: int = 1) -> None:
    sites.losses(sites.initial(Stream(0).at("initial")), Stream(0).at("round", round, "losses"))


def gradient(sites: Any, round: int = 1) -> None:
    x = sites.initial(Stream(0).at("initial"))
    sites.value_and_gradient(x, Stream(0).at("round", round, "gradient"))


ATTACKS: dict[str, tuple[list[tuple[Candidate | None, Any]], str]] = {
    "test rows before the choice": (
        [(HARMLESS, lambda s: measure(s, "test"))],
        "test rows are measured after the choice alone",
    ),
    "validation rows after it": (
        [(WHOLE, lambda s: measure(s, "validation"))],
        "test rows are measured after the choice alone",
    ),
    "another candidate after test rows": (
        [(WHOLE, lambda s: measure(s, "test")), (HARMLESS, gradient)],
        "a candidate was chosen, and others are not solved after that",
    ),
    "an own penalty that is not in the plan": (
        [(Candidate(1e-2, 0.5), gradient)],
        "the plan has no candidate with",
    ),
    "a penalty that is not in the plan": (
        [(Candidate(0.0, None), gradient)],
        "the plan has no candidate with",
    ),
    "no candidate": ([(None, gradient)], "the plan names candidates"),
    "a round more": ([(HARMLESS, lambda s: gradient(s, 601))], "the plan has 600"),
    "a question of another algorithm": ([(HARMLESS, play)], "the plan of this run has no"),
    "two candidates' gradients in one round": (
        [(HARMLESS, gradient), (Candidate(1e-1, None), gradient)],
        "the run asks for 'gradient gradient' 2 times",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_server_that_departs_from_the_plan_is_refused(name: str, tmp_path: Path) -> None:
    steps, message = ATTACKS[name]
    data, config = draw(), configure()
    grid = make_grid(data, config, tmp_path / "s")
    clients = join(grid, config, sign(config, settle()))
    asked = [
        (clients if c is None else present(c, clients.mailbox, clients.members, None), step)
        for c, step in steps
    ]
    for sites, step in asked[:-1]:
        step(sites)
    with pytest.raises(MissingClients, match=message):
        asked[-1][1](asked[-1][0])


def test_a_run_without_candidates_answers_for_none(tmp_path: Path) -> None:
    data, config = draw(), configure()
    grid = make_grid(data, config, tmp_path / "s")
    settings = replace(settle(), do="train")
    clients = join(grid, config, sign(config, settings))
    with pytest.raises(MissingClients, match="the plan has no candidates"):
        gradient(present(HARMLESS, clients.mailbox, clients.members, None))


def test_the_plan_tells_sites_what_a_fit_asks(tmp_path: Path) -> None:
    plan = make_plan(configure(), settle())
    words = "\n".join(plan.describe())
    assert "fit: 600 rounds of all candidates together" in words
    assert "linear models with l2 0.01, 0.1; own_l2 none, 0.1, 0.01" in words
    assert "test rows are measured after the choice, and no candidate is solved" in words
    assert read_plan(plan.encode().decode()) == plan
    plain = make_plan(configure(), replace(settle(), do="train"))
    assert "fit" not in json.loads(plain.encode())  # as plans of earlier versions


def test_a_plan_of_fewer_strengths_is_not_extended_by_one_of_more() -> None:
    plan = make_plan(configure(), settle())
    more: Plan = replace(plan, fit={**plan.fit, "l2": [*plan.fit["l2"], 0.0]})
    assert not more.extends(plan) and replace(plan, rounds=700).extends(plan)


# -- interruptions ---------------------------------------------------------------------------------


class Stop(Exception):
    pass


def interrupt(grid: MemoryGrid, at: int) -> None:
    push, sent = grid.push_messages, list[int]()

    def push_some(messages: Any) -> Any:
        sent.append(1)
        if len(sent) == at:
            raise Stop
        return push(messages)

    grid.push_messages = push_some  # type: ignore[method-assign]


@pytest.mark.parametrize("at", [30, 75, 105])
def test_an_interrupted_fit_ends_as_one_that_was_not(at: int, tmp_path: Path) -> None:
    data, config = draw(), configure()
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    grid = make_grid(data, config, tmp_path / "a")
    run_federation(grid, config, sign(config, settle(whole)))
    exchanges = len(grid.sent) // 4
    grid = make_grid(data, config, tmp_path / "b")
    interrupt(grid, at)
    with pytest.raises(Stop):
        run_federation(grid, config, sign(config, settle(halves)))
    before, push = len(grid.sent) // 4, MemoryGrid.push_messages
    grid.push_messages = push.__get__(grid)  # type: ignore[method-assign]
    # The setting do is not given again: what the run is stands in its folder.
    again = FederationSettings(4, deadlines=QUICK, out=str(halves), resume=True)
    run_federation(grid, config, again)
    repeated = len(grid.sent) // 4 - exchanges
    assert before < exchanges and 0 < repeated < 25  # a candidate at most, and the hello
    first, second = served_by(whole), served_by(halves)
    assert first == second
    for name in ("model.safetensors", "metrics.csv"):
        assert (whole / name).read_bytes() == (halves / name).read_bytes()


def test_rounds_that_are_used_up_are_told_and_signed_anew(tmp_path: Path) -> None:
    data, config = draw(), configure()
    grid = make_grid(data, config, tmp_path / "s")
    settings = sign(config, settle(tmp_path, rounds=70))
    with pytest.raises(TrainingError, match=r"rounds of the plan are left after \d+ candidates"):
        run_federation(grid, config, settings)
    told = json.loads((tmp_path / "flower.json").read_text())["plan"]
    longer = replace(read_plan(told["text"]), rounds=300)
    more = replace(settings, rounds=300, resume=True, plan=pack_plan(sign_plan(longer, KEY)))
    run_federation(grid, config, more)
    assert served_by(tmp_path)["choice"] == ef.fit(data).choice


def test_a_site_that_is_missing_ends_the_fit_and_no_candidate_goes_without_it(
    tmp_path: Path,
) -> None:
    data, config = draw(), configure()
    grid = make_grid(data, config, tmp_path / "s")
    gone = list(grid.apps)[1]

    def hear(request: Request, reply: Reply) -> None:
        if request.args.get("round") == 5:
            grid.offline.add(gone)

    listen(grid, hear)
    with pytest.raises(TrainingError, match="missing"):
        run_federation(grid, config, sign(config, settle(tmp_path)))
    grid.offline.clear()
    grid.tamper = None
    again = replace(settle(tmp_path), resume=True)
    run_federation(grid, config, again)
    assert served_by(tmp_path)["choice"] == ef.fit(data).choice


# -- what sites get, and what is refused -----------------------------------------------------------


def test_sites_get_the_chosen_model_with_their_own_part(tmp_path: Path) -> None:
    data, config = draw(), configure()
    grid = make_grid(data, config, tmp_path / "s")
    run_federation(grid, config, sign(config, settle(tmp_path, deliver=True)))
    told = served_by(tmp_path)
    assert told["candidate"].startswith("own bias")
    (row,) = [row for row in told["candidates"] if row["chosen"]]
    found = []
    for i, name in enumerate(data.names):
        (folder,) = (tmp_path / "s" / "memory" / "results" / name).iterdir()
        assert data.test is not None
        x, y = data.test.client(i)
        found.append(np.mean(load_predictor(folder, trust=True).predict(x).astype(int) == y))
        assert "fair-newton" in (folder / "card.md").read_text()
    assert np.mean(found) == pytest.approx(row["test"]["average"])


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"guard": "on"}, {}, 'no guard can check. Write guard = "off"'),
        ({}, {"start": "elsewhere"}, "A fit starts from nothing"),
    ],
)
def test_what_a_fit_cannot_have_is_refused_before_anybody_is_asked(
    changes: dict[str, Any], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = configure(**changes)
    grid = make_grid(draw(), config, tmp_path / "s", None)
    with pytest.raises(StartError, match=message):
        run_federation(grid, config, settle(**given))
    assert not grid.sent


@pytest.mark.parametrize("split", ["validation", "test"])
def test_sites_that_hold_nothing_out_are_told_to(split: str, tmp_path: Path) -> None:
    data, config = replace(draw(), **{split: None}), configure()  # type: ignore[arg-type]
    grid = make_grid(data, config, tmp_path / "s")
    with pytest.raises(StartError, match=f"No site has {split} rows.*holdout = "):
        run_federation(grid, config, sign(config, settle()))


def test_a_single_site_has_nothing_to_choose(tmp_path: Path) -> None:
    data, config = draw().subset([0]), configure()
    grid = make_grid(data, config, tmp_path / "s")
    with pytest.raises(StartError, match="there is only one"):
        run_federation(grid, config, sign(config, settle(clients=1)))


def test_a_site_with_a_privacy_budget_says_why_it_takes_no_part(tmp_path: Path) -> None:
    data, config = draw(), configure()
    budget = "[budget]\nepsilon = 3.0\nrows = 4.0\nloss = 3.0\n"
    grid = make_grid(data, config, tmp_path / "s", budget)
    with pytest.raises(StartError, match=r"a fit compares losses of validation rows.*privacy="):
        run_federation(grid, config, sign(config, settle()))


def test_a_candidate_whose_sums_would_show_a_site_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = SiteTrials.solve

    def refuse(self: Any, point: Any, *given: Any) -> Any:
        if point.rho is not None and point.own_l2 is None:
            raise PrivacyError("the sum would show one client's vector")
        return solve(self, point, *given)

    monkeypatch.setattr(SiteTrials, "solve", refuse)
    data, config = draw(), configure()
    run_federation(make_grid(data, config, tmp_path / "s"), config, sign(config, settle(tmp_path)))
    told = served_by(tmp_path)
    assert told["tried"] == 8 and "one shared model, fair" not in told["validation"]
    assert sum("was left out: the sum would show" in note for note in told["notes"]) == 2
