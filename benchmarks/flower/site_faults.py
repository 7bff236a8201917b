"""Faults of sites: wrong files, full disks, other versions, names twice, and who comes late."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.flower.damage import Follower, start, wait_for_line, wait_for_nodes

from equifed.flower.trial.apps import write_app
from equifed.flower.trial.deploy import Deployment

AGREED = """target = "ill"
class_names = ["no", "yes"]
units = { chol = "mg/dl" }
time = "day"
holdout = { test = 0.2 }
prepare = { unknown = "error" }
"""
SITE = """name = "{name}"
data = "{name}.csv"
[units]
chol = "{unit}"
"""
WRONG = {
    "columns": "south: column 2 is 'thalach', north: 'chol'",
    "units": "south: column 'chol' is in 'mmol/l', agreed is 'mg/dl'",
    "classes": "south has the label 'ja'",
    "dtype": "south: column 'chol' holds texts, north: numbers",
    "missing": "south: data: its table has no column 'ill'; [columns] in site.toml says",
    "headless": "does the file begin with a line of column names?",
    "category": "south: data: its column 'ward' has a category that no training row has",
    "nothing": "",
}
"""What is wrong at the second site, and what the operator is to read."""

OLD_VERSION = """import importlib.metadata as m
real = m.version
m.version = lambda name: "0.1.7" if name == "equifed" else real(name)
"""


def write_site(root: Path, name: str, wrong: str = "nothing") -> None:
    """Write the file and the settings of a site, with one thing wrong."""
    draw = np.random.default_rng(len(name))
    age, chol, thalach = draw.normal([60, 240, 150], [10, 40, 20], (60, 3)).round(1).T
    ill = (age + draw.normal(0, 8, 60) > 60).astype(int)
    words = ["nein", "ja"] if wrong == "classes" else ["no", "yes"]
    columns: dict[str, Any] = {"age": age, "chol": chol, "thalach": thalach}
    if wrong == "columns":
        columns = {"age": age, "thalach": thalach, "chol": chol}
    if wrong == "dtype":
        columns["chol"] = np.where(chol > 240, "high", "low")
    wards = ["a", "b"] * 30
    if wrong == "category":  # in the last rows, which are those of the test
        wards[-4:] = ["secret"] * 4
    columns |= {"ward": wards, "day": range(60), "ill": np.array(words)[ill]}
    if wrong == "missing":
        del columns["ill"]
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    (root / f"{name}.csv").write_text("\n".join(lines[wrong == "headless" :]) + "\n")
    unit = "mmol/l" if wrong == "units" else "mg/dl"
    (root / f"{name}.toml").write_text(SITE.format(name=name, unit=unit))


def start_sites(root: Path, names: tuple[str, ...]) -> Deployment:
    """Return a deployment of sites with files; it is not started."""
    toml = write_app(root / "trial-app", data="penguins") / "equifed.toml"
    text = toml.read_text().replace('name = "penguins"', f"{AGREED}#")
    toml.write_text(text.replace("every = 5", "splits = []"))
    for name in names:
        write_site(root, name)
    nodes = [{"site": str(root / f"{name}.toml")} for name in names]
    return Deployment(
        root / "up", nodes, app=root / "trial-app", env={"OMP_NUM_THREADS": "1"}, database=False
    )


def give_wrong_data(root: Path) -> dict[str, Any]:
    """Start runs in which one site has other columns, units, classes or kinds than the other."""
    told: dict[str, Any] = {}
    with start_sites(root, ("north", "south")) as deployment:
        for wrong, expected in WRONG.items():
            write_site(root, "south", wrong)
            settings = {"clients": 2, "rounds": 1, "out": str(root / wrong)}
            code, lines = Follower(deployment, root / "trial-app", **settings).end()
            right = expected in lines[-1] and code == (1 if expected else 0)
            right = right and not any(value in " ".join(lines) for value in list_values(root))
            told[wrong] = {"operator": lines[-1:], "exit": code, "good": right}
    good = all(case["good"] for case in told.values())
    return {**told, "exit": [case["exit"] for case in told.values()], "good": good}


def list_values(root: Path) -> list[str]:
    """Return the numbers of the second site, and its secret: nobody else may read them."""
    lines = (root / "south.csv").read_text().splitlines()[1:]
    return ["secret", *(cell for line in lines for cell in line.split(",") if "." in cell)]


@contextlib.contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of so many bytes in memory (Linux, root)."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disks(root: Path) -> dict[str, Any]:
    """Give no space to a site's memory, to its audit log, and to the run folder of the server."""
    deployment = start_sites(root, ("north", "south"))
    told: dict[str, Any] = {}

    def follow(case: str, out: Path | str, words: str) -> None:
        settings = {"clients": 2, "rounds": 1, "timeout": 60.0, "wait": 60.0, "out": str(out)}
        code, lines = Follower(deployment, root / "trial-app", **settings).end()
        right = words in lines[-1] and code == (1 if words else 0)
        told[case] = {"operator": lines[-1:], "exit": code, "good": right}

    with tiny_disk(root / "site", "1M") as site, tiny_disk(root / "server", "64k") as server:
        deployment.nodes[1]["memory"] = str(site / "memory")
        with deployment:
            fill(site)
            follow("site", root / "run", "south: failed: no space is left on the disk")
            (site / "filling").unlink()
            fill(server)
            follow("server", server / "run", "no space is left on the server's disk")
            follow("then", "", "")
    return {**told, "good": all(case["good"] for case in told.values())}


def fill(disk: Path) -> None:
    """Fill a disk."""
    with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with contextlib.suppress(OSError), (disk / "filling").open("ab", buffering=0) as file:
        while file.write(b"0"):
            pass


def share_name(root: Path) -> dict[str, Any]:
    """Start two nodes that call themselves the same."""
    deployment = start_sites(root, ("north", "south"))
    deployment.nodes = [deployment.nodes[0]] * 2
    with deployment:
        settings = {"clients": 2, "rounds": 1, "out": str(root / "run")}
        code, lines = Follower(deployment, root / "trial-app", **settings).end()
    good = code == 1 and "Two nodes have the name 'north'" in lines[-1]
    return {"operator": lines[-1:], "exit": code, "good": good}


def install_another_version(root: Path) -> dict[str, Any]:
    """Let one node have another version of equifed."""
    trial, shim = start(root), root / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(OLD_VERSION)
    trial.deployment.nodes = []
    with trial.deployment as deployment:
        deployment.nodes = [{"partition-id": i} for i in range(2)]
        path = deployment.env.get("PYTHONPATH", "")
        for i in range(2):
            deployment.register(i)
            deployment.env["PYTHONPATH"] = f"{shim}:{path}" if i else path
            deployment.start_node(i)
        deployment.env["PYTHONPATH"] = path
        wait_for_nodes(deployment)
        code, lines = Follower(deployment, root / "trial-app", **trial.settings()).end()
    good = code == 1 and "has 0.1.7; install the same minor version" in lines[-1]
    return {"operator": lines[-1:], "exit": code, "good": good}


def come_late(root: Path) -> dict[str, Any]:
    """Connect a third site to a run of two, and let it measure the model after the end."""
    names, out = ("north", "south", "west"), root / "run"
    deployment = start_sites(root, names)
    sites, deployment.nodes = deployment.nodes, deployment.nodes[:2]
    with deployment:
        settings = {"clients": 2, "rounds": 60, "out": str(out)}
        follower = Follower(deployment, root / "trial-app", **settings)
        while not (out / "rounds.csv").exists() and follower.process.poll() is None:
            time.sleep(0.2)
        deployment.nodes = sites
        deployment.register(2)
        deployment.start_node(2)
        notice = wait_for_line(deployment, "node2", "a run is under way without this node")
        code, lines = follower.end()
        about = {"do": "evaluate", "clients": 3, "start": str(out), "out": ""}
        after, told = Follower(deployment, root / "trial-app", **about).end()
    said = [line for line in lines if "west" in line]
    good = code == 0 and bool(notice) and after == 0
    good = good and any("left out of west" in line for line in said)
    good = good and any("delivered to west" in line for line in told)
    seen = {"node": notice, "operator": said, "evaluate": told}
    return {**seen, "exit": [code, after], "good": good}
