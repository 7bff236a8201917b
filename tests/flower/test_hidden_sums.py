"""A server that keeps all it opened and subtracts: nobody is in any difference.

``scripts/trust/hidden_sums.py`` loses it everywhere, with every algorithm; here at a few points.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scripts.trust.hidden_sums import CASES, play
from tests.flower.grid import convex, flower_clients, loop_clients, memory_grid, task

from equifed.contract.streams import Stream
from equifed.flower.secure.ledger import Ledger
from equifed.flower.secure.sums import SecureSums

pytestmark = pytest.mark.long

MANY = ("scaffold fresh", "scaffold stored", "drfa average", "scaff-pd cvar", "rfedfair average")
"""Algorithms with several sums in a round."""

FEW = (*MANY, "fedavg", "scaffold sampled", "feddyn", "drdm", "guarded")
"""What makes other sums; the others sum as one of these does, and are slow."""


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_no_difference_of_opened_sums_shows_a_client(name: str) -> None:
    for k in (5, 6, 7) if name in MANY else (6,):
        seen, _, end = play(CASES[name], k)
        assert sum(len(sums) for sums in seen.sums.values()) > 0
        assert seen.recoveries() == []
        if name == "drdm":  # it sums what clients keep by other weights: ends, and shows nobody
            assert end.startswith("PrivacyError") and "(client-2). Resume when they" in end
        else:
            assert end == ""


@pytest.mark.parametrize("name", ["scaffold fresh", "drfa average"])
def test_without_the_ledger_a_lost_client_is_recovered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "refuse", lambda ledger, wanted: None)
    monkeypatch.setattr("equifed.flower.secure.masking.are_apart", lambda one, other: True)
    assert any(play(CASES[name], k)[0].recoveries() for k in (6, 7, 8))


PAGES = ("SECURITY.md", "docs/trust.md", "docs/guides/privacy.md", "docs/deploy.md")


def test_losses_at_chosen_models_tell_a_gradient_and_the_pages_say_so(tmp_path: Path) -> None:
    """Hidden sums and a policy do not stop it; a cure has to change these pages, too."""
    policy = tmp_path / "policy.toml"
    policy.write_text('privacy = "secure"\n', encoding="utf-8")
    grid = memory_grid(convex(), task(), tmp_path / "memory", policy=str(policy))
    clients = flower_clients(grid, task(), hidden=SecureSums())
    x = torch.linspace(-1, 1, len(clients.initial(Stream(0))), dtype=torch.float64)
    _, vectors = loop_clients(convex(), task()).value_and_gradient(x, Stream(0))
    gradient = vectors.weighted_sum(np.eye(4)[2]).numpy()
    found, step = np.zeros(len(x)), 1e-5
    for k, move in enumerate(step * torch.eye(len(x), dtype=x.dtype)):
        above = clients.losses(x + move, Stream(0, ("round", 1, f"above {k}")))
        below = clients.losses(x - move, Stream(0, ("round", 1, f"below {k}")))
        found[k] = (above[2] - below[2]) / (2 * step)
    assert np.linalg.norm(found - gradient) < 1e-7 * np.linalg.norm(gradient)
    for page in PAGES:
        words = (Path(__file__).parents[2] / page).read_text(encoding="utf-8").replace("> ", "")
        assert "refuse foreign code, not questions" in " ".join(words.split()), page
