"""What a fit on a federation costs in rounds and exchanges: ``python -m benchmarks.flower.fit``.

Sites in this process with made-up rows of two classes (``--classes``), 60 for training, and an
offset of their own; each privacy level is fitted once for every number of sites.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tests.flower.grid import QUICK, memory_grid

from equifed.data.federation import Federation
from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.runs.fit import CHOICE


def draw(sites: int, classes: int) -> Federation:
    """Return made-up sites with validation and test rows."""
    rng, parts = np.random.default_rng(0), [dict[str, Any](), {}, {}]
    slopes = rng.normal(size=(4, classes))
    for i in range(sites):
        offset = rng.normal(size=classes)
        for part, rows in zip(parts, (60, 20, 20), strict=True):
            x = rng.normal(size=(rows, 4))
            part[f"site {i}"] = (
                x,
                (x @ slopes + offset + rng.gumbel(size=(rows, classes))).argmax(1),
            )
    return Federation.from_clients(parts[0], validation=parts[1], test=parts[2], classes=classes)


def measure(privacy: Any, sites: int, classes: int) -> tuple[str, float]:
    """Return what was said of the rounds, and exchanges of a site."""
    config = AppConfig.from_dict(
        {
            "rounds": 1,
            "data": {"classes": classes},
            "model": {"name": "logistic"},
            "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}},
            "guard": "off",
        }
    )
    with tempfile.TemporaryDirectory() as place:
        grid = memory_grid(draw(sites, classes), config.build_task(), Path(place) / "memory")
        out = Path(place) / "run"
        given = FederationSettings(sites, privacy, deadlines=QUICK, do="fit", out=str(out))
        run_federation(grid, config, given)
        told = json.loads((out / CHOICE).read_text())
    return told["notes"][0].partition(".")[0], len(grid.sent) / sites


def main() -> None:
    """Print a line for every privacy level and number of sites."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--classes", type=int, default=2)
    given = parser.parse_args()
    lines = []
    for privacy in ("none", "secure"):
        for sites in given.sites:
            told, exchanges = measure(privacy, sites, given.classes)
            lines.append(f"{privacy}, {sites} sites: {told}; {exchanges:.0f} exchanges")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
