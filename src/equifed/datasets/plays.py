"""Who says what in Shakespeare: two editions of the plays, read into roles and their lines.

The 1994 Gutenberg/World Library edition is read by the rules that LEAF (Caldas et al. 2018) states
for it; the Moby edition has its own, simpler layout.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from equifed.data.checks import DataError

Roles = dict[str, list[str]]
"""Role, as ``PLAY_ROLE``, to its lines in order."""

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF; a character's token is its place here."""

_BYLINE = "by William Shakespeare"
_LAST_PLAY_LINE = 124195  # LEAF: poems and licences follow this line of the 1994 edition
_SPEECH = re.compile(r"^  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_MORE = re.compile(r"^    (.*)")
_SPEECH_FLUSH = re.compile(r"^([a-zA-Z][a-zA-Z ]*)\. (.*)")  # The Comedy of Errors is not indented
_MOBY_SPEECH = re.compile(r"^([A-Z][A-Za-z'.&\- ]*)\t(.*)")
_MOBY_HEADINGS = re.compile(r"^(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|DRAMATIS)\b")
_DIRECTIONS = re.compile(r"\[[^\[\]]*\]")  # they may run over several lines


def read_gutenberg(path: Path) -> Roles:
    """Read the 1994 Gutenberg edition: ``.txt``, ``.txt.gz``, or the publisher's ``.zip``."""
    lines = _text(path).splitlines()[1:]
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
            title = _title(body, i)
            plays.append((title, {}))
            speaker, flush = None, title == "THE COMEDY OF ERRORS"
            continue
        if not plays:
            continue
        speaker = _gutenberg_line(line, plays[-1][1], speaker, flush)
    return {
        _role(title, name): said
        for title, roles in plays
        if len(roles) > 1  # a "play" with one speaker is a poem
        for name, said in roles.items()
    }


def _gutenberg_line(line: str, roles: Roles, speaker: str | None, flush: bool) -> str | None:
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


def _title(lines: list[str], byline: int) -> str:
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
                    roles |= {_role(place.name, k): v for k, v in _moby_play(text).items()}
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"Cannot read {path}: {error}; fetch it again.") from None
    if not roles:
        raise DataError(f"{path} holds no plays of the Moby edition.")
    return roles


def _moby_play(text: str) -> Roles:
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


def _role(play: str, character: str) -> str:
    return re.sub(r"\W+", "_", f"{play}_{character}")


def _text(path: Path) -> str:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                raw = archive.read(next(n for n in archive.namelist() if n.endswith(".txt")))
        else:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, StopIteration, zipfile.BadZipFile) as error:
        raise DataError(f"Cannot read {path}: {error!r}; fetch it again.") from None
    return raw.decode("latin-1")
