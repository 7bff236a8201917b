"""UCI Adult, a census sample, with clients by column or by partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equifed.data.checks import DataError
from equifed.data.columns import Columns, one_hot
from equifed.data.federation import Federation
from equifed.data.preprocess import standardise
from equifed.datasets.files import RemoteFile, checksums, obtain_all
from equifed.datasets.pooled import Spec, divide, divide_by_column

ADULT_FILES = tuple(
    RemoteFile(
        "adult",
        name,
        f"https://archive.ics.uci.edu/ml/machine-learning-databases/adult/{name}",
        sha256,
        size,
    )
    for name, sha256, size in (
        ("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d", 3974305),
        ("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05", 2003153),
    )
)

ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
ADULT_NUMBERS = (
    *("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"),
)


ADULT_CATEGORIES = tuple(c for c in ADULT_COLUMNS[:-1] if c not in ADULT_NUMBERS)


def adult(
    *, clients: str = "doctorate", partition: Spec | None = None, seed: int = 0
) -> Federation:
    """UCI Adult: whether a person of the 1994 census earns more than 50,000 dollars a year.

    Numbers are standardised with the training rows, categories become 0/1 columns (one for each
    value of the training file, the missing mark ``?`` included; nothing is dropped).

    Parameters
    ----------
    clients : str
        ``doctorate`` for the two clients of AFL and q-FFL (people with a doctorate, and all
        others), or a column whose values are the clients, such as ``race`` or ``education``.
    partition : Partition, name or mapping, optional
        Divide the pool this way, not by column.
    seed : int
        Seed of the partition.
    """
    paths = obtain_all(ADULT_FILES)
    train, test = (read_adult(path) for path in paths)
    categories = {c: sorted(set(train[c])) for c in ADULT_CATEGORIES}
    pools = [(_adult_features(table, categories), _adult_labels(table)) for table in (train, test)]
    source = {"publisher": "B. Becker and R. Kohavi 1996, UCI", "licence": "CC BY 4.0"}
    source |= checksums(paths)
    titles = ("<=50K", ">50K")
    if partition is not None:
        federation = divide("adult", pools[0], pools[1], partition, seed, titles, source)
    else:
        owners = [_adult_owners(table, clients) for table in (train, test)]
        federation = divide_by_column("adult", pools[0], pools[1], owners, titles, source)
    return standardise(federation, range(len(ADULT_NUMBERS)))


def read_adult(path: Path) -> Columns:
    """Read ``adult.data`` or ``adult.test``: fields separated by comma and blank, no header."""
    text = path.read_text(encoding="utf-8")
    rows = [line.rstrip(".").split(", ") for line in text.splitlines() if line.count(", ") > 1]
    short = [row for row in rows if len(row) != len(ADULT_COLUMNS)]
    if short or not rows:
        raise DataError(
            f"{path} is not the Adult table: expected {len(ADULT_COLUMNS)} fields a row."
        )
    return {name: [row[k] for row in rows] for k, name in enumerate(ADULT_COLUMNS)}


def _adult_features(table: Columns, categories: dict[str, list[str]]) -> NDArray[np.float32]:
    numbers = np.array([table[c] for c in ADULT_NUMBERS], dtype=np.float64).T
    blocks = [numbers, *(one_hot(table[c], values) for c, values in categories.items())]
    return np.hstack(blocks).astype(np.float32)


def _adult_labels(table: Columns) -> NDArray[np.int64]:
    return np.array([value == ">50K" for value in table["income"]], dtype=np.int64)


def _adult_owners(table: Columns, clients: str) -> list[str]:
    if clients == "doctorate":
        return ["doctorate" if v == "Doctorate" else "other" for v in table["education"]]
    if clients not in ADULT_CATEGORIES:
        raise DataError(
            f"adult: clients must be doctorate or one of {', '.join(ADULT_CATEGORIES)}, "
            f"got {clients!r}."
        )
    return list(table[clients])
