"""An app of ours: writing one, submitting it with Flower's own command, following it to its end."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

PACKAGE = ("__init__.py", "server.py", "client.py", "task.py", "equifed.toml")
TOP = ("pyproject.toml", "README.md")
# How the lines of a run that are for people begin, and the one with the reason of an end
PREFIX, ENDED = "equifed: ", "ENDED: "
# What to do, by what Flower says
ADVICE = {
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
# What is known of a run that ended without a reason of its own, by its status
SILENT = {
    "unknown": "the SuperLink cannot be reached any more. Start it again with the same --database; "
    "then continue with: equifed flower resume",
    "finished:stopped": "it was stopped with flwr stop.",
    "finished:failed": "the server's process of the run ended without a message: it was killed, or "
    "ran out of memory. Continue with: equifed flower resume",
}


class SubmitError(RuntimeError):
    """The run did not start; says why and what to do."""


def write_app(folder: Path, *, data: str = "heart-disease") -> Path:
    """Write a Flower app into a new or empty folder, and return the path of its package.

    ``data`` is the embedded data set for trying out; it says how many clients there are.
    """
    from equifed.runs.build import load_data
    from equifed.runs.config import read_data

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; choose another folder.")
    name = folder.absolute().name
    package = re.sub(r"\W+", "_", name).strip("_").lower()
    if not package.isidentifier():
        raise ValueError(f"{name!r} cannot be the name of an app; begin it with a letter.")
    words = {
        "{name}": re.sub(r"[^A-Za-z0-9._-]+", "-", name),
        "{package}": package,
        "{publisher}": "local",
        "{data}": data,
        "{clients}": str(len(load_data(read_data(data, [])))),
    }
    (folder / package).mkdir(parents=True)
    for target in (*TOP, *PACKAGE):
        text = (files("equifed.flower") / "template" / f"{target}.in").read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        (folder / ("" if target in TOP else package) / target).write_text(text, encoding="utf-8")
    return folder / package


# -- running it ---------------------------------------------------------------------------------


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
    summarise: Callable[[str], None] = lambda _: None,
) -> Ending:
    """Submit an app, show what is for people as it comes, and return how the run ended.

    ``summarise`` is told the summary, which is for programs (JSON).
    """
    number = _submit(folder, connection, settings, env)
    command = [find_script("flwr"), "log", number, connection, "--stream"]
    others, reason = deque[str](maxlen=30), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, **_surroundings(env)) as log:
        assert log.stdout is not None
        for line in log.stdout:
            text = line.rstrip()
            if not text.startswith(PREFIX):
                others.append(text)
                continue
            text = text.removeprefix(PREFIX)
            if text.startswith(ENDED):
                reason = text.removeprefix(ENDED)
            else:
                (summarise if text.startswith("{") else say)(text)
    told = call_flwr(["list", connection, "--run-id", number, "--format", "json"], env).stdout
    status = _find(r'"status":\s*"([^"]+)"', told) or "unknown"
    if status == "finished:completed":
        return Ending(True, "")
    tail = "\n".join(_plain(line) for line in others if line.strip())
    crashed = status == "finished:failed" and "Traceback" in tail
    silent = "" if crashed else SILENT.get(status, "")
    return Ending(False, reason or silent or f"Flower says {status!r}. The end of its log:\n{tail}")


def _submit(folder: Path, connection: str, settings: Sequence[str], env: Mapping[str, str]) -> str:
    """Start a run and return Flower's number of it."""
    words = ["run", str(folder.absolute()), connection, "--format", "json"]
    words += [word for setting in settings for word in ("--run-config", setting)]
    told = call_flwr(words, env).stdout
    if number := _find(r'"run-id":\s*"?(\w+)', told):
        return number
    text = _plain(told).strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error-message"])
    advice = [cure for pattern, cure in ADVICE.items() if re.search(pattern, text)]
    cause = _find_cause(connection, env) or next(iter(advice), "")
    said = " ".join(text.split())[-600:] or "Flower said nothing."
    raise SubmitError(f"The run did not start: {said} {cause}".rstrip())


def _find_cause(connection: str, env: Mapping[str, str]) -> str:
    """Say why a connection's SuperLink is not reached, of which Flower says that alone."""
    from equifed.flower.trial.doctor import check_superlink

    home = Path(env.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        table = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))
        told = table["superlink"][connection]
        found = check_superlink(str(told["address"]), Path(str(told["root-certificates"])))
    except (OSError, ValueError, KeyError, TypeError):  # Flower has said so, or has its defaults
        return ""
    return "" if found.good else f"Its cause: {found.text}."


def call_flwr(
    arguments: Sequence[str], env: Mapping[str, str], **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a ``flwr`` command to its end; what it says is all in ``stdout``."""
    command, about = [find_script("flwr"), *arguments], {**_surroundings(env), **more}
    return subprocess.run(command, stdout=subprocess.PIPE, check=False, **about)


def find_script(name: str) -> str:
    """Return the path of a command that stands beside this Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise SubmitError(
            f"{name} is not installed beside this Python; install it with: "
            "pip install 'equifed[flower]'"
        )
    return str(path)


def _surroundings(env: Mapping[str, str]) -> dict[str, Any]:
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    return {"env": dict(env), **streams, "text": True, "errors": "replace"}


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found.group(1) if found else ""


def _plain(text: str) -> str:
    """Return a text without the codes of its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
