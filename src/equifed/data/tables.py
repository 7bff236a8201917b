"""Small tables for the terminal, printable as plain text and by rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable


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
        widths = self._widths()
        return "\n".join([self.title, *(_aligned(line, widths) for line in self._lines())])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        """Draw the table, in several blocks of columns when the console is too narrow for all."""
        for number, columns in enumerate(self._blocks(options.max_width)):
            yield self._drawn(columns, self.title if number == 0 else None)

    def _drawn(self, columns: list[int], title: str | None) -> RichTable:
        from rich.table import Table as RichTable

        table = RichTable(title=title, title_justify="left", show_footer=bool(self.totals))
        for k in columns:
            footer = self.totals[k] if self.totals else ""
            table.add_column(self.header[k], footer, justify="right" if k else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(row[k] for k in columns))
        return table

    def _blocks(self, room: int) -> Iterator[list[int]]:
        """Divide the columns so that each block, led by the first column, fits into ``room``."""
        widths = [width + 3 for width in self._widths()]  # two blanks and a line
        block = [0]
        for k in range(1, len(widths)):
            if len(block) > 1 and 1 + sum(widths[j] for j in (*block, k)) > room:
                yield block
                block = [0]
            block.append(k)
        yield block

    def _lines(self) -> list[tuple[str, ...]]:
        return [self.header, *self.rows, *([self.totals] if self.totals else [])]

    def _widths(self) -> list[int]:
        return [max(len(line[k]) for line in self._lines()) for k in range(len(self.header))]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if k else cell.ljust(width)
        for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
