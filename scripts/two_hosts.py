"""A run over two hosts, which are network namespaces of this machine with a cable between them.

    sudo python scripts/two_hosts.py [--delay 5ms] [--rate 1gbit] [--rounds 5]

Each namespace sees its own end of a virtual cable and nothing else, so the two processes that
``torchrun`` starts can talk over that alone. The federation is in mapped files; every process says
how much of them it has read. The model must be that of one process, to the bit in double precision.
Needs Linux, ``ip`` and the right to make namespaces (root, or CAP_NET_ADMIN and CAP_SYS_ADMIN).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from equifed.data import FederationWriter

ROOT = Path(__file__).parent.parent
CLIENTS, SAMPLES, FEATURES = 64, 32, 1024
CONFIG = """
rounds = {rounds}
data = {{ name = "mapped", path = "{data}" }}
model = {{ name = "logistic", dtype = "float64", l2 = 0.01 }}
algorithm = {{ name = "scaffold", participation = 0.5, local = {{ lr = 0.05, steps = 3 }} }}
engine = {{ name = "{engine}" }}
"""
PROGRAM = """
import re, sys
from pathlib import Path
from equifed.__main__ import main
from equifed.training.folder import RunFolder

finish = RunFolder.finish

def tell(self, *given):
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    text = "".join(part for part in maps if "train-inputs.bin" in part)
    read, whole = (sum(map(int, re.findall(f"(?m)^{what}: +([0-9]+) kB", text)))
                   for what in ("Rss", "Size"))
    print(f"read {read} of {whole} kB of the inputs", file=sys.stderr)
    finish(self, *given)

RunFolder.finish = tell
main()
"""


def call(*command: str) -> None:
    """Run a command, or end with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def write_data(folder: Path) -> None:
    """Write a federation into mapped files."""
    draw = np.random.default_rng(0)
    truth = draw.standard_normal((FEATURES, 3))
    with FederationWriter(folder, classes=3) as writer:
        for i in range(CLIENTS):
            inputs = draw.standard_normal((SAMPLES, FEATURES))
            writer.add(f"client {i}", train=(inputs, (inputs @ truth).argmax(1)))


class Hosts:
    """Two namespaces and the cable between them, for as long as the block lasts."""

    def __init__(self, delay: str | None, rate: str | None) -> None:
        self.names = [f"equifed-{os.getpid()}-{k}" for k in (0, 1)]
        self.ends = [f"eq{os.getpid()}{k}"[-15:] for k in (0, 1)]
        self._shape = (["delay", delay] if delay else []) + (["rate", rate] if rate else [])

    def __enter__(self) -> Hosts:
        for name in self.names:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for k, (name, end) in enumerate(zip(self.names, self.ends, strict=True)):
            call("ip", "link", "set", end, "netns", name)
            inside = ("ip", "-n", name)
            call(*inside, "address", "add", f"10.77.0.{k + 1}/24", "dev", end)
            call(*inside, "link", "set", end, "up")
            call(*inside, "link", "set", "lo", "up")
            if self._shape:
                call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root",
                     "netem", *self._shape)  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def start(self, k: int, program: Path, arguments: list[str]) -> subprocess.Popen[str]:
        """Start one process of the group on a host."""
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(k),
            "--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", "29511",
        ]  # fmt: skip
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.ends[k], "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[k], *torchrun, str(program), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def sent(self) -> int:
        """Return the bytes that went over the cable, both ways."""
        found = subprocess.run(
            ["ip", "-n", self.names[0], "-s", "link", "show", self.ends[0]],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return sum(int(n) for n in re.findall(r"[RT]X:.*\n\s+(\d+)", found))


def main() -> None:
    """Run on one process and on two hosts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", help="of a packet on the cable, such as 5ms")
    parser.add_argument("--rate", help="of the cable, such as 1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="equifed-hosts-"))
    try:
        compare(folder, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(folder: Path, given: argparse.Namespace) -> None:
    """Print what both took, and end with an error if the models differ."""
    write_data(folder / "data")
    (folder / "program.py").write_text(PROGRAM)
    for engine in ("stacked", "distributed"):
        text = CONFIG.format(rounds=given.rounds, data=folder / "data", engine=engine)
        (folder / f"{engine}.toml").write_text(text)
    alone = ["run", str(folder / "stacked.toml"), "--out", str(folder / "one")]
    call(sys.executable, "-m", "equifed", *alone)
    arguments = ["run", str(folder / "distributed.toml"), "--out", str(folder / "two")]
    with Hosts(given.delay, given.rate) as hosts:
        begun = time.perf_counter()
        both = [hosts.start(k, folder / "program.py", arguments) for k in (0, 1)]
        said = [process.communicate(timeout=600)[0] for process in both]
        took, sent = time.perf_counter() - begun, hosts.sent()
    for k, (process, text) in enumerate(zip(both, said, strict=True)):
        if process.returncode:
            raise SystemExit(f"host {k} ended with {process.returncode}:\n{text}")
        print(f"host {k}: {re.findall('read .* of the inputs', text)[-1]}")
    one, two = ((folder / f / "model.safetensors").read_bytes() for f in ("one", "two"))
    print(f"{given.rounds} rounds in {took:.1f} s with the start of Python, {sent:,} bytes sent")
    if one != two:
        raise SystemExit("Two hosts end at another model than one process.")
    print("The model is that of one process, to the bit.")


if __name__ == "__main__":
    main()
