"""CONTRIBUTING's recipes, followed to the letter: a toy algorithm and a toy objective."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.runs import run as runs
from equifed.runs.catalogue import load_address
from equifed.runs.config import ConfigError, RunConfig
from equifed.runs.schema import settings
from equifed.testing import check_algorithm, check_objective
from equifed.training import loop as training

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SAME = ("model.safetensors", "metrics.csv", "weights.csv", "summary.json")

TOY = '''
"""A toy: FedAvg with momentum at the server, and what else a configuration can name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import equifed as ef
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.absence import sample_clients, scatter
from equifed.contract.streams import Stream
from equifed.objectives import SaddleObjective, WorstCase
from equifed.steps import ConstantSteps

from . import neighbour


@dataclass(frozen=True)
class Blend(SaddleObjective):
    """(1 - worst) times the mean plus worst times the largest loss."""

    worst: float = 0.5

    def value(self, losses: Losses) -> float:
        return float((1 - self.worst) * np.mean(losses) + self.worst * WorstCase().value(losses))

    def weights(self, losses: Losses) -> Weights:
        return self._mix(WorstCase().weights(losses))

    def prox(self, point: Weights, step: float) -> Weights:
        point = np.asarray(point, dtype=np.float64)
        share = (1 - self.worst) / len(point)
        return self._mix(WorstCase().prox((point - share) / self.worst, step))

    def _mix(self, weights: Weights) -> Weights:
        return (1 - self.worst) / len(weights) + self.worst * weights


@dataclass(frozen=True)
class State:
    x: Vector
    velocity: Vector | None = None


@dataclass(frozen=True)
class Toy:
    """Momentum on the weighted mean of the clients' displacements."""

    local: LocalSGD = LocalSGD(lr=0.05, steps=2, batch_size=4)
    momentum: float = 0.5
    objective: SaddleObjective = Blend()
    participation: float = 1.0

    def init(self, clients: Clients, x: Vector) -> State:
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        chosen = sample_clients(clients, self.participation, stream)
        losses = chosen.losses(state.x, stream.at("losses"))
        weights = self.objective.weights(losses)
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        velocity = moved.displacement.weighted_sum(weights)
        if state.velocity is not None:
            velocity = velocity + self.momentum * state.velocity
        told = scatter(weights, chosen.index, len(clients.names))
        return State(state.x - velocity, velocity), Info(told, index=chosen.index)

    def model(self, state: State) -> Vector:
        return state.x


@dataclass(frozen=True)
class Slow(ConstantSteps):
    """A schedule of one's own."""


def table(samples: int = 6, seed: int = 0) -> ef.Federation:
    """Three clients of two classes."""
    draw = np.random.default_rng(seed)
    clients = {}
    for name in neighbour.NAMES:
        inputs = draw.normal(size=(samples, 3))
        clients[name] = (inputs, np.arange(samples) % 2)
    return ef.Federation.from_clients(clients)


def network(input_shape: tuple[int, ...], outputs: int, *, width: int = 4) -> torch.nn.Module:
    """One hidden layer."""
    layers = [torch.nn.Linear(input_shape[0], width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, outputs))


def doubled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Twice the cross-entropy."""
    return 2 * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


NUMBER = 3
'''

CONFIG = """
rounds = 5
threads = 1
data = { name = "toy:table", samples = 8 }
model = { name = "toy:network", width = 3, loss = "toy:doubled" }

[algorithm]
name = "toy:Toy"
local = { lr = 0.1 }
objective = { name = "toy:Blend", worst = 0.3 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "neighbour.py").write_text('NAMES = ("north", "south", "west")\n')
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def command(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, **env}, timeout=200,
    )  # fmt: skip


# -- outside the repository ----------------------------------------------------------------------


def test_the_toys_pass_the_conformance_suite(folder: Path) -> None:
    toy = load_address(f"{folder / 'toy.py'}:Toy")
    check_algorithm(toy())
    check_algorithm(toy(participation=0.5, momentum=0.0))
    check_objective(load_address(f"{folder / 'toy.py'}:Blend")(0.3))


def test_everything_named_reaches_the_run_and_nothing_the_path(folder: Path) -> None:
    before = list(sys.path)
    config = RunConfig.read(folder / "run.toml")
    built = runs.build_run(config)
    assert built.federation.names == ("north", "south", "west")
    assert built.federation.train.sizes.tolist() == [8, 8, 8]
    assert type(built.algorithm).__name__ == "Toy"
    assert built.algorithm.objective.worst == 0.3
    assert built.algorithm.local.batch_size == 4  # the toy's own default stays
    assert sys.path == before and "toy" not in sys.modules
    file = str(folder / "toy.py")
    names = ("toy:table", "toy:network", "toy:doubled", "toy:Toy", "toy:Blend")
    assert sorted(config.loaded_code) == sorted((name, file) for name in names)


def test_a_resolved_configuration_needs_no_folder(folder: Path) -> None:
    config = RunConfig.read(folder / "run.toml")
    again = RunConfig.from_dict(tomllib.loads(config.to_toml()))
    assert again == config
    assert config.algorithm["name"] == f"{folder / 'toy.py'}:Toy"


def test_a_schedule_and_a_default_of_ones_own(folder: Path) -> None:
    table = tomllib.loads(CONFIG)
    steps = {"name": "toy:Slow", "primal": 0.1, "dual": 0.2}
    table["algorithm"] = {"name": "scaff-pd", "objective": "toy:Blend", "steps": steps}
    built = runs.build_run(RunConfig.from_dict(table, base=folder))
    assert type(built.algorithm.steps).__name__ == "Slow"
    table["algorithm"] = "toy:Toy"
    config = RunConfig.from_dict(table, base=folder)
    assert config.algorithm["objective"] == {"name": f"{folder / 'toy.py'}:Blend", "worst": 0.5}


class Dies(runs.Callback):
    """Breaks off after three rounds, as a kill would."""

    def evaluation(self, round: int, records: Any) -> None:
        if round == 3:
            raise KeyboardInterrupt


def test_the_command_line_trains_it_says_what_it_loads_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("equifed", "run", str(folder / "run.toml"), "--out", "whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"toy:Toy from {folder / 'toy.py'}" in done.stderr
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        runs.run(RunConfig.read(folder / "run.toml"), folder / "broken", callbacks=[Dies()])
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = command("equifed", "resume", str(folder / "broken"), cwd=elsewhere)
    assert done.returncode == 2 and f"{folder / 'toy.py'}:Toy" in done.stderr
    assert "--trust" in done.stderr
    done = command("equifed", "resume", str(folder / "broken"), "--trust", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    for name in SAME:
        whole, broken = ((folder / f / name).read_bytes() for f in ("whole", "broken"))
        assert whole == broken, name


def test_code_of_a_package_beside_the_file(folder: Path) -> None:
    package = folder / "mine"
    package.mkdir()
    for name in ("toy.py", "neighbour.py"):
        shutil.move(folder / name, package / name)
    (folder / "run.toml").write_text(CONFIG.replace("toy:", "mine.toy:"))
    assert runs.build_run(RunConfig.read(folder / "run.toml")).federation.names[0] == "north"
    (package / "__init__.py").write_text("")
    assert runs.build_run(RunConfig.read(folder / "run.toml")).federation.names[0] == "north"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Toy", r"algorithm.name: nowhere:Toy is not found: there is no file .*nowhere\.py"
         r" or .*__init__\.py and no installed module nowhere; put the file beside"),
        ("toy:Tyo", r"algorithm.name: in .*toy\.py there is no name 'Tyo' \(did you mean 'Toy'"),
        ("toy:NUMBER", r"algorithm.name: .*toy\.py:NUMBER is not a class or function"),
        ("toy:Blend", r"algorithm.name: .*:Blend gives a Blend, which has no init, round, model; an"
         " algorithm has init, round, model"),
        ("broken:Toy", r"algorithm.name: .*broken\.py:Toy cannot be loaded \(SyntaxError.*correct"),
        ("json:dumps", r"algorithm"),
        ("toy", r"there is no algorithm 'toy'.*or your own code as package\.module:Name"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_named(folder: Path, name: str, message: str) -> None:
    (folder / "broken.py").write_text("class Toy(\n")
    table = {**tomllib.loads(CONFIG), "algorithm": name}
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(table, base=folder)


def test_a_type_that_only_type_checkers_see_is_named(folder: Path) -> None:
    text = TOY.replace(
        "from equifed.contract.local import LocalSGD\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from equifed.contract.local import LocalSGD\n",
    ).replace("LocalSGD(lr=0.05, steps=2, batch_size=4)", "None")
    (folder / "hidden.py").write_text(text)
    table = {**tomllib.loads(CONFIG), "algorithm": "hidden:Toy"}
    with pytest.raises(ConfigError, match=r"cannot be read \(name 'LocalSGD' is not"):
        RunConfig.from_dict(table, base=folder)


def test_a_run_whose_code_is_gone_says_so(folder: Path) -> None:
    text = RunConfig.read(folder / "run.toml").to_toml()
    (folder / "toy.py").rename(folder / "moved.py")
    with pytest.raises(ConfigError, match=r"there is no file .*toy\.py\); update its path"):
        RunConfig.from_dict(tomllib.loads(text))


# -- inside the repository -----------------------------------------------------------------------


def test_a_new_algorithm_is_a_file_and_a_line_in_the_catalogue(tmp_path: Path) -> None:
    """The naive twin and the changelog are for readers; nothing else is needed to work."""
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("src", "scripts", "tests/conformance"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignore)
    page = tmp_path / "docs" / "reference" / "catalogue.md"
    page.parent.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "reference" / "catalogue.md", page)
    package = tmp_path / "src" / "equifed"
    text = TOY.replace("from . import neighbour\n", "").replace("neighbour.NAMES", '("a", "b")')
    (package / "algorithms" / "toy.py").write_text(text)
    catalogue = package / "runs" / "catalogue.py"
    line = '    "toy": Entry("equifed.algorithms.toy:Toy", "momentum at the server"),\n'
    catalogue.write_text(
        catalogue.read_text().replace("ALGORITHMS = {\n", f"ALGORITHMS = {{\n{line}")
    )
    path = os.pathsep.join((str(tmp_path / "src"), str(tmp_path)))
    done = command("scripts.public_names", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "| `toy` | momentum at the server |" in page.read_text()
    assert "import Toy as Toy" in (package / "__init__.pyi").read_text()
    assert re.search(r"import Toy\b", (package / "algorithms" / "__init__.py").read_text())
    program = tmp_path / "program.py"
    program.write_text(
        "import equifed as ef\n"
        "from equifed.algorithms import Toy\n"
        "from tests.conformance.cases import CASES\n"
        "assert ef.Toy is Toy and 'Toy' in ef.__all__\n"
        "for name in ('toy/plain', 'toy/sampled', 'toy/other'):\n"
        "    ef.testing.check_algorithm(CASES[name])\n"
    )
    done = command("program", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_an_own_module_starts_from_its_own_weights_unless_it_is_told_to_draw(
    tmp_path: Path,
) -> None:
    (tmp_path / "pretrained.py").write_text(
        "from torch import nn\n"
        "def make(input_shape, outputs):\n"
        "    layer = nn.Linear(784, outputs)\n"
        "    nn.init.constant_(layer.weight, 0.25)\n"
        "    return nn.Sequential(nn.Flatten(), layer)\n"
    )
    table: dict[str, Any] = {"rounds": 1, "algorithm": "fedavg"}
    table["data"] = {"name": "fashion-three", "train": 10, "test": 5}
    starts = {}
    for init in ("auto", "given", "fresh"):
        table["model"] = {"name": "pretrained:make", "init": init}
        clients = runs.build_run(RunConfig.from_dict(table, base=tmp_path)).clients
        x = clients.initial(Stream(0).at("initial"))
        starts[init] = clients.parameters(x)["1.weight"]
    assert (starts["auto"] == 0.25).all() and (starts["given"] == 0.25).all()
    assert not (starts["fresh"] == 0.25).any()


def test_a_dataclass_of_ones_own_inherits_settings_whose_types_it_does_not_import(
    tmp_path: Path,
) -> None:
    (tmp_path / "inherits.py").write_text(
        "from dataclasses import dataclass\nimport equifed as ef\n\n"
        "@dataclass(frozen=True)\nclass Mine(ef.FedAvg):\n    extra: float = 1.0\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        found = settings(load_address("inherits:Mine"))
    finally:
        sys.path.remove(str(tmp_path))
    assert found["extra"].annotation is float
    assert found["local"].annotation is LocalSGD
