"""What the operator sees when something goes wrong on a deployment, and the exit code.

    python -m benchmarks.flower.faults            # all of them, some minutes
    python -m benchmarks.flower.faults foreign-app killed-work

Each starts its own SuperLink and two nodes of ours with TLS and keys on this machine, does the
damage, and prints one JSON line: what was said, the exit code of ``equifed flower run`` and whether
it is as it should be. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.flower.deployment import Trial

from equifed.flower.trial.certificates import make_certificates, make_node_key
from equifed.flower.trial.deploy import CONNECTION, Deployment, format_settings
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


class Follower:
    """``equifed flower run`` as an operator starts it, in the background."""

    def __init__(self, deployment: Deployment, app: Path, **settings: Any) -> None:
        words = [sys.executable, "-m", "equifed", "flower", "run", str(app), CONNECTION]
        words += ["--run-config", format_settings(settings)]
        self.process = subprocess.Popen(
            words,
            env=deployment.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    def end(self, timeout: float = 300) -> tuple[int, list[str]]:
        """Return the exit code and the lines that are not about rounds that went well."""
        code = self.process.wait(timeout=timeout)
        self._thread.join()
        return code, [line for line in self.lines if ": objective" not in line]


def start(root: Path, rounds: int = 6) -> Trial:
    """Return a trial of two nodes; its deployment is not started."""
    return Trial(root, 2, rounds, "penguins")


def run_foreign_app(root: Path) -> dict[str, Any]:
    """Submit an app that reads a file of the sites."""
    trial, spy, secret = start(root), root / "spy" / "spy", root / "patients.csv"
    spy.mkdir(parents=True)
    (spy / "__init__.py").touch()
    (spy / "app.py").write_text(SPY)
    (root / "spy" / "pyproject.toml").write_text(SPY_APP)
    secret.write_text("patient 17")
    with trial.deployment as deployment:
        _wait_for_nodes(deployment)
        code, lines = Follower(deployment, root / "spy", path=str(secret)).end()
        audit = [_read_audit(deployment, i) for i in range(2)]
    refused = [line["refused"] for lines_of in audit for line in lines_of if "refused" in line]
    said = [line for line in lines if "a node said" in line]
    good = said == ["a node said: refused by the site"] * 2 and len(refused) == 2
    return {"operator": said, "audit": refused, "exit": code, "good": good}


def kill_work(root: Path) -> dict[str, Any]:
    """Kill the process that does a node's work, in the middle of a run that waits."""
    trial = start(root)
    with trial.deployment as deployment:
        settings = trial.settings(**{"on-missing": "wait", "timeout": 60.0})
        follower = Follower(deployment, root / "trial-app", **settings)
        trial.wait_for_round(2)
        node = deployment.supernodes[0].pid
        for work in _list_children(node):
            os.kill(work, signal.SIGKILL)
        code, lines = follower.end()
        said = [line for line in deployment.log("node0").splitlines() if "died" in line]
    error = trial.error()
    good = code == 0 and error == 0.0 and len(said) == 1
    return {"operator": lines[-1:], "node": said, "exit": code, "error": error, "good": good}


def stop_node(root: Path) -> dict[str, Any]:
    """Freeze a node (SIGSTOP) in the middle of a run that fails when somebody is missing."""
    trial = start(root)
    with trial.deployment as deployment:
        settings = trial.settings(**{"on-missing": "fail", "timeout": 10.0})
        follower = Follower(deployment, root / "trial-app", **settings)
        trial.wait_for_round(2)
        os.kill(deployment.supernodes[1].pid, signal.SIGSTOP)
        code, lines = follower.end()
        os.kill(deployment.supernodes[1].pid, signal.SIGCONT)
    good = code == 1 and "Gentoo" in lines[-1] and "no answer within" in lines[-1]
    return {"operator": lines[-1:], "exit": code, "good": good}


def kill_superlink(root: Path) -> dict[str, Any]:
    """Kill the SuperLink (kill -9), start it again with its database, resume."""
    trial = start(root)
    with trial.deployment as deployment:
        follower = Follower(deployment, root / "trial-app", **trial.settings())
        trial.wait_for_round(2)
        assert deployment.superlink is not None
        deployment.kill(deployment.superlink)
        code, lines = follower.end()
        began = time.monotonic()
        deployment.start_superlink()
        again = Follower(deployment, root / "trial-app", **trial.settings(resume=True)).end()
        took = round(time.monotonic() - began, 1)
    error = trial.error()
    good = code == 1 and again[0] == 0 and error == 0.0
    seen = {"operator": lines[-1:], "resumed": again[1][:3], "exit": [code, again[0]]}
    return {**seen, "seconds_to_the_end": took, "error": error, "good": good}


def refuse_keys(root: Path) -> dict[str, Any]:
    """Start a node whose key nobody registered, and look with the doctor."""
    trial = start(root)
    trial.deployment.nodes = []
    with trial.deployment as deployment:
        deployment.nodes = [{"partition-id": 0}]
        keys = deployment.folder / "keys"
        make_node_key(keys, "node0")
        deployment.start_node(0)
        said = _wait_for_line(deployment, "node0", "does not know this node's key")
        ask = {"superlink": f"127.0.0.1:{deployment.port}", "root_certificates": keys / "ca.pem"}
        before = [f.text for f in examine(**ask, node_key=keys / "node0.key") if "2004" in f.text]
        deployment.flwr("supernode", "register", str(keys / "node0.pub"), CONNECTION)
        connected = _wait_for_line(deployment, "node0", "is connected to")
        twice = subprocess.run(
            [*_words(deployment.supernodes[0])], env=deployment.env, capture_output=True, text=True
        )
        found = [f for f in examine(**ask, node_key=keys / "node0.key") if "knows" in f.text]
    good = bool(said and before and connected and found) and twice.returncode == 2
    told = {"node": said, "doctor": before, "then": connected, "second": twice.stderr.strip()}
    return {**told, "exit": twice.returncode, "good": good}


def expire_certificate(root: Path) -> dict[str, Any]:
    """Give the SuperLink an expired certificate, then one of another authority."""
    told = {}
    for name, days, other in (("expired", -1.0, False), ("another authority", 30.0, True)):
        place = root / name.replace(" ", "-")
        deployment = Deployment(place, [{"partition-id": 0}], app=start(place).root / "trial-app")
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
            said = _wait_for_line(deployment, "node0", "certificate of")
            superlink = f"127.0.0.1:{deployment.port}"
            looked = [f.text for f in examine(None, superlink, keys / "ca.pem") if not f.good]
            told[name] = {"node": said, "doctor": [t for t in looked if "certificate" in t]}
        finally:
            deployment.stop()
    good = "has expired" in told["expired"]["node"] and any(
        "another authority" in text for text in told["another authority"]["doctor"]
    )
    return {**told, "exit": None, "good": good}


def share_name(root: Path) -> dict[str, Any]:
    """Start two nodes that call themselves the same."""
    trial = start(root)
    trial.deployment.nodes = [{"partition-id": i, "name": "north"} for i in range(2)]
    package = root / "trial-app" / "trial_app" / "task.py"
    name = "name = str(context.node_config['name'])\n"
    text = package.read_text().replace(
        'return CONFIG.load_client(int(context.node_config["partition-id"]))',
        name
        + "        found = CONFIG.load_client(int(context.node_config['partition-id']))\n"
        + "        return {'train': (found.train.inputs, found.train.targets)}",
    )
    package.write_text(text)
    with trial.deployment as deployment:
        code, lines = Follower(deployment, root / "trial-app", **trial.settings()).end()
    good = code == 1 and "Two nodes call themselves 'north'" in lines[-1]
    return {"operator": lines[-1:], "exit": code, "good": good}


# -- small parts -----------------------------------------------------------------------------------


def _words(process: subprocess.Popen[bytes]) -> list[str]:
    assert isinstance(process.args, list)
    return [str(word) for word in process.args]


def _wait_for_line(deployment: Deployment, log: str, words: str, seconds: float = 90) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for line in deployment.log(log).splitlines():
            if words in line:
                return line
        time.sleep(0.3)
    return ""


def _wait_for_nodes(deployment: Deployment) -> None:
    for i in range(len(deployment.nodes)):
        _wait_for_line(deployment, f"node{i}", "is connected to")


def _list_children(pid: int) -> list[int]:
    """Return the processes that a node started to do its work."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        words = (path.parent / "cmdline").read_bytes()
        if int(fields[1]) == pid and b"spawn_main" in words:
            children.append(int(path.parent.name))
    return children


def _read_audit(deployment: Deployment, i: int) -> list[dict[str, Any]]:
    text = (deployment.folder / "logs" / f"audit{i}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


FAULTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "foreign-app": run_foreign_app,
    "killed-work": kill_work,
    "stopped-node": stop_node,
    "killed-superlink": kill_superlink,
    "unregistered-key": refuse_keys,
    "certificates": expire_certificate,
    "same-name": share_name,
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
