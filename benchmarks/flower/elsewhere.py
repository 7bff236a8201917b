"""Nodes on other hosts than the SuperLink: clocks that differ, networks of their own (Linux, root).

A host is a network namespace with an address of its own, joined to the SuperLink's by a bridge. A
clock is the one from which Flower takes the time of a message and of a signature.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.flower.damage import Follower
from benchmarks.flower.deployment import Trial
from typing_extensions import override

from equifed.flower.trial.deploy import Deployment, Process

CLOCK = """import datetime, os
import flwr.supercore.date as date
by = datetime.timedelta(seconds=float(os.environ["CLOCK"]))
date.now = lambda: datetime.datetime.now(tz=datetime.UTC) + by
"""
NETWORK = "10.77.0"
SITE = "eqsite{}"
NODES, ROUNDS = 3, 6


class Elsewhere(Deployment):
    """A deployment whose nodes are started with the words of ``before``, by their number."""

    before: dict[int, list[str]]

    @override
    def _spawn(self, name: str, command: Sequence[str]) -> Process:
        number = name.removeprefix("super").removeprefix("node")
        words = self.before.get(int(number), []) if number.isdigit() else []
        return super()._spawn(name, [*words, *command])


class Far(Elsewhere):
    """One whose SuperLink has an address in a network of its own."""

    host = f"{NETWORK}.1"


def shift_clocks(root: Path) -> dict[str, Any]:
    """Run with clocks four minutes behind and two seconds ahead; then six behind, one ahead."""
    trial, shim = Trial(root, NODES, ROUNDS, "penguins", kind=Elsewhere), root / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(CLOCK)
    deployment: Any = trial.deployment

    def shift(seconds: int) -> list[str]:
        path = f"{shim}:{deployment.env.get('PYTHONPATH', '')}"
        return ["env", f"PYTHONPATH={path}", f"CLOCK={seconds}"]

    deployment.before, refused = {0: shift(-240), 1: shift(2)}, {}
    with deployment:
        settings = trial.settings(wait=100.0)
        code, lines = Follower(deployment, root / "trial-app", **settings).end()
        for seconds in (-360, 60):
            deployment.kill(deployment.supernodes[0])
            before = len(deployment.log("node0"))
            deployment.before = {0: shift(seconds)}
            deployment.start_node(0)
            until, said = time.monotonic() + 90, list[str]()
            while not said and time.monotonic() < until:
                new = deployment.log("node0")[before:].splitlines()
                said = [line for line in new if "clocks" in line or "connected to" in line]
                time.sleep(0.3)
            refused[f"{seconds} s"] = said[:1]
    error = trial.error()
    right = all("clocks" in line for said in refused.values() for line in said or [""])
    good = code == 0 and error == 0.0 and right
    return {"operator": lines[-1:], "refused": refused, "error": error, "exit": code, "good": good}


def part_hosts(root: Path) -> dict[str, Any]:
    """Run with the SuperLink and three nodes on four hosts; then unplug one of them for a while."""
    trial = Trial(root, NODES, ROUNDS, "penguins", kind=Far)
    deployment: Any = trial.deployment
    deployment.before = {i: ["ip", "netns", "exec", SITE.format(i)] for i in range(NODES)}
    with networks(NODES), deployment:
        follower = Follower(deployment, root / "trial-app", **trial.settings(timeout=120.0))
        trial.wait_for_round(2)
        call(f"ip link set eqv{NODES - 1} down")
        time.sleep(15)
        call(f"ip link set eqv{NODES - 1} up")
        code, lines = follower.end()
    error = trial.error()
    good = code == 0 and error == 0.0
    return {"operator": lines, "error": error, "exit": code, "good": good}


def call(words: str) -> None:
    """Run a command of the system."""
    subprocess.run(shlex.split(words), check=True)


@contextmanager
def networks(hosts: int) -> Iterator[None]:
    """Make a bridge and so many hosts; take them away again."""
    call("ip link add eqbridge type bridge")
    try:
        call(f"ip addr add {NETWORK}.1/24 dev eqbridge")
        call("ip link set eqbridge up")
        for i in range(hosts):
            site = SITE.format(i)
            call(f"ip netns add {site}")
            call(f"ip link add eqv{i} type veth peer name eth0 netns {site}")
            call(f"ip link set eqv{i} master eqbridge up")
            call(f"ip -n {site} addr add {NETWORK}.{i + 2}/24 dev eth0")
            call(f"ip -n {site} link set eth0 up")
            call(f"ip -n {site} link set lo up")
        yield
    finally:
        for i in range(hosts):
            subprocess.run(["ip", "netns", "del", SITE.format(i)], check=False)
        call("ip link del eqbridge")
