"""Choosing on validation samples: settings change together, the best try is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments.harness.choice import alternatives, choose
from experiments.harness.experiment import Context
from experiments.harness.running import configured, count_runs, run_variants
from rich.console import Console

from equifed.runs.many import check_folders, make_job
from equifed.training.files import RunFolderError
from equifed.training.history import History

pytestmark = pytest.mark.long


def settings(rates: list[float]) -> dict[str, Any]:
    """Return a definition of one method with these step sizes."""
    small = {"name": "fashion-three", "train": 60, "test": 30, "holdout": {"validation": 0.2}}
    return {
        "tuning_seeds": [1000, 1001],
        "places": list(range(len(rates))),
        "run": {"rounds": 3, "threads": 1, "data": small, "model": {"name": "logistic"}},
        "methods": {
            "A": {"algorithm": {"name": "fedavg", "local": {"steps": 2, "batch_size": 10}}}
        },
        "tried": {
            "A": {
                "algorithm.local.lr": rates,
                "algorithm.local.steps": [2 + i for i in range(len(rates))],
            }
        },
    }


def score(history: History) -> float:
    """Return minus the average loss on validation samples."""
    record = history.last("loss", "validation")
    assert record is not None
    return -float(record.values.mean())


def test_values_at_the_same_place_belong_together() -> None:
    table = {**settings([0.1, 0.2, 0.3]), "places": [0, 2]}
    tries = [one["algorithm"]["local"] for _, one in alternatives(table, "A").values()]
    assert [(one["lr"], one["steps"]) for one in tries] == [(0.1, 2), (0.3, 4)]
    assert all(one["batch_size"] == 10 for one in tries)


def test_the_best_try_is_chosen(tmp_path: Path) -> None:
    context = Context(settings([1e-9, 0.1]), tmp_path, Console(quiet=True))
    variants, table = choose(context, score, "score")
    scores = [row[2] for row in table.rows]
    best = int(scores[1] > scores[0])
    assert [row[3] for row in table.rows] == [["chosen", ""], ["", "chosen"]][best]
    assert variants["A"]["algorithm"]["local"]["lr"] == [1e-9, 0.1][best]
    # The opposite score chooses the other one, from the same runs.
    others, _ = choose(context, lambda history: -score(history), "loss")
    assert others != variants


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_try_that_fails_is_not_chosen(tmp_path: Path) -> None:
    context = Context(settings([1e38, 0.1]), tmp_path / "one", Console(quiet=True))
    variants, table = choose(context, score, "score")
    assert table.rows[0][2] is None
    assert variants["A"]["algorithm"]["local"]["lr"] == 0.1
    context = Context(settings([1e38, 1e37]), tmp_path / "two", Console(quiet=True))
    with pytest.raises(ValueError, match="every value that was tried failed"):
        choose(context, score, "score")


def test_with_one_try_nothing_is_run(tmp_path: Path) -> None:
    context = Context(settings([0.1]), tmp_path, Console(quiet=True))
    variants, table = choose(context, score, "score")
    assert variants["A"]["algorithm"]["local"]["lr"] == 0.1
    assert table.rows == [["A", "lr = 0.1, steps = 2", None, "given"]]
    assert not any(tmp_path.iterdir())


def test_names_that_differ_late_have_runs_of_their_own(tmp_path: Path) -> None:
    table = settings([0.1])
    long = "a method with a name of more than forty letters, lr = "
    variants = {f"{long}{lr}": {"algorithm": {"name": "fedavg", "local": {"lr": lr, "steps": 2}}}
                for lr in (0.01, 0.1)}  # fmt: skip
    found, failed = run_variants(Context(table, tmp_path, Console(quiet=True)), variants, [0])
    assert not failed
    first, second = (score(runs[0]) for runs in found.values())
    assert first != second
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    table = settings([0.1])
    config = configured(table, table["methods"]["A"], 0)
    jobs = [make_job(name, config, 0, tmp_path / "same") for name in ("A", "B")]
    with pytest.raises(RunFolderError, match=r"'A, seed 0' and 'B, seed 0' would share the folder"):
        check_folders(jobs)


def test_a_finished_run_counts_whatever_engine_it_had(tmp_path: Path) -> None:
    def run(engine: str, rounds: int = 3) -> str:
        table = settings([0.1])
        table["run"] |= {"engine": {"name": engine}, "rounds": rounds}
        variants = {"A": {"algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}}}}
        run_variants(Context(table, tmp_path, Console(quiet=True)), variants, [0])
        (folder,) = (tmp_path / "runs").glob("*/seed-0")
        return (folder / "config.toml").read_text() + (folder / "run.json").read_text()

    first = run("loop")
    assert run("stacked") == first and 'name = "loop"' in first
    with pytest.raises(RunFolderError, match="another configuration"):
        run("loop", rounds=4)


def test_a_widened_grid_runs_what_is_new_and_every_run_is_counted(tmp_path: Path) -> None:
    def grid(rates: list[float]) -> Context:
        table = settings([]) | {
            "tuning_seeds": [1000],
            "grid": {"A": {"algorithm.local.lr": rates}},
        }
        return Context(table, tmp_path, Console(quiet=True))

    def written() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("summary.json")}

    choose(grid([0.1, 0.2]), score)
    before = written()
    _, table = choose(grid([0.2, 0.4, 0.8]), score)  # moved: one try is abandoned, two are new
    assert len(table.rows) == 3 and before.items() <= written().items()
    assert count_runs(tmp_path, grid([]).settings).rows == [["A", 4, 0]]
