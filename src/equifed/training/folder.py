"""The folder of a run: opened, refused, written, and cut back to a checkpoint.

Everything that reads one calls :func:`open_run_folder` first: it may come from somebody else. A
checksum shows damage, not forgery.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from equifed.contract.arrays import Weights, to_cell
from equifed.contract.clients import Group
from equifed.contract.evaluation import Hits
from equifed.training import checkpoint, files, tables
from equifed.training.files import Damaged, RunFolderError

GROWING = (*tables.TABLES, tables.EVENTS)
CHECKPOINTS = "checkpoint"
EXPORTED, PROGRAM = "predictor.json", "model.pt2"
"""Of a model that ``equifed export`` wrote: its description, and the program, which is code."""
CHOSEN_BY_DATA = ("name", "partition")
"""Settings of ``[data]`` that may name code; in the others a colon means nothing."""


class RunFolder:
    """Writes one run; of the processes of a group (``clients.group()``), the first one does.

    ``more``: something comes after training (own models), and whoever adds it finishes the folder.
    """

    def __init__(
        self, path: str | Path, names: Sequence[str], group: Group | None = None,
        more: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.names, self.writes = Path(path), tuple(names), not (group and group.rank)
        self._group, self._more, self._saved_at = group, more, time.monotonic()
        self._sums = {name: hashlib.sha256() for name in GROWING}

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def create(self, overwrite: bool = False, described: bool = False) -> None:
        """Make the folder with empty tables; refuse one that holds a run.

        ``described``: the folder says already what the new run is made of.
        """
        if self.writes:
            refuse_existing(self.path, overwrite)
            self.path.mkdir(parents=True, exist_ok=True)
            old = () if described else (tables.CONFIG, tables.RUN, tables.PREPARATION)
            for name in (*old, *tables.RECORDED, tables.SUMMARY, tables.CHECKSUMS):
                (self.path / name).unlink(missing_ok=True)
            for file in self.checkpoints.glob("*"):
                file.unlink()
            (self.path / tables.CLIENTS).write_text(json.dumps(list(self.names)), encoding="utf-8")
            self._sums = {name: hashlib.sha256() for name in GROWING}
            for name, columns in tables.TABLES.items():
                self._append(name, [columns])
            (self.path / tables.EVENTS).touch()
        self.wait()

    def describe(self, told: Mapping[str, Any], trained: Any) -> None:
        """Say what the run was made of; whoever made the folder may have said all but what ran."""
        if not self.writes:
            return
        if not (self.path / tables.RUN).exists():
            write_provenance(self.path, told, trained, self.path)
            return
        known = files.read_sealed(self.path / tables.RUN)
        files.write_file(self.path / tables.RUN, files.seal({**known, "ran": told["ran"]}))

    def round(self, record: tables.RoundRecord, info: Any = None) -> None:
        """Append a round; rounds, evaluations and events are told as to a ``Callback``."""
        self._append("rounds.csv", [record.to_row()])

    def evaluation(self, round: int, records: Sequence[tables.MetricRecord]) -> None:
        """Append an evaluation."""
        for record in records:
            self._append("metrics.csv", record.to_rows(self.names))

    def weights(self, round: int, weights: Weights) -> None:
        """Append the clients' weights."""
        pairs = zip(self.names, weights, strict=True)
        rows = [[str(round), to_cell(name), repr(float(weight))] for name, weight in pairs]
        self._append("weights.csv", rows)

    def event(self, event: dict[str, Any]) -> None:
        """Append an event; its time is added here."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write(tables.EVENTS, json.dumps({**event, "time": now}) + "\n")

    def hits(self, hits: Mapping[str, Hits]) -> None:
        """Replace what is known about single samples."""
        if self.writes and hits:
            files.write_file(self.path / tables.HITS, tables.pack_hits(hits))

    def beside(self, history: Any) -> None:
        """Write what samples say, and what clients have alone or without own parts."""
        if self.writes and history.details is not None:
            text = json.dumps(history.details.to_dict()) + "\n"
            files.write_file(self.path / tables.DETAILS, text.encode())
        records = {tables.ALONE: history.alone, tables.WITHOUT_OWN: history.without_own}
        for name, record in records.items():
            if self.writes and record is not None:
                (self.path / name).unlink(missing_ok=True)
                self._append(name, [tables.TABLES["metrics.csv"], *record.to_rows(self.names)])

    def finish(self, history: Any) -> None:
        """Write the model, the checksums and then the summary: the run is complete."""
        if self.writes and not self._more:
            from safetensors.torch import save

            for name, values in ((tables.MODEL, history.parameters), (tables.OWN, history.own)):
                if values is not None:
                    files.write_file(self.path / name, save(values))
            content = (json.dumps(history.summary(), indent=2) + "\n").encode()
            there = (name for name in tables.FILES if (self.path / name).exists())
            sums = {name: files.digest((self.path / name).read_bytes()) for name in there}
            sums[tables.SUMMARY] = files.digest(content)
            files.write_file(self.path / tables.CHECKSUMS, files.seal(sums))
            files.write_file(self.path / tables.SUMMARY, content)
        self.wait()

    def due(self, seconds: float) -> bool:
        """Tell whether the last checkpoint is at least that old, by the first process's clock."""
        due = time.monotonic() - self._saved_at >= seconds
        return due if self._group is None else self._group.from_first(str(due)) == "True"

    def save(self, round: int, state: Any, kept: Any, hits: Mapping[str, Hits]) -> None:
        """Flush the tables and write a checkpoint, which holds all that is not in them."""
        state, kept = checkpoint.collect(state), checkpoint.collect(kept)
        if not self.writes:
            return
        self.hits(hits)
        lengths = {}
        for name in GROWING:
            with (self.path / name).open("ab") as file:
                os.fsync(file.fileno())
                lengths[name] = file.tell()
        sums = {name: self._sums[name].hexdigest() for name in lengths}
        extra = {"lengths": lengths, "sums": sums}
        checkpoint.save(self.checkpoints, round, state, extra, (kept, tuple(hits.items())))
        self._saved_at = time.monotonic()

    def restore(self, template: Any) -> tuple[int, Any, Any, dict[str, Hits]]:
        """Cut the tables back to the newest checkpoint; return round, state, kept and hits."""
        files.refuse_links(self.path)
        found = tables.read_names(self.path / tables.CLIENTS)
        if found != self.names:
            raise RunFolderError(
                f"{self.path / tables.CLIENTS} is damaged or of another run: it names "
                f"{len(found)} clients, {', '.join(found[:3])}, ...; the data have "
                f"{len(self.names)}, {', '.join(self.names[:3])}, ..."
            )
        check = partial(_check_tables, self.path) if self.writes else None
        round, state, extra = checkpoint.load(self.checkpoints, template, check)
        for name, length in extra["lengths"].items() if self.writes else ():
            os.truncate(self.path / name, length)
            self._sums[name] = hashlib.sha256((self.path / name).read_bytes())
        self.wait()
        kept, hits = extra["kept"]
        return round, state, kept, dict(hits)

    def wait(self) -> None:
        """Wait until all processes of the group are here."""
        if self._group is not None:
            self._group.wait()

    def _append(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._write(name, text.getvalue())

    def _write(self, name: str, text: str) -> None:
        if self.writes:
            with (self.path / name).open("ab") as file:
                file.write(text.encode())
            if name in self._sums:
                self._sums[name].update(text.encode())


def write_provenance(
    folder: Path, told: Mapping[str, Any], trained: Any, source: Path | None
) -> None:
    """Write ``run.json``, the configuration if there is one, and the preparation."""
    import tomli_w

    prepared, there = getattr(trained, "preparation", None), source and source / tables.PREPARATION
    text = there.read_bytes() if there is not None and there.exists() else None
    if prepared is not None:
        text = json.dumps(prepared.to_json(), indent=1).encode() + b"\n"
    for name in (tables.CONFIG, tables.RUN, tables.PREPARATION):  # of a run that was replaced
        (folder / name).unlink(missing_ok=True)
    if text is not None:
        files.write_file(folder / tables.PREPARATION, text)
    if not told:
        return
    plain = {key: value for key, value in told.items() if key not in ("config", "sha256")}
    config = tomli_w.dumps(told["config"]).encode() if told.get("config") else None
    if config is not None:
        plain[tables.CONFIG] = files.digest(config)
    files.write_file(folder / tables.RUN, files.seal(plain))
    if config is not None:  # last: without it there is no run to resume
        files.write_file(folder / tables.CONFIG, config)


# -- who may read and replace a folder ----------------------------------------------------------


def is_complete(folder: Path) -> bool:
    """Tell whether a folder holds a run that has ended."""
    return (folder / tables.SUMMARY).exists()


def refuse_existing(folder: Path, overwrite: bool, *more: str) -> None:
    """Refuse a folder that cannot be one, or that holds a run: its tables, or one of ``more``."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; choose a folder.")
    if not any((folder / name).exists() for name in ("rounds.csv", *more)):
        return
    if not overwrite:
        raise RunFolderError(
            f"{folder} already holds a run; choose another folder, pass --overwrite to replace it, "
            f"or continue it with: equifed resume {folder}"
        )
    files.refuse_links(folder)  # what replaces the run would be written through them


def check_folder(folder: Path) -> None:
    """Refuse a folder with a file that is not what a run wrote.

    A complete run has checksums of everything, an interrupted one of its tables, version 0.1 none.
    """
    if is_complete(folder):
        summary = files.read_json(folder / tables.SUMMARY)
        if (folder / tables.CHECKSUMS).exists() or "format" in summary:
            for name, expected in files.read_sealed(folder / tables.CHECKSUMS).items():
                _check_one(folder, name, (*tables.FILES, tables.SUMMARY), expected)
        return
    for path in sorted((folder / CHECKPOINTS).glob("*.json"), reverse=True):
        try:
            manifest = files.read_sealed(path)
        except Damaged:
            continue  # damaged, or of version 0.1; an older one may do
        _check_tables(folder, manifest["extra"])
        return


def _check_tables(folder: Path, extra: Mapping[str, Any]) -> None:
    """Refuse tables that do not begin with what they held at a checkpoint."""
    for name, length in extra["lengths"].items():
        _check_one(folder, name, GROWING, extra["sums"][name], length)


def _check_one(
    folder: Path, name: str, known: Sequence[str], expected: str, length: int | None = None
) -> None:
    """Compare a file, or its beginning, with its checksum; unknown names may lead elsewhere."""
    if name not in known:
        raise Damaged(f"{folder} is damaged: it has a checksum of {name!r}, which no run writes.")
    path = folder / name
    try:
        with path.open("rb") as file:
            content = file.read(-1 if length is None else length)
    except OSError as error:
        raise Damaged(f"{path} is damaged: {error.strerror}.") from None
    if files.digest(content) != expected:
        raise Damaged(f"{path} is damaged: it does not match its checksum.")


def open_run_folder(
    folder: str | Path,
    *,
    trust: bool = False,
    data_only: bool = False,
    check: Callable[[Path], object] = check_folder,
) -> Path:
    """Return the path of a run folder, or of an exported one, once it may be read.

    It refuses, in this order: symbolic links (but the folder itself may be one), files that do not
    match their checksums (``check``), and code that the folder would load, unless the caller has
    ``trust`` or loads none (``data_only``). Nothing of the folder is imported before.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunFolderError(f"{path} is no folder; give the folder of a run.")
    files.refuse_links(path)
    check(path)
    code = [] if data_only or trust else find_code(path)
    if code:
        raise RunFolderError(
            f"{path} would run code: {', '.join(code)}. If you know what this code does and trust "
            "it, repeat with --trust (in Python trust=True)."
        )
    return path


def find_code(folder: Path) -> list[str]:
    """Return the code that a folder would load: what it names, and an exported program."""
    exported = (folder / EXPORTED).exists() and (folder / PROGRAM).exists()
    programs = [str(folder / PROGRAM)] if exported else []
    config = folder / tables.CONFIG
    return sorted(find_addresses(files.read_toml(config)) if config.exists() else ()) + programs


def find_addresses(config: Mapping[str, Any]) -> set[str]:
    """Return what a configuration names as ``package.module:Name``."""
    data = config.get("data")
    if isinstance(data, Mapping):
        data = {key: data[key] for key in CHOSEN_BY_DATA if key in data}
    return set(_addresses({**config, "data": data}))


def _addresses(value: Any) -> Iterator[str]:
    if isinstance(value, str) and ":" in value:
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _addresses(inner)
