"""Write the data files that the package embeds, from the publishers' files.

Reads the folder named by EQUIFED_DATA (by default ``../shared/data`` beside the repository) and
writes ``src/equifed/datasets/embedded``. Running it twice gives the same bytes.

* ``fashion_three.npz``: the first 1,000 training and 500 test images of Fashion-MNIST classes 0, 2
  and 6, in published order, as uint8.
* ``processed.*.data`` (UCI heart disease) and ``penguins.csv``: copies of the originals.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from equifed.datasets.files import read_idx

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(os.environ.get("EQUIFED_DATA", ROOT.parent / "shared" / "data"))
TARGET = ROOT / "src" / "equifed" / "datasets" / "embedded"

CLASSES = {"t_shirt": 0, "pullover": 2, "shirt": 6}
COUNTS = {"train": 1000, "t10k": 500}
COPIES = [
    "penguins/penguins.csv",
    *(
        f"heart_disease/processed.{site}.data"
        for site in ("cleveland", "hungarian", "switzerland", "va")
    ),
]


def fashion_three() -> dict[str, np.ndarray]:
    """Return the images of the three classes, by class and split."""
    arrays = {}
    for split, count in COUNTS.items():
        images = read_idx(SOURCE / "fashion_mnist" / f"{split}-images-idx3-ubyte.gz")
        labels = read_idx(SOURCE / "fashion_mnist" / f"{split}-labels-idx1-ubyte.gz")
        for name, label in CLASSES.items():
            title = f"{name}_{'train' if split == 'train' else 'test'}"
            arrays[title] = images[np.flatnonzero(labels == label)[:count]]
    return arrays


def main() -> None:
    """Write all embedded files."""
    TARGET.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(TARGET / "fashion_three.npz", **fashion_three())
    for name in COPIES:
        shutil.copyfile(SOURCE / name, TARGET / Path(name).name)
    for path in sorted(TARGET.iterdir()):
        print(f"{path.stat().st_size:>9} {path.name}")


if __name__ == "__main__":
    main()
