"""Write ``examples/hospitals.csv``: made-up patients of six unequal hospitals.

python -m scripts.example_table
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from tests.hospitals import draw_hospitals

PATH = Path(__file__).parents[1] / "examples" / "hospitals.csv"
SIZES = {"North": 150, "South": 100, "East": 70, "West": 60, "Lake": 50, "Hill": 30}


def draw_table() -> pd.DataFrame:
    """Return the table as it is written."""
    table = draw_hospitals(seed=2, sizes=SIZES)
    table["admitted"] = table["admitted"].dt.strftime("%Y-%m-%d")
    return table.round({"creatinine": 5, "platelets": 0, "lactate": 2})


if __name__ == "__main__":
    draw_table().to_csv(PATH, index=False)
    print(PATH)
