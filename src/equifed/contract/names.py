"""Names come from other people: what is shown or written of them is harmless."""

from __future__ import annotations

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""How a cell begins that a spreadsheet computes, and what is put before it instead."""


def show_text(text: str) -> str:
    r"""Return a text as a terminal may have it: what is not printable is written out.

    >>> show_text("north\x1b[31m\n")
    'north\\x1b[31m\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _write_out(c) for c in text)


def _write_out(character: str) -> str:
    return character.encode("unicode_escape").decode()


def to_cell(name: str) -> str:
    r"""Return a name as a cell of a CSV file, in one line and different for different names.

    >>> to_cell("=1+1"), to_cell("'=1+1"), to_cell("north"), to_cell("a\nb")
    ("'=1+1", "''=1+1", 'north', 'a\\nb')
    """
    line = show_text(name.replace("\\", "\\\\"))
    return "'" + line if line.startswith(FORMULA) else line
