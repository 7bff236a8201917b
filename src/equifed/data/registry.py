"""The data sets that have a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equifed.data import small, synthetic
from equifed.data.checks import DataError
from equifed.data.federation import Federation


@dataclass(frozen=True)
class DataSet:
    """A named data set: how to load it, and what a user should know before."""

    name: str
    description: str
    licence: str
    loader: Callable[..., Federation]
    embedded: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the loader and their defaults."""
        return {k: p.default for k, p in inspect.signature(self.loader).parameters.items()}


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
