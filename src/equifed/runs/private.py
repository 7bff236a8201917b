"""``[privacy]`` of a configuration: a table that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from equifed.data.federation import Federation
from equifed.models.losses import SampleLoss
from equifed.privacy.clients import Privacy, PrivateClients
from equifed.runs.schema import Checker, ConfigError, Table, blame, construct, settings

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


def build_private(
    engine: Table, privacy: Privacy, data: Federation, module: nn.Module, loss: SampleLoss,
    given: Mapping[str, Any],
) -> PrivateClients:  # fmt: skip
    """Return clients that answer with noise, which one engine adds."""
    if engine["name"] not in ("auto", "loop"):
        raise ConfigError([f"engine: {engine['name']} adds no noise; use 'loop'"])
    with blame("privacy: "):
        device = engine.get("device", "cpu")
        return privacy.make_clients(data, module, loss, device=device, **given)
