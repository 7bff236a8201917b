"""Who is told what happens in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equifed.contract.algorithm import Info
from equifed.training.history import History, MetricRecord, RoundRecord


class Callback:
    """Told what happens; the progress bar and trackers are such. Every method may be left out."""

    def start(self, history: History, rounds: int) -> None:
        """Hear that training begins, or begins again with a history."""

    def round(self, record: RoundRecord, info: Info) -> None:
        """Hear that a round ended."""

    def evaluation(self, round: int, records: Sequence[MetricRecord]) -> None:
        """Hear that the model was evaluated after a round."""

    def event(self, event: dict[str, Any]) -> None:
        """Hear that a client was quarantined, a run resumed or stopped."""

    def end(self, history: History) -> None:
        """Hear that training ended."""
