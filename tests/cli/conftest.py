"""A small configuration, for every command."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Return a function that writes a small configuration with changes."""

    def write(**changes: Any) -> Path:
        table = {
            "rounds": 3,
            "data": {"name": "fashion-three", "train": 6, "test": 4},
            "model": {"name": "logistic"},
            "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}},
            **changes,
        }
        path = tmp_path / "small.toml"
        path.write_text(tomli_w.dumps(table))
        return path

    return write
