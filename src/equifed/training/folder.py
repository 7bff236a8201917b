"""The folder of a run: tables that grow, checkpoints, and at the end the summary and the model.

A checkpoint remembers how long the tables were, so a resumed run cuts off what was written after it
and goes on to the same bytes that an uninterrupted run writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from equifed.contract.group import Group
from equifed.training.given_out import Kept
from equifed.training.history import History
from equifed.training.states import collect
from equifed.training.tables import EVENTS, TABLES, RunFolderError, Tables

if TYPE_CHECKING:
    import torch

__all__ = ["RunFolder", "RunFolderError"]


class RunFolder(Tables):
    """Writes one run; of the processes of a group, the first one does.

    Parameters
    ----------
    path : Path
        The folder.
    names : sequence of str
        The clients.
    group : Group, optional
        The processes that share the run (``clients.group()``); None: this one is alone.
    """

    def __init__(self, path: str | Path, names: Sequence[str], group: Group | None = None) -> None:
        super().__init__(path, names, writes=group is None or group.rank == 0)
        self._group, self._saved_at = group, time.monotonic()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoint"

    @override
    def create(self, overwrite: bool = False) -> None:
        super().create(overwrite)
        if self.writes and self.checkpoints.exists():
            for file in self.checkpoints.iterdir():
                file.unlink()
        self._wait()

    @override
    def finish(
        self,
        summary: Mapping[str, Any],
        parameters: dict[str, torch.Tensor] | None,
        own: dict[str, torch.Tensor] | None = None,
    ) -> None:
        super().finish(summary, parameters, own)
        self._wait()

    def due(self, seconds: float) -> bool:
        """Tell whether the last checkpoint is at least that old, by the first process's clock."""
        due = time.monotonic() - self._saved_at >= seconds
        return due if self._group is None else self._group.from_first(str(due)) == "True"

    def save(self, round: int, state: Any, kept: Kept) -> None:
        """Flush the tables and write a checkpoint."""
        from equifed.training import checkpoints

        state = collect(state)
        if not self.writes:
            return
        lengths = {}
        for name in (*TABLES, EVENTS):
            with (self.path / name).open("ab") as file:
                os.fsync(file.fileno())
                lengths[name] = file.tell()
        checkpoints.save(self.checkpoints, round, state, {"lengths": lengths}, kept)
        self._saved_at = time.monotonic()

    def restore(self, template: Any) -> tuple[int, Any, Kept, History]:
        """Cut the tables back to the newest checkpoint; return all that it holds, and them."""
        from equifed.training import checkpoints

        round, state, extra = checkpoints.load(self.checkpoints, template)
        for name in (*TABLES, EVENTS) if self.writes else ():
            length = extra["lengths"][name]
            if (self.path / name).stat().st_size < length:
                raise RunFolderError(
                    f"{self.path / name} is shorter than its checkpoint says: damaged."
                )
            os.truncate(self.path / name, length)
        self._wait()
        history = History.load(self.path, model=False)
        self._wait()  # nothing is written before all have read
        return round, state, extra["kept"], history

    def _wait(self) -> None:
        if self._group is not None:
            self._group.wait()
