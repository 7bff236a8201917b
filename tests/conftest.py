"""Where the real data files are; one seed for modules; files that are not wanted stay closed."""

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")

BESIDE = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where long tests are not wanted, do not import files that are long as a whole."""
    if "not long" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if re.search(r"^pytestmark = pytest\.mark\.long$", text, re.MULTILINE) else None


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


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported
torch.manual_seed(0)  # modules that test files make when they are imported


@pytest.fixture(autouse=True)
def _same_modules() -> None:
    """Draw the modules that a test hands over, which start from their own weights, by one seed."""
    torch.manual_seed(0)
