"""Count the function calls that ``equifed run`` spends on its configuration.

Importing modules is left out on both sides: it is paid once per process, whatever is run::

    python scripts/config_calls.py examples/three-clients.toml
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import equifed as ef
from equifed.runs.config import RunConfig


class Counter:
    """Calls seen by the interpreter: all of them, and those below a configuration's reading."""

    def __init__(self) -> None:
        self.all = 0
        self.configuration = 0
        self._reading: FrameType | None = None
        self._importing: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Count one event of ``sys.setprofile``."""
        if event == "call":
            name, file = frame.f_code.co_name, frame.f_code.co_filename
            if self._importing is None and name == "_find_and_load" and "importlib" in file:
                self._importing = frame
            if self._reading is None and frame.f_code is RunConfig.read.__func__.__code__:  # type: ignore[attr-defined]
                self._reading = frame
        if event in {"call", "c_call"} and self._importing is None:
            self.all += 1
            self.configuration += self._reading is not None
        elif event == "return":
            self._importing = None if frame is self._importing else self._importing
            self._reading = None if frame is self._reading else self._reading


def main() -> None:
    """Run a configuration and print the share of its calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a TOML file for equifed run")
    config = parser.parse_args().config
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(counter)
        try:
            ef.run(config, Path(folder) / "run", progress=False)
        finally:
            sys.setprofile(None)
    share = counter.configuration / counter.all
    print(f"{counter.configuration} of {counter.all} calls ({share:.1%}) resolve the configuration")


if __name__ == "__main__":
    main()
