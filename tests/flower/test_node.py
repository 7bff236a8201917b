"""A site's node: it runs the site's app alone, survives a crash of the work, writes down all."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Message, RecordDict

from equifed.cli.terminal import _explain
from equifed.flower import flwr_private, node
from equifed.flower.flwr_private import FleetError, Parcel, explain_transport
from equifed.flower.node import AuditError
from equifed.flower.plan import Plan, sign_plan
from equifed.flower.site import Budget, Site, SiteError
from equifed.flower.trial.deploy import make_node_key
from equifed.flower.wire import REFUSED, Reply, Request
from equifed.privacy.ledger import Entry
from equifed.training.keys import KeyProblem, public_of

pytestmark = pytest.mark.long
flwr_private.set_identity(1, 1)

APP = """
import os, signal, time
from pathlib import Path
import numpy as np
from equifed.flower.client import make_client_app
from equifed.flower.task import Task
from equifed.models import architectures

def load_data(context):
    what = Path(context.node_config["trouble"])
    if what.exists():
        word = what.read_text()
        what.unlink()
        if word == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if word == "hang":
            time.sleep(600)
        raise ValueError(word)
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 3)), np.arange(8) % 2

def build(shape, outputs):
    return architectures.build("logistic", shape, outputs)

app = make_client_app(load_data, Task(build, "cross_entropy", dtype="float64"), classes=2)
"""


class FakeFleet:
    """Hands out messages, takes replies, and ends the node when there are no more."""

    address, node_id = "fake:1", 7

    def __init__(self, inbox: list[tuple[int, float, Message]]) -> None:
        self.inbox, self.sent = inbox, list[Message]()
        self.lost = threading.Event()

    def open(self) -> int:
        return self.node_id

    def close(self) -> None: ...

    def receive(self) -> tuple[int, float, Parcel] | None:
        if not self.inbox:
            raise KeyboardInterrupt  # as Ctrl-C does
        run, seconds, message = self.inbox.pop(0)
        return run, seconds, Parcel.of(message)

    def send(self, reply: Parcel, message: Message, seconds: float) -> None:
        self.sent.append(message)


def serve(
    tmp_path: Path, *inbox: tuple[int, float, Message, str], policy: str = ""
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Serve requests, each preceded by trouble of a kind; return the replies and the log."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "site_app.py").write_text(APP)
    told = '[tool.flwr.app.components]\nclientapp = "site_app:app"\n'
    (site / "pyproject.toml").write_text(told)
    trouble, audit = tmp_path / "trouble", tmp_path / "audit.jsonl"
    settings = {"name": "north", "memory": str(tmp_path / "memory"), "trouble": str(trouble)}
    if policy:
        (tmp_path / "policy.toml").write_text(policy)
        settings["policy"] = str(tmp_path / "policy.toml")
    fleets: list[FakeFleet] = []

    class Troubled(FakeFleet):
        def receive(self) -> tuple[int, float, Parcel] | None:
            if words:
                word = words.pop(0)
                if word:
                    trouble.write_text(word)
            return super().receive()

    words = [word for *_, word in inbox]

    def connect() -> Any:
        fleets.append(Troubled([(r, s, m) for r, s, m, _ in inbox]))
        return fleets[-1]

    node.Node(Site(str(site), settings), connect, audit).run()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    return fleets[0].sent, lines


def ask(op: str = "hello", kind: str = "", run: str = "run") -> Message:
    content = Request(op, run, f"{op}#0", -1).to_records()
    return Message(content, 7, kind or node.VERBS[op].message)


def test_a_node_answers_refuses_and_survives(tmp_path: Path) -> None:
    foreign = Message(RecordDict({"c": ConfigRecord({"path": "/etc/passwd"})}), 7, "query.read")
    sent, lines = serve(
        tmp_path,
        (1, 60.0, ask(), ""),
        (1, 60.0, foreign, ""),
        (2, 60.0, ask(), "segfault"),  # another run loads the data again
        (2, 60.0, ask(), ""),
        (3, 1.0, ask(), "hang"),
        (4, 60.0, ask(), "row 17 of the patients"),
    )
    hello, refusal, crashed, again, late, failed = sent
    assert Reply.from_records(hello.content).numbers["name"] == "north"
    assert refusal.has_error() and refusal.error.reason == REFUSED
    dead = Reply.from_records(crashed.content)
    assert dead.error == "failed" and "died (SIGSEGV) and was started again" in dead.text
    assert (dead.op, dead.run, dead.tag) == ("hello", "run", "hello#0")
    assert Reply.from_records(again.content).numbers["sizes"] == {"train": 8}
    assert "took longer than the server waits" in Reply.from_records(late.content).text
    broken = Reply.from_records(failed.content)
    assert broken.error == "data" and "ValueError" in broken.text and "17" not in broken.text
    asked = [line for line in lines if line["event"] == "request"]
    assert [line["request"] for line in asked] == ["hello", "query.read"] + ["hello"] * 4
    assert "not a request that this site answers" in asked[1]["refused"]
    assert asked[0]["numbers"]["name"] == "north" and asked[0]["arrays"] == {}
    assert [line["bytes_in"] for line in asked] == [
        sum(len(content) for content in Parcel.of(message).contents.values())
        for message in (ask(), foreign, ask(), ask(), ask(), ask())
    ]
    assert asked[0]["bytes_out"] > len(json.dumps(asked[0]["numbers"]))
    assert all(line["site"] == "north" and "seconds" in line for line in asked)
    assert [line["event"] for line in lines if line not in asked] == [
        "started",
        "connected",
        "stopped",
    ]


def test_a_site_keeps_to_its_policy_and_writes_down_what_it_refused(tmp_path: Path) -> None:
    late = Request("hello", "run", "hello", -1, {"late": "a run is under way"}).to_records()
    rules = 'max_seconds = 1.0\nmin_samples = 8\nprivacy = "secure"\n'
    sent, lines = serve(
        tmp_path,
        (1, 60.0, ask(), "hang"),
        (2, 60.0, ask("recall"), ""),
        (2, 60.0, Message(late, 7, node.VERBS["hello"].message), ""),
        (2, 60.0, ask(), ""),
        policy=rules,
    )
    slow, refused, told, hello = (Reply.from_records(m.content) for m in sent)
    assert slow.error == "refused" and "took longer than this site allows" in slow.text
    assert refused.error == "refused" and "takes part with privacy 'secure' only" in refused.text
    assert told.numbers == hello.numbers and not told.error
    assert hello.numbers["notes"] == ["works at most 1 s on a request"]
    asked = [line for line in lines if line["event"] == "request"]
    assert ["refused" in line for line in asked] == [True, True, False, False]
    assert asked[2]["told"] == "a run is under way"


def test_a_plan_beyond_the_privacy_budget_is_written_down_as_refused(tmp_path: Path) -> None:
    key, step = Ed25519PrivateKey.generate(), {"times": 1, "models": 1}
    asked = {"gradient gradient": step, "curvature curvature full": step}
    about = {"algorithm": {"name": "fair-newton"}, "model": {"name": "logistic"}, "data": {}}
    plan = Plan("0" * 16, "train", {**about, "seed": 0}, "none", 3, 2, asked, 0, (), 1.0)
    hello = Request("hello", plan.run, "hello#0", -1, {"plan": sign_plan(plan, key)})
    ledger = Budget(1.0, 2.0, 2.0).open_ledger(tmp_path / "memory", "north")
    ledger.spend(Entry("moments", 1.0, 10.0))
    rules = f'operators = ["{public_of(key, "anna").line} anna"]\n'
    rules += "[budget]\nepsilon = 1.0\nrows = 2.0\nloss = 2.0\n"
    message = Message(hello.to_records(), 7, node.VERBS["hello"].message)
    (sent,), lines = serve(tmp_path, (1, 60.0, message, ""), policy=rules)
    (line,) = [line for line in lines if line["event"] == "request"]
    wanted = "privacy budget does not suffice: the plan costs epsilon 1, and 0.3"
    for said in (line["refused"], Reply.from_records(sent.content).text):
        assert wanted in said


def test_a_node_with_a_policy_that_cannot_be_read_does_not_start(tmp_path: Path) -> None:
    settings = {"memory": str(tmp_path), "policy": str(tmp_path / "none.toml")}
    with pytest.raises(SiteError, match=r"The policy .*none\.toml cannot be read"):
        node.Node(Site("a:b", settings), lambda: None)  # type: ignore[arg-type,return-value]


def test_a_site_whose_app_cannot_be_imported_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="no_such_module:app cannot be imported"):
        settings = {"memory": str(tmp_path)}
        node.Node(Site("no_such_module:app", settings), lambda: None).run()  # type: ignore
    for app, message in (
        ("nothing", "neither the folder of an app nor the address"),
        ("numpy:pi", "is a float, not a ClientApp"),
    ):
        with pytest.raises(SiteError, match=message):
            Site(app).load()
    with pytest.raises(SiteError, match="names no client"):
        Site(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ask("hello", "train.local"), "asks for 'hello'"),
        (Message(RecordDict(), 7, "query.hello"), "no equifed header"),
        (Message(RecordDict(), 7, "train"), "not a request that this site answers"),
    ],
)
def test_a_node_judges_what_it_is_asked(message: Message, reason: str) -> None:
    with pytest.raises(node.WireError, match=reason):
        node.judge_request(message)


def test_a_parcel_holds_the_same_message() -> None:
    arrays = {"x": np.arange(30_000, dtype=np.float64), "y": np.ones(3)}
    message = Message(Request("losses", "r", "t", 0, {}, arrays).to_records(), 7, "query.hello")
    back = Parcel.of(message).open()
    found = Request.from_records(back.content)
    assert all(found.arrays[k].tobytes() == v.tobytes() for k, v in arrays.items())
    small = Message(Request("losses", "r", "t", 0).to_records(), 7, "query.hello")
    assert len(Parcel.of(small).contents) == 3  # message, records, header: one call each


def test_one_key_serves_one_node(tmp_path: Path) -> None:
    key, _ = make_node_key(tmp_path, "node")
    held = node.open_key(key)
    assert held.curve.name == "secp384r1"
    with pytest.raises(SiteError, match="Another node on this machine uses the key"):
        node.open_key(key)
    node._HELD.pop().close()
    with pytest.raises(KeyProblem, match="holds no private key"):
        node.open_key(tmp_path / "none")


def test_every_private_name_of_flwr_is_as_we_use_it() -> None:
    changed = flwr_private.find_changes(flwr_private.USED | flwr_private.USED_BY_SERVER)
    assert not changed, f"this flwr changed what src/equifed/flower/flwr_private.py uses: {changed}"
    wrong = {"flwr.supercore.heartbeat:HeartbeatSender": "heart", "flwr.gone:x": ""}
    assert flwr_private.find_changes(wrong) == [
        "flwr.supercore.heartbeat:HeartbeatSender takes no 'heart' any more",
        "flwr.gone:x was removed",
    ]


def test_private_names_of_flwr_stand_in_one_file() -> None:
    public = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")
    root = Path(flwr_private.__file__).parents[1]
    for path in root.rglob("*.py"):
        if path.name == "flwr_private.py":
            continue
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and words[1].split(".")[0] == "flwr":
                assert words[1] in public, f"{path}: {line}"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("certificate verify failed: certificate has expired", "has expired"),
        ("certificate verify failed: self-signed certificate in chain", "another authority"),
        ("certificate verify failed: unable to get local issuer", "another authority"),
        ("Hostname mismatch, certificate is not valid for 'x'", "for another address"),
        ("[Errno 111] Connection refused", "cannot be reached"),
    ],
)
def test_reasons_of_no_connection_are_told_apart(said: str, told: str) -> None:
    assert told in explain_transport("fl:1", said)


def test_a_node_says_once_why_it_is_not_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = node.Node(Site("a:b", {"memory": str(tmp_path)}), lambda: None)  # type: ignore
    for error in [FleetError("no way")] * 3 + [FleetError("another")]:
        found._tell(str(error))
    found.audit.close()
    assert [r.getMessage() for r in caplog.records] == [
        "equifed: no way; trying again",
        "equifed: another; trying again",
    ]


def test_a_node_that_cannot_write_its_log_ends(tmp_path: Path) -> None:
    found = node.Node(Site("a:b", {"memory": str(tmp_path)}), lambda: None)  # type: ignore
    found.audit.close()
    found.audit._file = -1  # as on a disk that is gone
    with pytest.raises(OSError, match=r"The audit log .* cannot be written"):
        found._answer(FakeFleet([]), 1, 1.0, Parcel("x", b"", {}))  # type: ignore


@pytest.mark.parametrize("written", [10, OSError(28, "No space left on device")])
def test_nothing_leaves_that_was_not_written_down(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a line that finds no room nor a part of one lets an answer go."""
    found = node.Node(Site("a:b", {"memory": str(tmp_path)}), lambda: None)  # type: ignore
    foreign = Message(RecordDict({"c": ConfigRecord({"path": "x"})}), 7, "query.read")
    fleet: Any = FakeFleet([])
    found._answer(fleet, 1, 60.0, Parcel.of(foreign))
    assert len(fleet.sent) == 1

    def full(file: int, content: bytes) -> int:
        if isinstance(written, OSError):
            raise written
        return int(written)

    monkeypatch.setattr("equifed.flower.node.os.write", full)
    with pytest.raises(AuditError, match=r"No space left on device.*sends nothing") as caught:
        found._answer(fleet, 1, 60.0, Parcel.of(foreign))
    assert len(fleet.sent) == 1
    assert _explain(caught.value)[1] == 1, "systemd starts a node again that ended so"


def test_an_answer_that_was_not_delivered_is_written_down_as_such(tmp_path: Path) -> None:
    found = node.Node(Site("a:b", {"memory": str(tmp_path)}), lambda: None)  # type: ignore
    foreign = Message(RecordDict({"c": ConfigRecord({"path": "x"})}), 7, "query.read")

    class Gone(FakeFleet):
        def send(self, *args: Any) -> None:
            raise node.RunOver

    found._answer(Gone([]), 1, 60.0, Parcel.of(foreign))  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["request", "not delivered"]
    assert lines[1]["reason"] == "the run was over"
