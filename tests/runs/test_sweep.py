"""Sweeps: every combination is run once, and the marked points are those that nobody beats."""

import csv
import io
from xml.etree import ElementTree

import pytest
from tests.runs.test_compare import BASE

from equifed.runs.comparison import sweep
from equifed.runs.many import read_grid, read_points
from equifed.runs.schema import ConfigError

pytestmark = pytest.mark.long

ALGORITHM = """
[algorithm]
name = "afl"
dual_step = 0.1
local = { lr = 0.05, steps = 2, batch_size = 5 }
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "afl.toml"
    path.write_text(BASE + ALGORITHM)
    return path


def test_a_sweep_over_two_settings(config, tmp_path):
    over = ["algorithm.dual_step=0.01,1", "algorithm.local.lr=0.01,0.1"]
    report, _ = sweep(config, over, tmp_path / "s")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "s" / "frontier.csv").read_text())))
    settings = [(row["algorithm.dual_step"], row["algorithm.local.lr"]) for row in rows]
    assert settings == [("0.01", "0.01"), ("0.01", "0.1"), ("1", "0.01"), ("1", "0.1")]
    points = [(float(row["average_by_client"]), float(row["worst"])) for row in rows]
    for (a, w), row in zip(points, rows, strict=True):
        beaten = any(a2 >= a and w2 >= w and (a2, w2) != (a, w) for a2, w2 in points)
        assert row["non_dominated"] == str(int(not beaten))
    last = [m.history.last().values for m in report.methods]
    assert points == [(pytest.approx(v.mean()), pytest.approx(v.min())) for v in last]
    drawing = ElementTree.parse(tmp_path / "s" / "frontier.svg").getroot()
    dots = list(drawing.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(dots) == 4
    page = (tmp_path / "s" / "frontier.html").read_text()
    assert "dual_step = 0.01, lr = 0.01" in page


def test_values_reach_the_configuration(config):
    found = read_points(config, read_grid(["algorithm.dual_step=0.5, 2"]), ["rounds=2"])
    assert [c.algorithm["dual_step"] for c in found.values()] == [0.5, 2]
    assert all(c.rounds == 2 for c in found.values())


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (["rounds"], "key.path=value"),
        (["rounds=1,,2"], "key.path=value"),
        (["rounds=1,1"], "twice"),
        (["rounds=1", "rounds=2"], "twice"),
        (["rounds=1", "seed=2", "threads=1"], "one or two"),
        (["seed=1,2"], "--seeds"),
        ([], "one or two"),
        (["algorithm.dual_stop=1"], "dual_stop"),
    ],
)
def test_a_wrong_sweep_is_refused(config, over, words):
    with pytest.raises(ConfigError, match=words):
        read_points(config, read_grid(over))
