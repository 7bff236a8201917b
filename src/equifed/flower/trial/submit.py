"""Submitting a run with Flower's own command, following it to its end, and saying how it ended."""

from __future__ import annotations

import json
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from equifed.flower.trial.deploy import find_script

PREFIX, ENDED = "equifed: ", "ENDED: "
"""How the lines of a run that are for people begin; the one with the reason of an end."""

UNKNOWN = "unknown"
"""Status of a run that nobody can be asked about."""

ADVICE = {
    r"certificate has expired": "The SuperLink's certificate has expired; its owner must renew it.",
    r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSL": (
        "The SuperLink's certificate is not trusted: compare root-certificates of the connection "
        "with the authority that issued it (equifed flower doctor says which of the two it is)."
    ),
    r"ConnectError|Connection refused|UNAVAILABLE|unavailable|timed? ?out": (
        "The SuperLink cannot be reached: is it running, and is the address of the connection "
        "right?"
    ),
    r"[Ii]nvalid.*config|not present in the|does not exist in": (
        "A setting given with --run-config must stand in [tool.flwr.app.config] of the app."
    ),
    r"SuperLink connection .* not found|No such connection|does not exist in the": (
        "Connections stand in $FLWR_HOME/config.toml, as [superlink.NAME]."
    ),
}
"""What to do, by what Flower says."""


class SubmitError(RuntimeError):
    """The run did not start; says why and what to do."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: completed or not, and why not."""

    completed: bool
    reason: str


def run_app(
    folder: Path,
    connection: str,
    settings: Sequence[str],
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> Ending:
    """Submit an app, show what is for people as it comes, and return how the run ended."""
    number = submit(folder, connection, settings, env)
    command = [find_script("flwr"), "log", number, connection, "--stream"]
    others, reason = deque[str](maxlen=30), ""
    with subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as log:
        assert log.stdout is not None
        for line in log.stdout:
            text = line.rstrip()
            if not text.startswith(PREFIX):
                others.append(text)
                continue
            text = text.removeprefix(PREFIX)
            if text.startswith(ENDED):
                reason = text.removeprefix(ENDED)
            elif not text.startswith("{"):  # the summary, for programs
                say(text)
    status = read_status(number, connection, env)
    if status == "finished:completed":
        return Ending(True, "")
    return Ending(False, reason or _explain_silence(status, others))


def _explain_silence(status: str, lines: Iterable[str]) -> str:
    """Say what is known of a run that ended without a reason of its own."""
    tail = "\n".join(_plain(line) for line in lines if line.strip())
    if status == UNKNOWN:
        return (
            "the SuperLink cannot be reached any more. Start it again with the same --database; "
            "then go on with: equifed flower resume"
        )
    if status == "finished:stopped":
        return "it was stopped by somebody (flwr stop)."
    if status == "finished:failed" and "Traceback" not in tail:
        return (
            "the server's process of the run ended without a word: it was killed, or ran out of "
            "memory. Go on with: equifed flower resume"
        )
    return f"Flower says {status!r}. The end of its log:\n{tail}"


def submit(folder: Path, connection: str, settings: Sequence[str], env: Mapping[str, str]) -> str:
    """Start a run and return Flower's number of it."""
    options = [word for setting in settings for word in ("--run-config", setting)]
    done = _flwr(["run", str(folder.absolute()), connection, "--format", "json", *options], env)
    try:
        told = json.loads(done[done.index("{") : done.rindex("}") + 1])
        number = told["run-id"]
    except (ValueError, KeyError):
        number = None
    if not number:
        raise SubmitError(f"The run did not start: {explain(done)}")
    return str(number)


def read_status(number: str, connection: str, env: Mapping[str, str]) -> str:
    """Return what Flower says of a run, for example ``finished:completed``."""
    done = _flwr(["list", connection, "--run-id", number, "--format", "json"], env)
    found = re.search(r'"status":\s*"([^"]+)"', done)
    return found.group(1) if found else UNKNOWN


def explain(text: str) -> str:
    """Return what Flower said, shortened, with advice that fits it.

    >>> explain("x" * 9 + " Connection refused").endswith("is the address of the connection right?")
    True
    """
    plain = _plain(text).strip()
    told = " ".join(plain.split())[-600:]
    fitting = [advice for pattern, advice in ADVICE.items() if re.search(pattern, plain)]
    return " ".join([told or "Flower said nothing.", *fitting[:1]])


def _plain(text: str) -> str:
    """Return a text without the codes of its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _flwr(arguments: Sequence[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(
        [find_script("flwr"), *arguments],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout
