"""What a client keeps between messages: vectors in local files, found by key.

Every message may be a new process, and Flower ships its own client state to that process with each
message, so vectors of the model's size stay in files here and only their keys travel. A file
carries its own checksum; one that is damaged or gone is "stale" to the server, which asks again.
The folder belongs to one run and one client; it is readable by its owner alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equifed.flower.wire import WireError

if TYPE_CHECKING:  # which loads torch
    from equifed.models.predictor import Predictor

FOLDER = re.compile("[0-9a-f]{32}")  # how the folder of a run is called
KEEP_ROUNDS = 3  # after which a vector that nobody named again is deleted
OWN_ROUNDS = 64  # whose own parts are held, so that a run can be resumed from an earlier one
DAMAGED = (OSError, ValueError, KeyError, TypeError)  # of reading a file that is gone or damaged


class Stale(Exception):
    """The request refers to something that this client does not hold."""


class Refused(Exception):
    """The site does not do this; says in our own words which of its rules is against it."""


def refuse_if(rules: Mapping[str, object]) -> None:
    """Raise :class:`Refused` with the first of these sentences that is true."""
    for why, against in rules.items():
        if against:
            raise Refused(why)


def find_root() -> Path:
    """Return the folder of all client memories: ``$EQUIFED_MEMORY``, or one in the user's cache."""
    given = os.environ.get("EQUIFED_MEMORY")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(given) if given else cache / "equifed" / "memory"


class Memory:
    """Vectors and small records of one client in one run; ``root`` is the folder of all."""

    def __init__(self, root: Path, run: str, client: str) -> None:
        self.folder = root / _name(run) / _name(client)

    def put(
        self, key: str, vector: NDArray[Any], model: str, round: int, about: str, sync: bool = False
    ) -> None:
        """Keep a vector under a key: its model and round, and what else was told for it."""
        data = np.ascontiguousarray(vector)
        body, told = data.tobytes(), {"model": model, "round": round, "about": about}
        head = {"key": key, "dtype": data.dtype.name, "size": data.size, **told}
        head["sha256"] = hashlib.sha256(body).hexdigest()
        write_private(self._place(key), json.dumps(head).encode() + b"\n" + body, sync)

    def get(self, key: str) -> NDArray[Any] | None:
        """Return the vector under a key, or None if it is not here or damaged."""
        try:
            line, _, body = self._place(key).read_bytes().partition(b"\n")
            head = json.loads(line)
            if head["key"] != key or head["sha256"] != hashlib.sha256(body).hexdigest():
                return None
            return np.frombuffer(body, dtype=head["dtype"]).reshape(head["size"]).copy()
        except DAMAGED:
            return None

    def trace(self, key: str) -> tuple[str, int, str]:
        """Return model and round that a vector comes from, and what else was told for it.

        They are "" and 0 for one that is not here.
        """
        try:
            with self._place(key).open("rb") as file:
                head = json.loads(file.readline())
            return str(head["model"]), int(head["round"]), str(head["about"])
        except DAMAGED:
            return "", 0, ""

    def keep_own(self, round: int, part: NDArray[Any]) -> None:
        """Keep the own part that this client has after a round; the last rounds' are held."""
        rounds = sorted({*self._own_rounds(), round})
        self.put(f"own {round}", part, "", round, "", sync=True)
        for old in rounds[:-OWN_ROUNDS]:
            self._place(f"own {old}").unlink(missing_ok=True)
        self.write_record("own rounds", {"rounds": rounds[-OWN_ROUNDS:]})

    def own_before(self, round: int) -> NDArray[Any] | None:
        """Return the own part after the last round before another one; None: there was none."""
        last = max((r for r in self._own_rounds() if r < round), default=None)
        part = None if last is None else self.get(f"own {last}")
        if last is not None and part is None:
            raise Stale(
                f"the own part of round {last} is missing or damaged; restore the memory folder, "
                "or start a new run"
            )
        return part

    def _own_rounds(self) -> list[int]:
        return [int(r) for r in self.read_record("own rounds").get("rounds", [])]

    def read_record(self, name: str) -> dict[str, Any]:
        """Return a small record, empty if there is none."""
        return read_json(self._place(name, "json"))

    def write_record(self, name: str, value: dict[str, Any], sync: bool = True) -> None:
        """Replace a small record; it is on the disk when this returns."""
        write_json(self._place(name, "json"), value, sync)

    def tidy(self, round: int, keys: Sequence[str]) -> None:
        """Delete vectors that no request of the last rounds named; ``keys`` are named in this one.

        A run that went back to a checkpoint finds what it needs, because deletion lags
        :data:`KEEP_ROUNDS` rounds behind.
        """
        before = self.read_record("seen")
        seen = before | {key: max(round, before.get(key, round)) for key in keys}
        left = {key: last for key, last in seen.items() if last >= round - KEEP_ROUNDS}
        for key in seen.keys() - left.keys():
            self._place(key).unlink(missing_ok=True)
        if left != before:
            self.write_record("seen", left, sync=False)

    def _place(self, name: str, kind: str = "vector") -> Path:
        return self.folder / f"{_name(name)}.{kind}"


class KeptMemory(NamedTuple):
    """What is left of one run on this machine: its folder, its size, and how long it rested."""

    folder: Path
    bytes: int
    days: float


def find_memories(root: Path) -> list[KeptMemory]:
    """Return the memories in a folder, the oldest first; what is none of ours is not looked at."""
    found = []
    for folder in root.iterdir():
        if folder.is_dir() and not folder.is_symlink() and FOLDER.fullmatch(folder.name):
            stats = [path.stat() for path in (folder, *folder.rglob("*"))]
            days = (time.time() - max(stat.st_mtime for stat in stats)) / 86400
            found.append(KeptMemory(folder, sum(stat.st_size for stat in stats), days))
    return sorted(found, key=lambda one: -one.days)


def read_json(path: Path) -> dict[str, Any]:
    """Return what a small file holds, empty if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Mapping[str, Any], sync: bool = True) -> None:
    """Replace a small file; it is on the disk when this returns."""
    write_private(path, json.dumps(value).encode(), sync)


def write_private(path: Path, content: bytes, sync: bool = False) -> None:
    """Write a file that its owner alone may read, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(handle, 0o600)  # also where a killed process has left one
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def _name(text: str) -> str:
    """Return a file name for any text: no path, no surprises, no collisions."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -- what a site keeps of a run that ended ---------------------------------------------------------

CARD, PAGE, SUMS = "card.md", "participant.html", "SHA256SUMS"
LARGEST_TEXT = 1 << 25  # characters that a site takes


def keep_delivery(folder: Path, run: str, predictor: Predictor, args: Mapping[str, Any]) -> str:
    """Write what was delivered into a folder of the run, and return the checksum of all of it.

    The folder is what ``equifed predict`` reads. ``sha256sum -c SHA256SUMS`` checks it.
    """
    from equifed.models.export import export

    out, files = folder / slug(run), args.get("files")
    if not isinstance(files, dict) or not set(files) <= {CARD, PAGE}:
        raise WireError("other files are delivered than a card and a page")
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in files.items():
        if not isinstance(text, str) or len(text) > LARGEST_TEXT:
            raise WireError(f"{name} is not text, or too long")
        write_private(out / name, text.encode())
    names = sorted([*(path.name for path in export(predictor, out, program=True)), *files])
    lines = [f"{hashlib.sha256((out / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    content = "".join(lines).encode()
    write_private(out / SUMS, content)
    return hashlib.sha256(content).hexdigest()


def slug(text: str) -> str:
    """Return a name for a folder: no path, no surprises; people can still read it.

    >>> slug("../site 1")
    '___site_1-bba1dace'
    >>> slug("north")
    'north'
    """
    plain = re.sub(r"[^A-Za-z0-9-]", "_", text)[:40]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def digest(vector: NDArray[Any]) -> str:
    """Return the checksum of a model vector."""
    kind = np.ascontiguousarray(vector)
    head = json.dumps([kind.dtype.name, list(kind.shape)]).encode()
    return hashlib.sha256(head + kind.tobytes()).hexdigest()
