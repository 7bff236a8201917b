"""Shakespeare's speaking roles as clients: the next character from the 80 before it.

Two editions of the plays are read into roles and their lines. The 1994 Gutenberg/World Library
edition is read by the rules that LEAF (Caldas et al. 2018) states for it; the Moby edition has its
own, simpler layout.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from equifed.data.federation import Federation
from equifed.data.split import DataError, Split
from equifed.datasets.files import checksums, find
from equifed.datasets.natural import choose_names

Tokens = NDArray[np.int64]
Roles = dict[str, list[str]]
"""Role, as ``PLAY_ROLE``, to its lines in order."""

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF; a character's token is its place here."""

LENGTH = 80  # characters a prediction sees, as in LEAF

_TOKEN_OF_BYTE = np.full(256, CHARACTERS.index(" "), dtype=np.int64)
_TOKEN_OF_BYTE[list(CHARACTERS.encode("latin-1"))] = np.arange(len(CHARACTERS))
_BYLINE = "by William Shakespeare"
_LAST_PLAY_LINE = 124195  # LEAF: poems and licences follow this line of the 1994 edition
_SPEECH = re.compile(r"^  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_MORE = re.compile(r"^    (.*)")
_SPEECH_FLUSH = re.compile(r"^([a-zA-Z][a-zA-Z ]*)\. (.*)")  # The Comedy of Errors is not indented
_MOBY_SPEECH = re.compile(r"^([A-Z][A-Za-z'.&\- ]*)\t(.*)")
_MOBY_HEADINGS = re.compile(r"^(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|DRAMATIS)\b")
_DIRECTIONS = re.compile(r"\[[^\[\]]*\]")  # they may run over several lines


def shakespeare(
    *,
    edition: Literal["moby", "gutenberg"] = "moby",
    roles: int | None = None,
    stride: int = LENGTH,
    test: float = 0.2,
    min_samples: int = 2,
    seed: int = 0,
) -> Federation:
    """Next character of some 1,100 speaking roles.

    Roles are the clients; a character is predicted from the 80 before it. A role's lines are joined
    by blanks. The last ``test`` fraction of its text is held out, so that no test window overlaps a
    training window. LEAF takes a window at every character (``stride=1``, some four million); by
    default windows do not overlap.

    Parameters
    ----------
    edition : {"moby", "gutenberg"}
        The Moby edition is in the public domain. The Gutenberg edition of 1994, which LEAF uses,
        may be used for personal, non-commercial purposes only.
    roles : int, optional
        Use only that many roles, drawn at random.
    stride : int
        Characters from one window to the next.
    test : float
        Fraction of each role's text to hold out.
    min_samples : int
        Leave out roles with fewer training windows, and those with two lines or less.
    seed : int
        Seed of the draw of roles.
    """
    if not (stride >= 1 and min_samples >= 1 and 0 <= test < 1):
        raise DataError(
            "shakespeare: stride and min_samples must be at least 1 and test in [0, 1), "
            f"got {stride}, {min_samples} and {test}."
        )
    read, path, licence = _find_edition(edition)
    texts = _join_lines(read(path), stride, test, min_samples)
    names = choose_names(texts, roles, seed)
    clients = [
        (_cut_windows(text[:cut], stride), _cut_windows(text[cut:], stride))
        for text, cut in (texts[name] for name in names)
    ]
    train, held = (Split.from_clients([pair[k] for pair in clients]) for k in (0, 1))
    return Federation(
        name="shakespeare",
        names=names,
        train=train,
        test=held if test else None,
        classes=len(CHARACTERS),
        class_names=tuple(CHARACTERS),
        source={"publisher": f"{edition} edition", "licence": licence, **checksums([path])},
    )


def tokenise(text: str) -> Tokens:
    """Return the tokens of a text; characters outside LEAF's 80 count as blanks.

    >>> [CHARACTERS[t] for t in tokenise("To|be")]
    ['T', 'o', ' ', 'b', 'e']
    """
    return _TOKEN_OF_BYTE[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]


def _join_lines(
    roles: Roles, stride: int, test: float, min_samples: int
) -> dict[str, tuple[Tokens, int]]:
    """Return each role's text and where its held-out part begins, for roles with enough text."""
    texts = {}
    for name, lines in roles.items():
        text = tokenise(re.sub("  +", " ", " ".join(lines)))
        cut = len(text) - int(test * len(text))
        if len(lines) > 2 and -((LENGTH - cut) // stride) >= min_samples:
            texts[name] = (text, cut)
    if not texts:
        raise DataError(f"shakespeare: no role has {min_samples} training windows.")
    return texts


def _cut_windows(text: Tokens, stride: int) -> tuple[Tokens, Tokens]:
    if len(text) <= LENGTH:
        return np.empty((0, LENGTH), dtype=np.int64), np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[::stride]
    return windows[:, :-1].copy(), windows[:, -1].copy()


def _find_edition(edition: str) -> tuple[Callable[[Path], Roles], Path, str]:
    known: dict[str, tuple[Callable[[Path], Roles], tuple[str, ...], str]] = {
        "moby": (read_moby, ("moby_shakespeare.tar.gz",), "public domain"),
        "gutenberg": (
            read_gutenberg,
            ("gutenberg_100_1994.txt.gz", "1994-01-100.zip", "100.txt"),
            "World Library: personal, non-commercial use only",
        ),
    }
    if edition not in known:
        raise DataError(f"shakespeare: edition must be moby or gutenberg, got {edition!r}.")
    read, names, licence = known[edition]
    path = next((path for name in names if (path := find("shakespeare", name))), None)
    if path is None:
        raise DataError(
            f"shakespeare: the {edition} edition is not on this machine and has no address whose "
            f"checksum is known; put {' or '.join(names)} into $EQUIFED_DATA/shakespeare."
        )
    return read, path, licence


def read_gutenberg(path: Path) -> Roles:
    """Read the 1994 Gutenberg edition: ``.txt``, ``.txt.gz``, or the publisher's ``.zip``."""
    lines = _unpack(path).splitlines()[1:]
    bylines = [i for i, line in enumerate(lines) if _BYLINE in line]
    if len(bylines) < 30:
        raise DataError(f"{path} is not the 1994 edition of Gutenberg's Shakespeare.")
    start = bylines[1] - 5  # the first byline belongs to the sonnets
    body = lines[start : _LAST_PLAY_LINE + 1]
    plays: list[tuple[str, Roles]] = []
    speaker: str | None = None
    flush = False
    for i, line in enumerate(body):
        if _BYLINE in line:
            title = _find_title(body, i)
            plays.append((title, {}))
            speaker, flush = None, title == "THE COMEDY OF ERRORS"
            continue
        if not plays:
            continue
        speaker = _assign_line(line, plays[-1][1], speaker, flush)
    return {
        _name_role(title, name): said
        for title, roles in plays
        if len(roles) > 1  # a "play" with one speaker is a poem
        for name, said in roles.items()
    }


def _assign_line(line: str, roles: Roles, speaker: str | None, flush: bool) -> str | None:
    """Give one line to whoever says it, and return who may go on speaking."""
    speech = (_SPEECH_FLUSH if flush else _SPEECH).match(line)
    if speech:
        name = speech[1].upper()
        if flush and name.startswith("ACT "):
            return None
        roles.setdefault(name, []).append(speech[2])
        return name
    more = line if flush else _MORE.match(line)
    if speaker is None or more is None:
        return speaker
    said = more if isinstance(more, str) else more[1]
    if flush and said.startswith("<"):
        return None
    roles[speaker].append(said)
    return speaker


def _find_title(lines: list[str], byline: int) -> str:
    """Return the title of a play: the nearest text two to seven lines above its byline."""
    for above in range(2, 8):
        if lines[byline - above].strip():
            return lines[byline - above].strip()
    raise DataError(f"No title found above line {byline} of the 1994 edition.")


def read_moby(path: Path) -> Roles:
    """Read the Moby edition: a tar of plays, speakers in capitals before a tab.

    Stage directions in brackets are dropped; lines before the first act are the list of persons.
    """
    roles: Roles = {}
    try:
        with tarfile.open(path) as archive:
            for member in sorted(archive, key=lambda m: m.name):
                place = PurePosixPath(member.name)
                if member.isfile() and place.parent.name in ("comedies", "histories", "tragedies"):
                    file = archive.extractfile(member)
                    assert file is not None
                    text = file.read().decode("latin-1")
                    roles |= {_name_role(place.name, k): v for k, v in _read_play(text).items()}
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"Cannot read {path}: {error}; fetch it again.") from None
    if not roles:
        raise DataError(f"{path} holds no plays of the Moby edition.")
    return roles


def _read_play(text: str) -> Roles:
    roles: Roles = {}
    speaker: str | None = None
    begun = False
    for line in _DIRECTIONS.sub("", text).splitlines():
        if _MOBY_HEADINGS.match(line):
            begun = begun or line.startswith(("ACT", "PROLOGUE", "INDUCTION"))
            speaker = None
        elif begun and (speech := _MOBY_SPEECH.match(line)):
            speaker = speech[1].strip().upper()
            _say(roles, speaker, speech[2])
        elif begun and speaker and line.startswith("\t"):
            _say(roles, speaker, line[1:])
    return roles


def _say(roles: Roles, speaker: str, line: str) -> None:
    said = line.replace("[", "").replace("]", "").strip()  # a bracket without its partner
    if said:
        roles.setdefault(speaker, []).append(said)


def _name_role(play: str, character: str) -> str:
    return re.sub(r"\W+", "_", f"{play}_{character}")


def _unpack(path: Path) -> str:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                raw = archive.read(next(n for n in archive.namelist() if n.endswith(".txt")))
        else:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, StopIteration, zipfile.BadZipFile) as error:
        raise DataError(f"Cannot read {path}: {error!r}; fetch it again.") from None
    return raw.decode("latin-1")
