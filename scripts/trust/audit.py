"""Ask pip-audit whether any pinned version has a known weakness.

    python -m scripts.trust.audit

Exit code 1 if one has, or if pip-audit fails for a reason of its own. Where the advisories cannot
be reached the words "not reached" say so, and the exit code is 0: nothing was found out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNREACHED = re.compile(
    r"Connection|Timeout|ProxyError|SSLError|NameResolution|"
    r"(40[1347]|429|5\d\d) (Client|Server) Error"
)


def judge(report: str, errors: str) -> tuple[int, list[str]]:
    """Return the exit code, and what to say, from pip-audit's report and error stream.

    >>> judge("", "requests.exceptions.ConnectionError: ...")[0]
    0
    >>> skipped = '{"dependencies": [{"name": "a", "skip_reason": "not found"}]}'
    >>> judge(skipped, "")[1]
    ['Advisories were not reached for 1 of 1 pinned packages: a.']
    >>> weak = '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}]}'
    >>> judge(weak, "")
    (1, ['a 1: CVE-1', '1 of 1 pinned packages have known weaknesses.'])
    """
    try:
        packages = json.loads(report)["dependencies"]
    except ValueError:
        if UNREACHED.search(errors):
            return 0, ["Advisories were not reached: nothing is known about the pinned packages."]
        return 1, [errors.strip(), "pip-audit failed; its words are above."]
    skipped = [p["name"] for p in packages if "skip_reason" in p]
    weak = [p for p in packages if p.get("vulns")]
    words = [f"{p['name']} {p['version']}: {', '.join(v['id'] for v in p['vulns'])}" for p in weak]
    if skipped:
        named = ", ".join(skipped[:10]) + (", ..." if len(skipped) > 10 else "")
        counts = f"{len(skipped)} of {len(packages)} pinned packages"
        words.append(f"Advisories were not reached for {counts}: {named}.")
    if weak or not skipped:
        found = len(weak) or "None"
        words.append(f"{found} of {len(packages)} pinned packages have known weaknesses.")
    return int(bool(weak)), words


def main() -> None:
    """Audit the pinned versions."""
    given = ["--requirement", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *given, "--format", "json", "--timeout", "10"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    status, words = judge(done.stdout, done.stderr)
    print("\n".join(words))
    sys.exit(status)


if __name__ == "__main__":
    main()
