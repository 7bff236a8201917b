"""Tables as people save them are read, or it is explained why not."""

import builtins
import csv
import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equifed.data import DataError, Federation, files
from equifed.data.columns import read_columns
from equifed.data.files import read_csv

TABLE = {
    "site": ["Genève", "Bâle", "Genève", "Bâle"],
    "note": ["a;b", "c,d", "two\nlines", "\t|"],
    "dose": [0.5, 1.5, 2.5, 3.5],
    "ill": ["no", "yes", "yes", "no"],
}


def text_of(table=TABLE, separator=",") -> str:
    file = io.StringIO(newline="")
    rows = [list(table), *zip(*table.values(), strict=True)]
    csv.writer(file, delimiter=separator).writerows(rows)
    return file.getvalue()


def federation(table) -> Federation:
    options = {"categorical": ["note"], "min_count": 1, "name": "t"}
    return Federation.from_table(table, client="site", target="ill", **options)


SAVED = {
    "plain": text_of().encode(),
    "semicolon": text_of(separator=";").encode(),
    "tab": text_of(separator="\t").encode(),
    "bar": text_of(separator="|").encode(),
    "separator said": ("sep=;\r\n" + text_of(separator=";")).encode(),
    "byte-order mark": text_of().encode("utf-8-sig"),
    "UTF-16": text_of(separator="\t").encode("utf-16"),
    "gzip": gzip.compress(text_of(separator=";").encode()),
    "empty lines at the end": (text_of() + "\r\n\r\n,,,\r\n  \r\n").encode(),
    "blanks around names": text_of().replace("site,note", " site , note ").encode(),
}


@pytest.mark.parametrize("content", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("suffix", ["csv", "txt", "csv.gz"])
def test_the_same_table_is_read_however_it_was_saved(tmp_path, content, suffix):
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(content)
    assert federation(path).checksum() == federation(pd.DataFrame(TABLE)).checksum()


cells = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6).map(
    lambda text: "x" + text + "x"
)


@pytest.mark.long
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(cells, st.integers(-99, 99)), min_size=1, max_size=6),
    st.sampled_from(",;\t|"),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.booleans(),
)
def test_any_text_comes_back_whole(tmp_path, rows, separator, encoding, packed):
    table = {"c": [a for a, _ in rows], "x": [b for _, b in rows], "y": ["z"] * len(rows)}
    content = text_of(table, separator).encode(encoding)
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(content) if packed else content)
    fed = Federation.from_table(path, client="c", target="y", scale=None)
    assert fed.names == tuple(dict.fromkeys(table["c"]))
    for i, name in enumerate(fed.names):
        assert fed.train.client(i)[0][:, 0].tolist() == [b for a, b in rows if a == name]


EXPLAINED = {
    "windows": ("€,y\n1,2\n".encode("cp1252"), "byte 0x80 in line 1.*'cp1252'.*of Windows"),
    "latin-1": (text_of().encode("latin-1"), "not UTF-8 text .byte 0xe8 in line 2.*'latin-1'"),
    "empty": (b"", "is empty; expected a header"),
    "only blank lines": (b"\n\n \n", "is empty"),
    "only a mark": ("\ufeff".encode(), "is empty"),
    "header only": (b"site,note,dose,ill\n", "needs rows"),
    "workbook": (b"PK\x03\x04rest", "zip archive or a workbook; save .* as CSV"),
    "broken gzip": (gzip.compress(text_of().encode())[:40], "Cannot read"),
    "binary": (b"a,b\n\0\1", "binary data"),
    "twice": (b"site,dose,dose,ill\na,1,2,no\n", "must differ, got 'dose' twice"),
    "nameless": (b",site,ill\n0,a,no\n", "column 1 of 3 has no name.*index=False"),
    "short line": (b"site,dose,ill\na,1,no\na,1\n", "line 3 has 2 cells, expected 3"),
    "unquoted": (b"site,dose,ill\na,1,5,no\n", "line 2 has 4 cells.*quotes"),
}


@pytest.mark.parametrize(("content", "message"), EXPLAINED.values(), ids=EXPLAINED)
def test_what_cannot_be_read_is_explained(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        federation(path)


@pytest.mark.parametrize("column", ["dose", "ill"])
def test_decimal_commas_are_explained(tmp_path, column):
    table = TABLE | {column: ["0,5", "1,5", "2,5", "3,5"]}
    path = tmp_path / "t.csv"
    path.write_text(text_of(table, ";"))
    with pytest.raises(DataError, match=rf"'Genève': column '{column}' .*'0,5'.*decimal=','"):
        federation(path)
    frame = pd.read_csv(path, sep=";", decimal=",")
    assert federation(frame).train.inputs.dtype == np.float32


@pytest.mark.parametrize("table", ["no such file.csv", "a,b\n1,2", "a\0b", "x" * 5000, "."])
def test_texts_that_are_no_readable_files(table):
    with pytest.raises(DataError, match=r"Cannot read"):
        Federation.from_table(table, client="a", target="b")


def test_parquet_is_known_by_its_content_and_needs_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "t.data"
    pd.DataFrame(TABLE).to_parquet(path)
    assert federation(path).checksum() == federation(TABLE).checksum()
    (tmp_path / "no.parquet").write_bytes(b"site,ill\n")
    with pytest.raises(DataError, match="as Parquet"):
        federation(tmp_path / "no.parquet")
    known = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"needs pyarrow.*or save it as CSV"):
        federation(path)


def test_a_table_of_ten_gigabytes_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(10 << 30)  # sparse: it takes no room
    with pytest.raises(DataError, match=r"huge\.csv has 10,737,418,240 bytes .* limit .* Parquet"):
        read_csv(path)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    path = tmp_path / "small.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 249))
    assert len(read_csv(path)["a"]) == 249
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 250))
    with pytest.raises(DataError, match="1,001 bytes or more, the limit is 1,000"):
        read_csv(path)


def test_a_line_of_another_length_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("a,b\n" + "".join(f" {k} ,NA\n" for k in range(10)))
    assert read_columns(path) == {"a": [str(k) for k in range(10)], "b": [None] * 10}
    path.write_text(path.read_text() + "1,2,3\n")
    with pytest.raises(DataError, match="line 12 has 3 cells, expected 2"):
        read_csv(path)
