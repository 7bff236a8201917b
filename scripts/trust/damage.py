"""Damage run folders at random and see what becomes of them.

    python -m scripts.trust.damage --cases 10000

A run that was interrupted and one that is complete are copied, one file of the copy is damaged, and
the copy is resumed or read. What may come of it: an error that names a file of the folder, or
exactly the result of the undamaged run. Anything else (another result, any other exception) is
printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.training import loop
from equifed.training.checkpoint import CheckpointError
from equifed.training.files import RunFolderError
from equifed.training.history import History
from equifed.training.trackers import Callback

CONFIG = """
rounds = 6
threads = 1
[data]
name = "heart-disease"
[model]
name = "logistic"
l2 = 0.01
[algorithm]
name = "scaff-pd"
objective = "worst-case"
[evaluate]
every = 2
"""


class Outcome(Enum):
    """What became of a damaged folder."""

    REFUSED = "refused by name"
    SAME = "same result"
    OTHER = "another result"
    RAISED = "unexpected exception"


@dataclass(frozen=True)
class Folders:
    """A run that was interrupted after its fourth round, the same run to its end, and its file."""

    config: Path
    begun: Path
    whole: Path
    history: History


class _Dies(Callback):
    def round(self, record, info) -> None:  # type: ignore[no-untyped-def]
        if record.round == 5:
            raise KeyboardInterrupt


def make_folders(where: Path) -> Folders:
    """Run the two runs that are damaged later."""
    (where / "run.toml").write_text(CONFIG)
    config = RunConfig.from_dict(tomllib.loads(CONFIG))
    seconds, loop.CHECKPOINT_SECONDS = loop.CHECKPOINT_SECONDS, 0.0
    try:
        runs.run(config, where / "begun", callbacks=[_Dies()])
    except KeyboardInterrupt:
        pass
    finally:
        loop.CHECKPOINT_SECONDS = seconds
    history = runs.run(config, where / "whole")
    return Folders(where / "run.toml", where / "begun", where / "whole", history)


Draw = np.random.Generator


def _flip(content: bytes, draw: Draw) -> bytes:
    out = bytearray(content)
    for at in draw.integers(0, len(out), size=int(draw.integers(1, 4))):
        out[at] ^= int(draw.integers(1, 256))
    return bytes(out)


def _digit(content: bytes, draw: Draw) -> bytes:
    """Change one digit into another: the file stays readable."""
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if not digits:
        return _flip(content, draw)
    out, at = bytearray(content), int(draw.choice(digits))
    out[at] = ord("0") + (out[at] - ord("0") + int(draw.integers(1, 10))) % 10
    return bytes(out)


def _truncate(content: bytes, draw: Draw) -> bytes:
    return content[: int(draw.integers(0, max(1, len(content))))]


def _insert(content: bytes, draw: Draw) -> bytes:
    at = int(draw.integers(0, len(content) + 1))
    return content[:at] + draw.bytes(int(draw.integers(1, 20))) + content[at:]


def _repeat(content: bytes, draw: Draw) -> bytes:
    """Write a line twice, or swap two."""
    lines = content.split(b"\n")
    a, b = draw.integers(0, len(lines), size=2)
    lines[a] = lines[b]
    return b"\n".join(lines)


def _nest(content: bytes, draw: Draw) -> bytes:
    return b'{"a":' * int(draw.integers(1, 50_000)) + content


def _huge(content: bytes, draw: Draw) -> bytes:
    return _digit(content, draw).replace(b"1", b"1" + b"0" * int(draw.integers(10, 6_000)), 1)


DAMAGES: dict[str, Callable[[bytes, Draw], bytes]] = {
    "flip": _flip, "digit": _digit, "truncate": _truncate, "insert": _insert,
    "repeat": _repeat, "nest": _nest, "huge": _huge,
    "empty": lambda content, draw: b"", "delete": lambda content, draw: content,
    "swap": lambda content, draw: content,
}  # fmt: skip


def damage_one(folders: Folders, kind: str, seed: int, copy: Path) -> Outcome:
    """Copy a folder, damage a file of it, resume or read it, and say what came of it."""
    draw = np.random.default_rng(seed)
    complete = bool(draw.integers(2))
    shutil.copytree(folders.whole if complete else folders.begun, copy)
    files = sorted(p for p in copy.rglob("*") if p.is_file())
    victim = files[int(draw.integers(len(files)))]
    if kind == "delete":
        victim.unlink()
    elif kind == "swap":
        victim.write_bytes(files[int(draw.integers(len(files)))].read_bytes())
    else:
        victim.write_bytes(DAMAGES[kind](victim.read_bytes(), draw))
    try:
        found = History.load(copy) if complete and seed % 3 == 0 else runs.resume(copy)
    except (RunFolderError, CheckpointError) as error:
        named = any(p.name in str(error) for p in files) or str(copy) in str(error)
        return Outcome.REFUSED if named else Outcome.RAISED
    except Exception as error:  # this is what the script looks for
        print(f"{kind}, seed {seed}, {victim.relative_to(copy)}: {error!r}", file=sys.stderr)
        return Outcome.RAISED
    finally:
        shutil.rmtree(copy)
    if _same(found, folders.history):
        return Outcome.SAME
    print(f"{kind}, seed {seed}, {victim.relative_to(copy)}: another result", file=sys.stderr)
    return Outcome.OTHER


def _same(found: History, expected: History) -> bool:
    """Compare all that a run tells but for the clock."""
    rounds = [
        [(r.round, r.objective, r.exchanges, r.bytes_up, r.numbers) for r in h.rounds]
        for h in (found, expected)
    ]
    metrics = [
        [(r.round, r.split, r.metric, r.values.tobytes(), r.sizes.tobytes()) for r in h.metrics]
        for h in (found, expected)
    ]
    weights = [{r: w.tobytes() for r, w in h.weights.items()} for h in (found, expected)]
    events = [
        [(e["event"], e.get("reason")) for e in h.events if e["event"] != "resume"]
        for h in (found, expected)
    ]
    hits = [{s: h.hits[s].correct.tobytes() for s in h.hits} for h in (found, expected)]
    models = [
        {name: value.numpy().tobytes() for name, value in (h.parameters or {}).items()}
        for h in (found, expected)
    ]
    pairs = (rounds, metrics, weights, events, hits, models)
    return found.names == expected.names and all(a == b for a, b in pairs)


def main() -> int:
    """Damage folders as often as asked, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    kinds, counts = sorted(DAMAGES), Counter[tuple[str, Outcome]]()
    with tempfile.TemporaryDirectory() as where:
        folders = make_folders(Path(where))
        for case in range(options.cases):
            kind, seed = kinds[case % len(kinds)], options.first + case
            counts[kind, damage_one(folders, kind, seed, Path(where) / "copy")] += 1
    print("| damage | " + " | ".join(o.value for o in Outcome) + " |")
    print("|---|" + "---:|" * len(Outcome))
    for kind in kinds:
        print(f"| {kind} | " + " | ".join(f"{counts[kind, o]:,}" for o in Outcome) + " |")
    wrong = sum(n for (_, o), n in counts.items() if o in (Outcome.OTHER, Outcome.RAISED))
    print(f"{options.cases:,} damaged folders, {wrong} silent or unexpected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
