"""Faults of processes: killed, frozen, started again."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.flower.damage import Follower, find_server_app, list_children, read_audit, start


def kill_work(root: Path) -> dict[str, Any]:
    """Kill the process that does a node's work, in the middle of a run that waits."""
    trial = start(root)
    with trial.deployment as deployment:
        settings = trial.settings(**{"on-missing": "wait", "timeout": 60.0})
        follower = Follower(deployment, root / "trial-app", **settings)
        trial.wait_for_round(2)
        node = deployment.supernodes[0].pid
        for work in list_children(node):
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


def kill_node(root: Path) -> dict[str, Any]:
    """Kill a node (kill -9) in the middle of a run that goes on without those who are missing."""
    trial = start(root, 8)
    with trial.deployment as deployment:
        policy = {"on-missing": "continue", "timeout": 30.0, "grace": 5.0, "quorum": 0.5}
        follower = Follower(deployment, root / "trial-app", **trial.settings(**policy))
        trial.wait_for_round(2)
        deployment.kill(deployment.supernodes[1])
        code, lines = follower.end()
    missing = [line for line in lines if "quarantine of Gentoo" in line]
    good = code == 0 and bool(missing) and len(trial.rows()) == 8
    return {"operator": missing[:1] + lines[-1:], "exit": code, "good": good}


def kill_server_app(root: Path) -> dict[str, Any]:
    """Kill the server app of a secure run, and resume with an app that says privacy = "none"."""
    trial = start(root)
    with trial.deployment as deployment:
        settings = trial.settings(privacy="secure")
        follower = Follower(deployment, root / "trial-app", **settings)
        trial.wait_for_round(2)
        os.kill(find_server_app(deployment), signal.SIGKILL)
        lower = trial.settings(resume="privacy", privacy="none")
        refused = Follower(deployment, root / "trial-app", **lower).end()
        again = Follower(deployment, root / "trial-app", **trial.settings(resume=True)).end()
        code, lines = follower.end()
        left = [set(line.get("arrays", {})) for i in range(2) for line in read_audit(deployment, i)]
    told = json.loads((trial.out / "flower.json").read_text())
    error = trial.error()
    good = (code, refused[0], again[0]) == (1, 1, 0) and told["privacy"] == "secure"
    good = good and set().union(*left) == {"masked"} and error is not None and error < 1e-10
    seen = {"operator": lines[-1:], "lower_privacy": refused[1][-1:], "resumed": again[1][:3]}
    return {**seen, "exit": [code, refused[0], again[0]], "error": error, "good": good}
