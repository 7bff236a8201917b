"""Columns of a table, client by client: what is missing, and on which scale the rest is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equifed.data.columns import Columns, group_rows, to_numbers
from equifed.data.tables import Table

Described = dict[str, dict[str, dict[str, float]]]
"""Column to client to ``rows``, ``missing`` and, of numbers, ``mean`` and ``deviation``."""


def describe_columns(columns: Columns, client: str, features: Sequence[str]) -> Described:
    """Return what every client has in every column, from all its rows.

    >>> table = {"site": ["n", "n", "s"], "age": [40, 60, None]}
    >>> describe_columns(table, "site", ["age"])["age"]["n"]
    {'rows': 2, 'missing': 0, 'mean': 50.0, 'deviation': 10.0}
    """
    named = [k for k, value in enumerate(columns[client]) if value is not None]
    owners = group_rows([columns[client][k] for k in named], f"Column {client!r}")
    return {
        name: {
            who: describe_values([columns[name][named[r]] for r in rows])
            for who, rows in owners.items()
        }
        for name in features
    }


def tabulate_columns(title: str, found: Described) -> list[Table]:
    """Return two tables, clients as rows: values missing in percent; mean and deviation."""
    clients = list(next(iter(found.values())))
    gaps = [
        (who, *(f"{100 * d[who]['missing'] / d[who]['rows']:.0f}" for d in found.values()))
        for who in clients
    ]
    numbers = {n: d for n, d in found.items() if any("mean" in told for told in d.values())}
    scales = [(who, *(_write_scale(d[who]) for d in numbers.values())) for who in clients]
    tables = [Table(f"{title}: missing values in %", ("client", *found), gaps)]
    if numbers:
        header = f"{title}: mean and deviation before scaling"
        tables.append(Table(header, ("client", *numbers), scales))
    return tables


def tabulate_shares(
    title: str, names: Sequence[str], counts: Any, class_names: Sequence[str]
) -> tuple[Table, dict[str, dict[str, float]]]:
    """Return the share of each class in a client's training samples, as a table and as numbers."""
    totals = np.maximum(counts.sum(1, keepdims=True), 1)
    labels = list(class_names) or [f"class {k}" for k in range(counts.shape[1])]
    shares = {
        name: dict(zip(labels, row, strict=True))
        for name, row in zip(names, (counts / totals).tolist(), strict=True)
    }
    rows = [
        (name, *(f"{100 * share:.1f}" for share in row.values())) for name, row in shares.items()
    ]
    return Table(f"{title}: share of each class in %", ("client", *labels), rows), shares


def describe_values(values: Sequence[Any]) -> dict[str, float]:
    """Return ``rows``, ``missing`` and, of numbers, ``mean`` and ``deviation`` of cleaned cells."""
    present = [v for v in values if v is not None]
    told: dict[str, float] = {"rows": len(values), "missing": len(values) - len(present)}
    numbers = None if any(isinstance(v, bool) for v in present) else to_numbers(present)
    if present and numbers is not None and np.isfinite(numbers).all():
        told |= {"mean": float(numbers.mean()), "deviation": float(numbers.std())}
    return told


def _write_scale(told: Mapping[str, float]) -> str:
    return f"{told['mean']:.3g} ± {told['deviation']:.2g}" if "mean" in told else "-"
