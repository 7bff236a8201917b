"""A server that keeps all it opened and subtracts: nobody is in any difference.

``scripts/trust/hidden_sums.py`` loses it everywhere, with every algorithm; here at a few points.
"""

from __future__ import annotations

import pytest
from scripts.trust.hidden_sums import CASES, play

from equifed.flower.secure.ledger import Ledger

pytestmark = pytest.mark.long

MANY = ("scaffold fresh", "scaffold stored", "drfa average", "scaff-pd cvar", "rfedfair average")
"""Algorithms with several sums in a round."""

FEW = (*MANY, "fedavg", "scaffold sampled", "feddyn", "drdm", "guarded")
"""What makes other sums; the others sum as one of these does, and are slow."""


POINTS = {"drdm": (9, 10)}
"""Which reply is lost, if not the sixth: DRDM's first six measure the losses before any round."""


ENDS = ("drdm", "scaled")
"""What ends when a client is lost, shows nobody, and says who has to be back.

DRDM sums what clients keep by other weights, Scaled gradients at the model of its curvature.
"""


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_no_difference_of_opened_sums_shows_a_client(name: str) -> None:
    for k in (5, 6, 7) if name in MANY else POINTS.get(name, (6,)):
        seen, _, end = play(CASES[name], k)
        assert sum(len(sums) for sums in seen.sums.values()) > 0
        assert seen.recoveries() == []
        if name in ENDS:
            assert end.startswith("PrivacyError") and "(client-2). Resume when they" in end
        else:
            assert end == ""


@pytest.mark.parametrize("name", ["scaffold fresh", "drfa average"])
def test_without_the_ledger_a_lost_client_is_recovered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "refuse", lambda ledger, wanted: None)
    monkeypatch.setattr("equifed.flower.secure.masking.find_exposed", lambda opened, wanted: None)
    assert any(play(CASES[name], k)[0].recoveries() for k in (6, 7, 8))
