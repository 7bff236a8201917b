"""Files of a run folder: read through one gate, replaced in one step, written by one process."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import socket
import stat
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import IO, Any

from safetensors import SafetensorError

LOCK = ".lock"
SEAL = "sha256"
# What reading a file of wrong content may raise
UNREADABLE: tuple[type[Exception], ...] = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
    EOFError, csv.Error, zipfile.BadZipFile, zlib.error, MemoryError, SafetensorError,
)  # fmt: skip
# The most bytes of a file by the end of its name, and of any other
LARGEST = {".toml": 2**24, ".json": 2**28, ".npz": 2**32, ".csv": 2**34, ".jsonl": 2**34}
MOST = 2**37
DEEPEST = 50  # how many folders may lie in one another in a folder that is read


class RunFolderError(RuntimeError):
    """The folder cannot be used, and what to do."""


def refuse_folder(*checks: tuple[Any, str]) -> None:
    """Raise a :class:`RunFolderError` with the message of the first check that found a fault."""
    for wrong, message in checks:
        if wrong:
            raise RunFolderError(message)


class Damaged(RunFolderError):
    """A file is not what was written."""


class Changed(RunFolderError):
    """Somebody else changed a file while a run was writing it."""


def write_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: temporary name, flush to the disk, rename, flush the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- the gate: every read of a folder that somebody else may have made ---------------------------


# What every folder must pass when it is opened: its signature, where one is asked for
CHECK: ContextVar[Callable[[Any], object] | None] = ContextVar("check", default=None)


class StoredRun:
    """A folder that may come from somebody else, opened for reading.

    Opening it refuses links, and whatever is not a plain file, at any depth. What is read later
    is compared with ``sums``, the checksums that were true when the folder was checked; of a signed
    folder ``only`` what was signed is read.
    """

    only: frozenset[str] | None = None

    def __init__(self, folder: str | Path) -> None:
        self.path, self.sums = Path(folder), dict[str, str]()
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; give the folder of a run.")
        refuse_links(self.path)
        check = CHECK.get()
        if check is not None:
            check(self)

    def __truediv__(self, name: str) -> Path:
        """Return where a file is, to tell it."""
        return self.path / name

    def __contains__(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def below(self, name: str) -> Path:
        """Return a folder below this one, as a file of it names it."""
        return self.path.joinpath(*find_parts(self.path, name))

    def read(self, name: str, length: int = -1) -> bytes:
        """Return the content of a file, or its beginning."""
        if self.only is not None and name not in self.only:
            raise RunFolderError(f"{self / name} is not among the files that were signed.")
        with open_inside(self.path, name) as file:
            content = file.read(length)
        if length < 0 and self.sums.get(name, digest(content)) != digest(content):
            raise Damaged(f"{self / name} is damaged: it does not match its checksum.")
        return content

    def json(self, name: str, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
        """Read a JSON file."""
        with reading(self / name):
            found = json.loads(self.read(name))
            if not isinstance(found, kind):
                raise ValueError(f"a {kind.__name__} is expected, not a {type(found).__name__}")
            return found

    def toml(self, name: str) -> dict[str, Any]:
        """Read a TOML file."""
        with reading(self / name):
            return tomllib.loads(self.read(name).decode())

    def sealed(self, name: str) -> dict[str, Any]:
        """Read a sealed document without its seal, or say that it is damaged."""
        document = self.json(name)
        told = document.pop(SEAL, None)
        try:
            if told is not None and told == _digest_of(document):
                return document  # type: ignore[no-any-return]
        except RecursionError:
            pass
        raise Damaged(f"{self / name} is damaged: it does not match its own checksum.")


@contextmanager
def open_inside(folder: Path, name: str, flags: int = os.O_RDONLY) -> Iterator[IO[bytes]]:
    """Open a file below a folder: no link on the way, a plain file, of a size that can be.

    Every component is opened from the one before, so that none can be replaced by a link between a
    look and the opening; Windows, which cannot do that, looks first.
    """
    path = folder / name
    handle = _descend(folder, find_parts(folder, name), flags)
    with open(handle, "rb" if flags == os.O_RDONLY else "ab") as file:
        told, most = os.fstat(handle), LARGEST.get(path.suffix, MOST)
        _refuse_special(path, told.st_mode)
        if told.st_size > most:
            raise RunFolderError(
                f"{path} has {told.st_size:,} bytes; such a file has at most {most:,}. It is not "
                "what a run wrote; ask for the folder again."
            )
        yield file


def find_parts(folder: Path, name: str) -> tuple[str, ...]:
    """Return the components of a path below a folder; refuse one that leads elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in name or Path(name).drive:
        raise RunFolderError(f"{name!r} points outside {folder}; a run folder holds its own files.")
    return parts


def _descend(folder: Path, parts: tuple[str, ...], flags: int) -> int:
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if os.open not in os.supports_dir_fd:  # pragma: no cover - Windows
        refuse_link(folder.joinpath(*parts))
        return os.open(folder.joinpath(*parts), flags | safe)
    handle, here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), folder
    for k, part in enumerate(parts):
        here /= part
        last = k == len(parts) - 1
        try:
            new = os.open(part, safe | (flags if last else os.O_DIRECTORY), dir_fd=handle)
        except OSError as error:
            refuse_link(here)
            raise OSError(error.errno, error.strerror, str(here)) from None
        finally:
            os.close(handle)
        handle = new
    return handle


def refuse_links(folder: Path) -> None:
    """Refuse a folder with a link, a pipe or a device at any depth: no run wrote it."""
    deepest = len(folder.parts) + DEEPEST
    for place, folders, names in os.walk(folder):  # what a run at work deletes is passed over
        if len(Path(place).parts) > deepest:
            raise RunFolderError(
                f"{place[:200]} is more than {DEEPEST} folders deep; no run wrote it. Delete it."
            )
        for name in sorted((*folders, *names)):
            refuse_link(Path(place, name))


def refuse_link(path: Path) -> None:
    """Refuse a path that is a symbolic link, or neither a file nor a folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise RunFolderError(
                f"{path} is a symbolic link; a run folder must hold its files itself. Put a copy "
                "of the file in its place if it belongs to the run, or delete the link."
            )
        if not stat.S_ISDIR(mode):
            _refuse_special(path, mode)


def _refuse_special(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise RunFolderError(f"{path} is not a plain file; no run wrote it. Delete it.")


def digest(content: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def as_plain(document: Any) -> Any:
    """Return a document as every reader of JSON has it: null for what is no finite number."""
    return json.loads(json.dumps(document, default=str), parse_constant=lambda _: None)


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON document with its own checksum in it."""
    plain = json.loads(json.dumps(document))
    return (json.dumps({**plain, SEAL: _digest_of(plain)}, indent=2) + "\n").encode()


def _digest_of(plain: Mapping[str, Any]) -> str:
    return digest(json.dumps(plain, sort_keys=True).encode())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a file's content into one error that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{path} is missing.") from None
    except UNREADABLE as error:
        reason = str(error) or type(error).__name__
        raise Damaged(f"{path} is damaged: it cannot be read ({reason}).") from None


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a sealed document of a folder that this process writes."""
    return StoredRun(path.parent).sealed(path.name)


def append_file(folder: Path, name: str, content: bytes, length: int) -> int:
    """Append to a file of so many bytes and return how many it has now; refuse a changed one."""
    try:
        with open_inside(folder, name, os.O_WRONLY | os.O_APPEND) as file:
            found = os.fstat(file.fileno()).st_size
            if found != length:
                raise changed(folder / name, f"has {found} bytes where this run wrote {length}")
            file.write(content)
            if not content:  # a checkpoint is about to count on what is there
                os.fsync(file.fileno())
    except FileNotFoundError:
        raise changed(folder / name, "was deleted") from None
    return length + len(content)


def changed(path: Path, what: str) -> Changed:
    """Return the error about a file that another hand changed while a run wrote it."""
    return Changed(
        f"{path} {what}: another process changed it during the run. The folder can no longer be "
        "relied on; start the run again in another one."
    )


# -- one writer per folder --------------------------------------------------------------------


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder that another process works in, and say which one it is.

    The lock is the operating system's, gone with its process; without one the file's text decides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    refuse_link(path)
    me = {"process": os.getpid(), "host": socket.gethostname()}
    with _hold(path) as file:
        file.truncate(0)
        file.write(json.dumps({**me, "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}).encode())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is held: who waits for it looks again


@contextmanager
def _hold(path: Path) -> Iterator[IO[bytes]]:
    while True:
        with path.open("a+b") as file:
            try:
                _take(file)
            except OSError as error:
                without = error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
                if not without and not isinstance(error, BlockingIOError):
                    raise
                if not without or is_worked_on(path.parent):
                    raise _refusal(path) from None
            with suppress(FileNotFoundError):  # its holder deletes the file before it lets go
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    yield file
                    return


def _take(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:  # pragma: no cover - no such locks on this system
        raise OSError(errno.ENOSYS, "no file locks") from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_holder(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError, RunFolderError):
        with open_inside(path.parent, path.name) as file:
            told = json.loads(file.read())
        if isinstance(told, dict) and {"process", "host", "since"} <= told.keys():
            return told
    return {}


def is_worked_on(folder: Path) -> bool:
    """Tell whether a running process has signed a folder's lock, without touching it."""
    told = _read_holder(folder / LOCK)
    if not told or told["host"] != socket.gethostname() or not isinstance(told["process"], int):
        return bool(told)
    try:
        os.kill(told["process"], 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _refusal(path: Path) -> RunFolderError:
    told = _read_holder(path)
    who = "Process {process} on {host} (since {since})" if told else "Another process"
    here = not told or told["host"] == socket.gethostname()
    cure = (
        "wait for it, or stop it" if here else f"wait for it; if it no longer runs, delete {path}"
    )
    return RunFolderError(f"{who.format(**told)} is working in {path.parent}; {cure}.")
