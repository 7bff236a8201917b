"""What clients have, as small tables for the terminal and the notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from equifed.data.columns import Columns, group_rows, to_amounts

Described = dict[str, dict[str, dict[str, float]]]
"""Column to client to ``rows``, ``missing`` and, of numbers, ``mean`` and ``deviation``."""


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of text and an optional last row of totals.

    >>> print(Table("sizes", ("client", "train"), [("a", "10"), ("b", "7")], ("all", "17")))
    sizes
    client  train
    a          10
    b           7
    all        17
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    totals: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self._lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = (
            "  ".join(
                cell.rjust(width) if k else cell.ljust(width)
                for k, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        return "\n".join([self.title, *shown])

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        head, *rows = self._lines()
        body = "".join(_format_row("td", row) for row in rows)
        return (
            f"<table><caption>{escape(self.title)}</caption>"
            f"<thead>{_format_row('th', head)}</thead><tbody>{body}</tbody></table>"
        )

    def _lines(self) -> list[tuple[str, ...]]:
        return [self.header, *self.rows, *([self.totals] if self.totals else [])]


def describe_columns(columns: Columns, client: str, features: Sequence[str]) -> Described:
    """Return what every client has in every column, from all its rows."""
    named = np.array([k for k, value in enumerate(columns[client]) if value is not None])
    known = columns.take(named)
    owners = group_rows(known[client], f"Column {client!r}")
    return {
        name: {w: describe_values([known[name][r] for r in rows]) for w, rows in owners.items()}
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
    scales = [
        (who, *(
            f"{d[who]['mean']:.3g} ± {d[who]['deviation']:.2g}" if "mean" in d[who] else "-"
            for d in numbers.values()
        )) for who in clients
    ]  # fmt: skip
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
    given = zip(names, (counts / totals).tolist(), strict=True)
    shares = {name: dict(zip(labels, row, strict=True)) for name, row in given}
    rows = [(name, *(f"{100 * s:.1f}" for s in row.values())) for name, row in shares.items()]
    return Table(f"{title}: share of each class in %", ("client", *labels), rows), shares


def describe_values(values: Sequence[Any]) -> dict[str, float]:
    """Return ``rows``, ``missing`` and, of numbers, ``mean`` and ``deviation`` of cleaned cells."""
    present = [v for v in values if v is not None]
    told: dict[str, float] = {"rows": len(values), "missing": len(values) - len(present)}
    numbers = to_amounts(present)
    if present and numbers is not None and np.isfinite(numbers).all():
        told |= {"mean": float(numbers.mean()), "deviation": float(numbers.std())}
    return told


def _format_row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"
