"""The folder of a run: opened, refused, written, and cut back to a checkpoint.

Whoever reads one is given a :class:`StoredRun` by :func:`open_run_folder`, since it may come from
somebody else. A checksum shows damage, not forgery.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from equifed.contract.arrays import Weights, show_text, to_cell
from equifed.contract.clients import Group
from equifed.contract.evaluation import Hits
from equifed.training import checkpoint, files, tables
from equifed.training.files import Damaged, RunFolderError, StoredRun

GROWING = (*tables.TABLES, tables.EVENTS)
WHOLE = (tables.SUMMARY, tables.CHECKSUMS)  # a run without them is not complete
CHECKPOINTS = "checkpoint"
# Of a model that ``equifed export`` wrote: its description, and the program, which is code
EXPORTED, PROGRAM = "predictor.json", "model.pt2"
# Settings of ``[data]`` that may name code; in the others a colon means nothing
CHOSEN_BY_DATA = ("name", "partition")


class RunFolder:
    """Writes one run; of the processes of a group (``clients.group()``), the first one does.

    ``more``: something comes after training (own models), and whoever adds it finishes the folder.
    """

    def __init__(
        self, path: str | Path, names: Sequence[str], group: Group | None = None,
        more: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.names, self.writes = Path(path), tuple(names), not (group and group.rank)
        self._group, self.more, self._saved_at = group, more, time.monotonic()
        # Of the tables, as this process has written them
        self._lengths, self._sums = dict[str, int](), dict[str, Any]()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def open(self) -> StoredRun:
        """Return the folder opened for reading."""
        return StoredRun(self.path)

    def create(self, overwrite: bool = False, described: bool = False) -> None:
        """Make the folder with empty tables; refuse one that holds a run.

        Nothing of a run that was there is kept; what describes it is, if ``described``: whoever
        calls has replaced it, or does so next.
        """
        if self.writes:
            refuse_existing(self.path, overwrite)
            self.path.mkdir(parents=True, exist_ok=True)
            kept = tables.DESCRIBED if described else ()
            old = (self.path / name for name in (*WHOLE, *tables.FILES) if name not in kept)
            for path in (*old, *self.checkpoints.glob("*")):
                path.unlink(missing_ok=True)
            files.write_file(self.path / tables.CLIENTS, json.dumps(list(self.names)).encode())
            for name in GROWING:
                header = [tables.TABLES[name]] if name in tables.TABLES else []
                (self.path / name).write_bytes(tables.write_rows(header))
                self._track(name)
        self.wait()

    def describe(self, told: Mapping[str, Any], trained: Any) -> None:
        """Say what the run was made of; whoever made the folder may have said all but what ran."""
        if self.writes and (self.path / tables.RUN).exists():
            known = self.open().sealed(tables.RUN)
            files.write_file(self.path / tables.RUN, files.seal({**known, "ran": told["ran"]}))
        elif self.writes:
            write_provenance(self.path, told, trained, self.path)

    def round(self, record: tables.RoundRecord, info: Any = None) -> None:
        """Append a round; rounds, evaluations and events are told as to a ``Callback``."""
        self._write("rounds.csv", tables.write_rows([record.to_row()]))

    def evaluation(self, round: int, records: Sequence[tables.MetricRecord]) -> None:
        """Append an evaluation."""
        rows = [row for record in records for row in record.to_rows(self.names)]
        self._write("metrics.csv", tables.write_rows(rows))

    def weights(self, round: int, weights: Weights) -> None:
        """Append the clients' weights."""
        pairs = zip(self.names, weights, strict=True)
        rows = [[str(round), to_cell(name), repr(float(weight))] for name, weight in pairs]
        self._write("weights.csv", tables.write_rows(rows))

    def event(self, event: dict[str, Any]) -> None:
        """Append an event; its time is added here."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write(tables.EVENTS, (json.dumps({**event, "time": now}) + "\n").encode())

    def finish(self, history: Any) -> None:
        """Write the rest of a history, the checksums and then the summary: the run is complete."""
        if self.writes:
            run = self.open()
            for name in self._lengths:  # refuse tables that are not what was written into them
                if name not in run or files.digest(run.read(name)) != self._sums[name].hexdigest():
                    raise files.changed(run / name, "is not what this run wrote")
        if self.writes and not self.more:
            for key, name in tables.PARTS.items():
                if part := getattr(history, key):
                    content = tables.pack_part(name, part, self.names)
                    files.write_file(self.path / name, content)
            content = (json.dumps(history.summary(), indent=2) + "\n").encode()
            sums = {name: files.digest(run.read(name)) for name in tables.FILES if name in run}
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
        if hits:
            files.write_file(self.path / tables.HITS, tables.pack_hits(hits))
        for name, length in self._lengths.items():
            files.append_file(self.path, name, b"", length)
        sums = {name: self._sums[name].hexdigest() for name in GROWING}
        extra = {"lengths": self._lengths, "sums": sums}
        checkpoint.save(self.checkpoints, round, state, extra, (kept, tuple(hits.items())))
        self._saved_at = time.monotonic()

    def restore(self, template: Any) -> tuple[int, Any, Any, dict[str, Hits]]:
        """Cut the tables back to the newest checkpoint; return round, state, kept and hits."""
        run = self.open()
        found = tables.read_names(run)
        if found != self.names:
            raise RunFolderError(
                f"{self.path / tables.CLIENTS} is damaged or of another run: it names "
                f"{len(found)} clients, {_first(found)}; the data have {len(self.names)}, "
                f"{_first(self.names)}"
            )
        check = partial(_check_tables, run) if self.writes else None
        round, state, extra = checkpoint.load(self.checkpoints, template, check)
        for name, length in extra["lengths"].items() if self.writes else ():
            with files.open_inside(self.path, name, os.O_WRONLY) as file:
                file.truncate(length)
            self._track(name)
        self.wait()
        kept, hits = extra["kept"]
        return round, state, kept, dict(hits)

    def wait(self) -> None:
        """Wait until all processes of the group are here."""
        if self._group is not None:
            self._group.wait()

    def _write(self, name: str, content: bytes) -> None:
        if self.writes:
            if name not in self._lengths:  # of a run that something is added to
                self._track(name)
            before = self._lengths[name]
            self._lengths[name] = files.append_file(self.path, name, content, before)
            self._sums[name].update(content)

    def _track(self, name: str) -> None:
        """Go on with a table as it is now."""
        content = self.open().read(name)
        self._lengths[name], self._sums[name] = len(content), hashlib.sha256(content)


def _first(names: Sequence[str]) -> str:
    return show_text(", ".join(names[:3])[:200]) + ", ..."


def write_provenance(
    folder: Path, told: Mapping[str, Any], trained: Any, source: Path | None
) -> None:
    """Write ``run.json``, the configuration if there is one, preparation and split."""
    import tomli_w

    texts = {
        name: StoredRun(source).read(name)
        for name in (tables.PREPARATION, tables.SPLIT)
        if source is not None and (source / name).exists()
    }
    if (prepared := getattr(trained, "preparation", None)) is not None:
        texts[tables.PREPARATION] = json.dumps(prepared.to_json(), indent=1).encode() + b"\n"
    if (divided := getattr(trained, "divided", None)) is not None:
        texts[tables.SPLIT] = divided.encode()
    for name in tables.DESCRIBED:  # of a run that was replaced
        (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        files.write_file(folder / name, text)
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
    held = any((folder / name).exists() for name in ("rounds.csv", *more))
    cure = "choose another folder, pass --overwrite to replace it, or continue it with"
    files.refuse_folder(
        (folder.exists() and not folder.is_dir(), f"{folder} is a file; choose a folder."),
        (held and not overwrite, f"{folder} already holds a run; {cure}: equifed resume {folder}"),
    )
    if held:
        files.refuse_links(folder)  # what replaces the run would be written through them


def check_folder(run: StoredRun) -> None:
    """Refuse a folder with a file that is not what a run wrote.

    A complete run has checksums of everything, an interrupted one of its tables, version 0.1 none.
    """
    if is_complete(run.path):
        summary = run.json(tables.SUMMARY)
        if tables.CHECKSUMS in run or "format" in summary:
            for name, expected in run.sealed(tables.CHECKSUMS).items():
                _check_one(run, name, (*tables.FILES, tables.SUMMARY), expected)
                run.sums[name] = expected
        return
    for path in sorted((run / CHECKPOINTS).glob("*.json"), reverse=True):
        try:
            manifest = run.sealed(f"{CHECKPOINTS}/{path.name}")
        except Damaged:
            continue  # damaged, or of version 0.1; an older one may do
        _check_tables(run, manifest["extra"])
        return


def _check_tables(run: StoredRun, extra: Mapping[str, Any]) -> None:
    """Refuse tables that do not begin with what they held at a checkpoint."""
    for name, length in extra["lengths"].items():
        _check_one(run, name, GROWING, extra["sums"][name], length)


def _check_one(
    run: StoredRun, name: str, known: Sequence[str], expected: str, length: int = -1
) -> None:
    """Compare a file, or its beginning, with its checksum; unknown names may lead elsewhere."""
    if name not in known:
        raise Damaged(f"{run.path} is damaged: it has a checksum of {name!r}, which no run writes.")
    with files.reading(run / name):
        content = run.read(name, length)
    if files.digest(content) != expected:
        raise Damaged(f"{run / name} is damaged: it does not match its checksum.")


def open_run_folder(
    folder: str | Path,
    *,
    trust: bool = False,
    data_only: bool = False,
    check: Callable[[StoredRun], object] = check_folder,
) -> StoredRun:
    """Return a run folder, or an exported one, opened for reading once it may be read.

    It refuses, in this order: symbolic links (but the folder itself may be one), files that do not
    match their checksums (``check``), and code that the folder would load, unless the caller has
    ``trust`` or loads none (``data_only``). Nothing of the folder is imported before.
    """
    run = StoredRun(folder)
    check(run)
    told = run.json(tables.RUN) if tables.RUN in run else {}
    for key in ("data", "versions", "samples"):
        if not isinstance(told.get(key), dict | None):
            raise Damaged(f"{run / tables.RUN} is damaged: its {key} are not a table.")
    code = [] if data_only or trust else find_code(run)
    if code:
        raise RunFolderError(
            f"{run.path} would run code: {', '.join(code)}. If you know what this code does and "
            "trust it, repeat with --trust (in Python trust=True)."
        )
    return run


def find_code(run: StoredRun) -> list[str]:
    """Return the code that a folder would load: what it names, and an exported program."""
    programs = [str(run / PROGRAM)] if EXPORTED in run and PROGRAM in run else []
    return (
        sorted(find_addresses(run.toml(tables.CONFIG)) if tables.CONFIG in run else ()) + programs
    )


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
