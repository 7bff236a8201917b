"""What a checkpoint may hold: own classes come back, strangers are refused, old forms are told."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equifed.contract.arrays import KeyedMemory
from equifed.engines.ordered_sums import DenseVectors
from equifed.training import checkpoint
from equifed.training.checkpoint import CheckpointError
from equifed.training.files import RunFolderError, seal
from equifed.training.tables import FORMAT


@dataclass(frozen=True)
class Part:
    """Something a state may hold later on."""

    values: np.ndarray
    scale: float


@dataclass(frozen=True)
class State:
    """A user's own state, of a module outside equifed."""

    x: torch.Tensor
    part: Any = None
    memory: Any = None


FIRST = State(torch.zeros(3))


def there_and_back(state: State, folder: Path, template: State = FIRST) -> State:
    checkpoint.save(folder, 4, state, {"more": [1]})
    done, restored, extra = checkpoint.load(folder, template)
    assert (done, extra) == (4, {"more": [1], "kept": None})
    return restored  # type: ignore[no-any-return]


def test_a_users_own_state_needs_no_ceremony(tmp_path: Path) -> None:
    part = Part(np.array([1.0, np.nan]), float("inf"))
    vectors = DenseVectors(torch.arange(6.0).view(2, 3))
    state = State(torch.arange(3.0), (part, "word", None, True), vectors)
    restored = there_and_back(state, tmp_path)
    assert torch.equal(restored.x, state.x)
    assert isinstance(restored.memory, DenseVectors)
    assert torch.equal(restored.memory.matrix, vectors.matrix)
    again, *rest = restored.part
    assert np.array_equal(again.values, part.values, equal_nan=True) and again.scale == part.scale
    assert rest == ["word", None, True]
    keys = there_and_back(replace(state, memory=KeyedMemory(("a", ""))), tmp_path).memory
    assert keys == KeyedMemory(("a", ""))


def test_a_class_that_the_first_state_holds_is_known_wherever_it_comes_from(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Local:
        n: int

    state = replace(FIRST, part=Local(3))
    assert there_and_back(state, tmp_path, replace(FIRST, part=Local(1))).part == Local(3)


def test_a_stranger_is_refused_by_name(tmp_path: Path) -> None:
    other = make_dataclass("Other", [("n", int)], frozen=True)
    other.__module__ = "a_users_other_module"
    state = replace(FIRST, part=other(3))
    with pytest.raises(CheckpointError, match=r"a_users_other_module:Other.*in the module of"):
        there_and_back(state, tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "antigravity:State",  # a module that importing would have a visible effect
        "equifed.training.checkpoint:dataclasses.Field",  # what a module merely imports
        "equifed.training.checkpoint:pack",  # no dataclass
        "equifed.no_such_module:State",
        "tests.training.test_checkpoint:there_and_back",
    ],
)
def test_nothing_else_is_imported_or_called_because_a_file_says_so(
    address: str, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, 1, replace(FIRST, part=Part(np.zeros(1), 0.0)), {})
    manifest = tmp_path / "00000001.json"
    own = checkpoint.address_of(Part)
    told = json.loads(manifest.read_text().replace(own, address))
    manifest.write_bytes(seal({key: told[key] for key in told if key != "sha256"}))
    before = set(sys.modules)
    cure = "with that version" if address.startswith("equifed.") else "in the module of"
    with pytest.raises(CheckpointError, match=f"which is not known here; .*{cure}"):
        checkpoint.load(tmp_path, FIRST)
    assert "antigravity" not in set(sys.modules) - before


def test_a_state_cannot_hold_just_anything(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"cannot hold a set \(at state.part\)"):
        checkpoint.save(tmp_path, 1, replace(FIRST, part={1}), {})


@pytest.mark.parametrize(("found", "words"), [(None, r"equifed 0\.1"), (FORMAT + 1, "a later")])
def test_checkpoints_of_other_versions_are_refused(
    found: int | None, words: str, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, 1, FIRST, {})
    manifest = tmp_path / "00000001.json"
    told = json.loads(manifest.read_text())
    told.pop("format")
    manifest.write_text(json.dumps(told if found is None else {**told, "format": found}))
    with pytest.raises(RunFolderError, match=f"was written by {words}.*start it again"):
        checkpoint.load(tmp_path, FIRST)


@dataclass(frozen=True)
class Scattered(KeyedMemory):
    """Vectors of which each process would hold its part."""

    whole: DenseVectors

    def collect(self) -> DenseVectors:
        return self.whole


def test_scattered_memories_are_collected_at_any_depth() -> None:
    whole = DenseVectors(torch.ones(2, 3))
    inner = replace(FIRST, memory=Scattered((), whole))
    assert checkpoint.collect(replace(FIRST, part=inner)).part.memory is whole
    assert checkpoint.collect(FIRST) is FIRST  # nothing is copied where nothing is scattered
