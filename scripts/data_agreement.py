"""Do two versions of equifed load the same data? Run on each, then compare the texts.

    EQUIFED_DATA=FOLDER python scripts/data_agreement.py > OUT.txt

One line per data set and choice of parameters: the checksum of the federation, which covers client
names, classes, every sample, its dtype and its owner, and that of its stated source. Data that are
not here give the error's kind.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np

try:
    from equifed.datasets import load
    from equifed.datasets.pooled import arrays
except ImportError:  # version 0.1
    from equifed.data.pooled import arrays

    from equifed.data import load

from equifed.data import DataError, Federation

SKEWED = {"name": "imbalance", "base": {"name": "dirichlet", "clients": 20, "alpha": 0.05}}
SHARDS = {"name": "shards", "clients": 15, "shards": 3}
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("fashion-three", {}),
    ("fashion-three", {"train": 10, "test": 5}),
    ("heart-disease", {}),
    ("heart-disease", {"missing": "complete", "validation": 0.1, "seed": 3}),
    ("penguins", {}),
    ("penguins", {"clients": "island", "target": "species", "validation": 0.2, "seed": 1}),
    ("synthetic-regression", {}),
    ("synthetic-regression", {"clients": 9, "features": 4, "scale": 2.0, "shift": 0.5, "seed": 5}),
    ("mnist", {}),
    ("mnist", {"partition": SKEWED, "seed": 1}),
    ("mnist", {"partition": "one-class", "samples": 6000}),
    ("fashion-mnist", {}),
    ("fashion-mnist", {"partition": SHARDS, "seed": 3}),
    ("cifar10", {}),
    ("cifar10", {"partition": SKEWED, "standardised": True, "samples": 12000}),
    ("adult", {}),
    ("adult", {"clients": "race"}),
    ("vehicle", {}),
    ("vehicle", {"test": 0.1, "validation": 0.1, "seed": 7}),
    ("shakespeare", {}),
    ("shakespeare", {"roles": 40, "stride": 5, "test": 0.1, "seed": 2}),
    ("femnist", {}),
    ("femnist", {"writers": 30, "seed": 6}),
)


def own_data() -> dict[str, Federation]:
    """Return federations made of one's own arrays, tables and partitions."""
    draw = np.random.default_rng(11)
    inputs, labels = draw.standard_normal((90, 4)), draw.integers(3, size=90)
    owners = draw.choice(["north", "south", "west"], size=90)
    table = {f"x{k}": inputs[:, k] for k in range(4)}
    table |= {"site": owners, "kind": draw.choice(["p", "q"], size=90), "y": labels}
    rows = [np.flatnonzero(owners == name) for name in dict.fromkeys(owners)]
    clients = {f"c{i}": (inputs[r], labels[r]) for i, r in enumerate(rows)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.npz"
        np.savez(path, x_train=inputs, y_train=labels, x_test=inputs[:30], y_test=labels[:30])
        pool = arrays(path, {"name": "dirichlet", "clients": 4, "alpha": 1.0, "min_samples": 5})
    return {
        "from_clients": Federation.from_clients(clients, test={"c1": clients["c0"]}),
        "from_table": Federation.from_table(
            table, client="site", target="y", test=0.2, validation=0.1, seed=2
        ),
        "arrays": pool,
    }


def describe(federation: Federation) -> str:
    """Return the checksums of the samples and of the source."""
    source = hashlib.sha256(repr(sorted(federation.source.items())).encode())
    return f"{federation.checksum()} {source.hexdigest()[:8]}"


def main() -> None:
    """Print the table."""
    for name, params in CASES:
        try:
            result = describe(load(name, **params))
        except DataError as error:
            result = type(error).__name__
        print(f"{name} {params}: {result}", flush=True)
    for name, federation in own_data().items():
        print(f"{name}: {describe(federation)}", flush=True)


if __name__ == "__main__":
    main()
