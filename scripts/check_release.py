"""Whether a release may be made: tag, version, changelog and citation must say the same.

python -m scripts.check_release v0.3.0     # exits with 1 and says what differs
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def find_problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return what speaks against a release under this tag."""
    text = {name: (root / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff")}
    version = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    problems = []
    if tag != f"v{version}":
        problems.append(f"the tag is {tag}, pyproject.toml has version {version}; tag v{version}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        problems.append(f"version {version} of pyproject.toml is no release; write e.g. 0.3.0")
    newest = re.search(r"^## (\S+) \((.*)\)$", text["CHANGELOG.md"], re.M)
    if newest is None or newest[1] != version:
        found = "nothing" if newest is None else newest[1]
        problems.append(f"CHANGELOG.md begins with {found}; begin it with {version}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2]):
        problems.append(f"CHANGELOG.md calls {version} '{newest[2]}'; write the day of release")
    cited = re.search(r"^version: (.*)$", text["CITATION.cff"], re.M)
    if cited is None or cited[1].strip("\"'") != version:
        problems.append(f"CITATION.cff has not version {version}; write it there")
    return problems


def main(arguments: Sequence[str]) -> int:
    """Say what speaks against a release."""
    if len(arguments) != 1:
        print("give the tag, e.g. v0.3.0", file=sys.stderr)
        return 2
    problems = find_problems(arguments[0])
    print("\n".join(problems) or f"{arguments[0]} may be released")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
