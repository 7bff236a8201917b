"""The table own x engine x algorithm: every cell runs and agrees with the loop, or is refused.

An own part is orthogonal to the algorithm, so that six algorithms are enough: one for each of
plain steps, stored and fresh control variates, drawn clients, paired losses and curvature. Rows
are these with minibatches, with sampled clients, and with full gradients; columns are own parts by
profile losses, by joint and by alternating local steps, on the loop, the stacked engine (in chunks,
and beyond its memory) and a group of processes. Flower's cells are in ``tests/flower/test_own.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.cases import CASES, PRIMAL_DUAL
from tests.problems import classification

from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.engines.distributed import DistributedClients
from equifed.engines.simulate import simulate
from equifed.flower.app_config import AppConfig
from equifed.training.history import History
from equifed.training.loop import train

pytestmark = pytest.mark.long

FULL = LocalSGD(lr=0.05, steps=2)
OWN: dict[str, dict[str, Any]] = {
    "profile": {"model": "logistic", "loss": "logistic", "own": "bias"},
    "joint": {"model": "mlp", "own": "bias"},
    "alternating": {"model": "mlp", "own": "head", "own_steps": "alternating"},
}
ENGINES: dict[str, Any] = {
    "stacked": simulate,
    "chunks": lambda *a, **k: simulate(*a, **k, chunk=2),
    "lazy": lambda *a, **k: simulate(*a, **k, memory=1),
    "distributed": DistributedClients,
}


def with_full_gradients(algorithm: Any) -> Any:
    """Return the algorithm without minibatches."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, LocalSGD):
            changes[field.name] = dataclasses.replace(FULL, lr=value.lr)
        elif field.name == "algorithm":
            changes[field.name] = with_full_gradients(value)
        elif field.name.endswith("batch_size"):
            changes[field.name] = None
    return dataclasses.replace(algorithm, **changes)


def with_given_steps(algorithm: Any) -> Any:
    """Return a wrapper whose algorithm has step sizes that do not depend on the engine's bounds."""
    inner = getattr(algorithm, "algorithm", None)
    if inner is None:
        return algorithm
    if hasattr(inner, "algorithm"):
        return dataclasses.replace(algorithm, algorithm=with_given_steps(inner))
    if not hasattr(inner, "metric"):  # no schedule: FedAvg and its like
        return algorithm
    return dataclasses.replace(algorithm, algorithm=dataclasses.replace(inner, steps=PRIMAL_DUAL))


PLAIN = {
    f"{name}/{kind}": with_given_steps(CASES[f"{name}/{kind}"])
    for name in ("fedavg", "scaffold", "drfa", "scaff-pd", "rfedfair", "fair-newton")
    for kind in ("plain", "sampled")
    if f"{name}/{kind}" in CASES
}
ROWS: dict[str, AnyAlgorithm] = PLAIN | {
    f"{name}, full": with_full_gradients(algorithm)
    for name, algorithm in PLAIN.items()
    if name.endswith("/plain")
}


@cache
def federation() -> Federation:
    return classification((6, 9, 4, 8, 5), classes=2, seed=4).split(test=0.25, seed=0)


def play(make: Any, row: str, own: str) -> History | str:
    """Return what a cell comes to: a history, or why it is refused."""
    given = {"l2": 0.05, "dtype": torch.float64, **OWN[own]}
    clients = make(federation(), given.pop("model"), **given)
    try:
        return train(ROWS[row], clients, rounds=2, seed=1, evaluate=("test",))
    except ValueError as error:
        return str(error)


@cache
def reference(row: str, own: str) -> History | str:
    return play(lambda *a, **k: simulate(*a, **k, engine="loop"), row, own)


WHERE = {"full": "stacked", "plain": "distributed", "sampled": "chunks"}


def cells() -> Iterator[Any]:
    """Yield the table; what needs minutes is slow.

    With full gradients every algorithm has profile losses; with minibatches it is refused them, and
    has joint and alternating local steps in turn.
    """
    for place, row in enumerate(ROWS):
        kind = row.rpartition("/")[2].rpartition(" ")[2]
        chosen = {
            "full": ["profile"],
            "plain": ["profile", "joint" if place % 2 else "alternating"],
            "sampled": ["joint"],
        }
        for own in OWN:
            marks = () if own in chosen[kind] else (pytest.mark.slow,)
            yield pytest.param(row, own, WHERE[kind], marks=marks)
    for own in OWN:
        yield pytest.param("scaffold/plain, full", own, "lazy")


@pytest.mark.parametrize(("row", "own", "engine"), [*cells()])
def test_a_cell_agrees_with_the_loop_or_is_refused_by_name(row: str, own: str, engine: str) -> None:
    ours, theirs = play(ENGINES[engine], row, own), reference(row, own)
    if row.startswith("fair-newton") and own != "profile":  # no second derivatives of these
        assert ours == theirs and "FairNewton" in str(ours), ours
        return
    if isinstance(theirs, str) or isinstance(ours, str):
        assert own == "profile" and ours == theirs and not row.endswith("full")
        assert "own_steps='profile' needs all samples" in str(ours)
        return
    assert ours.parameters is not None and theirs.parameters is not None
    assert ours.own is not None and theirs.own is not None
    for found, expected in ((ours.parameters, theirs.parameters), (ours.own, theirs.own)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-8)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        np.testing.assert_allclose(a.values, b.values, rtol=0, atol=1e-8)


def test_own_parts_differ_from_client_to_client() -> None:
    for own in OWN:
        history = reference("fedavg/plain, full", own)
        assert isinstance(history, History) and history.own is not None
        for values in history.own.values():
            assert len(values) == 5 and not torch.equal(values[0], values[1])


@pytest.mark.parametrize(("name", "steps"), [("scaff-pd", "profile"), ("fedavg", "joint")])
def test_an_app_of_a_federation_has_them(name: str, steps: str) -> None:
    more = {"objective": {"name": "cvar", "tail": 0.5}}
    if steps == "joint":
        more = {"local": {"lr": 0.1, "steps": 1, "batch_size": 4}}
    table = {
        "rounds": 1,
        "model": {"name": "logistic", "own": "bias"},
        "algorithm": {"name": name, **more},
    }
    engine = AppConfig.from_dict(table).build_task().build_engine(federation().subset([0]))
    assert engine.own is not None and engine.own.steps == steps
