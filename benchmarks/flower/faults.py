"""What the operator sees when something goes wrong on a deployment, and the exit code.

    python -m benchmarks.flower.faults            # all of them, a quarter of an hour
    python -m benchmarks.flower.faults foreign-app killed-work

Each starts its own SuperLink and two nodes of ours with TLS and keys on this machine, does the
damage, and prints one JSON line: what was said, the exit code of ``equifed flower run`` and whether
it is as it should be. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.flower.damage import (
    Follower,
    read_audit,
    start,
    wait_for_line,
    wait_for_nodes,
    words,
)
from benchmarks.flower.elsewhere import part_hosts, shift_clocks
from benchmarks.flower.process_faults import (
    kill_node,
    kill_server_app,
    kill_superlink,
    kill_work,
    stop_node,
)
from benchmarks.flower.site_faults import (
    come_late,
    fill_disks,
    give_wrong_data,
    install_another_version,
    share_name,
)

from equifed.flower.trial.deploy import CONNECTION, Deployment, make_certificates, make_node_key
from equifed.flower.trial.doctor import examine

SPY = """
from pathlib import Path
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

app = ClientApp()
server = ServerApp()

@app.query("read")
def read(message: Message, context: Context) -> Message:
    text = Path(str(message.content["c"]["path"])).read_text()
    return Message(RecordDict({"c": ConfigRecord({"text": text})}), reply_to=message)

@server.main()
def main(grid: Grid, context: Context) -> None:
    asked = RecordDict({"c": ConfigRecord({"path": str(context.run_config["path"])})})
    sent = [Message(asked, node, "query.read") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(sent, timeout=60):
        said = reply.error.reason if reply.has_error() else reply.content["c"]["text"]
        print(f"equifed: a node said: {said}", flush=True)
"""
SPY_APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "spy"
version = "0.1.0"
license = "Apache-2.0"
[tool.hatch.build.targets.wheel]
packages = ["spy"]
[tool.flwr.app]
publisher = "local"
[tool.flwr.app.components]
serverapp = "spy.app:server"
clientapp = "spy.app:app"
[tool.flwr.app.config]
path = ""
"""


def run_foreign_app(root: Path) -> dict[str, Any]:
    """Submit an app that reads a file of the sites."""
    trial, spy, secret = start(root), root / "spy" / "spy", root / "patients.csv"
    spy.mkdir(parents=True)
    (spy / "__init__.py").touch()
    (spy / "app.py").write_text(SPY)
    (root / "spy" / "pyproject.toml").write_text(SPY_APP)
    secret.write_text("patient 17")
    with trial.deployment as deployment:
        wait_for_nodes(deployment)
        code, lines = Follower(deployment, root / "spy", path=str(secret)).end()
        audit = [read_audit(deployment, i) for i in range(2)]
    refused = [line["refused"] for lines_of in audit for line in lines_of if "refused" in line]
    said = [line for line in lines if "a node said" in line]
    good = said == ["a node said: refused by the site"] * 2 and len(refused) == 2
    return {"operator": said, "audit": refused, "exit": code, "good": good}


def refuse_keys(root: Path) -> dict[str, Any]:
    """Start a node whose key nobody registered, and look with the doctor."""
    trial = start(root)
    trial.deployment.nodes = []
    with trial.deployment as deployment:
        deployment.nodes = [{"partition-id": 0}]
        keys = deployment.folder / "keys"
        make_node_key(keys, "node0")
        deployment.start_node(0)
        said = wait_for_line(deployment, "node0", "does not know this node's key")
        ask = {"superlink": f"127.0.0.1:{deployment.port}", "root_certificates": keys / "ca.pem"}
        before = [f.text for f in examine(**ask, node_key=keys / "node0.key") if "2004" in f.text]
        deployment.flwr("supernode", "register", str(keys / "node0.pub"), CONNECTION)
        connected = wait_for_line(deployment, "node0", "is connected to")
        twice = subprocess.run(
            [*words(deployment.supernodes[0])], env=deployment.env, capture_output=True, text=True
        )
        found = [f for f in examine(**ask, node_key=keys / "node0.key") if "knows" in f.text]
    good = bool(said and before and connected and found) and twice.returncode == 2
    told = {"node": said, "doctor": before, "then": connected, "second": twice.stderr.strip()}
    return {**told, "exit": twice.returncode, "good": good}


def expire_certificate(root: Path) -> dict[str, Any]:
    """Give the SuperLink an expired certificate, then one of another authority."""
    told: dict[str, Any] = {}
    for name, days, other in (("expired", -1.0, False), ("other", 30.0, True)):
        place = root / name
        app = start(place).root / "trial-app"
        deployment = Deployment(place, [{"partition-id": 0}], app=app)
        for folder in ("home", "logs", "memory", "keys"):
            (deployment.folder / folder).mkdir(parents=True, exist_ok=True)
        keys = deployment.folder / "keys"
        make_certificates(keys, ["127.0.0.1"], days)
        make_node_key(keys, "node0")
        try:
            deployment.start_superlink()
            if other:
                make_certificates(place / "other", ["127.0.0.1"])
                (keys / "ca.pem").write_bytes((place / "other" / "ca.pem").read_bytes())
            deployment.start_node(0)
            said = wait_for_line(deployment, "node0", "certificate of")
            superlink = f"127.0.0.1:{deployment.port}"
            looked = [f.text for f in examine(None, superlink, keys / "ca.pem") if not f.good]
            code, lines = Follower(deployment, app).end()
            told[name] = {"node": said, "doctor": [t for t in looked if "certificate" in t]}
            told[name] |= {"operator": lines[-1:], "exit": code}
        finally:
            deployment.stop()
    good = all(
        any(words in line for line in [*case["doctor"], ""]) and words in case["operator"][0]
        for words, case in (("has expired", told["expired"]), ("another authority", told["other"]))
    )
    good = good and "has expired" in told["expired"]["node"]
    return {**told, "exit": [case["exit"] for case in told.values()], "good": good}


FAULTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "foreign-app": run_foreign_app,
    "killed-work": kill_work,
    "killed-node": kill_node,
    "stopped-node": stop_node,
    "killed-server-app": kill_server_app,
    "killed-superlink": kill_superlink,
    "unregistered-key": refuse_keys,
    "certificates": expire_certificate,
    "wrong-data": give_wrong_data,
    "full-disks": fill_disks,
    "another-version": install_another_version,
    "same-name": share_name,
    "late-joiner": come_late,
    "clocks": shift_clocks,
    "hosts": part_hosts,
}


def main() -> int:
    """Do the damage and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--keep", type=Path, help="keep keys, logs and run folders here")
    chosen, good = parser.parse_args(), True
    for name in chosen.faults or FAULTS:
        with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
            root = (chosen.keep or Path(temporary)) / name
            root.mkdir(parents=True)
            found = FAULTS[name](root)
        print(json.dumps({"fault": name, **found}), flush=True)
        good = good and found["good"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
