"""What a notebook shows of a run."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.report.synthetic import history

from equifed.metrics import wilson_interval
from equifed.training.history import History, MetricRecord


def rows(text: str) -> list[list[str]]:
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", text)]


def shown(values: list[float], sizes: list[int], metric: str) -> str:
    names = tuple(f"c{i}" for i in range(len(values)))
    record = MetricRecord(3, "test", metric, np.array(values), np.array(sizes))
    return History(names, metrics=[record])._repr_html_()


def test_names_are_escaped() -> None:
    text = history(("<b>", "c"))._repr_html_()
    assert "&lt;b&gt;" in text and "<b>" not in text


def test_a_run_that_was_not_evaluated_says_so() -> None:
    assert History(("a",))._repr_html_() == "<p>1 client, 0 rounds; not evaluated.</p>"


def test_the_worst_served_come_first_with_wilsons_limits() -> None:
    found = rows(shown([0.75, 0.5, np.nan, 0.25], [4, 8, 0, 16], "accuracy"))
    assert [row[0] for row in found] == ["c3", "c1", "c0", "c2"]
    lower, upper = wilson_interval([4], [16])
    assert found[0][1:] == ["25.0 %", f"{100 * lower[0]:.1f} to {100 * upper[0]:.1f} %", "16"]
    assert found[3][1:] == ["-", "-", "0"]


def test_a_large_loss_is_bad_and_has_no_limits() -> None:
    found = rows(shown([0.5, 2.0], [4, 8], "loss"))
    assert [row[:3] for row in found] == [["c1", "2", "-"], ["c0", "0.5", "-"]]


def test_accuracies_that_are_no_counts_have_no_limits() -> None:
    assert rows(shown([0.3], [2], "accuracy"))[0][1:] == ["30.0 %", "-", "2"]


@pytest.mark.parametrize(("clients", "said"), [(20, "worst served first"), (21, "20 of them")])
def test_at_most_twenty_rows(clients: int, said: str) -> None:
    text = shown([0.5] * clients, [4] * clients, "accuracy")
    assert len(rows(text)) == 20 and said in text
