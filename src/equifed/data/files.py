"""Tables in files: Parquet, and CSV as people save it (other separators, compressed, with a mark).

CSV needs nothing but Python; large files are read by pandas where it is installed.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equifed.data.split import DataError, refuse, refuse_twice

SEPARATORS = (",", ";", "\t", "|")
MOST_BYTES = 2 << 30
"""Largest table that is read, decompressed; as cells in memory it takes several times that."""
LARGE = 4 << 20
"""Characters from which on reading takes longer than importing pandas."""
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


def read_csv(path: Path, *, header: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Read a CSV file; its first line names the columns unless ``header`` does.

    The separator is the one of comma, semicolon, tab and bar that makes most of the first line.
    Lines without any content are skipped. The file is UTF-8 (or says that it is UTF-16) and may be
    compressed by gzip. A file above ``MOST_BYTES`` is refused before it is loaded.
    """
    text = _read_text(path)
    separator, text = _find_separator(text) if header is None else (",", text)
    large = header is None and len(text) >= LARGE
    columns = _read_large(text, separator) if large else None
    columns = _read_plain(path, text, separator, header) if columns is None else columns
    if header is not None:
        return dict(zip(header, columns, strict=True))
    titles = [values.pop(0).strip() for values in columns]
    if "" in titles:
        raise DataError(
            f"{path}: column {titles.index('') + 1} of {len(titles)} has no name; name it in the "
            "header line, or remove it (pandas writes its index there unless index=False)."
        )
    refuse_twice(titles, f"{path}: column names must differ, got {{!r}} twice; rename one.")
    return dict(zip(titles, columns, strict=True))


def _read_plain(
    path: Path, text: str, separator: str, header: Sequence[str] | None
) -> list[list[str]]:
    """Return the columns, their titles first where the file has them, or say what is wrong."""
    file = io.StringIO(text, newline="")
    reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != "\t")
    try:
        lines = [(reader.line_num, line) for line in reader if any(map(str.strip, line))]
    except csv.Error as error:
        raise DataError(
            f"Cannot read the table {path}: {error} in line {reader.line_num}."
        ) from None
    if not lines and header is None:
        raise DataError(f"{path} is empty; expected a header line and rows.")
    width = len(lines[0][1]) if header is None else len(header)
    refuse(
        ((number, len(line)) for number, line in lines if len(line) != width),
        lambda odd: (
            f"{path}: line {odd[0]} has {odd[1]} cells, expected {width} separated by "
            f"{separator!r}; put cells that contain it into quotes."
        ),
    )
    return [[line[k] for _, line in lines] for k in range(width)]


def _read_large(text: str, separator: str) -> list[list[str]] | None:
    """Return the columns as pandas reads them; None where the plain reader may know better."""
    if text.count("\r") != text.count("\r\n"):
        return None
    try:
        import pandas

        frame = pandas.read_csv(
            io.StringIO(text, newline=""), sep=separator, header=None, dtype=object,
            keep_default_na=False, skipinitialspace=separator != "\t",
        )  # fmt: skip
    except (ImportError, ValueError):  # not installed; or a line is too long, or a quote open
        return None
    if (frame.iloc[:, -1].str.strip() == "").any():  # of an empty line, or one that is too short
        return None
    return [frame[k].to_list() for k in frame]


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
            f"as UTF-8, or hand over pandas.read_csv(path, encoding={code!r}) if it is {name}."
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
