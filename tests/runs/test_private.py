"""Runs under privacy from a configuration: what it says, refuses, and what a resume spends."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.problems import classification
from tests.runs.test_resume import SAME, Dies

import equifed as ef
from equifed.privacy.site import PrivateSite
from equifed.runs import run as runs
from equifed.runs.alone import is_small_and_convex
from equifed.runs.build import build_run
from equifed.runs.config import RunConfig
from equifed.runs.schema import ConfigError
from equifed.training import loop as training

DATES = re.compile(rb"20[0-9-]{8}[T ][0-9:+-]+( UTC)?")

BUDGET = {"epsilon": 2.0, "rows": 2.0, "loss": 3.0}


def table(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "data": {"name": "fashion-three", "train": 12, "test": 6},
        "model": {"name": "logistic", "l2": 1e-2},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2, "batch_size": "none"}},
        "privacy": BUDGET,
        **changes,
    }


def test_a_configuration_says_what_is_private_and_reads_back():
    config = RunConfig.from_dict(table())
    assert config.privacy is not None
    assert (config.privacy.rounds, config.privacy.delta) == (4, 1e-5)
    assert (config.evaluate.splits, config.with_alone) == (("test",), False)
    again = RunConfig.from_dict(config.to_dict())
    assert again.privacy == config.privacy
    assert RunConfig.from_dict({k: v for k, v in table().items() if k != "privacy"}).privacy is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"privacy": {"epsilon": 1.0}}, "privacy.rows"),
        ({"privacy": BUDGET | {"epsilon": -1.0}}, "epsilon"),
        ({"privacy": BUDGET | {"rounds": 3}}, "privacy.rounds"),
        ({"evaluate": {"splits": ["train"]}}, "evaluate.splits"),
        ({"engine": {"name": "stacked"}}, "adds no noise"),
        ({"with_alone": True}, "without noise, which no privacy budget covers"),
        (
            {"model": {"name": "logistic", "own": "bias", "own_steps": "alternating"}},
            "own_steps='alternating'",
        ),
        (
            {"algorithm": {"name": "afl", "local": {"lr": 0.1, "steps": 2}}},
            "AFL has no private version",
        ),
        ({"algorithm": {"name": "fedavg", "local": {"steps": 2}}}, "algorithm.lr"),
    ],
)
def test_what_cannot_be_private_is_refused(changes, told, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=told):
        runs.run(RunConfig.from_dict(table(**changes)), tmp_path / "run")


def test_the_folder_has_no_checksum_of_rows_with_which_to_test_guesses(tmp_path):
    config = RunConfig.from_dict(table(rounds=1))
    runs.run(config, tmp_path / "run")
    checksum = build_run(config).federation.checksum()
    told = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert told and not any(checksum.encode() in p.read_bytes() for p in told)


@pytest.mark.long
@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_has_the_noise_and_the_price_of_an_uninterrupted_one(
    own, tmp_path, monkeypatch
):
    newton = {"name": "fair-newton", "objective": "average"}
    model = {"name": "logistic", "l2": 1e-2, "own": "bias"}
    changes = {"model": model, "algorithm": newton} if own else {}
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    seen = []
    monkeypatch.setattr(
        runs, "build_run", lambda config: seen.append(build_run(config)) or seen[-1]
    )
    runs.run(RunConfig.from_dict(table(**changes)), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        broken = RunConfig.from_dict(table(**changes))
        runs.run(broken, tmp_path / "broken", callbacks=[Dies(2)])
    runs.resume(tmp_path / "broken")
    for name in SAME:
        whole, broken = ((tmp_path / f / name).read_bytes() for f in ("whole", "broken"))
        assert whole == broken, name
    first, _, last = (run.clients.ledgers for run in seen)
    for ledger, other in zip(first, last, strict=True):
        assert set(ledger.entries) == set(other.entries)
        assert ledger.spent == pytest.approx(2.0, rel=1e-9)


def test_no_own_models_are_fitted_beside_a_private_run():
    data, privacy = classification(), ef.Privacy(**BUDGET, rounds=2)
    plain, private = (ef.simulate(data, "logistic", privacy=p) for p in (None, privacy))
    assert is_small_and_convex(plain, data) and not is_small_and_convex(private, data)


def test_a_run_with_secret_noise_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    config = RunConfig.from_dict(table(privacy=BUDGET | {"secret": True}))
    with pytest.raises(KeyboardInterrupt):
        runs.run(config, tmp_path / "broken", callbacks=[Dies(2)])
    with pytest.raises(ValueError, match="Secret noise"):
        runs.resume(tmp_path / "broken")


@pytest.mark.parametrize("own", [None, "bias"])
def test_a_folder_tells_of_rows_by_noised_answers_alone(own, tmp_path, monkeypatch):
    """With these answers made constant, all other rows leave the same files."""
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    monkeypatch.setattr(PrivateSite, "mean_loss", lambda *_: torch.tensor(0.5).double())
    monkeypatch.setattr(PrivateSite, "mean_gradient", lambda _, x, rows=None: 0 * x)
    monkeypatch.setattr(PrivateSite, "mean_moments", lambda _: torch.eye(4).double())
    privacy, found = ef.Privacy(**BUDGET, rounds=2), []
    for seed in (1, 2):
        data = replace(classification(seed=seed), test=classification(seed=3).train)
        data.train.targets[-9:] *= seed == 1  # the last client's are of one class then
        clients = ef.simulate(data, "logistic", privacy=privacy, own=own)
        fair = ef.FairNewton(ef.objectives.ChiSquare(0.3, scale=1.0))
        history = ef.train(fair, clients, rounds=2, evaluate=["test"], progress=False)
        history.save(tmp_path / str(seed))
        ef.write_report(history, tmp_path / str(seed) / "report.html", per_client=True)
        files = sorted(p for p in (tmp_path / str(seed)).rglob("*") if p.is_file())
        found.append({p.name: DATES.sub(b"", p.read_bytes()) for p in files})
        del found[-1]["checksums.json"]  # of the dates, too
    assert found[0] == found[1] and len(found[0]) > 5
