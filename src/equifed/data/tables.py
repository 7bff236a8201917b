"""Small tables for the terminal, printable as plain text and by rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
        lines = [self.header, *self.rows, *([self.totals] if self.totals else [])]
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.header))]
        return "\n".join([self.title, *(_aligned(line, widths) for line in lines)])

    def __rich__(self) -> Any:
        """Return the table that a rich console draws."""
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, show_footer=bool(self.totals))
        footers = self.totals or ("",) * len(self.header)
        for k, (title, footer) in enumerate(zip(self.header, footers, strict=True)):
            table.add_column(title, footer, justify="left" if k == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if k else cell.ljust(width)
        for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
