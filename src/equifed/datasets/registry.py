"""The data sets that have a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from equifed.data.federation import Federation
from equifed.data.preparation import Prepare
from equifed.data.split import DataError, Holdout, refuse
from equifed.datasets import natural, pooled, small
from equifed.datasets.files import RemoteFile, find

DEFAULT, NOTHING = Prepare(), Holdout()


@dataclass(frozen=True)
class DataSet:
    """A named data set: how to load it, and what a user should know before."""

    name: str
    licence: str
    loader: Callable[..., Federation]
    embedded: bool = False
    files: tuple[RemoteFile, ...] = ()
    instead: tuple[str, ...] = ()  # folder/name of files that serve as well as ``files``

    @property
    def description(self) -> str:
        """What it is, in one line: the first of its loader's documentation."""
        return (self.loader.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the loader and their defaults."""
        return {k: p.default for k, p in inspect.signature(self.loader).parameters.items()}

    def missing(self) -> list[RemoteFile]:
        """Return the publisher's files that are needed and not on this machine."""
        if any(find(*place.split("/")) for place in self.instead):
            return []
        return [file for file in self.files if file.find() is None]


DATASETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet("fashion-three", "MIT", small.fashion_three, embedded=True),
        DataSet("heart-disease", "CC BY 4.0", small.heart_disease, embedded=True),
        DataSet("penguins", "CC0", small.penguins, embedded=True),
        DataSet("synthetic-regression", "generated", small.synthetic_regression, embedded=True),
        DataSet("mnist", "CC BY-SA 3.0", pooled.mnist, files=pooled.MNIST_FILES),
        DataSet("fashion-mnist", "MIT", pooled.fashion_mnist, files=pooled.FASHION_FILES),
        DataSet("cifar10", "none stated; research use", pooled.cifar10,
                files=pooled.CIFAR_FILES, instead=("cifar10/test_batch.webp",)),
        DataSet("cifar100", "none stated; research use", pooled.cifar100),
        DataSet("adult", "CC BY 4.0", natural.adult, files=natural.ADULT_FILES),
        DataSet("vehicle", "none stated; research use", natural.vehicle,
                files=natural.VEHICLE_FILES, instead=("vehicle/vehicle_ditto_train.json.gz",)),
        DataSet("shakespeare", "public domain", natural.shakespeare),
        DataSet("femnist", "US government work", natural.femnist),
    )
}  # fmt: skip


def load(name: str, **params: Any) -> Federation:
    """Load a data set by name.

    >>> load("fashion-three", train=10, test=5)
    <Federation 'fashion-three': 3 clients; samples: train 30, test 15>
    """
    entry = _find_entry(name)
    refuse(
        sorted(set(params) - set(entry.parameters)),
        lambda key: (
            f"Data set {name} has no parameter {key!r}; it has {', '.join(entry.parameters)}."
        ),
    )
    return entry.loader(**params)


def fetch(name: str) -> list[str]:
    """Fetch the files of a data set that are not here yet; return where they are now."""
    entry = _find_entry(name)
    if not entry.files and not entry.embedded:
        raise DataError(
            f"{name} has no file with a known checksum to fetch; load it once to see which file "
            "to put into $EQUIFED_DATA."
        )
    for file in entry.missing():
        file.obtain()
    places = [file.find() for file in entry.files] + [find(*p.split("/")) for p in entry.instead]
    return [str(place) for place in places if place]


def _find_entry(name: str) -> DataSet:
    if name not in DATASETS:
        raise DataError(f"There is no data set {name!r}; there are {', '.join(DATASETS)}.")
    return DATASETS[name]


def table(
    path: str | Path,
    client: str,
    target: str,
    features: tuple[str, ...] | None = None,
    split: str | None = None,
    keep_together: str | None = None,
    time: str | None = None,
    report_by: str | None = None,
    task: Literal["classification", "regression"] | None = None,
    classes: int | None = None,
    dtype: Literal["float32", "float64"] = "float32",
    prepare: Prepare = DEFAULT,
    holdout: Holdout = NOTHING,
) -> Federation:
    """Load your table from a file, as :meth:`equifed.Federation.from_table` does.

    Parameters
    ----------
    path : path
        CSV file with a header line, or Parquet file.
    prepare : Prepare
        How columns become features.
    holdout : Holdout
        Fractions of every client's rows to hold out, before anything is fitted.
    """
    return Federation.from_table(
        path, client, target, features=features, split=split, keep_together=keep_together,
        time=time, report_by=report_by, task=task, classes=classes, dtype=dtype,
        **asdict(prepare), **asdict(holdout),
    )  # fmt: skip
