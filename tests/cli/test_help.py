"""What a stranger can find out from the command line itself: help, completion, lists, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import equifed
from typer.main import get_command
from typer.testing import CliRunner

from equifed.cli.main import app
from equifed.cli.terminal import EXIT_CODES
from equifed.runs.catalogue import SECTIONS
from equifed.training.history import History

pytestmark = pytest.mark.long


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the words of every command and group."""
    yield path
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from walk(inner, (*path, name))


def find(path: tuple[str, ...]) -> Any:
    command = get_command(app)
    for word in path:
        command = command.commands[word]
    return command


COMMANDS = list(walk(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_explains_every_argument_and_option(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no help is broken into lines
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    command = find(path)
    assert command.help and command.help.splitlines()[0] in result.output
    for parameter in command.params:
        words = getattr(parameter, "help", None)
        assert words, f"{parameter.name} of {' '.join(path)} has no help"
        assert words in result.output
        if parameter.param_type_name == "option":
            assert parameter.opts[-1] in result.output


def test_an_option_means_the_same_in_every_command() -> None:
    same = {"--set", "--overwrite", "--quiet", "--json", "--jobs", "--workers", "--seeds"}
    words: dict[str, set[str | None]] = {}
    for path in COMMANDS:
        for parameter in find(path).params:
            if parameter.param_type_name == "option" and parameter.opts[0] in same:
                words.setdefault(parameter.opts[0], set()).add(parameter.help)
    assert words.keys() == same
    assert all(len(meanings) == 1 for meanings in words.values()), words


def test_out_says_whether_it_is_a_folder_or_a_file() -> None:
    found = [p.help for path in COMMANDS for p in find(path).params if "--out" in p.opts]
    assert len(found) > 3
    assert all(
        words is not None and ("older" in words or "file" in words.lower()) for words in found
    ), found


def test_version_and_exit_codes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import version

    lines = equifed("--version").stdout.splitlines()
    assert lines[0] == f"equifed {version('equifed')}" and f"torch {version('torch')}" in lines
    monkeypatch.setenv("COLUMNS", "1000")
    assert EXIT_CODES in equifed("--help").stdout
    assert equifed("run", "--processes", 2).exit_code == 2


def complete(*words: str) -> list[str]:
    """Return what bash is told after these words, the last of which is not finished."""
    environment = {
        "_EQUIFED_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("equifed", *words)),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(app, [], prog_name="equifed", env=environment)
    return result.stdout.split()


def test_a_shell_completes_commands_and_names() -> None:
    source = {"_EQUIFED_COMPLETE": "source_bash"}
    script = CliRunner().invoke(app, [], prog_name="equifed", env=source).stdout
    assert "complete -o default -F" in script and script.rstrip().endswith("equifed")
    assert complete("res") == ["resume"]
    assert complete("list", "alg") == ["algorithms"]
    assert complete("list", "algorithms", "scaff-") == ["scaff-pd", "scaff-pd-ia"]
    assert complete("list", "nothing", "") == []
    assert complete("data", "show", "fashion-t") == ["fashion-three"]
    assert complete("run", "--engine", "sta") == ["stacked"]


# -- lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_tells_its_settings(section: str) -> None:
    listed = json.loads(equifed("list", section, "--json").stdout)[section]
    assert listed.keys() == SECTIONS[section].entries().keys()
    for name in listed:
        result = equifed("list", section, name, "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert (found["name"], found["summary"]) == (name, listed[name]["summary"])
        assert not {row["setting"] for row in found["settings"]} & set(SECTIONS[section].given)


def test_settings_are_those_that_a_configuration_resolves(config: Any) -> None:
    """Of what is listed, everything with a default is in the resolved file, with that value."""
    from equifed.runs.config import RunConfig

    resolved = RunConfig.read(config(algorithm={"name": "scaffold"})).to_dict()
    listed = {("model", "models", "logistic"), ("algorithm", "algorithms", "scaffold"),
              ("engine", "engines", "auto")}  # fmt: skip
    for table, section, name in listed:
        rows = json.loads(equifed("list", section, name, "--json").stdout)["settings"]
        found = {}
        for row in rows:
            inner = resolved[table]
            for word in row["setting"].split("."):
                inner = inner.get(word) if inner is not None else None
            found[row["setting"]] = inner
        assert found == {row["setting"]: row["default"] for row in rows}


def test_settings_are_shown_with_their_meaning() -> None:
    text = equifed("list", "algorithms", "scaff-pd").stdout
    assert "objective  (required; see: equifed list objectives)" in text
    assert "participation = 1.0  (float)" in text
    assert "penalty psi of the weights" in text
    wrong = equifed("list", "algorithms", "scaf-pd")
    assert (wrong.exit_code, "did you mean 'scaff-pd'" in wrong.stderr) == (2, True)


def test_losses_are_listed() -> None:
    listed = json.loads(equifed("list", "losses", "--json").stdout)["losses"]
    assert {"cross_entropy", "squared"} <= listed.keys()


# -- JSON: what a program reads is what the files say, and nothing else is on standard output ---


def test_json_of_data_adds_up() -> None:
    found = json.loads(
        equifed("data", "show", "fashion-three", "--set", "data.train=7", "--json").stdout
    )
    assert found["clients"]["pullover"] == {
        "train": 7, "test": 500, "T-shirt": 0, "pullover": 7, "shirt": 0
    }  # fmt: skip
    for column, total in found["all"].items():
        assert total == sum(client[column] for client in found["clients"].values())


def test_json_of_a_run_and_of_its_resumption(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = json.loads(equifed("run", config(), "--out", out, "--json").stdout)
    history = History.load(out)
    assert found["folder"] == str(out)
    assert found["summary"] == json.loads((out / "summary.json").read_text())
    assert found["clients"]["test"]["accuracy"] == history.per_client("accuracy", "test")
    assert found["clients"]["train"]["loss"] == history.per_client("loss", "train")
    again = equifed("resume", out, "--json")
    assert json.loads(again.stdout) == found
    quiet = equifed("resume", out, "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")


VARIANTS = {"a": {"algorithm": {"participation": 1.0}}, "b": {"rounds": 2}}


def test_json_of_a_comparison(config: Any, tmp_path: Path) -> None:
    path, out = config(variants=VARIANTS), tmp_path / "c"
    found = json.loads(equifed("compare", path, "--seeds", 1, "--out", out, "--json").stdout)
    assert (found.pop("folder"), found.pop("problems")) == (str(out), [])
    assert found == json.loads((out / "comparison.json").read_text())
    quiet = equifed("compare", path, "--seeds", 1, "--out", out, "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")
    over = ("compare", config(), "--over", "rounds=1,2", "--seeds", 1, "--out", tmp_path / "s")
    points = json.loads(equifed(*over, "--json").stdout)["methods"]
    assert [point["name"] for point in points] == ["rounds = 1", "rounds = 2"]
    shown = equifed(*over).stdout
    assert "rounds = 1" in shown and "rounds = 2" in shown
