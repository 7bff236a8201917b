"""An objective over some of the clients, when all weight was with the others."""

from __future__ import annotations

import numpy as np
import pytest

from equifed.algorithms.absence import Among
from equifed.objectives import CVaR, WorstCase


@pytest.mark.parametrize("objective", [WorstCase(), CVaR(0.5)])
def test_members_without_weight_step_from_the_start(objective: WorstCase | CVaR) -> None:
    """An entropic step keeps zeros at zero: nobody would be left to share the weight."""
    among, losses = Among(objective, (0, 2, 3)), np.array([1.0, np.inf, 2.0, 0.5])
    stepped = among.mirror(np.array([0.0, 1.0, 0.0, 0.0]), losses, 0.7)
    np.testing.assert_array_equal(stepped, among.mirror(among.start(4), losses, 0.7))
    assert stepped.sum() == pytest.approx(1.0) and stepped[1] == 0.0
