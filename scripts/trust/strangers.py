"""Give folders from a stranger to every command and function that reads one, and see what it does.

    python -m scripts.trust.strangers                      # every folder to every reader
    python -m scripts.trust.strangers --drawn 2000         # and folders changed at random
    python -m scripts.trust.strangers --only pipe --reader resume

A reader may read what it can, or refuse it by a message. It must not run code of the folder, open,
write or delete anything outside of it, start a process, speak to the network, take more than twenty
seconds of a processor, send control characters to a terminal, write text of the folder as HTML, say
"This should not happen", or end in an exception that is none of ours. What does is printed, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scripts.trust.gifts import GIFTS, SECRET, change_at_random, make_folders, renew
from typer.testing import CliRunner

import equifed as ef
from equifed.cli.main import app
from equifed.report import build, read_methods, write_report
from equifed.runs.evidence import pack_evidence, write_model_card
from equifed.runs.load import evaluate
from equifed.training.checkpoint import CheckpointError
from equifed.training.files import RunFolderError
from equifed.training.keys import make_key, sign_folder, signed_by
from equifed.training.play_round import TrainingError

FIT = ("link", "path", "pipe", "many", "odd", "size", "folder", "tried", "choice", "empty")
SECONDS, WAIT = 20, 300
"""The most processor time of one reader, and by the clock: who waits takes none."""
OURS = (RunFolderError, CheckpointError, TrainingError, ValueError, OSError)
"""What a function may raise about a folder."""


class Case:
    """A folder from a stranger in a place of its own, beside what is ours."""

    def __init__(self, place: Path, made: Path, kind: str) -> None:
        self.place, self.made = place, made
        self.gift, self.outside, self.mine = place / "gift", place / "outside", place / "mine"
        shutil.copytree(made / kind, self.gift)
        for path in (self.outside, self.mine):
            path.mkdir()
        (self.outside / "secret").write_text(SECRET)
        shutil.copytree(made / "python", self.outside / "elsewhere")

    def look(self) -> dict[str, bytes]:
        """Return what is outside of the folder."""
        files = (p for p in sorted(self.outside.rglob("*")) if p.is_file() and not p.is_symlink())
        return {str(p): p.read_bytes() for p in files if p.stat().st_size < 2**20}


def _cli(*arguments: str) -> Callable[[Case], Any]:
    """Return a reader that runs a command; GIFT, MADE and MINE stand for folders."""

    def read(case: Case) -> Any:
        known = {"GIFT": case.gift, "MADE": case.made, "MINE": case.mine}
        given = [_fill(word, known) for word in arguments]
        return CliRunner().invoke(app, given)

    return read


def _fill(word: str, known: dict[str, Path]) -> str:
    for name, path in known.items():
        word = word.replace(name, str(path))
    return word


TAKES: dict[str, tuple[str, ...]] = {
    "predict": ("whole", "exported", "python"), "evaluate": ("whole", "fitted"),
    "personalise": ("whole",), "resume": ("broken", "whole"), "ef.resume": ("broken",),
    "compare": ("comparison",), "run": ("broken",), "fit": ("fitted",),
    "report": ("whole", "comparison", "broken"), "write_report": ("comparison", "python"),
    "evidence": ("whole", "fitted"), "sign": ("exported", "whole"), "watch": ("broken",),
    "load_predictor": ("whole", "exported"), "History.load": ("fitted", "broken"),
}  # fmt: skip
"""Kinds of folders that a reader is given, by the longest beginning of its name; else "whole"."""


QUICK = (
    "predict", "evaluate", "export --out", "evidence", "personalise", "report", "watch", "resume",
    "compare", "load_predictor", "History.load", "sign", "privacy", "flower resume",
)  # fmt: skip
"""One reader of each kind; the others take the same ways through the code."""


def list_kinds(reader: str) -> tuple[str, ...]:
    """Return which kinds of folders a reader is given."""
    fits = [name for name in TAKES if reader.startswith(name)]
    return TAKES[max(fits, key=len)] if fits else ("whole",)


READERS: dict[str, Callable[[Case], Any]] = {
    "predict": _cli("predict", "GIFT", "MADE/rows.csv", "--keep", "--out", "MINE/p.csv"),
    "predict --personalised": _cli("predict", "GIFT", "MADE/rows.csv", "--personalised"),
    "predict --signed-by": _cli("predict", "GIFT", "MADE/rows.csv", "--signed-by", "MADE/me.pub"),
    "evaluate": _cli("evaluate", "GIFT", "MADE/rows.csv"),
    "evaluate --json": _cli("evaluate", "GIFT", "MADE/rows.csv", "--json"),
    "export": _cli("export", "GIFT", "--card"),
    "export --out": _cli("export", "GIFT", "--out", "MINE/out", "--card", "--client", "north"),
    "evidence": _cli("evidence", "GIFT", "--out", "MINE/pack.zip"),
    "personalise": _cli("personalise", "GIFT"),
    "personalise a newcomer": _cli(
        "personalise", "GIFT", "MADE/new.csv", "--client", "new", "--out", "MINE/new"
    ),
    "report": _cli("report", "GIFT", "--page", "MINE/page.html", "--per-client"),
    "report beside mine": _cli("report", "GIFT", "MADE/python", "--page", "MINE/page.html"),
    "report of a folder of folders": _cli("report", "GIFT/..", "--page", "MINE/page.html"),
    "watch": _cli("report", "GIFT", "--watch", "--every", "0.1", "--page", "MINE/page.html"),
    "resume": _cli("resume", "GIFT"),
    "resume --accept-config": _cli("resume", "GIFT", "--accept-config", "--json"),
    "compare": _cli("compare", "MADE/run.toml", "--out", "GIFT", "--seeds", "1"),
    "run": _cli("run", "MADE/run.toml", "--out", "GIFT"),
    "run --overwrite": _cli("run", "MADE/run.toml", "--out", "GIFT", "--overwrite", "--quiet"),
    "fit": _cli("fit", "MADE/train.csv", "--client", "site", "--target", "ill", "--out", "GIFT"),
    "fit --overwrite": _cli(
        "fit", "MADE/train.csv", "--client", "site", "--target", "ill", "--out", "GIFT",
        "--overwrite",
    ),
    "fit --split": _cli(
        "fit", "MADE/train.csv", "--client", "site", "--target", "ill", "--out", "MINE/fit",
        "--split", "GIFT/split.csv",
    ),
    "sign": _cli("sign", "GIFT", "--key", "MADE/me.key"),
    "verify": _cli("verify", "GIFT", "--signed-by", "MADE/me.pub"),
    "privacy": _cli("privacy", "GIFT"),
    "flower resume": _cli("flower", "resume", "MADE", "--out", "GIFT", "--nodes", "7"),
    "load_predictor": lambda c: ef.load_predictor(c.gift).predict(str(c.made / "rows.csv")),
    "load_predictor, signed": lambda c: _signed(c),
    "History.load": lambda c: _look_at(ef.History.load(c.gift)),
    "History.predictor": lambda c: ef.History.load(c.gift).predictor(),
    "write_report": lambda c: write_report(build(read_methods([c.gift])), c.mine / "page.html"),
    "pack_evidence": lambda c: pack_evidence(c.gift, c.mine / "pack.zip"),
    "write_model_card": lambda c: write_model_card(c.gift, c.mine),
    "ef.evaluate": lambda c: evaluate(c.gift, c.made / "rows.csv"),
    "ef.personalise": lambda c: ef.personalise(c.gift),
    "ef.resume": lambda c: ef.resume(c.gift),
}  # fmt: skip


def _signed(case: Case) -> Any:
    sign_folder(case.gift, case.made / "me.key")
    with signed_by(case.made / "me.pub"):
        return ef.load_predictor(case.gift)


def _look_at(history: Any) -> tuple[Any, ...]:
    shown = repr(history), history._repr_html_(), history.summary(), history.to_frame()
    return *shown, history.describe_certificate()


# -- what is seen of a reader --------------------------------------------------------------------

MAKES = {"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime"}
MOVES = {"os.rename", "os.link", "os.symlink"}
NEVER = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
    "socket.getaddrinfo", "socket.bind", "urllib.Request", "pickle.find_class", "ctypes.dlopen",
    "webbrowser.open", "ftplib.connect", "smtplib.connect",
}  # fmt: skip
LIBRARY = tuple(
    os.path.realpath(p)
    for p in {*map(sysconfig.get_path, ("stdlib", "platlib", "purelib")), sys.base_prefix,
              str(Path(__file__).parents[2]), "/proc", "/sys", "/dev/null", "/dev/urandom", "/usr",
              "/etc/localtime"}
)  # fmt: skip


class Watcher:
    """Hears what the interpreter does to files, processes and the network."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        """Take one audit event."""
        case = self.case
        if case is None:
            return
        if event == "open" and isinstance(given[0], str | bytes | os.PathLike):
            writes = isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
            self._look(case, "writes" if writes else "reads", given[0], writes)
        elif event in MAKES | MOVES:
            for path in given[: 2 if event in MOVES else 1]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._look(case, event, path, True)
        elif event in NEVER:
            self.seen.append(f"{event} {str(given)[:200]}")

    def _look(self, case: Case, what: str, given: Any, writes: bool) -> None:
        path = os.fsdecode(given)
        if not os.path.isabs(path):  # of a folder that is open already
            return
        at = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        allowed = (str(case.gift), str(case.mine), *(() if writes else (str(case.made), *LIBRARY)))
        places = ("tmp", "torchinductor_")  # a folder of ours, and one of torch's
        scratch = at.startswith(tuple(os.path.join(tempfile.gettempdir(), p) for p in places))
        scratch |= at == str(case.place) and not writes
        if not scratch and not any(at == root or at.startswith(root + "/") for root in allowed):
            self.seen.append(f"{what} {at}")

    @contextlib.contextmanager
    def watch(self, case: Case) -> Iterator[list[str]]:
        """Collect what goes beyond a case's own places."""
        self.case, self.seen = case, []
        try:
            yield self.seen
        finally:
            self.case = None


TIMERS = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, WAIT))


def _too_long(*_: Any) -> None:
    raise TimeoutError("too long")


def judge(watcher: Watcher, case: Case, read: Callable[[Case], Any]) -> tuple[str, list[str]]:
    """Let a reader read; return what came of it in a word, and what is wrong with that."""
    before, wrong, printed = case.look(), list[str](), io.StringIO()
    for kind, number, most in TIMERS:
        signal.signal(number, _too_long)
        signal.setitimer(kind, most)
    error: BaseException | None = None
    text, code = "", 0
    try:
        with (
            watcher.watch(case) as seen, warnings.catch_warnings(),
            contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            result = read(case)
        if hasattr(result, "exit_code"):
            text, code = result.output, result.exit_code
            error = result.exception if not isinstance(result.exception, SystemExit) else None
    except Exception as found:
        error, code = found, 2
        text = str(found)
    finally:
        for kind, _, _ in TIMERS:
            signal.setitimer(kind, 0)
    wrong += seen
    if error is not None and (hasattr(error, "__traceback__") and not isinstance(error, OURS)):
        wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
    if isinstance(error, TimeoutError) or "too long" in text:
        wrong.append(f"took more than {SECONDS} seconds of a processor, or {WAIT} seconds")
    for words in ("should not happen", "Traceback"):
        at = text.find(words)
        if at >= 0:
            wrong.append(f"says {text[max(0, at - 200) : at + 200]!r}")
    if len(text) > 50_000:
        wrong.append(f"says {len(text)} characters: {text[:100]}")
    if any((ord(c) < 32 and c not in "\n\t\r") or ord(c) in (127, 0x202E) for c in text):
        wrong.append(f"control characters: {text[:300]!r}")
    if SECRET in text:
        wrong.append("tells the secret")
    if (case.outside / "ran").exists():
        wrong.append("ran code")
    if case.look() != before:
        wrong.append("changed something outside")
    wrong += [told for p in (*case.mine.rglob("*"), *case.gift.glob("*")) for told in _look_into(p)]
    return ("refused" if code else "read"), wrong


def _look_into(path: Path) -> list[str]:
    """Return what is wrong with a file that may have been written."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 2**26:
        return []
    content = path.read_bytes()
    if path.suffix == ".md":  # which may have it as code, or after a backslash
        content = re.sub(rb"`[^`]*`|\\.", b"", content)
    page = path.suffix in (".html", ".md")
    told = {SECRET: True, "<script>document.title": page, "<img src=x": page}
    found = [text for text, where in told.items() if where and text.encode() in content]
    return [f"{path.name} holds {text!r}" for text in found]


def sweep(
    made: Path, gifts: Sequence[str], readers: Sequence[str], drawn: Sequence[int] = ()
) -> tuple[Counter[str], list[str]]:
    """Give every folder to every reader; return how often what came of it, and what was wrong."""
    watcher, counts, wrong = Watcher(), Counter[str](), list[str]()
    pairs = [(kind, reader) for reader in readers for kind in list_kinds(reader)]
    cases: list[tuple[str, str, str, int | None]]
    cases = [(gift, *pair, None) for gift in gifts for pair in pairs if _concerns(gift, pair[1])]
    for seed in drawn:
        chosen = np.random.default_rng(seed).choice(len(pairs), min(4, len(pairs)), replace=False)
        cases += [("drawn", *pairs[int(k)], seed) for k in chosen]
    for gift, kind, reader, seed in cases:
        with tempfile.TemporaryDirectory(prefix="gift-", dir=made.parent) as place:
            case = Case(Path(place), made, kind)
            told = gift
            if seed is not None:
                generator = np.random.default_rng([seed, 1])
                told = f"seed {seed}, {change_at_random(case.gift, case.outside, generator)}"
            elif GIFTS[gift](case.gift, case.outside) is False:
                counts["not there"] += 1
                continue
            renew(case.gift)
            outcome, found = judge(watcher, case, READERS[reader])
        counts["wrong" if found else outcome] += 1
        for what in found:
            line = f"{told} | {kind} | {reader}: {what}"
            wrong.append(line)
            print(line.replace("\n", " / "), flush=True)
    return counts, wrong


def _concerns(gift: str, reader: str) -> bool:
    """Tell whether a reader that solves again for a second could see what was changed."""
    return not reader.startswith("fit -") or gift.startswith(FIT)


def prepare(where: Path) -> Path:
    """Make the real folders once, and a key; return where they are."""
    made = where / "made"
    make_folders(made)
    make_key(made, "me")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, print what was wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(GIFTS), help="of the folders")
    parser.add_argument("--reader", action="append", choices=list(READERS))
    parser.add_argument("--quick", action="store_true", help="one reader of each kind")
    parser.add_argument("--drawn", type=int, default=0, help="folders changed at random")
    parser.add_argument("--first", type=int, default=0, help="first seed of these")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="strangers-") as where:
        made = prepare(Path(where).resolve())
        gifts = given.only or ([] if given.drawn else list(GIFTS))
        drawn = range(given.first, given.first + given.drawn)
        readers = given.reader or list(QUICK if given.quick else READERS)
        counts, wrong = sweep(made, gifts, readers, drawn)
    told = ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()))
    print(f"{len(gifts) or len(drawn)} folders, {len(readers)} readers: {told}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
