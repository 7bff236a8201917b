"""What a run says that it ran: the algorithm with all that a default has put around it."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.training.test_training import WORK, clients

from equifed.algorithms.around import Averaged
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.objectives import Average, ChiSquare
from equifed.report import write_report
from equifed.runs.run import run
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train

FAIR = ScaffPD(ChiSquare(0.1, scale=1.0))


@pytest.mark.parametrize(
    ("given", "ran", "added"),
    [
        (FedAvg(WORK), FedAvg(WORK), False),
        (Safeguarded(FAIR, patience=7), Safeguarded(FAIR, patience=7), False),
        (FAIR, Safeguarded(FAIR), True),
        (Averaged(FAIR), Averaged(Safeguarded(FAIR)), True),
    ],
    ids=["nothing to add", "written by the user", "automatic steps", "inside a wrapper"],
)
def test_history_names_the_algorithm_with_its_wrappers(
    given: Any, ran: Any, added: bool, tmp_path: Path
) -> None:
    history = train(given, clients(), rounds=1)
    assert history.algorithm == repr(ran)
    notes = [event["reason"] for event in history.events if "by default" in event.get("reason", "")]
    assert len(notes) == added
    if added:
        assert "Safeguarded" in notes[0] and "halves the step sizes" in notes[0]
    history.save(tmp_path)
    assert History.load(tmp_path).algorithm == repr(ran)


def test_the_folder_of_a_configuration_names_it(tmp_path: Path) -> None:
    fair = {"name": "scaff-pd", "objective": "average"}
    table = {"rounds": 1, "data": "fashion-three", "model": "logistic", "algorithm": fair}
    history = run(table, tmp_path)
    assert history.algorithm == repr(Safeguarded(ScaffPD(Average())))
    assert History.load(tmp_path).algorithm == history.algorithm
    page = write_report(history, tmp_path / "report.html").read_text("utf-8")
    assert f"What ran</dt><dd>{history.algorithm}</dd>" in unescape(page)


def test_the_measured_scale_is_part_of_what_ran(tmp_path: Path) -> None:
    fair = {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 0.1}}
    table = {"rounds": 1, "data": "heart-disease", "model": "logistic", "algorithm": fair}
    history = run(table, tmp_path)
    (scale,) = [event["scale"] for event in history.events if event["event"] == "scale"]
    assert history.algorithm is not None and f"scale={scale!r}" in history.algorithm
    assert History.load(tmp_path).algorithm == history.algorithm


def test_a_folder_says_what_its_last_run_was_made_of(tmp_path: Path) -> None:
    for algorithm in (FedAvg(WORK), FAIR):
        folder = RunFolder(tmp_path, clients().names)
        folder.create(overwrite=True)
        history = train(algorithm, clients(), rounds=1, folder=folder)
        assert History.load(tmp_path).algorithm == history.algorithm


class Unnamed:
    """An algorithm whose repr is an address in memory."""

    init, round, model = FedAvg(WORK).init, FedAvg(WORK).round, FedAvg(WORK).model


def test_an_address_in_memory_is_left_out() -> None:
    told = train(Unnamed(), clients(), rounds=1).algorithm
    assert told is not None and "Unnamed" in told and "0x" not in told
