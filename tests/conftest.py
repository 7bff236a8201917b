"""Where the real data files are: the folder named by EQUIFED_DATA, or one beside the repository."""

import os
from pathlib import Path

import pytest
import torch

BESIDE = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture
def data_folder(monkeypatch, tmp_path):
    folder = Path(os.environ.get("EQUIFED_DATA", BESIDE))
    if not folder.is_dir():
        pytest.skip(f"no data files: set EQUIFED_DATA (looked at {folder})")
    monkeypatch.setenv("EQUIFED_DATA", str(folder))
    monkeypatch.setenv("EQUIFED_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """An empty data folder and an empty cache; nothing else is searched."""
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("EQUIFED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


torch.manual_seed(0)  # modules that test files make when they are imported


@pytest.fixture(autouse=True)
def _same_modules() -> None:
    """Draw the modules that a test hands over, which start from their own weights, by one seed."""
    torch.manual_seed(0)
