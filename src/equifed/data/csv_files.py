"""CSV files as people save them: other separators, compressed, with a byte-order mark."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

from equifed.data.split import DataError

SEPARATORS = (",", ";", "\t", "|")
MOST_BYTES = 2 << 30
"""Largest table that is read, decompressed; as cells in memory it takes several times that."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_csv(path: Path, *, header: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Read a CSV file; its first line names the columns unless ``header`` does.

    The separator is the one of comma, semicolon, tab and bar that makes most of the first line.
    Lines without any content are skipped. The file is UTF-8 (or says that it is UTF-16) and may be
    compressed by gzip. A file above ``MOST_BYTES`` is refused before it is loaded.
    """
    text = _read_text(path)
    separator, text = _find_separator(text) if header is None else (",", text)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=separator != "\t"
    )
    try:
        lines = [(reader.line_num, line) for line in reader if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise DataError(
            f"Cannot read the table {path}: {error} in line {reader.line_num}."
        ) from None
    if header is None:
        if not lines:
            raise DataError(f"{path} is empty; expected a header line and rows.")
        (_, first), *lines = lines
        header = _check_header(path, [title.strip() for title in first])
    for number, line in lines:
        if len(line) != len(header):
            raise DataError(
                f"{path}: line {number} has {len(line)} cells, expected {len(header)} separated by "
                f"{separator!r}; put cells that contain it into quotes."
            )
    return {name: [line[k] for _, line in lines] for k, name in enumerate(header)}


def _read_text(path: Path) -> str:
    """Return the text of a file, decompressed and decoded."""
    try:
        _check_size(path, path.stat().st_size)
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)  # a small file may stand for a huge one
            _check_size(path, len(content))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"Cannot read the table {path}: {error}.") from None
    if content.startswith(b"PK\x03\x04"):
        raise DataError(f"{path} is a zip archive or a workbook; save the table in it as CSV.")
    try:
        text = content.decode("utf-16" if content.startswith(UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        raise DataError(
            f"{path} is not UTF-8 text (byte {content[error.start]:#04x} in line {line}); save it "
            "as UTF-8, or hand over pandas.read_csv(path, encoding='latin-1') if it is Latin-1."
        ) from None
    if "\0" in text:
        raise DataError(f"{path} holds binary data; expected a CSV file in UTF-8.")
    return text


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes or more, the limit is {MOST_BYTES:,}: a CSV file is read "
            "into memory as text. Divide it into one file for each client, or save it as Parquet "
            "and hand over the columns that are needed: "
            "pandas.read_parquet(path, columns=[...])."
        )


def _find_separator(text: str) -> tuple[str, str]:
    """Return the separator, and the text without a first line that only says it."""
    first, _, rest = text.partition("\n")
    if first.lower().startswith("sep=") and len(first.strip()) == 5:
        return first.strip()[4], rest
    cells = {}
    for separator in SEPARATORS:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        try:
            cells[separator] = len(next((row for row in rows if any(row)), []))
        except csv.Error:
            cells[separator] = 0
    return max(SEPARATORS, key=lambda separator: cells[separator]), text


def _check_header(path: Path, titles: list[str]) -> list[str]:
    nameless = next((k for k, title in enumerate(titles, start=1) if not title), None)
    if nameless is not None:
        raise DataError(
            f"{path}: column {nameless} of {len(titles)} has no name; name it in the header line, "
            "or remove it (pandas writes its index there unless index=False)."
        )
    twice = next((title for k, title in enumerate(titles) if title in titles[:k]), None)
    if twice is not None:
        raise DataError(f"{path}: column names must differ, got {twice!r} twice; rename one.")
    return titles
