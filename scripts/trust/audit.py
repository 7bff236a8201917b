"""Ask pip-audit whether any pinned version has a known weakness.

    python -m scripts.trust.audit

Exit code 1 if one has, or if pip-audit fails for a reason of its own. Where the advisories cannot
be reached the words "not reached" say so, and the exit code is 0: nothing was found out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNREACHED = re.compile(
    r"ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|MaxRetryError|"
    r"NameResolutionError|Could not connect|Connection refused|"
    r"(40[1347]|429|5\d\d) (Client|Server) Error"
)


def judge(status: int, output: str) -> tuple[int, str]:
    """Return our exit code, and what to say, from pip-audit's.

    >>> judge(1, "requests.exceptions.ConnectionError: ...")
    (0, 'Advisories were not reached: nothing is known about weaknesses of the pinned versions.')
    >>> judge(1, "Found 1 known vulnerability in 1 package")[0]
    1
    """
    if status == 0:
        return 0, "No known weaknesses in the pinned versions."
    if "known vulnerabilit" not in output and UNREACHED.search(output):
        return 0, (
            "Advisories were not reached: nothing is known about weaknesses of the pinned versions."
        )
    return 1, "pip-audit found weaknesses, or failed; its words are above."


def main() -> None:
    """Audit the pinned versions."""
    command = ["--requirement", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *command, "--timeout", "10"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    status, words = judge(done.returncode, output)
    if status or done.returncode == 0:
        print(output.strip())
    print(words)
    sys.exit(status)


if __name__ == "__main__":
    main()
