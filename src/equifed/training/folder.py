"""The folder of a run: tables that grow, checkpoints, and at the end the summary and the model.

A checkpoint remembers how long the tables were, so a resumed run cuts off what was written after it
and goes on to the same bytes that an uninterrupted run writes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from equifed.contract.clients import Group
from equifed.contract.evaluation import Hits
from equifed.training.checkpoint import collect
from equifed.training.files import RunFolderError, refuse_links
from equifed.training.given_out import Kept
from equifed.training.history import History
from equifed.training.hits import pack_hits, unpack_hits
from equifed.training.provenance import RUN, write_provenance
from equifed.training.tables import CLIENTS, EVENTS, TABLES, Tables, check_tables, read_names

if TYPE_CHECKING:
    import torch


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
    more : bool
        Something comes after training (own models), and whoever adds it finishes the folder: if
        that is killed, the run is not complete, and resuming it does what is missing.
    """

    def __init__(
        self,
        path: str | Path,
        names: Sequence[str],
        group: Group | None = None,
        more: bool = False,
    ) -> None:
        super().__init__(path, names, writes=group is None or group.rank == 0)
        self._group, self._saved_at, self._more = group, time.monotonic(), more

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

    def describe(self, told: Mapping[str, Any], preparation: bytes | None) -> None:
        """Say what the run was made of, unless whoever made the folder has said it."""
        if self.writes and not (self.path / RUN).exists():
            write_provenance(self.path, told, preparation)

    @override
    def finish(
        self,
        summary: Mapping[str, Any],
        parameters: dict[str, torch.Tensor] | None,
        own: dict[str, torch.Tensor] | None = None,
    ) -> None:
        if not self._more:
            super().finish(summary, parameters, own)
        self._wait()

    def due(self, seconds: float) -> bool:
        """Tell whether the last checkpoint is at least that old, by the first process's clock."""
        due = time.monotonic() - self._saved_at >= seconds
        return due if self._group is None else self._group.from_first(str(due)) == "True"

    def save(self, round: int, state: Any, kept: Kept, hits: Mapping[str, Hits]) -> None:
        """Flush the tables and write a checkpoint, which holds all that is not in them."""
        from equifed.training import checkpoint

        state = collect(state)
        if not self.writes:
            return
        lengths = {}
        for name in (*TABLES, EVENTS):
            with (self.path / name).open("ab") as file:
                os.fsync(file.fileno())
                lengths[name] = file.tell()
        sums = {name: self._sums[name].hexdigest() for name in lengths}
        extra = {"lengths": lengths, "sums": sums}
        single = np.frombuffer(bytearray(pack_hits(hits)), dtype=np.uint8)
        checkpoint.save(self.checkpoints, round, state, extra, (kept, single))
        self._saved_at = time.monotonic()

    def restore(self, template: Any) -> tuple[int, Any, Kept, History]:
        """Cut the tables back to the newest checkpoint; return all that it holds, and them."""
        from equifed.training import checkpoint

        refuse_links(self.path)
        self._check_names()
        check = partial(check_tables, self.path) if self.writes else None
        round, state, extra = checkpoint.load(self.checkpoints, template, check)
        for name, length in extra["lengths"].items() if self.writes else ():
            os.truncate(self.path / name, length)
            self._sums[name] = hashlib.sha256((self.path / name).read_bytes())
        self._wait()
        history = History.read_tables(self.path)
        kept, single = extra["kept"]
        history.hits = unpack_hits(single.tobytes())
        self._wait()  # nothing is written before all have read
        return round, state, kept, history

    def _check_names(self) -> None:
        found = read_names(self.path / CLIENTS)
        if found != self.names:
            raise RunFolderError(
                f"{self.path / CLIENTS} is damaged or of another run: it names "
                f"{len(found)} clients, {', '.join(found[:3])}, ...; the data have "
                f"{len(self.names)}, {', '.join(self.names[:3])}, ..."
            )

    def _wait(self) -> None:
        if self._group is not None:
            self._group.wait()
