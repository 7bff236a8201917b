"""Attacks by a modified submitter and server over a network: the script against real nodes."""

from __future__ import annotations

import pytest
from scripts.trust.network_attacks import KNOWN, main

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.mark.timeout(1800)
def test_attacks_over_a_network_are_refused_at_the_site_and_are_in_its_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["--evaluations", "20"])  # one more than the plan has would do
    told = capsys.readouterr().out
    assert code == 0, told
    assert len(told.splitlines()) == 2 + len(KNOWN)
