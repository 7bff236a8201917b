"""The block about differential privacy: there for private runs, with their numbers."""

from __future__ import annotations

import re

import pytest
from tests.problems import classification

import equifed as ef
from equifed.report import as_methods, build, render
from equifed.report.text import describe_privacy, read_budget

pytestmark = pytest.mark.long


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_a_private_run_says_what_is_protected_and_what_not():
    data = classification(sizes=(12, 30), classes=2)
    plain = ef.train(ef.FedAvg(), ef.simulate(data, "logistic"), rounds=2, evaluate=["train"])
    privacy = ef.Privacy(epsilon=2.5, rows=2.0, loss=1.5, rounds=2, delta=1e-6)
    records = ef.train(ef.FedAvg(), ef.simulate(data, "logistic", privacy=privacy), rounds=2)
    server = ef.PrivateFedAvg(epsilon=7.0, rounds=2, clip=0.5)
    clients = ef.train(server, ef.simulate(data, "logistic"), rounds=2)
    assert read_budget(plain) is None
    assert describe_privacy(as_methods(plain)) is None
    assert "Differential privacy" not in text_of(render(build(as_methods(plain))))
    page = text_of(render(build(as_methods(records))))
    assert "Epsilon 2.5 at delta 1e-06 for every record: replacing one row" in page
    assert "noise is added at the client" in page and "Publish the model alone" in page
    assert '"entries"' not in page  # ledgers are not spread out over the table of events
    methods = as_methods({"open": plain, "rows": records, "whole": clients})
    several = describe_privacy(methods)
    assert several is not None
    starts = [line[:30] for line in several["budget"]]
    assert starts == ["rows: Epsilon 2.5 at delta 1e-", "whole: Epsilon 7 at delta 1e-0",
                      "Without privacy: open."]  # fmt: skip
    assert "added at the server, which is trusted" in several["budget"][1]
