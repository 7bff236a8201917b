"""Tables in files: Parquet, and CSV as people save it."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from pathlib import Path
from typing import Any

from equifed.data.split import DataError, refuse_twice

SEPARATORS = (",", ";", "\t", "|")
MOST_BYTES = 2 << 30  # largest table, decompressed; as cells it takes several times that
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_file(path: Path) -> Any:
    """Return a pyarrow Table of a Parquet file, or the columns of a CSV file."""
    try:
        with path.open("rb") as file:
            packed = file.read(4) == b"PAR1"
    except (OSError, ValueError):
        packed = False  # reading it as CSV says what is wrong
    if not packed and path.suffix != ".parquet":
        return read_csv(path)
    try:
        import pyarrow.parquet as parquet

        return parquet.read_table(path)
    except ImportError:
        raise DataError(
            f"Reading {path} needs pyarrow: pip install 'equifed[data]', or save it as CSV."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path} as Parquet: {str(error)[:200]}.") from None


def read_csv(path: Path) -> dict[str, list[str]]:
    """Read a CSV file whose first line names the columns."""
    separator, text = _find_separator(_read_text(path))
    file = io.StringIO(text, newline="")
    reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != "\t")
    lines = (line for line in reader if any(map(str.strip, line)))
    try:
        titles = [cell.strip() for cell in next(lines, [])]
        _check_titles(path, titles)
        columns: list[list[str]] = [[] for _ in titles]
        for line in lines:
            if len(line) != len(titles):
                raise DataError(
                    f"{path}: line {reader.line_num} has {len(line)} cells, expected "
                    f"{len(titles)} separated by {separator!r}; put cells that contain it into "
                    "quotes."
                )
            for column, cell in zip(columns, line, strict=True):
                column.append(cell)
    except csv.Error as error:
        raise DataError(f"Cannot read {path}: {error} in line {reader.line_num}.") from None
    return dict(zip(titles, columns, strict=True))


def _check_titles(path: Path, titles: list[str]) -> None:
    if not titles:
        raise DataError(f"{path} is empty; expected a header line and rows.")
    if "" in titles:
        raise DataError(
            f"{path}: column {titles.index('') + 1} of {len(titles)} has no name; name it in the "
            "header line, or remove it (pandas writes its index there unless index=False)."
        )
    refuse_twice(titles, f"{path}: column names must differ, got {{!r}} twice; rename one.")


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
        windows = any(byte in content for byte in range(0x80, 0xA0))  # signs there, not in Latin-1
        code, name = ("cp1252", "of Windows") if windows else ("latin-1", "Latin-1")
        raise DataError(
            f"{path} is not UTF-8 text (byte {content[error.start]:#04x} in line {line}); save it "
            f"as UTF-8, or pass pandas.read_csv(path, encoding={code!r}) if it is {name}."
        ) from None
    if "\0" in text:
        raise DataError(f"{path} holds binary data; expected a CSV file in UTF-8.")
    return text


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes or more, the limit is {MOST_BYTES:,}. Divide it into one "
            "file for each client, or save it as Parquet and pass the columns that are "
            "needed: pandas.read_parquet(path, columns=[...])."
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
