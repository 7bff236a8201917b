"""Plans: what is signed, what sites refuse, and that no honest run is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message
from scripts.trust.questions import (
    ATTACKS,
    Attack,
    agree,
    far_model,
    finite_differences,
    measure_gradient,
    measure_row,
    one_row_batches,
    read_sum,
    run_attack,
    serve,
    shorten,
    training_rows_measured,
    true_gradient,
)
from tests.conformance import cases as conformance
from tests.flower.grid import QUICK, convex
from tests.flower.test_secure import tampering
from tests.flower.test_tables import TABLE, make_grid, run
from typer.testing import CliRunner

from equifed.algorithms.guard import guard_algorithm
from equifed.algorithms.guard_limits import Guard, round_losses
from equifed.cli.flower import app as flower_cli
from equifed.flower import rehearsal
from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.handshake import StartError
from equifed.flower.memory import Memory
from equifed.flower.messenger import SecureSums
from equifed.flower.node import serve_site
from equifed.flower.participant import Client
from equifed.flower.plan import pack_plan, read_plan, sign_plan
from equifed.flower.rehearsal import make_plan
from equifed.flower.secure.session import Epoch
from equifed.flower.server import FlowerClients
from equifed.flower.site import Policy, Site, SiteError
from equifed.flower.trial.deploy import make_node_key
from equifed.flower.wire import Reply, Request
from equifed.training.keys import KeyProblem, make_key, public_of, read_key_file, read_private
from equifed.training.loop import train

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"
KEY = Ed25519PrivateKey.generate()
LINE = f'operators = ["{public_of(KEY, "anna").line} anna"]\n'


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_refused_at_the_site_by_name_as_the_page_says(attack: Attack) -> None:
    reply = run_attack(attack)
    assert reply.error == "refused" and ATTACKS[attack].message in reply.text
    assert not reply.arrays and not set(reply.numbers) - {"name"}
    what = f"| {str(attack.__doc__).strip('.')} | "
    (line,) = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(what)]
    assert line.endswith(
        f" | {shorten(reply)} | {ATTACKS[attack].where} | {ATTACKS[attack].left} |"
    )


def test_sites_that_answer_anybody_answered_before() -> None:
    for attack in (finite_differences, training_rows_measured, far_model, one_row_batches):
        assert not run_attack(attack, anybody=True).error
        line = f"| {str(attack.__doc__).strip('.')} | answered | "
        assert line in PAGE.read_text("utf-8")


def test_what_a_signed_server_gets_by_choosing_models_is_what_the_page_says() -> None:
    """The bounds of docs/parties.md: losses tell, and rounding makes them tell less."""
    with serve("secure") as server:
        used, plain = measure_gradient(server, 1e-5)
    with serve("secure", 1e-2) as server:
        rounded = measure_gradient(server, 0.1)[1]
    assert used <= 60 and plain < 1e-3 and rounded > 0.3
    with serve("secure") as server:
        assert measure_row(server, 9.0)[1] < 0.1


def test_a_sum_whose_members_were_told_different_models_is_noise() -> None:
    """Else the others would be sent a model at which they have no gradient."""
    with serve("secure") as server:
        honest = read_sum(server, np.zeros(server.size))
        truths = [true_gradient(server, np.zeros(server.size), i) for i in range(4)]
        np.testing.assert_allclose(honest, np.mean(truths, axis=0), atol=1e-10)
    with serve("secure") as server:
        models = np.ones((4, server.size))
        models[0] = 0
        assert np.abs(read_sum(server, models)).min() > 1.0  # of numbers up to 8.4e6


def test_the_preparation_of_a_run_is_that_of_its_rows_and_stays(tmp_path: Path) -> None:
    """A server that stretches rows would make a long model of a short one."""
    plan = make_plan(AppConfig.from_dict(TABLE), settings(tmp_path))
    grid = make_grid(tmp_path / "sites", more=listed(tmp_path))
    given = settings(tmp_path, plan=pack_plan(sign_plan(plan, KEY)))
    run_federation(grid, AppConfig.from_dict(TABLE), given)
    told = json.loads((tmp_path / "run" / "preparation.json").read_text())
    stretched = json.loads(json.dumps(told))
    column = next(c for c in stretched["columns"] if c["kind"] == "number")
    column["scale"] *= 1e-4
    for run_id, sent, message in (
        (plan.run, stretched, "the preparation differs from the one this site received"),
        ("0" * 16, stretched, f"column '{column['name']}' is not scaled as the rows here are"),
        ("0" * 16, told, "the preparation differs from the one this site received"),
        (plan.run, told, ""),
    ):
        args = {"plan": sign_plan(replace(plan, run=run_id), KEY), "preparation": sent}
        node = next(iter(grid.apps))
        request = Request("hello", run_id, "hello/1#0", -1, args)
        (sent_id,) = grid.push_messages([Message(request.to_records(), node, "query.hello")])
        (answer,) = grid.pull_messages([sent_id])
        reply = Reply.from_records(answer.content)
        assert message in reply.text and (reply.error == "refused") == bool(message)


def test_an_operator_who_is_listed_no_more_has_no_say_in_runs_under_way() -> None:
    with serve("none") as server:
        x = agree(server)
        assert not server.gradient(x, 1).error
        config = next(iter(server.grid.contexts.values())).node_config
        line = public_of(KEY, "bert").line
        Path(str(config["policy"])).write_text(f'operators = ["{line} bert"]\n')
        assert (
            "not signed by an operator listed in this site's policy" in server.gradient(x, 2).text
        )


def settings(tmp_path: Path, **given: Any) -> FederationSettings:
    return FederationSettings(4, deadlines=QUICK, out=str(tmp_path / "run"), **given)


def listed(tmp_path: Path, text: str = LINE) -> dict[str, dict[str, Any]]:
    (tmp_path / "policy.toml").write_text(text)
    policy = {"policy": str(tmp_path / "policy.toml")}
    return dict.fromkeys(("North", "South", "East", "West"), policy)


@pytest.mark.parametrize("privacy", ["none", "secure"])
def test_a_signed_run_is_the_unsigned_one(privacy: Any, tmp_path: Path) -> None:
    config = AppConfig.from_dict(TABLE)
    plain = run(make_grid(tmp_path / "a"), privacy=privacy)
    plan = make_plan(config, settings(tmp_path, privacy=privacy))
    given = settings(tmp_path, privacy=privacy, plan=pack_plan(sign_plan(plan, KEY)))
    grid = make_grid(tmp_path / "b", more=listed(tmp_path))
    signed = run_federation(grid, config, given)
    for name, value in plain.parameters.items():
        assert (signed.parameters[name] == value).all()  # type: ignore[index]
    told = json.loads((tmp_path / "run" / "flower.json").read_text())["plan"]
    assert read_plan(told["text"]) == plan


def test_sites_with_operators_refuse_an_unsigned_run(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="West: refused: this site answers only signed runs"):
        run(make_grid(tmp_path / "sites", more=listed(tmp_path)))


def test_a_plan_waits_until_a_site_approves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AppConfig.from_dict(TABLE)
    plan = make_plan(config, settings(tmp_path))
    given = settings(tmp_path, plan=pack_plan(sign_plan(plan, KEY)))
    more = {"South": listed(tmp_path, LINE + 'approve = "ask"\n')["South"]}
    grid, root = make_grid(tmp_path / "sites", more=more), tmp_path / "sites" / "memory"
    with pytest.raises(StartError, match=r"South: waiting: .*not approved.*equifed flower approve"):
        run_federation(grid, config, given)
    assert "waiting for 4 sites, 4 connected: East, North, West, South (waiting" in (
        capsys.readouterr().out
    )
    shown = CliRunner().invoke(flower_cli, ["approve", str(root)])
    assert "signed by anna" in shown.output and "algorithm fedavg" in shown.output
    name = next(p.stem for p in (root / "plans").glob("*South*"))
    assert name.startswith(plan.digest[:16])
    assert CliRunner().invoke(flower_cli, ["approve", str(root), name]).exit_code == 0
    assert run_federation(grid, config, given).rounds[-1].round == 3


def make_members(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the settings of four nodes with keys, and the lines of their public halves."""
    more: dict[str, dict[str, Any]] = {}
    lines = []
    for who in ("North", "South", "East", "West"):
        private, public = make_node_key(folder / "keys", who)
        more[who] = {"node-key": str(private)}
        lines.append(public.read_text())
    (folder / "members").write_text("".join(lines))
    return more, lines


def test_keys_of_hidden_sums_are_signed_by_the_members_of_the_plan(tmp_path: Path) -> None:
    """Sites without ``peers`` refuse keys that the server made as well."""
    more, config = make_members(tmp_path)[0], AppConfig.from_dict(TABLE)
    given = settings(tmp_path, privacy="secure")
    plan = make_plan(config, given, read_key_file(tmp_path / "members"))
    grid = make_grid(tmp_path / "sites", more=more)
    mine = Epoch("server", 2, b"s" * 32, 16).publish().to_dict()
    grid.tamper = tampering(-1, "query.keys", lambda numbers: {**numbers, **mine})
    with pytest.raises(StartError, match="are not signed by the key that this site"):
        run_federation(grid, config, replace(given, plan=pack_plan(sign_plan(plan, KEY))))


def test_only_listed_sites_with_their_keys_take_part(tmp_path: Path) -> None:
    more, lines = make_members(tmp_path)
    members, config = read_key_file(tmp_path / "members"), AppConfig.from_dict(TABLE)
    plan = make_plan(config, settings(tmp_path), members)
    given = settings(tmp_path, plan=pack_plan(sign_plan(plan, KEY)))
    run_federation(make_grid(tmp_path / "a", more=more), config, given)
    swapped = {**more, "West": more["East"]}
    with pytest.raises(StartError, match="West: refused: it does not prove that it has the key"):
        run_federation(make_grid(tmp_path / "b", more=swapped), config, given)
    unsigned = {who: given for who, given in more.items() if who != "West"}
    with pytest.raises(StartError, match="West: refused: it does not prove that it has the key"):
        run_federation(make_grid(tmp_path / "u", more=unsigned), config, given)
    (tmp_path / "others").write_text("".join(lines[:3]))
    known = {**more, "South": {**more["South"], "peers": str(tmp_path / "others")}}
    with pytest.raises(StartError, match="South: refused: the plan gives 'West' a key that is not"):
        run_federation(make_grid(tmp_path / "c", more=known), config, given)
    (tmp_path / "site.toml").write_text('peers = "others"')  # the file of a site says it as well
    known = {**more, "South": {**more["South"], "site": str(tmp_path / "site.toml")}}
    with pytest.raises(StartError, match="South: refused: the plan gives 'West' a key that is not"):
        run_federation(make_grid(tmp_path / "e", more=known), config, given)
    three = replace(plan, members={k: v for k, v in plan.members.items() if k != "West"})
    given = settings(tmp_path, plan=pack_plan(sign_plan(three, KEY)))
    with pytest.raises(StartError, match="West: refused: the plan does not name 'West'"):
        run_federation(make_grid(tmp_path / "d", more=more), config, given)


def test_a_name_has_one_key_and_a_key_one_name(tmp_path: Path) -> None:
    one = public_of(KEY, "north").line
    other = public_of(Ed25519PrivateKey.generate(), "x").line
    for text, message in (
        (f"{one} north\n{other} north\n", "line 2: a second key of 'north'"),
        (f"{one} north\n{one} south\n", "key of 'north' under a second name, 'south'"),
    ):
        (tmp_path / "peers").write_text(text)
        with pytest.raises(KeyProblem, match=message):
            read_key_file(tmp_path / "peers")


def test_a_node_without_operators_does_not_start(tmp_path: Path) -> None:
    private, _ = make_node_key(tmp_path, "north")
    with pytest.raises(SiteError, match=r"lists no operators.*or use --any-operator"):
        serve_site("app", 'name="north"', "x:1", tmp_path / "ca.pem", private, None)


def test_keys_are_written_once_and_read_back(tmp_path: Path) -> None:
    made = CliRunner().invoke(flower_cli, ["keys", str(tmp_path), "anna"])
    assert made.exit_code == 0 and 'operators = ["ssh-ed25519 ' in made.output
    private = read_private(tmp_path / "anna.key")
    (line,) = (tmp_path / "anna.pub").read_text().splitlines()
    assert f"{public_of(private, 'anna').line} anna" == line
    assert (tmp_path / "anna.key").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        make_key(tmp_path, "anna")
    (tmp_path / "policy.toml").write_text(f'operators = ["{line}"]\n')
    assert list(Policy.read(tmp_path / "policy.toml").operator_keys) == ["anna"]
    for text, message in (
        ('operators = ["ssh-ed25519 AAAA anna"]', "is not a public key with a name"),
        ('approve = "ask"', "needs operators"),
        ('approve = "later"', "approve"),
    ):
        (tmp_path / "policy.toml").write_text(text)
        with pytest.raises(SiteError, match=message):
            Policy.read(tmp_path / "policy.toml")


def test_the_server_computes_with_the_losses_that_sites_round(tmp_path: Path) -> None:
    """The guard of a simulation and the sites of a federation round alike."""
    algorithm = {"name": "afl", "local": {"lr": 0.1, "steps": 3}, "dual_step": 0.1}
    guard = {"mode": "watch", "rounding": 0.125}
    table = {**TABLE, "algorithm": algorithm, "guard": guard, "evaluate": {"splits": []}}
    clear, hidden = (
        run(make_grid(tmp_path / privacy, table), table=table, privacy=privacy)
        for privacy in ("none", "secure")
    )
    assert clear.rounds[-1].round == 3
    for r, weights in clear.weights.items():
        np.testing.assert_array_equal(weights, hidden.weights[r])
    losses = np.array([0.1, 0.2, 0.37, 0.5])
    once = round_losses(losses, 0.125)
    np.testing.assert_array_equal(once * 8, np.rint(once * 8))
    np.testing.assert_array_equal(round_losses(once, 0.125), once)


HONEST = ("scaffold/plain", "q-fedavg/plain", "averaged/plain")


@pytest.mark.parametrize(
    ("name", "privacy"), [(n, "secure") for n in HONEST] + [(n, "none") for n in HONEST]
)
def test_no_honest_round_is_beyond_its_plan(
    name: str, privacy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan from three rounds among made-up clients covers six on other data."""
    case = guard_algorithm(conformance.CASES[name], Guard("on"))
    monkeypatch.setattr(AppConfig, "build_algorithm", lambda config, sizes: case)
    rehearsal._rehearse_once.cache_clear()
    table = {"rounds": 6, "data": {"classes": 3}, "evaluate": {"splits": []}}
    model = {"name": "logistic", "l2": 0.001, "dtype": "float64"}
    config = AppConfig.from_dict({**table, "model": model, "algorithm": {"name": "fedavg"}})
    given = FederationSettings(5, privacy)
    plan = make_plan(config, given)
    federation, the_task = convex(5, seed=5), config.build_task()
    site = Site(settings={"memory": tmp_path})
    clients = [Client(federation.subset([i]), the_task, site) for i in range(5)]
    told = {"digest": plan.digest, **sign_plan(plan)}
    for client in clients:
        Memory(tmp_path, "rehearsal", client.name).write_record("plan", told)
    mailbox = rehearsal._Rehearsal(clients, given.deadlines, {})
    members = rehearsal._introduce(the_task, federation)
    hidden = SecureSums() if privacy == "secure" else None
    history = train(case, FlowerClients(mailbox, members, hidden), rounds=6, progress=False)
    assert history.rounds[-1].round == 6
    kept = Memory(tmp_path, "rehearsal", clients[0].name).read_record("account")
    assert kept["round"] == 6
