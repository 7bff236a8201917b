"""What predicts with a trained model, as parts see it that know no module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray


class Predicts(Protocol):
    """What :class:`equifed.models.predictor.Predictor` does, whose docstrings say it at length."""

    @property
    def module(self) -> Any:
        """The module with its weights."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None for a regression."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Who took part in training."""

    def predict(self, rows: Any, client: str | Sequence[str] | None = None) -> NDArray[Any]:
        """Return the class name, or the value, of every row."""

    def predict_proba(self, rows: Any, client: str | Sequence[str] | None = None) -> NDArray[Any]:
        """Return the probability of every class, shape (rows, classes)."""

    def decision_function(
        self, rows: Any, client: str | Sequence[str] | None = None
    ) -> NDArray[Any]:
        """Return scores: of the second of two classes (rows,), else of every class."""

    def for_client(self, client: str) -> Predicts:
        """Return what predicts for one client alone: its own part is in the module."""

    def for_new_client(
        self, rows: Any = None, targets: Any = None, client: str = "new client"
    ) -> Predicts:
        """Return what predicts for a client that took no part in training."""
