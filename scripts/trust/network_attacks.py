"""The attacks of ``questions`` by a modified submitter and server, over a network, on real nodes.

    python -m scripts.trust.network_attacks                     # all, about four minutes
    python -m scripts.trust.network_attacks --only lonely_sum older_round --evaluations 40

A SuperLink and four nodes, with TLS, node keys, ``peers`` and a policy that lists one operator, are
processes on this machine. Who has the address and the authority's certificate submits an app whose
server plays attacks in place of training; for those that an operator could try it has his key, too.
Prints what the site said to each and the line of its audit log; exits with 1 if one is answered, is
refused in other words than the table of ``questions`` says, or leaves no line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from scripts.trust import questions
from scripts.trust.questions import APP, ATTACKS, VICTIM, Attack, Refusal, Server, agree, shorten
from typing_extensions import override

from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.flwr_private import pull_replies
from equifed.flower.plan import sign_plan
from equifed.flower.rehearsal import make_plan
from equifed.flower.secure.session import Epoch
from equifed.flower.trial.apps import write_app
from equifed.flower.trial.deploy import Deployment
from equifed.flower.wire import VERBS, Reply, Request
from equifed.runs.build import load_data
from equifed.training.keys import public_of, read_key_file, read_private

GIVEN = "EQUIFED_ATTACK"
"""Names, in the environment of the attacking server, the file that says what to do."""

SERVER = """from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity as Me

app = ServerApp()


@app.main()
def main(grid, context):
    known = Me.run_id, Me.task_id, Me.node_id
    from scripts.trust.network_attacks import play  # loads a grid for tests, which changes them

    Me.run_id, Me.task_id, Me.node_id = known
    play(grid)
"""
SECONDS = 300.0
"""Until a site that says nothing is given up."""


# -- the server that was submitted -----------------------------------------------------------------


class NetworkServer(Server):
    """A server at Flower's grid; ``nodes`` are those of the sites, ``last`` what was sent last."""

    nodes: dict[int, int]
    last: tuple[str, str]

    @property
    @override
    def sites(self) -> range:
        return range(len(self.nodes))

    @override
    def send(self, request: Request, at: int) -> Reply:
        self.last = request.run, request.tag
        kind = VERBS[request.op].message
        return self.deliver(Message(request.to_records(), self.nodes[at], kind, ttl=SECONDS))

    def deliver(self, message: Message) -> Reply:
        """Send a message and return what comes back."""
        (sent,) = self.grid.push_messages([message])
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            for found in pull_replies(self.grid, [sent], 1 << 26, SECONDS):
                if found.message is None or found.message.has_error():
                    told = found.problem if found.message is None else found.message.error.reason
                    return Reply("", "", "", {}, error="refused", text=told)
                return Reply.from_records(found.message.content)
            time.sleep(0.02)
        raise TimeoutError(f"no answer to {self.last}")


def play(grid: Grid) -> None:
    """Play the attacks, and write down what the victim said to each."""
    given = json.loads(Path(os.environ[GIVEN]).read_text())
    questions.OPERATOR = read_private(Path(given["operator"]))
    config = AppConfig.read(Path(given["config"]))
    settings, members = FederationSettings(4, "secure"), read_key_file(Path(given["peers"]))
    nodes: dict[int, int] = {}
    while len(nodes) < settings.clients:
        for node in set(grid.get_node_ids()) - set(nodes.values()):
            server = NetworkServer(grid, None, None, Path())  # type: ignore[arg-type]
            server.nodes = {0: node}
            told = server.send(Request("hello", "who", "hello", -1), 0)  # refused, by name
            nodes[int(str(told.numbers["name"]).removeprefix("client-"))] = node
    found = {}
    for attack in KNOWN:
        if attack.__name__ not in given["attacks"]:
            continue
        plan = make_plan(config, settings, members)
        server = NetworkServer(grid, plan, load_data(config.data), Path(given["memory"]))  # type: ignore[arg-type]
        server.nodes, server.evaluations = nodes, given["evaluations"]
        reply = attack(server)
        said = {"error": reply.error, "text": reply.text, "numbers": sorted(reply.numbers)}
        found[attack.__name__] = {**said, "last": server.last}
        Path(given["found"]).write_text(json.dumps(found))


# -- attacks that need a network, or sites that know each other ------------------------------------


def foreign_code(server: Server) -> Reply:
    """Bring code along, and a message for it."""
    assert isinstance(server, NetworkServer)
    server.last = "", "query.read"
    content = RecordDict({"read": ConfigRecord({"path": "/etc/passwd"})})
    return server.deliver(Message(content, server.nodes[VICTIM], "query.read", ttl=SECONDS))


def replayed(server: Server) -> Reply:
    """Repeat a request, byte for byte, then with another model."""
    x = agree(server)
    first, again = server.gradient(x, 1), server.gradient(x, 1)
    assert (first.numbers, first.error) == (again.numbers, ""), "the same answer tells nothing new"
    return server.gradient(x + 1e-5, 1)


def request_of_another_run(server: Server) -> Reply:
    """Send a request of one run in the name of another."""
    x = agree(server)
    server.gradient(x, 1)
    server.plan = replace(server.plan, run="0" * 16)
    return server.gradient(x, 1)


def other_member(server: Server) -> Reply:
    """Sign a plan with a key of the operator's under the name of a site."""
    lie = dict(server.plan.members)
    lie[sorted(lie)[-1]] = public_of(questions.OPERATOR, "x").line
    return server.greet(sign_plan(replace(server.plan, members=lie), questions.OPERATOR))


def server_plays_a_member(server: Server) -> Reply:
    """Put keys of the server's own in the place of a member's."""
    agree(server)
    table = {"name": "epoch", "slots": 2}
    keys = {str(i): server.ask("keys", {"mask": table}, at=i).numbers for i in server.sites}
    keys["2"] = {**keys["2"], **Epoch("epoch", 2, b"s" * 32, 2).publish().to_dict()}
    return server.ask("shares", {"mask": {**table, "parties": keys}})


SECOND_MODEL = ATTACKS[questions.finite_differences].message
KNOWN: dict[Attack, Refusal] = {
    foreign_code: Refusal("refused by the site", "node"),
    replayed: Refusal(SECOND_MODEL, "account"),
    request_of_another_run: Refusal("no plan of this run was agreed to", "account"),
    other_member: Refusal("a key that is not in this site's peers", "hello"),
    server_plays_a_member: Refusal("are not signed by the key that this site has", "masks"),
    **ATTACKS,
}
"""All attacks, and what comes of them."""


# -- the deployment --------------------------------------------------------------------------------


def attack_all(root: Path, attacks: list[str], evaluations: int) -> dict[str, dict[str, Any]]:
    """Start the deployment, submit the attacking app, and return what the victim said and wrote."""
    package = write_app(root / "site-app", data="heart-disease")
    (package / "equifed.toml").write_text(tomli_w.dumps({**APP, "guard": {"mode": "on"}}))
    shutil.copytree(root / "site-app", root / "attack-app")
    (root / "attack-app" / package.name / "server.py").write_text(SERVER)
    config = AppConfig.read(package / "equifed.toml")
    names, keys, up = load_data(config.data).names, root / "up" / "keys", root / "up"
    given = {
        "operator": str(keys / "operator.key"), "config": str(package / "equifed.toml"),
        "peers": str(root / "peers"), "memory": str(up / "memory"),
        "found": str(root / "found.json"), "attacks": attacks, "evaluations": evaluations,
    }  # fmt: skip
    (root / "given.json").write_text(json.dumps(given))
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(here / "src"), str(here)])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, GIVEN: str(root / "given.json")}
    with Deployment(up, [], app=root / "site-app", signed=True, env=env) as deployment:
        for i, name in enumerate(names):
            deployment.nodes.append({"partition-id": i, "peers": given["peers"]})
            deployment.register(i)
            line = " ".join((keys / f"node{i}.pub").read_text().split()[:2])
            with (root / "peers").open("a") as file:
                file.write(f"{line} {name}\n")
        for i in range(len(names)):
            deployment.start_node(i)
        deployment.run(root / "attack-app", {"clients": len(names)})
        said = root / "found.json"
        if not said.exists():
            raise RuntimeError(deployment.log("superlink")[-3000:])
    found: dict[str, dict[str, Any]] = json.loads(said.read_text())
    lines = [json.loads(t) for t in (up / "logs" / f"audit{VICTIM}.jsonl").read_text().splitlines()]
    for one in found.values():
        run, tag = one["last"]
        named = [
            number
            for number, line in enumerate(lines, start=1)
            if "refused" in line and tag in (line.get("tag"), line.get("request"))
            if run == line.get("run", "")
        ]
        one["line"] = named[-1] if named else 0
    return found


def main(arguments: list[str] | None = None) -> int:
    """Attack, print a row for each, and say whether all were refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [attack.__name__ for attack in KNOWN]
    parser.add_argument("--only", nargs="*", choices=known, default=known, metavar="ATTACK")
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="keep keys and logs here")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
        root = chosen.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        found = attack_all(root.absolute(), chosen.only, chosen.evaluations)
    wrong = 0
    print("| attack | the site says | refused by | line of its audit log |\n" + "|---" * 4 + "|")
    for attack, refusal in KNOWN.items():
        if attack.__name__ not in chosen.only:
            continue
        one = found.get(attack.__name__, {"error": "", "text": "", "numbers": "?", "line": 0})
        good = one["error"] == "refused" and refusal.message in one["text"] and one["line"] > 0
        wrong += not good
        reply = Reply("", "", "", error=one["error"], text=one["text"])
        told = shorten(reply) if good else f"WRONG: {one}"
        print(f"| {str(attack.__doc__).strip('.')} | {told} | {refusal.where} | {one['line']} |")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
