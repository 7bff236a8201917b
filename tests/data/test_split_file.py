"""``split.csv``: which row of a table is in which split, and the same split again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equifed as ef
from equifed.data.columns import read_columns

TABLE: dict[str, list[Any]] = {
    "site": [f"s{k % 3}" for k in range(60)],
    "person": [f"p{k // 5}" for k in range(60)],
    "x": [float(k * 37 % 60) + 0.5 for k in range(60)],
    "y": [None if k in (4, 31) else int(k * 7 % 5 > 1) for k in range(60)],
}


def read(**given: Any) -> ef.Federation:
    return ef.Federation.from_table(TABLE, "site", "y", features=["x"], **given)


@pytest.mark.parametrize("how", [{}, {"keep_together": "person"}])
@pytest.mark.filterwarnings("ignore::equifed.data.DataWarning")
def test_a_split_is_written_row_by_row_and_repeated(how: dict[str, str], tmp_path: Path) -> None:
    drawn = read(test=0.25, validation=0.2, seed=3, **how)
    assert drawn.divided is not None
    path = tmp_path / "split.csv"
    path.write_text(drawn.divided)
    again = read(split=str(path))
    assert again.checksum() == drawn.checksum() and again.divided == drawn.divided
    assert read(test=0.25, validation=0.2, seed=4, **how).divided != drawn.divided
    # By hand: the rows that the file names, client by client.
    written = read_columns(path)["split"]
    assert written[4] is None and written[31] is None
    for label, split in drawn.splits().items():
        for i, name in enumerate(drawn.names):
            rows = [k for k in range(60) if written[k] == label and TABLE["site"][k] == name]
            scaled = drawn.preparation.columns[0]  # type: ignore[union-attr]
            given = (np.array([TABLE["x"][k] for k in rows]) - scaled.centre) / scaled.scale
            assert split.client(i)[0][:, 0] == pytest.approx(given, abs=1e-6)


def test_a_file_of_another_table_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_text("row,split\n1,train\n2,test\n")
    with pytest.raises(ValueError, match="divides a table of 2 rows, this one has 60"):
        read(split=str(path))
    with pytest.raises(ValueError, match="neither a column of the table nor a file"):
        read(split="nowhere.csv")


@pytest.mark.filterwarnings("ignore::equifed.data.DataWarning")
def test_runs_leave_the_file_and_private_ones_do_not(tmp_path: Path) -> None:
    rows = zip(
        *(["" if v is None else v for v in column] for column in TABLE.values()), strict=True
    )
    lines = [",".join(TABLE), *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    data = {"name": "table", "path": str(tmp_path / "t.csv"), "client": "site", "target": "y"}
    data |= {"features": ["x"], "holdout": {"test": 0.25}}  # type: ignore[dict-item]
    config: dict[str, Any] = {"rounds": 2, "data": data, "model": {"name": "logistic", "l2": 0.01}}
    config["algorithm"] = {"name": "fair-newton", "objective": {"name": "average"}}
    ef.run(config, tmp_path / "open")
    drawn = (tmp_path / "open" / "split.csv").read_text()
    again = {**config, "data": {**data, "split": str(tmp_path / "open" / "split.csv")}}
    again["data"].pop("holdout")
    ef.run(again, tmp_path / "again")
    assert (tmp_path / "again" / "split.csv").read_text() == drawn
    metrics = [(tmp_path / run / "metrics.csv").read_bytes() for run in ("open", "again")]
    assert metrics[0] == metrics[1]
    table = {"client": "site", "target": "y", "features": ["x"]}
    served = ef.fit(tmp_path / "t.csv", **table, out=tmp_path / "f")
    kept = (tmp_path / "f" / "split.csv").read_text()
    assert kept.count("test") == len(served.history.hits["test"].correct) > 0
    config["privacy"] = {"epsilon": 5.0, "rows": 4.0, "loss": 3.0, "preparation": "public"}
    ef.run(config, tmp_path / "secret")
    assert not (tmp_path / "secret" / "split.csv").exists()
