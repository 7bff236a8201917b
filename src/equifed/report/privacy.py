"""What a report says of differential privacy: the budget, what it protects, and what not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equifed.report.methods import Method, join_names
from equifed.training.events import PRIVACY
from equifed.training.history import History

AT_CLIENT = "noise is added at the client, so no server is trusted"
PROTECTED = {
    "record": f"one row of a client by another; {AT_CLIENT}",
    "person": f"all rows of one person by others; {AT_CLIENT}",
    "client": "all rows of a client by others; noise is added at the server, which is trusted with "
    "the clients' updates",
}
"""What may be replaced, and where noise is added, by unit."""

LEFT = (
    "What is true of many rows, whoever has them: that is what a model learns.",
    "The numbers that this page and the run folder have of every client, test rows included, and "
    "who took part. Publish the model alone.",
    "Other runs on the same rows, those of tuning too: their budgets add up.",
    "Preparation that reads the rows: scales, categories and fillings that were not declared.",
    "A simulation: its noise follows from the seed, which the run folder names.",
)
"""What no budget of a run covers."""


def read_budget(history: History) -> Mapping[str, Any] | None:
    """Return the ledger of a run with the largest budget; None: it had no privacy."""
    found = [told for e in history.events if e["event"] == PRIVACY for told in e["ledgers"]]
    return max(found, key=lambda told: (told["epsilon"], told["delta"]), default=None)


def describe_budget(told: Mapping[str, Any]) -> str:
    """Say what a budget is, and whose rows it protects.

    >>> describe_budget({"epsilon": 3.0, "delta": 1e-5, "unit": "record"})[:45]
    'Epsilon 3 at delta 1e-05 for every record: re'
    """
    return (
        f"Epsilon {told['epsilon']:g} at delta {told['delta']:g} for every {told['unit']}: "
        f"replacing {PROTECTED[told['unit']]}. Any event that depends on the model changes its "
        f"probability by at most a factor of e^{told['epsilon']:g}, and by {told['delta']:g} more."
    )


def describe_privacy(methods: Sequence[Method]) -> dict[str, list[str]] | None:
    """Return what is protected and what not; None: no run had privacy."""
    budgets = {method.name: read_budget(method.history) for method in methods}
    if not any(budgets.values()):
        return None
    lines = [
        (f"{name}: " if len(budgets) > 1 else "") + describe_budget(told)
        for name, told in budgets.items()
        if told is not None
    ]
    without = [name for name, told in budgets.items() if told is None]
    if without:
        lines.append(f"Without privacy: {join_names(without)}.")
    return {"budget": lines, "left": list(LEFT)}
