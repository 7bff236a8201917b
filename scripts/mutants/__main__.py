"""Draw mutants of the library and tell which survive the tests that are nearest to them.

    python -m scripts.mutants --seed 7                        # 200 mutants
    python -m scripts.mutants --seed 7 --count 15 --jobs 2
    python -m scripts.mutants --seed 7 --only objectives,metrics

Lines are drawn evenly from all lines of the folders below that some operator changes
(``operators.py``), and for each line one of its mutants. The nearest tests of a mutant are those
that execute its line, or else call its function, the most specific first and no test function for
long, as far as the seconds given go. Who executes what is learnt from one run of the tests that are
not slow (``calls.py``), kept in ``build/mutants`` and made again with ``--learn``. Everything runs
in copies of the tree; results are appended to ``build/mutants/SEED.jsonl``, and the same command
resumes an interrupted one. Seconds are of processor time.

``equivalent.toml`` has the survivors that compute the same as the original, each with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

from scripts.mutants.operators import Mutant, read_mutants

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "mutants"
FOLDERS = (
    "objectives", "algorithms", "steps", "engines", "data", "runs", "metrics", "training", "flower",
)  # fmt: skip
PYTEST = (
    "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=no",
)  # fmt: skip
IN_A_ROW, OWN_IN_A_ROW = 3, 12
"""Cases of one test function before others have their turn; of those in the module's own file."""


@dataclass(frozen=True)
class Test:
    """One test that passes: the lines of functions it executes as bits, and how long it takes."""

    name: str
    seconds: float
    functions: Mapping[str, int] = field(hash=False)


Words = Callable[[str], frozenset[str]]


@cache
def read_words(file: str) -> frozenset[str]:
    """Return the words of a test file."""
    return frozenset(re.findall(r"\w+", (ROOT / file).read_text(encoding="utf-8")))


def draw_mutants(mutants: Sequence[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return a mutant of each of as many lines, drawn by a seed."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        lines[mutant.path, mutant.line].append(mutant)
    draws = random.Random(seed)
    chosen = draws.sample(sorted(lines), min(count, len(lines)))
    return [draws.choice(lines[line]) for line in chosen]


def copy_tree(root: Path, target: Path) -> None:
    """Copy what git knows or does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def surroundings(copy: Path) -> dict[str, str]:
    """Return the environment of tests in a copy: its own sources, one thread, the same data."""
    data = os.environ.get("EQUIFED_DATA", str(ROOT.parent / "shared" / "data"))
    path = os.pathsep.join((str(copy / "src"), str(copy)))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **more, "EQUIFED_DATA": data}


def learn_calls(copy: Path, output: Path, paths: Sequence[str], jobs: int) -> None:
    """Run the tests that are not slow, and write what each of them calls."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".new")
    partial.unlink(missing_ok=True)
    plugin = ("-n", str(jobs), "-p", "scripts.mutants.calls")
    command = [sys.executable, "-m", "pytest", *PYTEST, *plugin, *paths]
    given = {**surroundings(copy), "MUTANTS_CALLS": str(partial)}
    subprocess.run(command, cwd=copy, env=given, check=False)
    if not partial.is_file():
        raise SystemExit("No test passed, so nothing is known of what tests call.")
    partial.replace(output)


def read_tests(path: Path, copy: Path) -> list[Test]:
    """Return the tests that were learnt, as far as their files are still there."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tests = {}
    for row in rows:
        lines = {name: int(bits, 16) for name, bits in row["functions"].items()}
        tests[row["test"]] = Test(row["test"], row["seconds"], lines)
    return [test for name, test in tests.items() if (copy / name.split("::")[0]).is_file()]


def choose_tests(
    mutant: Mutant, tests: Sequence[Test], seconds: float, words: Words = frozenset
) -> list[Test]:
    """Return tests that execute the mutant's line, those that call least else first.

    Where none is known to: tests that call its function, the functions of its class, or anything of
    its module. Tests of files that are open already come for nothing more than their own time;
    another file costs half a second. Tests in ``test_MODULE.py`` count as four times as near, and
    so do tests in files that name the module and the constant that it is about (``words`` are
    those of a file), which need not call anything.
    """
    own = f"/test_{Path(mutant.path).stem}.py::"
    name = f"{mutant.path}::{mutant.function}"
    line = sum(1 << k for k in range(mutant.first, mutant.last + 1))
    near = [t for t in tests if t.functions.get(name, 0) & line]
    near = near or [t for t in tests if name in t.functions]
    for prefix in (f"{name}.", f"{mutant.path}::"):
        near = near or [t for t in tests if any(f.startswith(prefix) for f in t.functions)]
    named = _find_naming(mutant, tests, words)
    near += [t for t in tests if t.name.split("::")[0] in named and t not in near]
    its = {t for t in near if own in t.name or t.name.split("::")[0] in named}
    far = {t: (len(t.functions) + 20 * t.seconds) / (4 if t in its else 1) for t in near}
    near.sort(key=lambda t: (far[t], t.name))
    turns, ranks = Counter[str](), {}
    for test in near:
        function = test.name.split("[")[0]
        ranks[test.name] = turns[function] // (OWN_IN_A_ROW if test in its else IN_A_ROW)
        turns[function] += 1
    chosen: list[Test] = []
    files: set[str] = set()
    for test in sorted(near, key=lambda t: ranks[t.name]):
        file = test.name.split("::")[0]
        cost = test.seconds + 0.01 + 0.5 * (file not in files)
        if cost <= seconds or not chosen:
            chosen.append(test)
            files.add(file)
            seconds -= cost
    return chosen


def _find_naming(mutant: Mutant, tests: Sequence[Test], words: Words) -> set[str]:
    """Return the files that name the mutant's module and one of its constants."""
    if not mutant.constants:
        return set()
    files, module = {test.name.split("::")[0] for test in tests}, Path(mutant.path).stem
    return {f for f in files if module in words(f) and words(f) & {*mutant.constants}}


class Copy:
    """A copy of the tree, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tester = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("tester.py")], cwd=folder,
            env=surroundings(folder), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return exit status and output; None for tests that did not end in time."""
        written = self.folder / ".mutant-output"
        asked = {"arguments": list(arguments), "output": str(written), "limit": limit}
        assert self._tester.stdin is not None and self._tester.stdout is not None
        self._tester.stdin.write(json.dumps(asked) + "\n")
        self._tester.stdin.flush()
        code = json.loads(self._tester.stdout.readline())
        return code, written.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process that waits for tests."""
        self._tester.communicate()


def try_mutant(mutant: Mutant, copy: Copy, tests: Sequence[Test], limit: float) -> dict[str, Any]:
    """Return what becomes of a mutant in a copy, which is restored."""
    file = copy.folder / mutant.path
    source = file.read_text(encoding="utf-8")
    before, after = mutant.lines(source)
    told = {
        "file": mutant.path, "line": mutant.line, "operator": mutant.operator, "before": before,
        "after": after, "key": _key(mutant), "tests": len(tests),
    }  # fmt: skip
    if not tests:
        return {**told, "outcome": "survived", "why": "no test calls it"}
    file.write_text(mutant.apply(source), encoding="utf-8")
    names = copy.folder / ".mutant-tests"
    names.write_text("\n".join(test.name for test in tests), encoding="utf-8")
    try:
        code, output = copy.run([*PYTEST, "-x", f"@{names}"], limit)
    finally:
        file.write_text(source, encoding="utf-8")
    if code is None:
        return {**told, "outcome": "killed", "why": f"no end in {limit:.0f} s"}
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    why = lines[0] if lines else output.strip().splitlines()[-1:]
    return {**told, "outcome": "killed", "why": why} if code else {**told, "outcome": "survived"}


def _key(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.begin}:{mutant.operator}:{mutant.text}"


def read_equivalent(path: Path) -> dict[tuple[str, str, str], str]:
    """Return the reasons of mutants that compute the same, by file, line before and after."""
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    return {(one["file"], one["before"], one["after"]): one["reason"] for one in listed}


def report(rows: Sequence[dict[str, Any]], equivalent: dict[tuple[str, str, str], str]) -> str:
    """Return the survivors, and how many died."""
    lines, counts = [], Counter(row["outcome"] for row in rows)
    same = 0
    for row in sorted(rows, key=lambda row: (row["file"], row["line"])):
        if row["outcome"] == "survived":
            reason = equivalent.get((row["file"], row["before"], row["after"]))
            same += reason is not None
            word = f"equivalent: {reason}" if reason else row.get("why", f"{row['tests']} tests")
            lines += [f"{row['file']}:{row['line']} {row['operator']} ({word})"]
            lines += [f"    - {row['before']}", f"    + {row['after']}"]
    total = len(rows) - same
    share = counts["killed"] / total if total else 1.0
    summary = f"{counts['killed']} of {total} mutants died ({share:.1%}); {same} more are the same"
    return "\n".join([*lines, summary])


def run_all(chosen: Sequence[Mutant], tests: Sequence[Test], output: Path, given: Any) -> None:
    """Try mutants in as many copies as there are jobs, and append what becomes of them."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made, copies = [], Queue[Copy]()
        for job in range(given.jobs):
            copy_tree(ROOT, Path(folder) / str(job))
            made.append(Copy(Path(folder) / str(job)))
            copies.put(made[-1])

        def play(mutant: Mutant) -> None:
            copy = copies.get()
            try:
                near = choose_tests(mutant, tests, given.seconds, read_words)
                row = try_mutant(mutant, copy, near, given.limit)
            finally:
                copies.put(copy)
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['outcome']:9}{row['file']}:{row['line']} {row['after']}", flush=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(play, chosen))
        for copy in made:
            copy.close()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="draws the mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", default=",".join(FOLDERS), help="folders of src/equifed")
    parser.add_argument("--jobs", type=int, default=2, help="copies to try mutants in at once")
    parser.add_argument("--seconds", type=float, default=20, help="of tests per mutant")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which it is killed")
    parser.add_argument("--learn", action="store_true", help="learn again what each test calls")
    parser.add_argument("--paths", default="tests src", help="the tests to learn from")
    return parser.parse_args()


def main() -> None:
    """Draw, try and tell."""
    given = parse()
    calls = KEPT / "calls.jsonl"
    if given.learn or not calls.is_file():
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy_tree(ROOT, Path(folder))
            learn_calls(Path(folder), calls, given.paths.split(), given.jobs)
    tests = read_tests(calls, ROOT)
    chosen = draw_mutants(read_mutants(ROOT, tuple(given.only.split(","))), given.seed, given.count)
    output = KEPT / f"{given.seed}.jsonl"
    output.touch()
    done = {row["key"]: row for row in map(json.loads, output.read_text().splitlines())}
    run_all([m for m in chosen if _key(m) not in done], tests, output, given)
    done = {row["key"]: row for row in map(json.loads, output.read_text().splitlines())}
    rows = [done[_key(mutant)] for mutant in chosen]
    print(report(rows, read_equivalent(Path(__file__).with_name("equivalent.toml"))))


if __name__ == "__main__":
    main()
