"""The commands of the pages on deploying, executed in their order on this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.test_deployment import wait_until

from equifed.flower.trial.apps import find_script
from equifed.flower.trial.deploy import flower_environment, is_reachable
from equifed.runs.run import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DOCS = Path(__file__).parents[2] / "docs"
SITES = ("north", "south", "west", "east")
STAYS = ("flower-superlink", "equifed flower node")


def read_blocks(page: str) -> list[str]:
    text = (DOCS / f"deploy-{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not language]


class Machine:
    """Everybody's folders, with the addresses and paths of the pages put in their place."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self.env = {**os.environ, **flower_environment(root), "OMP_NUM_THREADS": "1"}
        self.running: list[subprocess.Popen[bytes]] = []
        for name in ("var/lib", "var/log", "etc/equifed", "srv", "home"):
            (root / name).mkdir(parents=True)

    def translate(self, text: str, site: str) -> str:
        places = {place: f"{self.root}{place}" for place in ("/etc/equifed", "/srv")}
        places |= {"/var/lib/equifed": f"{self.root}/var/lib/{site}"}
        places |= {"/var/log/equifed": f"{self.root}/var/log/{site}"}
        places |= {"fl.example.org": "127.0.0.1", "0.0.0.0": "127.0.0.1", "8000": str(self.port)}
        for old, new in {**places, "north": site, "/srv/data": f"/srv/{site}"}.items():
            text = text.replace(old, new)
        return text

    def run(self, block: str, site: str = "host") -> str:
        """Run the commands of a block one after the other; those that stay are left running."""
        told = ""
        for line in self.translate(block, site).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words or words[0] == "export":
                continue
            told += self._start(words, site) if is_service(words) else self._call(words)
        return told

    def _call(self, words: list[str]) -> str:
        command = words if words[0] == "mkdir" else [find_script(words[0]), *words[1:]]
        done = subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    def _start(self, words: list[str], site: str) -> str:
        log = self.root / f"{site}.log"
        with log.open("ab") as file:
            self.running.append(
                subprocess.Popen(
                    [find_script(words[0]), *words[1:]], cwd=self.root, env=self.env, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
        if words[0] == "flower-superlink":
            wait_until(lambda: is_reachable("127.0.0.1", self.port), 90)
        else:
            wait_until(lambda: "is connected to" in log.read_text(), 120)
        return ""

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in reversed(self.running):
                if process.poll() is None:
                    os.killpg(process.pid, number)
            time.sleep(2)
        for process in self.running:
            process.wait(timeout=20)


def is_service(words: list[str]) -> bool:
    return any(" ".join(words).startswith(name) for name in STAYS)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.stop()


def find(blocks: list[str], word: str) -> str:
    (found,) = [block for block in blocks if word in block]
    return found


def join(machine: Machine, site: str, blocks: dict[str, list[str]]) -> None:
    """Do what the pages ask of a new organisation."""
    rng = np.random.default_rng(len(site))
    x, y = rng.normal(size=(80, 4)), rng.integers(0, 2, size=80)
    parts: dict[str, Any] = {"X_train": x[:60], "y_train": y[:60]}
    np.savez(machine.root / "srv" / f"{site}.npz", **parts, X_test=x[60:], y_test=y[60:])
    host, own = blocks["host"], blocks["site"]
    machine.run(find(host, "certificates keys --node"), site)
    machine.run(find(host, "supernode register"), site)
    machine.run(find(own, "flower doctor"), site)


def test_the_commands_of_the_pages_run_in_their_order(machine: Machine) -> None:
    blocks = {page: read_blocks(page) for page in ("host", "site", "tables", "members")}
    host, members = blocks["host"], blocks["members"]
    machine.run("equifed flower new hospitals")
    toml = machine.root / "hospitals" / "hospitals" / "equifed.toml"
    text = re.sub(r"(?s)\[data\].*?\n\n", "[data]\nclasses = 2\n\n", toml.read_text())
    toml.write_text(text.replace("rounds = 20", "rounds = 2"))
    machine.run(find(host, "certificates keys --address"))
    machine.run(find(host, "flower-superlink"))
    connection = machine.translate(find(host, "[superlink.fl]"), "host")
    (machine.root / "home" / "config.toml").write_text(connection)
    (machine.root / "etc/equifed/ca.pem").write_bytes((machine.root / "keys/ca.pem").read_bytes())
    told = machine.run(find(host, "flower keys keys anna"))
    (operators,) = re.findall("^operators = .*$", told, re.MULTILINE)
    (machine.root / "etc/equifed/policy.toml").write_text(f'{operators}\nprivacy = "secure"\n')
    for site in SITES[:3]:
        join(machine, site, blocks)
    told = machine.run(find(host, "flower doctor hospitals"))
    assert "round 2: objective" in told and "delivered to west, checksum" in told
    assert "rows" in machine.run(find(blocks["tables"], "flower statistics"))
    plans = machine.run("equifed flower approve /var/lib/equifed", "south")
    assert "signed by anna" in plans
    join(machine, "east", blocks)
    told = "".join(map(machine.run, [b for b in members if b.startswith("equifed flower")]))
    assert told.count("delivered to east, checksum") == 2
    for site in SITES:
        assert list((machine.root / "var/lib" / site / "results").glob("*/*/SHA256SUMS"))
    assert (machine.root / "var/lib/host/run2").is_dir()
    machine.run("equifed flower clean /var/lib/equifed --days 0 --yes", "north")
    assert (machine.root / "var/log/north.jsonl").stat().st_size > 0
