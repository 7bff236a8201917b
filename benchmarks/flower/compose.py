"""The walk of ``deploy/compose.yaml`` without Docker: the same commands, as plain processes.

    python -m benchmarks.flower.compose            # about two minutes; --rounds 20 as in the app

Services are started in the order of ``depends_on``; the folders of the volumes lie in a temporary
one, and the SuperLink listens on a free port of this machine alone. One JSON line per step says how
long it took, the last one where the report is. Exit code 1 if there is none. What it cannot
try: the image, the network and the users of containers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from equifed.flower.trial.deploy import HOST, flower_environment, is_reachable, list_session
from equifed.runs.run import free_port

FOLDER = Path(__file__).parents[2] / "deploy"


class ChunkWalk:
    """The services of the compose file, with folders and ports of this machine."""

    def __init__(self, root: Path, rounds: int) -> None:
        self.root, self.rounds, self.port = root, rounds, free_port()
        self.services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("keys", "app", "runs", "state", "home", "logs"):
            (root / name).mkdir(parents=True)
        connection = self.translate((FOLDER / "connection.toml").read_text(), "")
        (root / "home" / "config.toml").write_text(connection)

    def translate(self, text: str, service: str) -> str:
        """Return what a container is told, in the words of this machine."""
        text = re.sub(r"(?<!\w)/(keys|app|runs|state)\b", rf"{self.root}/\1", text)
        text = re.sub(r"(?<!\w)/memory\b", f"{self.root}/memory-{service}", text)
        words = {"superlink:8000": f"{HOST}:{self.port}", "--port=8000": f"--port={self.port}"}
        words |= {"0.0.0.0": HOST, "--address superlink": f"--address {HOST}"}
        words |= {"$$": "$", "clients=3": f"clients=3 rounds={self.rounds}"}
        for old, new in words.items():
            text = text.replace(old, new)
        return text

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service; its output is in a log."""
        service: Mapping[str, Any] = self.services[name]
        env = {**os.environ, **flower_environment(self.root), **service.get("environment", {})}
        env |= {"FLWR_HOME": str(self.root / "home")}
        with (self.root / "logs" / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [self.translate(word, name) for word in service["command"]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.running[name]

    def finish(self, name: str) -> None:
        """Run a service that ends by itself."""
        if self.start(name).wait() != 0:
            raise RuntimeError(f"{name} failed:\n{self.log(name)}")

    def log(self, name: str) -> str:
        """Return what a service said."""
        return (self.root / "logs" / f"{name}.log").read_text(errors="replace")[-3000:]

    def wait(self, names: list[str], seconds: float = 180) -> None:
        """Return when services that stay are there."""
        until = time.monotonic() + seconds
        for name in names:
            while not self._is_up(name):
                if self.running[name].poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{name} did not start:\n{self.log(name)}")
                time.sleep(0.1)

    def _is_up(self, name: str) -> bool:
        if name == "superlink":
            return is_reachable(HOST, self.port)
        return "is connected to" in self.log(name)

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Go through the services; a step is what has been done, and what to say of it."""
        self.finish("prepare")
        yield "certificates, keys and app", self.log("prepare").splitlines()
        self.start("superlink")
        self.wait(["superlink"])
        yield "SuperLink", None
        self.finish("register")
        yield "three keys registered", None
        sites = list(self.services["run"]["depends_on"])
        for name in sites:
            self.start(name)
        self.wait(sites)
        yield "three nodes", None
        self.finish("run")
        yield f"run of {self.rounds} rounds and report", self.log("run").splitlines()[-4:]

    def stop(self) -> None:
        """End every process that was started."""
        for process in reversed(self.running.values()):
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
            for pid in list_session(process.pid):
                os.kill(pid, 9)


def main() -> int:
    """ChunkWalk, and print how long each step took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="keep everything here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
        walk = ChunkWalk((chosen.keep or Path(temporary)).absolute(), chosen.rounds)
        try:
            began = time.monotonic()
            for what, said in walk.steps():
                took, began = time.monotonic() - began, time.monotonic()
                print(json.dumps({"step": what, "s": round(took, 1), "said": said}), flush=True)
        finally:
            walk.stop()
        reports = [str(path.name) for path in walk.root.glob("runs/*/*.html")]
        print(json.dumps({"report": reports, "load": os.getloadavg()}), flush=True)
    return 0 if reports else 1


if __name__ == "__main__":
    sys.exit(main())
