"""The data sets that have a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from equifed.data.checks import DataError
from equifed.data.federation import Federation
from equifed.datasets import census, natural, pooled, small, synthetic
from equifed.datasets.files import Progress, RemoteFile, find, obtain_all


@dataclass(frozen=True)
class DataSet:
    """A named data set: how to load it, and what a user should know before."""

    name: str
    description: str
    licence: str
    loader: Callable[..., Federation]
    embedded: bool = False
    files: tuple[RemoteFile, ...] = ()
    instead: tuple[str, ...] = ()  # folder/name of files that serve as well as ``files``

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
        DataSet(
            "fashion-three",
            "T-shirts, pullovers, shirts of Fashion-MNIST: 3 clients, one class each",
            "MIT",
            small.fashion_three,
            embedded=True,
        ),
        DataSet(
            "heart-disease",
            "UCI heart disease: 4 hospitals, 920 patients, ill or healthy",
            "CC BY 4.0",
            small.heart_disease,
            embedded=True,
        ),
        DataSet(
            "penguins",
            "Palmer penguins: 3 species or islands, 333 penguins with 4 measurements",
            "CC0",
            small.penguins,
            embedded=True,
        ),
        DataSet(
            "synthetic-regression",
            "Linear regression with a different true model per client (SCAFF-PD, Section 6.1)",
            "generated",
            synthetic.synthetic_regression,
            embedded=True,
        ),
        DataSet(
            "mnist",
            "MNIST digits, divided by a partition",
            "CC BY-SA 3.0",
            pooled.mnist,
            files=pooled.MNIST_FILES,
        ),
        DataSet(
            "fashion-mnist",
            "Fashion-MNIST, divided by a partition",
            "MIT",
            pooled.fashion_mnist,
            files=pooled.FASHION_FILES,
        ),
        DataSet(
            "cifar10",
            "CIFAR-10, divided by a partition",
            "none stated; research use",
            pooled.cifar10,
            files=pooled.CIFAR_FILES,
            instead=("cifar10/test_batch.webp", "cifar10/cifar-10-python.tar.gz"),
        ),
        DataSet(
            "adult",
            "UCI Adult (census income): clients by education or another column",
            "CC BY 4.0",
            census.adult,
            files=census.ADULT_FILES,
        ),
        DataSet(
            "vehicle",
            "Vehicle sensors: 23 clients, 1,860 samples of 100 features, two classes",
            "none stated; research use",
            natural.vehicle,
            files=natural.VEHICLE_FILES,
            instead=("vehicle/vehicle_ditto_train.json.gz",),
        ),
        DataSet(
            "shakespeare",
            "Next character of some 1,100 speaking roles",
            "public domain (moby) or non-commercial (gutenberg)",
            natural.shakespeare,
        ),
        DataSet(
            "femnist",
            "Handwritten characters of 105 writers, 62 classes",
            "US government work",
            natural.femnist,
        ),
    )
}


def load(name: str, **params: Any) -> Federation:
    """Load a data set by name.

    >>> load("fashion-three", train=10, test=5)
    <Federation 'fashion-three': 3 clients; samples: train 30, test 15>
    """
    if name not in DATASETS:
        raise DataError(f"There is no data set {name!r}; there are {', '.join(DATASETS)}.")
    allowed = DATASETS[name].parameters
    wrong = sorted(set(params) - set(allowed))
    if wrong:
        raise DataError(
            f"Data set {name} has no parameter {wrong[0]!r}; it has {', '.join(allowed)}."
        )
    return DATASETS[name].loader(**params)


def fetch(name: str, progress: Progress | None = None) -> list[str]:
    """Fetch the files of a data set that are not here yet; return where they are now."""
    if name not in DATASETS:
        raise DataError(f"There is no data set {name!r}; there are {', '.join(DATASETS)}.")
    entry = DATASETS[name]
    if not entry.files and not entry.embedded:
        raise DataError(
            f"{name} has no file with a known checksum to fetch; load it once to see which file "
            "to put into $EQUIFED_DATA."
        )
    obtain_all(entry.missing(), progress)
    places = [file.find() for file in entry.files] + [find(*p.split("/")) for p in entry.instead]
    return [str(place) for place in places if place]


def table(
    path: str | Path,
    client: str,
    target: str,
    features: tuple[str, ...] | None = None,
    categorical: tuple[str, ...] = (),
    split: str | None = None,
    task: Literal["classification", "regression"] | None = None,
    missing: Literal["error", "drop"] = "error",
    classes: int | None = None,
    dtype: Literal["float32", "float64"] = "float32",
) -> Federation:
    """Load your own table from a file, as :meth:`equifed.Federation.from_table` does."""
    return Federation.from_table(
        path,
        client=client,
        target=target,
        features=features,
        categorical=categorical,
        split=split,
        task=task,
        missing=missing,
        classes=classes,
        dtype=dtype,
    )
