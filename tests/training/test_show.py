"""What a notebook shows of a run."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.report.synthetic import history

from equifed.contract.evaluation import ClientDetail, Details
from equifed.training.history import History, MetricRecord


def rows(text: str) -> list[list[str]]:
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", text)]


def shown(
    values: list[float], sizes: list[int], metric: str, details: Details | None = None
) -> str:
    names = tuple(f"c{i}" for i in range(len(values)))
    record = MetricRecord(3, "test", metric, np.array(values), np.array(sizes))
    return History(names, metrics=[record], details=details)._repr_html_()


def test_names_are_escaped() -> None:
    text = history(("<b>", "c"))._repr_html_()
    assert "&lt;b&gt;" in text and "<b>" not in text


def test_a_run_that_was_not_evaluated_says_so() -> None:
    assert History(("a",))._repr_html_() == "<p>1 client, 0 rounds; not evaluated.</p>"


def test_the_worst_served_come_first_with_their_limits() -> None:
    known = ClientDetail(16, {"accuracy": (0.125, 0.5)}, majority=0.75)
    details = Details("test", (None, None, None, known))
    found = rows(shown([0.75, 0.5, np.nan, 0.25], [4, 8, 0, 16], "accuracy", details))
    assert [row[0] for row in found] == ["c3", "c1", "c0", "c2"]
    assert found[0][1:] == ["25.0 %", "16", "12.5 % to 50.0 %", "75.0 %"]
    assert found[3][1:] == ["–", "0", "– to –", "–"]


def test_a_large_loss_is_bad() -> None:
    found = rows(shown([0.5, 2.0], [4, 8], "loss"))
    assert found == [["c1", "2", "8"], ["c0", "0.5", "4"]]


@pytest.mark.parametrize(("clients", "said"), [(20, "worst served first"), (21, "20 of them")])
def test_at_most_twenty_rows(clients: int, said: str) -> None:
    text = shown([0.5] * clients, [4] * clients, "accuracy")
    assert len(rows(text)) == 20 and said in text
