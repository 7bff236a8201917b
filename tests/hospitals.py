"""A table as a consortium has it: six unequal hospitals, text, gaps, scales over five orders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

SIZES = {"North": 420, "South": 260, "East": 180, "West": 120, "Lake": 90, "Hill": 24}
"""Patients of each hospital."""


def draw_hospitals(seed: int = 0, sizes: dict[str, int] = SIZES) -> pd.DataFrame:
    """Return the patients of all hospitals, in random order.

    The outcome follows a logistic model of the columns before values go missing; hospitals differ
    in their mix of patients, in what they do not measure, and a little in level.
    """
    draw = np.random.default_rng(seed)
    frames = []
    for k, (hospital, size) in enumerate(sizes.items()):
        z = draw.standard_normal((size, 3)) + 0.3 * (k - 2)
        sex, ward = draw.choice(["f", "m"], size), draw.choice(["surgery", "medicine", "icu"], size)
        smoker = draw.random(size) < 0.3
        score = 3 * z[:, 0] - 2 * z[:, 1] + 2 * (ward == "icu") + (sex == "m") + smoker - 1
        frames.append(
            pd.DataFrame(
                {
                    "hospital": hospital,
                    "age": np.round(60 + 12 * z[:, 2]),
                    "creatinine": 0.01 + 1e-3 * z[:, 0],
                    "platelets": 250_000 + 60_000 * z[:, 1],
                    "lactate": np.exp(draw.standard_normal(size)),
                    "sex": sex,
                    "ward": ward,
                    "smoker": smoker,
                    "unit": "mmol",
                    "admitted": pd.Timestamp("2024-01-01")
                    + pd.to_timedelta(draw.integers(0, 365, size), "D"),
                    "outcome": np.where(score + draw.logistic(0, 0.3, size) > 0, "died", "home"),
                }
            )
        )
    table = pd.concat(frames, ignore_index=True).sample(frac=1, random_state=seed)
    table.insert(0, "record", [f"R{k:05d}" for k in range(len(table))])
    for column, share in {"age": 0.05, "platelets": 0.08, "lactate": 0.3, "ward": 0.04}.items():
        table.loc[draw.random(len(table)) < share, column] = None
    table.loc[table["hospital"] == "West", "lactate"] = None  # never measured there
    return table.reset_index(drop=True)


def write_hospitals(path: Path, seed: int = 0) -> Path:
    """Write the table as a CSV file."""
    table = draw_hospitals(seed)
    table["admitted"] = table["admitted"].dt.strftime("%Y-%m-%d")
    table.to_csv(path, index=False)
    return path
