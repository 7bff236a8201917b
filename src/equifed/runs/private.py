"""``[privacy]`` of a configuration: a table that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equifed.privacy.clients import Privacy
from equifed.runs.schema import Checker, Table, construct, settings

PRIVACY = settings(Privacy, ("rounds",))
"""Its settings; the budget is split over the rounds of the run."""


def resolve_privacy(checker: Checker, resolved: Table, table: Mapping[str, Any]) -> None:
    """Check the table; defaults elsewhere ask nothing of training rows, which has a price now."""
    resolved["privacy"] = checker.table(PRIVACY, table["privacy"], "privacy")
    asked = table.get("evaluate", {})
    splits = asked.get("splits", ["test"]) if isinstance(asked, Mapping) else ["test"]
    resolved["evaluate"]["splits"] = splits
    if isinstance(splits, list | tuple) and {*map(str, splits)} - {"test"}:
        checker.problem(
            "evaluate.splits",
            "under privacy only test rows can be evaluated without cost; use test",
        )
    if "with_alone" not in table:
        resolved["with_alone"] = False


def construct_privacy(table: Table, rounds: int) -> Privacy:
    """Return the settings of a resolved table."""
    return construct(Privacy, table, "privacy", rounds=rounds)  # type: ignore[no-any-return]
