"""Names that do harm elsewhere: shown and written without."""

from __future__ import annotations

import csv
import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from equifed.contract.arrays import show_text, to_cell
from equifed.data.federation import Federation
from equifed.report import write_report
from equifed.training.history import History
from equifed.training.show import print_line, tabulate_clients
from equifed.training.tables import MetricRecord, RoundRecord

HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07", "a\nb", "a\r\nb", "a\rb", "=cmd|' /C calc'!A0", "+1", "-1", "@x",
    "'=1", "../../etc", "[bold]x[/bold]", "<script>alert(1)</script>", "\u202egnp.exe", "x,y\"z",
    "\t=1", "\x00", "north",
)  # fmt: skip


def make_history() -> History:
    n = len(HOSTILE)
    values, sizes = np.linspace(0.1, 0.9, n), np.full(n, 10)
    return History(
        HOSTILE,
        [RoundRecord(1, 0.5, 1, 1, 1, 0.1)],
        [MetricRecord(1, "test", "accuracy", values, sizes)],
        {1: np.full(n, 1 / n)},
    )


def test_a_folder_gives_back_the_names_and_numbers_it_was_given(tmp_path):
    history = make_history()
    history.save(tmp_path / "run")
    again = History.load(tmp_path / "run")
    assert again.names == HOSTILE
    assert again.per_client("accuracy") == history.per_client("accuracy")
    np.testing.assert_array_equal(again.weights[1], history.weights[1])


@given(names=st.lists(st.text(min_size=1), min_size=1, unique=True))
def test_cells_are_no_formulas_and_differ_as_names_do(names):
    cells = [to_cell(name) for name in names]
    assert len(set(cells)) == len(names)
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in cells)


@given(text=st.text())
def test_shown_text_moves_no_cursor(text):
    assert show_text(text).isprintable()
    assert show_text(text) == text or not text.isprintable()


def test_a_terminal_sees_no_control_character():
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=200)
    console.print(tabulate_clients({"\x1b[2J": make_history()}))
    for name in HOSTILE:
        print_line(console, f"client {name} was left out")
    shown = out.getvalue()
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "[bold]x[/bold]" in shown and "\\x1b[31mred" in shown


def test_a_federations_table_is_harmless():
    X, y = np.arange(6.0).reshape(3, 2), [0, 1, 1]
    federation = Federation.from_clients(dict.fromkeys(HOSTILE, (X, y)))
    assert all(line.isprintable() for line in str(federation.table()).split("\n"))
    out = io.StringIO()
    Console(file=out, width=200).print(federation.table())
    assert "[bold]x[/bold]" in out.getvalue() and "\x1b" not in out.getvalue()


@pytest.mark.long
def test_a_report_escapes_names_and_its_files_stay_in_their_folder(tmp_path):
    before = set(tmp_path.rglob("*"))
    write_report(make_history(), tmp_path / "out" / "report.html", per_client=True)
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text
    for path in set(tmp_path.rglob("*")) - before:
        assert (tmp_path / "out") in (path, *path.parents)


def test_tables_are_ordinary_csv(tmp_path):
    folder = make_history().save(tmp_path / "run")
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {6}
    assert [row[1] for row in itertools.islice(rows, 1, None)] == [to_cell(n) for n in HOSTILE]
